"""Costs of a model on one rank, from its config: bytes of weights and KV, and operations and bytes of a step.

Operations and bytes of a step, of which MFU and MBU are made, are those that the model needs, not those that a kernel
happens to do: two operations for each weight and token of a matrix product, the head for the rows with logits alone,
attention for each pair of a token and a key that it sees, two readings and a correction of a recurrent state for each
token; each weight's bytes once in the form it is kept in, the keys and values that are read once for each sequence,
those that are written, and a state for both. Norms, rope, activations, the embedding's rows and sampling are small
beside it and left out.

Legend: T tokens, S sequences, R rows with logits, P scored rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cluster.kv_groups import num_rows
from cluster.text import format_bytes
from engine.kv.pool import cell_size
from engine.models.config import ModelConfig
from engine.models.experts import MXFP4_GROUP, ExpertsConfig
from engine.models.shapes import (
    MatrixShape,
    expert_vector_elements,
    layer_matrices,
    layer_vector_elements,
    state_vector_bytes,
    vocabulary_matrix,
)
from engine.native.structures import INT4_ZEROS, INT8, MXFP4
from engine.quantization.blocks import GROUP, kept_kind
from engine.quantization.integers import multiplies_quantized, stored_bytes
from engine.quantization.interface import Kernels, TritonProducts, weight_formats
from engine.quantization.packed import kept_group
from engine.quantization.plain import keeps_plain
from engine.quantization.stored import Blocks, Microscaling, Packing, Products, Scaling, Stored
from engine.step_input import StepInput

_FLOATS = frozenset({"F32", "F16", "BF16"})
"""Types of GGUF that are decoded by themselves."""

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WeightForm:
    """The form in which a rank keeps a model's weights. Names are resolved."""

    dtype: str
    device: str = "cpu"
    quantization: str = "none"
    keeps_codes: bool = False
    """The answer of the packing's `keeps_codes`."""
    is_tiled: bool = False
    """Whether Baton's kernels multiply with the weights, which are then padded for them."""
    is_plain_tiled: bool = False
    """Whether they multiply with weights that are not rounded."""
    are_codes_tiled: bool = False
    """Whether they multiply with the codes of a packed checkpoint."""
    are_in_triton: bool = False
    """Whether Baton's kernels in Triton multiply with weights in fewer bits, as they are."""

    @property
    def element_type(self) -> torch.dtype:
        return _torch_dtype(self.dtype)

    @property
    def is_unpacked(self) -> bool:
        """Whether each matrix is unpacked before it is multiplied with."""
        return self.quantization != "none" and not self.is_tiled and not self.are_in_triton

    def bytes_of(self, shape: tuple[int, int]) -> int:
        """Bytes that a weight [O, I] takes."""
        form = weight_formats()[self.quantization]
        return form.size_bytes(shape, self.element_type, torch.device(self.device), self.is_tiled)

    def unrounded_bytes_of(self, shape: tuple[int, int]) -> int:
        """Bytes that a weight [O, I] takes which is never in fewer bits."""
        form, is_tiled = weight_formats()["none"], self.is_plain_tiled
        return form.size_bytes(shape, self.element_type, torch.device(self.device), is_tiled)


def choose_form(
    config: ModelConfig, *, dtype: str, device: str, quantization: str, kernels: Kernels | None
) -> WeightForm:
    packing, kind = config.packing, _torch_dtype(dtype)
    are_in_triton, is_cpu = isinstance(kernels, TritonProducts), multiplies_quantized(kernels)
    products: Products = "triton" if are_in_triton else "cpu" if is_cpu else None
    keeps_codes = packing is not None and packing.keeps_codes(quantization, kind == torch.bfloat16, products)
    is_tiled = weight_formats()[quantization].is_tiled(kernels, kind)
    return WeightForm(
        dtype,
        device,
        quantization,
        keeps_codes,
        is_tiled,
        is_plain_tiled=weight_formats()["none"].is_tiled(kernels, kind),
        are_codes_tiled=keeps_codes and is_cpu,
        are_in_triton=are_in_triton,
    )


def kv_bytes_per_token(config: ModelConfig, tp_size: int, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in blocks of every group of layers on one rank, in a pool of this type;
    rounded up, where ranks share tokens."""
    return -(-len(config.kv_groups) * _kv_row_bytes(config, tp_size, kv_dtype) // config.num_token_shares)


def kv_block_bytes(config: ModelConfig, tp_size: int, kv_dtype: str, block_size: int) -> int:
    """Bytes of a block of so many tokens on one rank; it holds one group of layers."""
    return block_size // config.num_token_shares * _kv_row_bytes(config, tp_size, kv_dtype)


def kv_layer_bytes(config: ModelConfig, tp_size: int, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in one layer on one rank that keeps it."""
    kind = _torch_dtype(kv_dtype)
    head_bytes = cell_size(config.head_dim, kind) * kind.itemsize
    return config.num_kv_planes * len(config.kv_head_range(0, tp_size)) * head_bytes


def _kv_row_bytes(config: ModelConfig, tp_size: int, kv_dtype: str) -> int:
    """Bytes of one token in a block on one rank that keeps it."""
    return num_rows(config.kv_groups) * kv_layer_bytes(config, tp_size, kv_dtype)


def _pair_widths(config: ModelConfig, *, is_prompt: bool) -> tuple[int, int]:
    """Dimensions of a key, and of a value, of one head."""
    latent = config.latent
    if latent is None:
        return config.head_dim, config.head_dim
    return (latent.qk_head_dim, latent.v_head_dim) if is_prompt else (latent.width, latent.kv_lora_rank)


def weight_bytes(config: ModelConfig, tp_size: int, form: WeightForm) -> int:
    """Bytes that one rank's weights take once they are loaded, in every form that is kept of them.

    A head that is tied to the embedding shares its memory only as far as it is multiplied with as it lies there.
    """
    kind, place = form.element_type, torch.device(form.device)
    vocabulary = vocabulary_matrix(config, tp_size).shape
    embedding = vocabulary[0] * vocabulary[1] * kind.itemsize
    head = form.bytes_of(vocabulary)
    is_plain = form.quantization == "none" and keeps_plain(vocabulary, kind, place, form.is_tiled)
    if config.tie_word_embeddings and is_plain:
        head -= embedding
    layers = sum(kept.size_bytes for m in layer_matrices(config, tp_size) for kept in _kept(config, m, form))
    if config.foreign is not None:  # each rank holds the whole embedding
        table = config.vocab_size * config.hidden_size * kind.itemsize
        head += embedding if config.tie_word_embeddings and is_plain and tp_size > 1 else 0
        return layers + table + head + config.foreign.num_vector_elements * kind.itemsize
    num_attending = config.num_hidden_layers - len(config.state_layers)
    vectors = num_attending * layer_vector_elements(config, tp_size) + config.hidden_size
    vectors += expert_vector_elements(config, tp_size)
    sinks = num_attending * config.num_attention_heads // tp_size if config.attention_sinks else 0
    of_states = state_vector_bytes(config, tp_size, kind.itemsize)
    biases = config.experts.num_biases if config.experts else 0
    whole = (sinks + biases) * torch.float32.itemsize
    return layers + embedding + head + vectors * kind.itemsize + whole + of_states


def layers_multiplied_bytes(config: ModelConfig, tp_size: int, form: WeightForm, *, of_experts: bool = False) -> int:
    """Bytes of the matrices of all layers on one rank, in one form: of all experts, or of what all tokens take."""
    matrices = [matrix for matrix in layer_matrices(config, tp_size) if matrix.is_expert == of_experts]
    return sum(kept.size_bytes for matrix in matrices for kept in _kept(config, matrix, form, is_read=True))


def largest_matrix_elements(config: ModelConfig, tp_size: int) -> int:
    """Elements of the largest matrix that one rank multiplies with, the head included."""
    matrices = [*layer_matrices(config, tp_size), vocabulary_matrix(config, tp_size)]
    return max(matrix.num_elements for matrix in matrices)


def multiplied_elements(config: ModelConfig, tp_size: int) -> int:
    """Elements of the matrices of all layers on one rank that one token is multiplied with."""
    experts = config.experts
    count = 0
    for matrix in layer_matrices(config, tp_size):
        held = matrix.count * matrix.num_elements
        count += held * experts.num_per_token // experts.num_experts if experts and matrix.is_expert else held
    return count


@dataclass(frozen=True)
class _Kept:
    """Matrices of one size: how the checkpoint has them, how the rank keeps them, and what they take there."""

    stored: str
    kept: str
    size_bytes: int


def describe_weights(config: ModelConfig, tp_size: int, form: WeightForm) -> str:
    """Returns how the checkpoint's weights are kept on one rank and the bytes that they take, for a log."""
    sizes: Counter[tuple[str, str]] = Counter()
    for matrix in layer_matrices(config, tp_size):
        for kept in _kept(config, matrix, form):
            sizes[kept.stored, kept.kept] += kept.size_bytes
    rest = weight_bytes(config, tp_size, form) - sizes.total()
    head = "" if form.quantization == "none" else f", head in {form.quantization}"
    told = [f"{stored} {kept}, {format_bytes(size)}" for (stored, kept), size in sizes.most_common()]
    return "; ".join([*told, f"vocabulary and norms in {form.dtype}{head}, {format_bytes(rest)}"])


def _kept(config: ModelConfig, matrix: MatrixShape, form: WeightForm, is_read: bool = False) -> Iterator[_Kept]:
    """All matrices of one size. `is_read`: bytes of one form, where weights are kept in two."""
    packing = _packing_of(config, matrix)
    if not isinstance(packing, Blocks):
        kept, size = _kept_as(config, matrix, form, packing, is_read)
        yield _Kept(_stored_name(config, packing), kept, matrix.count * size)
        return
    of_layers = [[f"model.layers.{layer}.{part}" for part in matrix.parts] for layer in range(config.num_hidden_layers)]
    held = [names for names in of_layers if packing.stored_type(names[0])]
    for names in held:
        types = {packing.stored_type(name) for name in names}
        kind = None
        if form.keeps_codes:
            kind = kept_kind(packing, names, matrix.num_inputs, form.quantization, form.are_in_triton)
        if kind is None:
            kept, size = _kept_as(config, matrix, form, None if types <= _FLOATS else packing, is_read)
        else:
            kept = f"kept as {'int4' if kind == INT4_ZEROS else 'int8'} in groups of {GROUP}"
            size = stored_bytes(matrix.shape, kind, GROUP, form.are_codes_tiled)
        yield _Kept(f"GGUF {' + '.join(sorted(types))}", kept, matrix.count // len(held) * size)


def _packing_of(config: ModelConfig, matrix: MatrixShape) -> Stored | None:
    """Returns how the checkpoint has a matrix in codes; None where it is plain."""
    if not matrix.is_packed or (isinstance(config.packing, Microscaling) and not matrix.is_expert):
        return None
    return config.packing


def _stored_name(config: ModelConfig, packing: Stored | None) -> str:
    if isinstance(packing, Scaling):
        return f"{packing.form} {packing.scales_by}"
    if isinstance(packing, Microscaling):
        return "MXFP4"
    return f"{packing.method} in {packing.bits} bits" if isinstance(packing, Packing) else config.dtype


def _kept_as(
    config: ModelConfig, matrix: MatrixShape, form: WeightForm, packing: Stored | None, is_read: bool = False
) -> tuple[str, int]:
    """Returns how one such matrix is kept, for a log, and its bytes. `packing`: how the checkpoint has it in codes;
    blocks are those that no kernel takes. `is_read`: bytes of one form, where it is kept in two."""
    as_it_is = "as it is" if form.dtype == config.dtype else f"computed in {form.dtype}"
    if not matrix.is_laid_out:
        return as_it_is, matrix.num_elements * form.element_type.itemsize
    if not matrix.is_rounded:
        return as_it_is, form.unrounded_bytes_of(matrix.shape)
    if form.keeps_codes and isinstance(packing, Scaling):
        return "kept as int8", stored_bytes(matrix.shape, INT8, 0, form.are_codes_tiled)
    if form.keeps_codes and isinstance(packing, Microscaling) and packing.can_keep(matrix.num_inputs):
        return "kept as it is", stored_bytes(matrix.shape, MXFP4, MXFP4_GROUP, form.are_codes_tiled)
    if form.keeps_codes and isinstance(packing, Packing):
        group = kept_group(packing, matrix.num_inputs, matrix.num_ranks)
        if group is not None:
            order = matrix.num_inputs * torch.int64.itemsize if packing.is_scattered(matrix.num_inputs) else 0
            size = stored_bytes(matrix.shape, INT4_ZEROS, group, form.are_codes_tiled)
            return f"kept as int4 in groups of {group}", size + order
    kept = as_it_is if packing is None else f"decoded to {form.dtype}"
    if form.quantization != "none":
        kept = f"rounded to {form.quantization}"
    elif is_read and not form.is_tiled:
        return kept, matrix.num_elements * form.element_type.itemsize
    return kept, form.bytes_of(matrix.shape)


@dataclass(frozen=True)
class StepFlops:
    """Operations and bytes of one step on one rank."""

    num_tokens: int
    flops: float
    """Floating point operations, a multiplication and an addition counted as two."""
    size_bytes: float
    """Read from and written to the device's memory."""
    has_prompt: bool
    """At least one sequence has several new tokens."""
    has_decode: bool
    """At least one has a single one."""


@dataclass(frozen=True)
class ModelFlops:
    """One model as one rank of `tp_size` computes it."""

    layers_flops: int
    """Operations of one token in all layers, without attention's products of queries, keys and values."""
    head_flops: int
    """Operations of one row."""
    layers_bytes: int
    """Bytes of all layers' matrices, but for experts."""
    head_bytes: int
    pair_flops: int
    """Operations of one token and one key in one layer, all query heads of the rank."""
    generated_pair_flops: int
    """The same in a step of one new token of each sequence: latents are keys and values then."""
    kv_layer_bytes: float
    """Bytes of one token's keys and values in one layer; where ranks share tokens, on average."""
    windows: tuple[tuple[int | None, int], ...]
    """(tokens that a token sees, None: all before it; number of such layers)."""
    num_states: int = 0
    """Layers that keep a recurrent state."""
    state_flops: int = 0
    """Operations of one token in the state of one layer."""
    state_bytes: int = 0
    """Bytes of one layer's state."""
    experts: ExpertsConfig | None = None
    experts_bytes: int = 0
    """Bytes of all experts of all layers."""

    @classmethod
    def of(cls, config: ModelConfig, tp_size: int, form: WeightForm, kv_dtype: str) -> Self:
        """`kv_dtype`: the pool's type, as `engine.memory.resolve_kv_dtype` gives it."""
        head, net = vocabulary_matrix(config, tp_size), config.delta_net
        attending = [window for i, window in enumerate(config.layer_windows) if i not in config.state_layers]
        return cls(
            layers_flops=2 * multiplied_elements(config, tp_size),
            head_flops=2 * head.num_elements,
            layers_bytes=layers_multiplied_bytes(config, tp_size, form, of_experts=False),
            experts_bytes=layers_multiplied_bytes(config, tp_size, form, of_experts=True),
            head_bytes=_kept_as(config, head, form, None, is_read=True)[1],
            pair_flops=2 * config.num_attention_heads // tp_size * sum(_pair_widths(config, is_prompt=True)),
            generated_pair_flops=2 * config.num_attention_heads // tp_size * sum(_pair_widths(config, is_prompt=False)),
            kv_layer_bytes=kv_layer_bytes(config, tp_size, kv_dtype) / config.num_token_shares,
            windows=tuple(Counter(attending).items()),
            num_states=len(config.state_layers),
            state_flops=0 if net is None else 6 * net.matrix_elements // tp_size,
            state_bytes=0 if net is None else net.state.size_bytes(net.num_key_heads // tp_size),
            experts=config.experts,
        )

    def weights_read(self, num_tokens: int) -> float:
        """Returns the bytes of the layers' weights that a step of as many tokens reads, if they choose their experts
        evenly and each by itself."""
        return self.layers_bytes + (self.experts_bytes * self.experts.chosen_share(num_tokens) if self.experts else 0.0)

    def of_step(self, step: StepInput) -> StepFlops:
        """Counts a step. One of no tokens only copies blocks, which costs nothing here."""
        num_tokens, num_rows = len(step.token_ids), len(step.logits_indices) + len(step.scored)
        if not num_tokens:
            return StepFlops(0, 0.0, 0.0, has_prompt=False, has_decode=False)
        has_prompt = num_tokens > len(step.seqlens_k)  # each sequence has one at least
        has_decode = not has_prompt or bool((np.diff(step.cu_seqlens_q) == 1).any())
        num_pairs = num_read = 0  # summed over layers
        for window, num_layers in self.windows:
            pairs, read = _seen(step, window, has_prompt=has_prompt)
            num_pairs += num_layers * pairs
            num_read += num_layers * read
        written = num_tokens * sum(num_layers for _, num_layers in self.windows)
        flops = num_tokens * self.layers_flops + num_rows * self.head_flops
        flops += num_pairs * (self.pair_flops if has_prompt else self.generated_pair_flops)
        size_bytes = self.weights_read(num_tokens) + (self.head_bytes if num_rows else 0)
        size_bytes += (num_read + written) * self.kv_layer_bytes
        flops += num_tokens * self.num_states * self.state_flops
        size_bytes += 2 * len(step.seqlens_k) * self.num_states * self.state_bytes
        return StepFlops(num_tokens, float(flops), float(size_bytes), has_prompt, has_decode)


def _seen(step: StepInput, window: int | None, *, has_prompt: bool) -> tuple[int, int]:
    """Counts, in one layer, the pairs of a token and a key that it sees, itself included, and the keys read."""
    if not has_prompt:
        seen = step.seqlens_k if window is None else np.minimum(step.seqlens_k, window)
        count = int(seen.sum(dtype=np.int64))
        return count, count
    new: Lengths = np.diff(step.cu_seqlens_q).astype(np.int64)
    last: Lengths = step.seqlens_k.astype(np.int64)
    first = last - new + 1  # keys that the first new token would see without a window, as `last` of the last one
    if window is None:
        return int((first + last) @ new) // 2, int(last.sum())
    within = np.clip(window, first - 1, last)
    pairs = (within * (within + 1) - (first - 1) * first) // 2 + (last - within) * window
    return int(pairs.sum()), int(np.minimum(last, new - 1 + window).sum())


def _torch_dtype(name: str) -> torch.dtype:
    kind: torch.dtype = getattr(torch, name)
    return kind
