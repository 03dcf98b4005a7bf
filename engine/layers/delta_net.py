"""A gated delta-net layer (arXiv 2412.06464) of one rank: projections, a short convolution, the rule, a gated norm.

Ranks share out the key heads, each with its value heads. Sequences with one new token are taken in together, prompts
one after another, cut where blocks end, so that each full block gets the state at its end. Convolution, rule and norm
are computed in float32. Weight names are Hugging Face's.

Legend: T tokens, S sequences, U key heads of this rank, R value heads of each, K and V dimensions of a key and of a
value, Q channels of one key head, W inputs that the convolution reaches back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.interface import AttentionBatch
from engine.checkpoint import TensorSlice
from engine.kv.states import StatePages
from engine.layers.delta_rule import MOST_CHUNK_TOKENS, advance, advance_chunks, convolve, convolve_next, normalize
from engine.layers.linear import ColumnParallelLinear, Loader, Projection, RowParallelLinear
from engine.models.delta_net import DeltaNetConfig
from engine.quantization.interface import Rows

_PIECE_BYTES = 1 << 22
"""States that are taken out of the pool at a time, on a CPU."""


@dataclass(frozen=True)
class SingleTokens:
    """Sequences of a step that have one new token each."""

    rows: Tensor | None
    """Their rows of the step, int64 [S]; None: all of them."""
    old_blocks: Tensor
    """Blocks of the states that they go on from, int64 [S]."""
    new_blocks: Tensor
    """Blocks of the states that they leave, int64 [S]."""
    begins: Tensor | None
    """Whether each has no state yet, bool [S]; None: all have one."""


@dataclass(frozen=True)
class PromptRows:
    """One sequence of a step that has several new tokens."""

    rows: slice
    first: int
    """Its tokens before these."""
    old_block: Tensor | None
    """Block of the state that it goes on from, int64 [1]; None: it has none yet."""
    new_blocks: dict[int, Tensor]
    """Blocks, int64 [1], of the states behind so many of its tokens: at the end of each block, and of these tokens."""


StepStates = tuple[SingleTokens | None, list[PromptRows]]


def step_states(batch: AttentionBatch) -> StepStates:
    """Where the states of a step's sequences lie before and after it; the same for all layers of a group."""
    return batch.once("states", lambda: _step_states(batch))


def _step_states(batch: AttentionBatch) -> StepStates:
    step, size = batch.step, batch.block_size
    lengths, tables = batch.seqlens_q, step.block_tables
    firsts = step.seqlens_k - lengths
    old = tables[np.arange(len(tables)), np.maximum(firsts - 1, 0) // size].astype(np.int64)
    every: Tensor = batch.to_device(step.slot_mapping.astype(np.int64) // size)
    of_sequences = batch.to_device(old)
    ones = np.flatnonzero(lengths == 1)
    single = None
    if len(ones):
        has_all = len(ones) == len(step.token_ids)
        rows = None if has_all else batch.to_device(step.cu_seqlens_q[ones].astype(np.int64))
        begins = firsts[ones] == 0
        single = SingleTokens(
            rows,
            of_sequences if has_all else of_sequences[batch.to_device(ones)],
            every if rows is None else every[rows],
            batch.to_device(begins) if begins.any() else None,
        )
    prompts = []
    for sequence in np.flatnonzero(lengths > 1).tolist():
        begin, stop = step.cu_seqlens_q[sequence : sequence + 2].tolist()
        first = int(firsts[sequence])
        last = first + stop - begin
        ends = [*range((first // size + 1) * size, last, size), last]
        blocks = {end: every[begin + end - 1 - first : begin + end - first] for end in ends}
        start = of_sequences[sequence : sequence + 1] if first else None
        prompts.append(PromptRows(slice(begin, stop), first, start, blocks))
    return single, prompts


class GatedDeltaNet:
    """[T, E] to [T, E], by the state of each sequence."""

    def __init__(self, config: DeltaNetConfig, hidden_size: int, eps: float, layer: int, loader: Loader) -> None:
        name = f"model.layers.{layer}.linear_attn"
        heads = loader.equal_share(config.num_key_heads)
        self._num_heads, self._ratio = len(heads), config.values_per_key
        self._key, self._value, self._channels = config.key_head_dim, config.value_head_dim, config.head_channels
        self._reach, self._eps = config.conv_kernel - 1, eps
        gates = config.values_per_key * config.value_head_dim
        self.inputs = ColumnParallelLinear(
            loader,
            [
                _projection(f"{name}.in_proj_qkvz", config.num_key_heads, heads, config.head_channels + gates),
                _projection(f"{name}.in_proj_ba", config.num_key_heads, heads, 2 * config.values_per_key),
            ],
            hidden_size,
            bias=False,
        )
        self._weight = self._load_convolution(config, f"{name}.conv1d.weight", heads, loader)  # [U, Q, W + 1]
        own = range(heads.start * self._ratio, heads.stop * self._ratio)
        decay, bias = (
            _float32(loader, f"{name}.{which}", config.num_value_heads, own) for which in ("A_log", "dt_bias")
        )
        self._decay, self._bias = -decay.exp().view(-1, self._ratio), bias.view(-1, self._ratio)  # [U, R]
        self._norm = _float32(loader, f"{name}.norm.weight", self._value, range(self._value))
        num_values = config.num_value_heads * config.value_head_dim
        self.out = RowParallelLinear(loader, f"{name}.out_proj", num_values, hidden_size, bias=False)

    def mix(self, x: Rows, batch: AttentionBatch, pages: StatePages) -> Tensor:
        """[T, E] to this rank's heads of [T, U * R * V], which `out` takes; writes the new states."""
        channels, gate, beta, log_decay = self._project(x)
        read = gate.new_empty(gate.shape, dtype=torch.float32)  # [T, U, R, V]
        single, prompts = step_states(batch)
        if single is not None:
            rows = single.rows
            if rows is None:
                self._take_single(channels, beta, log_decay, single, pages, read)
            else:
                inputs = channels.index_select(0, rows), beta.index_select(0, rows), log_decay.index_select(0, rows)
                found = read.new_empty((len(rows), *read.shape[1:]))
                self._take_single(*inputs, single, pages, found)
                read.index_copy_(0, rows, found)
        for prompt in prompts:
            own, size = prompt.rows, batch.block_size
            read[own] = self._take_prompt(channels[own], beta[own], log_decay[own], prompt, size, pages)
        normed = F.rms_norm(read, (self._value,), self._norm, self._eps)
        return normed.mul_(F.silu(gate.float())).to(gate.dtype).flatten(1)

    def _project(self, x: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs [T, U, Q], the gate [T, U, R, V], beta and the decay's logarithm, float32 [T, U, R].

        Of each key head the first projection has query, key, values and gates, the second beta's and the decay's
        arguments.
        """
        mixed, heads, ratio = self.inputs(x), self._num_heads, self._ratio
        cut = heads * (self._channels + ratio * self._value)
        first = mixed[:, :cut].view(len(mixed), heads, -1)
        second = mixed[:, cut:].float().view(len(mixed), heads, 2, ratio)
        gate = first[..., self._channels :].view(len(mixed), heads, ratio, self._value)
        log_decay = self._decay * F.softplus(second[:, :, 1] + self._bias)
        return first[..., : self._channels], gate, second[:, :, 0].sigmoid(), log_decay

    def _take_single(
        self, channels: Tensor, beta: Tensor, log_decay: Tensor, at: SingleTokens, pages: StatePages, out: Tensor
    ) -> None:
        """[S, U, Q] to [S, U, R, V], as many sequences at a time as have their states in a cache of the CPU."""
        size = max(1, _PIECE_BYTES // pages.size_bytes) if out.device.type == "cpu" else len(out)
        for first in range(0, len(out), size):
            own = slice(first, first + size)
            matrices, earlier = pages.read(at.old_blocks[own])
            if at.begins is not None:
                for part in (matrices, earlier):
                    part.masked_fill_(at.begins[own].unsqueeze(1), 0.0)
            state = matrices.view(-1, self._num_heads, self._ratio, self._key, self._value)
            inputs = channels[own]
            convolved, later = convolve_next(inputs, earlier.view(*inputs.shape, self._reach), self._weight)
            out[own] = advance(state, *self._split(convolved), log_decay[own], beta[own])
            pages.write(at.new_blocks[own], [matrices, later.reshape(earlier.shape)])

    def _take_prompt(
        self, channels: Tensor, beta: Tensor, log_decay: Tensor, at: PromptRows, block_size: int, pages: StatePages
    ) -> Tensor:
        """[T, U, Q] to [T, U, R, V]"""
        state, earlier = self._begin(at, pages)
        convolved, every = convolve(channels, earlier, self._weight)

        def keep(end: int, state: Tensor) -> None:
            if end in at.new_blocks:
                last = every[end - at.first : end - at.first + self._reach].permute(1, 2, 0)
                pages.write(at.new_blocks[end], [state.reshape(1, -1), last.reshape(1, -1)])

        size = math.gcd(block_size, MOST_CHUNK_TOKENS)
        split = self._split(convolved)
        return advance_chunks(state, *split, log_decay, beta, first=at.first, chunk_size=size, after_chunk=keep)

    def _begin(self, at: PromptRows, pages: StatePages) -> tuple[Tensor, Tensor]:
        """The state [U, R, K, V] and the inputs [U, Q, W] that a prompt goes on from."""
        matrix, inputs = (self._num_heads, self._ratio, self._key, self._value), (self._channels, self._reach)
        if at.old_block is None:
            zeros = self._weight.new_zeros
            return zeros(matrix), zeros(self._num_heads, *inputs)
        state, earlier = pages.read(at.old_block)
        return state.view(matrix), earlier.view(self._num_heads, *inputs)

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, U, K] as the rule takes them, and values [T, U, R, V], of [T, U, Q]."""
        q, k, v = convolved.tensor_split((self._key, 2 * self._key), dim=-1)
        values = v.reshape(*v.shape[:2], self._ratio, self._value)
        return normalize(q).mul_(self._key**-0.5), normalize(k), values

    def _load_convolution(self, config: DeltaNetConfig, name: str, heads: range, loader: Loader) -> Tensor:
        """A checkpoint has the channels of all queries, then of all keys and of all values; here each key head's are
        together."""
        widths = (config.key_head_dim, config.key_head_dim, config.values_per_key * config.value_head_dim)
        shape, first, parts = (config.num_key_heads * config.head_channels, 1, config.conv_kernel), 0, []
        for width in widths:
            part = TensorSlice(name, shape, 0, first + heads.start * width, first + heads.stop * width)
            out = torch.empty(part.local_shape, dtype=torch.float32, device=loader.device)
            loader.checkpoint.read(part, out)
            parts.append(out.view(len(heads), width, config.conv_kernel))
            first += config.num_key_heads * width
        return torch.cat(parts, dim=1)


def _projection(name: str, num_heads: int, heads: range, width: int) -> Projection:
    """One whose outputs are those of one key head after another."""
    return Projection(name, num_heads * width, range(heads.start * width, heads.stop * width))


def _float32(loader: Loader, name: str, total: int, own: range) -> Tensor:
    """Values of a vector, not rounded to the model's type."""
    part = TensorSlice(name, (total,), 0, own.start, own.stop)
    out = torch.empty(part.local_shape, dtype=torch.float32, device=loader.device)
    loader.checkpoint.read(part, out)
    return out
