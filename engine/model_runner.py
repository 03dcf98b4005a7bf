"""One tensor-parallel rank of a model, ready to run: weights, KV pool, attention backend, and one forward pass a step.

Every rank of a group runs the same steps in the same order. Which step comes next, and whose blocks it names, is
decided elsewhere; the runner trusts a step that `build_step` made.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cluster.kv_groups import KvGroup, StateShape
from engine.attention.interface import AttentionBatch
from engine.attention.registry import Heads, choose_attention
from engine.checkpoint import Checkpoint
from engine.copies import upload
from engine.cuda_graphs import Capture, DecodeGraphs, choose_capture
from engine.decode_inputs import DecodeInputs, choose_advance
from engine.expert_balancer import ExpertBalancer
from engine.gguf_checkpoint import open_checkpoint
from engine.kv.pool import KvCache
from engine.layers.experts import RoutedExperts
from engine.layers.linear import Loader
from engine.layers.ops import choose_ops
from engine.layers.rope import RopeTable
from engine.memory import resolve_block_size, resolve_device, resolve_dtype, resolve_kv_dtype
from engine.model_cost import choose_form
from engine.models.decoder import Decoder, StepContext
from engine.models.experts import ExpertLoad
from engine.models.folder import read_model
from engine.models.loading import load_model
from engine.native import Native
from engine.native.decode_step import choose_decode_step
from engine.sampling.params import SampleRow
from engine.sampling.prompt_logprobs import PromptScores, score_rows
from engine.sampling.sampler import Sampler
from engine.sampling.samples import Samples
from engine.step_input import IntArray, StepInput
from engine.tp import TPGroup, with_ordered_sums


class StepOutput(NamedTuple):
    """The results of a step."""

    logits: torch.Tensor
    """Float32 [R, V]; of a replayed step they stay until the next step begins."""
    scores: PromptScores | None = None
    """None when no row is scored."""
    samples: Samples | None = None
    """The tokens of a step that was prepared for their choice and replayed."""


class ModelRunner:
    """Loads at construction; raises CheckpointError or ConfigError when the folder or the sizes do not fit."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        tp: TPGroup,
        device: str,
        dtype: str,
        block_size: int | None,
        num_blocks: int | None = None,
        attention: str = "auto",
        model_impl: str = "auto",
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        kernels: str = "auto",
        deterministic: bool = False,
        graphs_up_to: int = 0,
        capture: Capture | None = None,
        sampler: Sampler | None = None,
        open_weights: Callable[[Path], Checkpoint] = open_checkpoint,
        report: Callable[[str], None] | None = None,
        expert_parallel: int = 1,
        expert_rebalance_tokens: int = 0,
        split_latents: bool = False,
    ) -> None:
        """Decode steps of up to `graphs_up_to` sequences become CUDA graphs where that works, by `capture` if given.
        With a `sampler` they choose its tokens, too. Without `num_blocks` there is no KV pool until `make_pool`.
        `block_size`: None for what suits the attention. `deterministic`: a token's logits have the same bits in any
        step, generated or as a part of a prompt. `expert_parallel`: groups of ranks among which experts are divided;
        `expert_rebalance_tokens`: how many tokens apart they are placed anew by load, 0: never. `split_latents`: each
        rank keeps a part of every block's tokens.

        `open_weights` opens the weights, by default those of the folder's files.
        """
        self.config = read_model(model_path, model_impl).divided(tp.size, expert_parallel, split_latents)
        if deterministic:
            self.config.check_deterministic()
        tp = with_ordered_sums(tp) if deterministic else tp
        self._tp = tp
        self.device = torch.device(resolve_device(device))
        self.dtype = resolve_dtype(self.config, dtype, str(self.device))
        """The name of the type it computes in: `float32`, `bfloat16` or `float16`."""
        self.kernels = kernels
        torch_dtype: torch.dtype = getattr(torch, self.dtype)
        ops, products, self.kernels_reason = choose_ops(
            kernels, self.device, torch_dtype, self.config.head_dim, deterministic
        )
        """The origin of Baton's own kernels, or why they are not used."""
        self._kv_dtype: torch.dtype = getattr(torch, resolve_kv_dtype(kv_cache_dtype, self.dtype, str(self.device)))
        self._num_kv_heads = len(self.config.kv_head_range(tp.rank, tp.size))
        num_heads = self.config.num_attention_heads // tp.size
        heads = Heads(num_heads, self._num_kv_heads, self.config.head_dim)
        self._attention, self.attention_reason = choose_attention(
            attention,
            self.device,
            torch_dtype,
            products,
            block_size,
            self._kv_dtype,
            heads,
            self.config.attention_extras,
        )
        """Who computes attention, and why: what `auto` timed, what cannot run here."""
        kv_dtype = str(self._kv_dtype).removeprefix("torch.")
        self.block_size = resolve_block_size(self.config, tp.size, kv_dtype, block_size, self._attention.block_size)
        self.weight_form = choose_form(
            self.config, dtype=self.dtype, device=str(self.device), quantization=quantization, kernels=products
        )
        """The form in which the weights are kept."""
        with open_weights(Path(model_path)) as checkpoint:
            keeps_codes, packing = self.weight_form.keeps_codes, self.config.packing
            loader = Loader(checkpoint, tp, self.device, torch_dtype, products, quantization, packing, keeps_codes, ops)
            self._model = load_model(self.config, Path(model_path), loader, report or (lambda line: None))
            if self.config.foreign is not None:
                check = importlib.import_module("engine.models.transformers_check").check_steps
                check(self._model, self.config, self._attention, self._kv_dtype, self.block_size, self.device)
        self._native = products if isinstance(products, Native) else None
        self._advance = choose_advance(products)
        if capture is None:
            obstacle = self._attention.static_obstacle(self.block_size, self._kv_dtype)
            if self.config.delta_net is not None:
                obstacle = "layers with a recurrent state are not captured"
            if self.config.foreign is not None:
                obstacle = "transformers' own code computes the model"
            capture, self.graphs_reason = choose_capture(graphs_up_to, self.device, tp.size, obstacle)
        """The decode steps that are CUDA graphs, or why none are."""
        self._capture_with, self._graphs_up_to, self._sampler = capture, graphs_up_to, sampler
        self._graphs: DecodeGraphs | None = None
        self._num_rows = 0
        """Rows of logits of the latest step."""
        self._rebalance_tokens = expert_rebalance_tokens
        self._balancer: ExpertBalancer | None = None
        if num_blocks is not None:
            self.make_pool(num_blocks)

    def make_pool(self, num_blocks: int, memory: Callable[[int], torch.Tensor] | None = None) -> None:
        """Allocates the KV pool and captures decode steps over it. To be called once, before the first step, if
        `num_blocks` was not given at construction. `memory`: as of `engine.kv.pool.KvCache`."""
        longest = self.config.max_position_embeddings
        if all(group.window is None for group in self.config.kv_groups):  # of a window a sequence gives blocks back
            longest = min(longest, num_blocks * self.block_size)
        capture = self._capture_with
        self._allocate(self.config.kv_groups, num_blocks, longest, has_scratch=capture is not None, memory=memory)
        if capture is not None:
            width = -(-longest // self.block_size)
            self._graphs, self.graphs_reason = self._capture(capture, self._graphs_up_to, width)
        mlps = self._expert_mlps()
        for mlp in mlps.values():
            mlp.num_tokens.zero_()  # of rehearsals and captures
        if self.config.experts is not None and self.config.experts.num_groups > 1 and self._rebalance_tokens:
            self._balancer = ExpertBalancer(mlps, self._tp, self._rebalance_tokens)

    def rehearsal(self, num_blocks: int, length: int) -> ModelRunner:
        """A runner with one layer of each kind of these weights and a small pool, for positions below `length`.

        A step takes the same memory there in a fraction of the time. Its results mean nothing.
        """
        layers = self.config.layer_kinds
        other = copy.copy(self)
        other._model = self._model.only(layers)
        other._graphs = other._balancer = None
        groups = [
            replace(group, layers=tuple(i for i in group.layers if i in layers)) for group in self.config.kv_groups
        ]
        other._allocate(groups, num_blocks, length)
        return other

    def _allocate(
        self,
        groups: Sequence[KvGroup],
        num_blocks: int,
        num_positions: int,
        has_scratch: bool = False,
        memory: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`has_scratch`: one more block, which belongs to no sequence."""
        config = self.config
        self._num_blocks = num_blocks
        dtype = getattr(torch, self.dtype)
        self._ropes = [RopeTable(rope, config.roped_dim, num_positions, self.device, dtype) for rope in config.ropes]
        self._kv = KvCache(
            groups,
            num_blocks + has_scratch,
            self.block_size // config.num_token_shares,
            self._num_kv_heads,
            config.head_dim,
            self._kv_dtype,
            self.device,
            memory,
            config.num_kv_planes,
            self._states,
        )
        self.decode_step, self.decode_reason = choose_decode_step(
            self._native, self._model, config, self._kv, self._ropes
        )
        """Says that decode steps are one call, or why they are not."""

    @property
    def _states(self) -> tuple[StateShape, int] | None:
        """The shape of the states that layers keep, and this rank's heads of them."""
        net = self.config.delta_net
        return None if net is None else (net.state, net.state.num_local_heads(self._tp.size))

    @property
    def attention_name(self) -> str:
        return self._attention.name

    @property
    def kv(self) -> torch.Tensor:
        """The pool: [layers of a group, planes, num_blocks, local_tokens, local_kv_heads, head_dim] (`engine.kv.pool`).

        Where decode steps are captured it has one block more, the last, which belongs to no sequence.
        """
        return self._kv.pool

    def expert_load(self) -> ExpertLoad:
        """Returns what experts have got. On a GPU it waits for what is under way."""
        mlps, balancer = self._expert_mlps(), self._balancer
        return ExpertLoad(
            {number: mlp.num_tokens.tolist() for number, mlp in mlps.items()},
            {number: mlp.group_tokens() for number, mlp in mlps.items()},
            0 if balancer is None else balancer.num_moved,
        )

    def _expert_mlps(self) -> dict[int, RoutedExperts]:
        """Returns the MLPs with experts by layer; those of transformers' own code are not counted."""
        if not isinstance(self._model, Decoder):
            return {}
        mlps = enumerate(layer.mlp for layer in self._model.layers)
        return {number: mlp for number, mlp in mlps if isinstance(mlp, RoutedExperts)}

    def forward(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """The logits of `run`."""
        return self.run(step, on_layer).logits

    def prepare(self, step: StepInput, sampled: torch.Tensor | None, rows: Callable[[], Sequence[SampleRow]]) -> None:
        """Has the next call of `run`, with this step and without `on_layer`, choose its tokens where it is replayed and
        that can be recorded. `rows`, of its logits, is asked for only then."""
        if self._graphs is not None and self._graphs.chooses and self._graphs.takes(step, sampled):
            wanted = rows()
            with torch.inference_mode():
                self._graphs.prepare(wanted if len(wanted) == len(step.logits_indices) else ())

    @torch.inference_mode()
    def run(
        self,
        step: StepInput,
        on_layer: Callable[[int], None] | None = None,
        sampled: torch.Tensor | None = None,
    ) -> StepOutput:
        """Copies blocks, writes the new tokens' KV, and returns logits and scores, equal on every rank.

        `on_layer(n)` is called, n from 1 on, as soon as the KV of the first n layers is written; on a GPU: as soon as
        the writes are queued on the current stream. A step of no tokens only copies blocks and has no layers.
        `sampled`, integers [R] on the device, are the tokens that the step before led to, one of each row of its
        logits; a step that needs them is launched without waiting for them. Of several ranks only rank 0 has them, and
        gives them to the others.
        """
        num_slots = len(self.config.kv_groups) * len(step.token_ids)
        assert step.cu_seqlens_q[-1] == len(step.token_ids), "a step's arrays disagree"
        assert len(step.slot_mapping) == num_slots, f"{len(step.slot_mapping)} slots, not {num_slots}"
        if self._balancer is not None:
            self._balancer.before_step(len(step.token_ids))
        if self._tp.size > 1 and step.has_unread_tokens:
            sampled = self._of_rank_0(sampled)
        self._num_rows = len(step.logits_indices)
        if self.decode_step is not None and on_layer is None and self.decode_step.takes(step):
            return StepOutput(self.decode_step.run(step if sampled is None else step.with_tokens(sampled.numpy())))
        self._check_blocks(step)
        if len(step.block_copies):
            self._kv.copy_blocks(self._to_device(step.block_copies, np.int64))
        if len(step.token_ids) == 0:
            return StepOutput(torch.empty((0, self.config.vocab_size), device=self.device))
        if self._graphs is not None and on_layer is None and self._graphs.takes(step, sampled):
            logits, samples = self._graphs.run(step, sampled)
            return StepOutput(logits, samples=samples)
        hidden = self._compute(
            self._token_ids(step, sampled),
            self._to_device(step.positions, np.int32),
            self._to_device(step.slot_mapping, np.int64).chunk(len(self.config.kv_groups)),
            self._batches(step),
            on_layer,
        )
        logits = self._model.logits(hidden, self._to_device(step.logits_indices, np.int32))
        if not len(step.scored):
            return StepOutput(logits)
        vocab_size = self.config.vocab_size
        scores = score_rows(step.scored, lambda rows: self._model.logits(hidden, rows), vocab_size, self.device)
        return StepOutput(logits, scores)

    def _of_rank_0(self, sampled: torch.Tensor | None) -> torch.Tensor:
        """Tokens that rank 0 sampled, int32 [R], on every rank: queued behind their choice, and nobody waits."""
        if self._tp.rank:
            tokens = torch.empty(self._num_rows, dtype=torch.int32, device=self.device)
        else:
            assert sampled is not None and len(sampled) == self._num_rows, "a row of the step before has no token"
            tokens = sampled.int()
        self._tp.broadcast(tokens)
        return tokens

    def _token_ids(self, step: StepInput, sampled: torch.Tensor | None) -> torch.Tensor:
        """int32 [T]"""
        own = self._to_device(step.token_ids, np.int32)
        if sampled is None:
            return own
        places = self._to_device(step.token_places(len(sampled)), np.int32)
        return torch.cat((sampled.int(), own)).index_select(0, places)

    def _compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: tuple[torch.Tensor, ...],
        batches: tuple[AttentionBatch, ...],
        on_layer: Callable[[int], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The hidden state of every token, as `Decoder` gives it. `slots`: int64 [T] of each group of
        layers."""
        context = StepContext(
            batches,
            slots,
            tuple(rope.at(positions) for rope in self._ropes),
            positions,
            self._kv,
            self._attention,
            on_layer,
        )
        return self._model(token_ids, context)

    def _batches(self, step: StepInput) -> tuple[AttentionBatch, ...]:
        """A step as each group of layers sees it."""
        count = len(self.config.kv_groups)
        steps = [step] if count == 1 else [step.of_group(place) for place in range(count)]
        return tuple(AttentionBatch(one, self.block_size, self.device) for one in steps)

    @torch.inference_mode()
    def _capture(self, capture: Capture, most: int, width: int) -> tuple[DecodeGraphs | None, str]:
        def compute(inputs: DecodeInputs) -> torch.Tensor:
            hidden = self._compute(inputs.token_ids, inputs.positions, inputs.slots, inputs.batches)
            return self._model.logits(hidden, inputs.logits_indices)

        try:
            graphs = DecodeGraphs(
                compute,
                capture,
                most=most,
                width=width,
                block_size=self.block_size,
                scratch_block=self._num_blocks,
                vocab_size=self.config.vocab_size,
                device=self.device,
                advance=self._advance,
                agree=self._is_so_on_every_rank,
                chooser_of=None if self._sampler is None else self._sampler.reserve,
                num_groups=len(self.config.kv_groups),
            )
        except RuntimeError as error:  # without graphs everything still works
            return None, f"capturing them failed: {error}"
        collectives = "" if self._tp.size == 1 else f", with the collectives of {self._tp.size} ranks"
        choice = ", with the choice of their tokens" if graphs.chooses else ""
        what = f"{len(graphs.sizes)} sizes of decode steps, up to {graphs.sizes[-1]} sequences"
        return graphs, what + collectives + choice

    def _is_so_on_every_rank(self, is_so: bool) -> bool:
        """Called by all ranks at once."""
        if self._tp.size == 1:
            return is_so
        return bool(self._tp.all_gather(torch.tensor([is_so], dtype=torch.int32, device=self.device)).all())

    def _check_blocks(self, step: StepInput) -> None:
        """Refuses blocks that do not exist, to which kernels would write all the same."""
        num_slots = self._num_blocks * self.block_size
        for array, limit in ((step.block_tables, self._num_blocks), (step.slot_mapping, num_slots)):
            if array.size and not 0 <= array.min() <= array.max() < limit:
                raise IndexError(f"a step names block or slot {array.min()} to {array.max()}; there are {limit}")

    def _to_device(self, array: IntArray, dtype: type[np.int32] | type[np.int64]) -> torch.Tensor:
        """A copy, since arrays that came as bytes cannot be written and torch would warn."""
        return upload(array.astype(dtype), self.device)
