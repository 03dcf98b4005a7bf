"""Latent attention (MLA, arXiv 2405.04434): one latent a token is kept, of which keys and values of all heads are made.

A sequence's one new token attends to the latents themselves: its queries are multiplied with what would make keys, and
the result with what would make values, so that to a backend it is attention of all query heads to one KV head whose
values are its keys. Several new tokens attend to keys and values that are made of all the latents they see, some heads
at a time.

Each rank keeps all latents, or an equal part of every block's tokens (docs/adr/0016-latents-on-one-rank-each.md). Then
queries of all heads attend to the part on each rank, and every rank merges what its own heads have found on all of
them; for several new tokens, the latents of all ranks are gathered.

Legend: T tokens, E hidden_size, Hq query heads of this rank, N blocks, K block_size, n blocks of a sequence, J keys in
them, h heads at a time; C kv_lora_rank, P qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim, W = C + R the width of
what is kept, D the wider of P + R and V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.kv_groups import TokenShare
from engine.attention.interface import Attention, AttentionBatch, merge
from engine.checkpoint import TensorSlice
from engine.kv.pool import decode, is_rounded, store
from engine.layers.linear import (
    ColumnParallelLinear,
    Loader,
    Projection,
    RmsNorm,
    RowParallelLinear,
    takes_rounded,
)
from engine.layers.rope import rotate
from engine.models.config import ModelConfig
from engine.models.latent import LatentConfig
from engine.quantization.interface import Rows
from engine.step_input import IntArray, StepInput

_NORM_EPS = 1e-6
"""The eps of the norms inside, whatever config.json says of the others; as in transformers."""


@dataclass(frozen=True)
class _Prompt:
    """A sequence of several new tokens, whose keys and values are made as pages in order."""

    rows: slice
    blocks: Tensor  # int64 [n], of its latents
    batch: AttentionBatch


@dataclass(frozen=True)
class _Parts:
    """A step by how many new tokens a sequence has."""

    rows: Tensor | None  # int64, the tokens of sequences with one; None: all of the step
    generated: AttentionBatch | None
    prompts: tuple[_Prompt, ...] = ()


class LatentAttention:
    """The attention of one layer; its queries are made of a compressed input, too, where the model says so."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        assert config.latent is not None
        self._sizes, self._scale, self._tp = config.latent, config.softmax_scale, loader.tp
        sizes, name = config.latent, f"model.layers.{layer}.self_attn"
        own = loader.equal_share(config.num_attention_heads)
        self.num_heads = len(own)
        self._load_queries(config, sizes, own, name, loader)
        self._latent_norm = RmsNorm(loader, f"{name}.kv_a_layernorm", sizes.kv_lora_rank, _NORM_EPS)
        made = sizes.made_dim
        shape = config.num_attention_heads * made, sizes.kv_lora_rank
        weight = loader.plain([TensorSlice(f"{name}.kv_b_proj.weight", shape, 0, own.start * made, own.stop * made)])
        self._expansion = weight.view(len(own), made, sizes.kv_lora_rank)  # [Hq, P + V, C]
        inner = config.num_attention_heads * sizes.v_head_dim
        self.out = RowParallelLinear(loader, f"{name}.o_proj", inner, config.hidden_size, config.attention_output_bias)

    def _load_queries(self, config: ModelConfig, sizes: LatentConfig, own: range, name: str, loader: Loader) -> None:
        """Loads the projections to queries, and to what is kept, which is fused with the first of them."""
        width, rank = sizes.qk_head_dim, sizes.q_lora_rank
        total, columns = config.num_attention_heads * width, range(own.start * width, own.stop * width)
        of_query, of_kept = (_order(config, before) for before in (sizes.qk_nope_head_dim, sizes.kv_lora_rank))
        self._query: ColumnParallelLinear | None = None
        first = Projection(f"{name}.q_proj", total, columns, of_query)
        if rank is not None:
            first = Projection(f"{name}.q_a_proj", rank, range(rank))
            self._query_norm = RmsNorm(loader, f"{name}.q_a_layernorm", rank, _NORM_EPS)
            self._query = ColumnParallelLinear(
                loader, [Projection(f"{name}.q_b_proj", total, columns, of_query)], rank, False
            )
        kept = Projection(f"{name}.kv_a_proj_with_mqa", sizes.width, range(sizes.width), of_kept)
        self._inner = ColumnParallelLinear(loader, [first, kept], config.hidden_size, config.attention_bias)

    @property
    def takes_rounded(self) -> bool:
        return takes_rounded(self._inner.matrix)

    def attend(self, queries: Tensor, pages: Tensor, batch: AttentionBatch, attention: Attention) -> Tensor:
        """[T, E] of queries [T, Hq, P + R] to what lies in the pages [N, K, 1, W] or, rounded, [N, K, 1, W + 4]."""
        parts = batch.once("latent parts", lambda: _divide(batch))
        if not parts.prompts and parts.generated is not None:
            return self.out(self._attend_latents(queries, pages, parts.generated, attention).flatten(1))
        out = queries.new_empty((len(queries), self.num_heads, self._sizes.v_head_dim))
        if parts.rows is not None and parts.generated is not None:
            some = queries.index_select(0, parts.rows)
            out.index_copy_(0, parts.rows, self._attend_latents(some, pages, parts.generated, attention))
        for prompt in parts.prompts:
            self._attend_expanded(queries[prompt.rows], pages, prompt, attention, out[prompt.rows])
        return self.out(out.flatten(1))

    def project(
        self, x: Rows, rope_rows: tuple[Tensor, Tensor], slots: Tensor, pages: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Queries [T, Hq, P + R] of [T, E], their last part turned; stores what is kept of the tokens."""
        sizes, inner = self._sizes, self._inner(x)
        first, alike_dim = inner.shape[1] - sizes.width, sizes.qk_nope_head_dim
        queries, kept = inner[:, :first], inner[:, first:]
        if self._query is not None:
            queries = self._query(self._query_norm(queries, rounds=takes_rounded(self._query.matrix)))
        latents = self._latent_norm(kept[:, : sizes.kv_lora_rank])
        assert isinstance(latents, Tensor), "nothing asked for rounded rows"
        queries = queries.reshape(len(queries), self.num_heads, sizes.qk_head_dim)
        turned = rotate(kept[:, None, sizes.kv_lora_rank :], rope_rows)
        row = torch.cat([latents.unsqueeze(1), turned], dim=2)  # [T, 1, W]
        if sizes.num_shares > 1:
            own = batch.once("own tokens", lambda: _own_tokens(batch, self._share(batch)))
            row, slots = row.index_select(0, own.rows), own.slots
        if len(row):
            store([pages], [row], slots)
        return torch.cat([queries[..., :alike_dim], rotate(queries[..., alike_dim:], rope_rows)], dim=2)

    def _attend_latents(self, queries: Tensor, pages: Tensor, batch: AttentionBatch, attention: Attention) -> Tensor:
        """[T, Hq, V] of the tokens of sequences with one new token."""
        alike_dim, rank = self._sizes.qk_nope_head_dim, self._sizes.kv_lora_rank
        to_keys, to_values = self._expansion[:, :alike_dim], self._expansion[:, alike_dim:]
        absorbed = torch.bmm(queries[..., :alike_dim].transpose(0, 1), to_keys).transpose(0, 1)  # [T, Hq, C]
        absorbed = torch.cat([absorbed, queries[..., alike_dim:]], dim=2)
        if self._sizes.num_shares > 1:
            out = self._attend_shares(absorbed, pages, batch, attention)
        else:
            out = attention(absorbed, pages, pages, batch, softmax_scale=self._scale)[..., :rank]
        return torch.bmm(out.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1)

    def _attend_shares(self, absorbed: Tensor, pages: Tensor, batch: AttentionBatch, attention: Attention) -> Tensor:
        """Returns what absorbed queries [T, Hq, W] find in the latents of all ranks: [T, Hq, C].

        Behind each head's values lie the bits of its softmax's logarithm, so that both are one message.
        """
        rank, count = self._sizes.kv_lora_rank, self._sizes.num_shares
        every = self._tp.all_gather(absorbed, dim=1)  # heads of all ranks
        own = batch.once("own keys", lambda: _own_keys(batch, self._share(batch)))
        log_sums = torch.empty(every.shape[:2], dtype=torch.float32, device=every.device)
        extras: dict[str, Any] = {"log_sums": log_sums}
        out = attention(every, pages, pages, own, softmax_scale=self._scale, **extras)[..., :rank]
        found = torch.cat([out, log_sums.unsqueeze(-1).view(out.dtype)], dim=2)
        found = found.view(len(found), count, self.num_heads, -1).transpose(0, 1).contiguous()
        found = self._tp.all_to_all(found)  # [ranks, T, Hq, C and the logarithm]
        return merge(found[..., :rank], found[..., rank:].contiguous().view(torch.float32).squeeze(-1))

    def _share(self, batch: AttentionBatch) -> TokenShare:
        return TokenShare(batch.block_size, self._sizes.num_shares, self._tp.rank)

    def _attend_expanded(
        self, queries: Tensor, pages: Tensor, prompt: _Prompt, attention: Attention, out: Tensor
    ) -> None:
        """Fills `out` [Q, Hq, V] of one sequence's new tokens."""
        cells = pages.index_select(0, prompt.blocks)  # [n, K, 1, W]
        if self._sizes.num_shares > 1:
            cells = self._tp.all_gather(cells, dim=1)
        kept = (decode(cells, queries.dtype) if is_rounded(cells.dtype) else cells).flatten(0, 2)  # [J, W]
        width, at_once = self._sizes.expanded_dim, self._sizes.heads_at_once(len(kept), self.num_heads)
        for first in range(0, self.num_heads, at_once):
            heads = slice(first, first + at_once)
            keys, values = (made.view(*cells.shape[:2], -1, width) for made in self._expand(kept, heads, width))
            some = _padded(queries[:, heads], width)
            found = attention(some, keys, values, prompt.batch, softmax_scale=self._scale)
            out[:, heads] = found[..., : self._sizes.v_head_dim]

    def _expand(self, kept: Tensor, heads: slice, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values [J, h, D] of [J, W]."""
        rank, alike_dim, weight = self._sizes.kv_lora_rank, self._sizes.qk_nope_head_dim, self._expansion[heads]
        made = F.linear(kept[:, :rank], weight.flatten(0, 1)).view(len(kept), *weight.shape[:2])  # [J, h, P + V]
        turned = kept[:, None, rank:].expand(-1, len(weight), -1)
        keys = torch.cat([made[..., :alike_dim], turned], dim=2)
        return _padded(keys, width), _padded(made[..., alike_dim:], width).contiguous()


def _order(config: ModelConfig, num_before: int) -> tuple[int, ...] | None:
    """Returns `RopeConfig.head_order` of what rope turns, behind so many other dimensions."""
    order = config.rope.head_order(config.roped_dim)
    return None if order is None else (*range(num_before), *(num_before + place for place in order))


def _padded(heads: Tensor, width: int) -> Tensor:
    """[.., D] with zeros behind what each head has."""
    return heads if heads.shape[-1] == width else F.pad(heads, (0, width - heads.shape[-1]))


def _divide(batch: AttentionBatch) -> _Parts:
    """A step that is captured has sequences with one new token only."""
    if batch.fixed is not None or not (batch.seqlens_q > 1).any():
        return _Parts(None, batch)
    alone = np.flatnonzero(batch.seqlens_q == 1)
    prompts = tuple(_prompt(batch, int(sequence)) for sequence in np.flatnonzero(batch.seqlens_q > 1))
    if not len(alone):
        return _Parts(None, None, prompts)
    rows = batch.step.cu_seqlens_q[alone]
    ends = np.arange(len(alone) + 1, dtype=np.int32)
    step = _step_of(batch.step, rows, ends, batch.step.seqlens_k[alone], batch.step.block_tables[alone])
    return _Parts(batch.to_device(rows.astype(np.int64)), replace(batch, step=step, _derived={}), prompts)


@dataclass(frozen=True)
class _OwnTokens:
    """The new tokens that a rank keeps, and their slots in its pages."""

    rows: Tensor  # int64 of the step's tokens
    slots: Tensor  # int64, likewise


def _own_tokens(batch: AttentionBatch, share: TokenShare) -> _OwnTokens:
    blocks, offsets = np.divmod(batch.step.slot_mapping.astype(np.int64), share.block_size)
    rows = np.flatnonzero(offsets // share.size == share.place)
    slots = blocks[rows] * share.size + offsets[rows] % share.size
    return _OwnTokens(batch.to_device(rows), batch.to_device(slots))


def _own_keys(batch: AttentionBatch, share: TokenShare) -> AttentionBatch:
    """The step as it lies in a rank's pages: each sequence with the tokens of it that the rank keeps."""
    lengths = np.array([share.num_before(length) for length in batch.step.seqlens_k.tolist()], dtype=np.int32)
    step = replace(batch.step, seqlens_k=lengths)
    return replace(batch, step=step, block_size=share.size, _derived={})


def _prompt(batch: AttentionBatch, sequence: int) -> _Prompt:
    step = batch.step
    start, stop = step.cu_seqlens_q[sequence : sequence + 2].tolist()
    length = step.seqlens_k[sequence : sequence + 1]
    num_blocks = -(-int(length[0]) // batch.block_size)
    blocks = step.block_tables[sequence, :num_blocks].astype(np.int64)
    ends, table = np.array([0, stop - start], dtype=np.int32), np.arange(num_blocks, dtype=np.int32)[None]
    own = _step_of(step, np.arange(start, stop), ends, length, table)
    return _Prompt(slice(start, stop), batch.to_device(blocks), replace(batch, step=own, _derived={}))


def _step_of(step: StepInput, rows: IntArray, ends: IntArray, lengths: IntArray, tables: IntArray) -> StepInput:
    """Some sequences of a step, as far as attention looks at it."""
    return replace(
        step,
        token_ids=step.token_ids[rows],
        positions=step.positions[rows],
        slot_mapping=step.slot_mapping[rows],
        cu_seqlens_q=ends,
        seqlens_k=lengths,
        block_tables=tables,
    )
