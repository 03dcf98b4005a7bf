"""The decoder that dense model families (`engine.models.registry`) have in common; `ModelConfig` has the differences.

Built straight from a checkpoint, sharded as it is read. It knows attention as a function and KV as pages to write;
nothing of requests, schedules or serving. Weight names are Hugging Face's. The shapes of what a rank holds stand at the
end, beside the classes that load it; `engine.model_cost` makes bytes and operations of them.

Legend: T tokens, R rows with logits, E hidden_size, V vocab_size, Hq/H query/KV heads of this rank, D head_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.interface import Attention, AttentionBatch
from engine.checkpoint import TensorSlice
from engine.kv.pool import KvCache
from engine.layers.experts import RoutedExperts
from engine.layers.linear import (
    ColumnParallelLinear,
    Linear,
    Loader,
    Projection,
    RmsNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabShard,
    takes_rounded,
)
from engine.layers.ops import gelu_mul
from engine.models.config import ModelConfig
from engine.quantization.interface import Rows

Hidden = tuple[torch.Tensor, torch.Tensor | None]
"""The residual [T, E] after the last layer, and the last layer's output, which is still to be added."""

UNUSED_TENSORS: tuple[str, ...] = ("rotary_emb.inv_freq",)
"""Endings of tensors that some checkpoints carry and that are computed here instead."""


@dataclass(frozen=True)
class StepContext:
    """The values that all layers of one forward pass share."""

    batches: tuple[AttentionBatch, ...]
    """For each group of layers whose KV lies in blocks of its own."""
    slots: tuple[torch.Tensor, ...]  # int64 [T], likewise
    rope_rows: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Of the model's rope, and behind it of that of layers with a window, where they have one."""
    kv: KvCache
    attention: Attention
    on_layer: Callable[[int], None] | None = None
    """Called after each layer with the number of layers whose keys and values are in the pages."""


class SelfAttention:
    """Grouped-query attention with q, k and v in one projection."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        name = f"model.layers.{layer}.self_attn"
        tp, self._head_dim = loader.tp, config.head_dim
        heads = loader.equal_share(config.num_attention_heads)
        kv_heads = config.kv_head_range(tp.rank, tp.size)
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)
        self.qkv = ColumnParallelLinear(
            loader,
            [
                self._projection(f"{name}.q_proj", config.num_attention_heads, heads),
                self._projection(f"{name}.k_proj", config.num_key_value_heads, kv_heads),
                self._projection(f"{name}.v_proj", config.num_key_value_heads, kv_heads),
            ],
            config.hidden_size,
            config.attention_bias,
        )
        self.out = RowParallelLinear(
            loader,
            f"{name}.o_proj",
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            config.attention_output_bias,
        )
        self.head_norm = self._load_head_norm(config, name, loader) if config.qk_norm else None  # [Hq + H, D]
        self._eps = config.rms_norm_eps
        self._ops = loader.ops
        self.layer = layer
        self.group = next(place for place, group in enumerate(config.kv_groups) if layer in group.layers)
        window = config.layer_windows[layer]
        self._rope = int(window is not None and config.local_rope is not None)
        self._scale = (config.query_scalar or config.head_dim) ** -0.5
        self.sinks = self._load_sinks(config, name, heads, loader) if config.attention_sinks else None  # float32 [Hq]
        self._extras: dict[str, Any] = (
            {} if config.attention_softcap is None else {"soft_cap": config.attention_softcap}
        )
        if self.sinks is not None:
            self._extras["sinks"] = self.sinks
        self.window_size = (-1, -1) if window is None else (window - 1, 0)

    def __call__(self, x: Rows, context: StepContext) -> torch.Tensor:
        pages = context.kv.pages(self.layer)
        qkv = self.qkv(x)
        qkv = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self._head_dim)
        q = self._ops.rotate_and_store(
            qkv,
            self.head_norm,
            self._eps,
            context.rope_rows[self._rope],
            context.slots[self.group],
            pages,
            self.num_heads,
        )
        if context.on_layer is not None:
            context.on_layer(self.layer + 1)
        out = context.attention(
            q,
            *pages,
            context.batches[self.group],
            softmax_scale=self._scale,
            window_size=self.window_size,
            **self._extras,
        )
        return self.out(out.flatten(1))

    def _projection(self, name: str, total: int, heads: range) -> Projection:
        size = self._head_dim
        return Projection(name, total * size, range(heads.start * size, heads.stop * size))

    def _load_sinks(self, config: ModelConfig, name: str, heads: range, loader: Loader) -> torch.Tensor:
        part = TensorSlice(f"{name}.sinks", (config.num_attention_heads,), 0, heads.start, heads.stop)
        return loader.stack([part]).float()

    def _load_head_norm(self, config: ModelConfig, name: str, loader: Loader) -> torch.Tensor:
        """One row for each head, query heads first, so that both norms are one product."""
        size, eps = config.head_dim, config.rms_norm_eps
        q, k = (RmsNorm(loader, f"{name}.{which}_norm", size, eps, config.is_gemma).weight for which in "qk")
        return torch.cat([q.expand(self.num_heads, -1), k.expand(self.num_kv_heads, -1)])


class GatedMlp:
    """SwiGLU (arXiv 2002.05202) with gate and up in one projection."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        name = f"model.layers.{layer}.mlp"
        own = loader.equal_share(config.intermediate_size)
        inner = [Projection(f"{name}.{which}_proj", config.intermediate_size, own) for which in ("gate", "up")]
        self.gate_up = ColumnParallelLinear(loader, inner, config.hidden_size, config.mlp_bias)
        self.down = RowParallelLinear(
            loader, f"{name}.down_proj", config.intermediate_size, config.hidden_size, config.mlp_bias
        )
        self._ops = loader.ops
        self._has_gelu = config.is_gemma

    @property
    def takes_rounded(self) -> bool:
        """Whether what computes its input should round it."""
        return takes_rounded(self.gate_up.matrix)

    @property
    def linears(self) -> Sequence[Linear]:
        return self.gate_up, self.down

    def __call__(self, x: Rows) -> torch.Tensor:
        if self._has_gelu:
            return self.down(gelu_mul(self.gate_up(x)))
        return self.down(self._ops.silu_mul(self.gate_up(x), takes_rounded(self.down.matrix)))


class DecoderLayer:
    """Attention and MLP, each behind a norm and beside a residual; the next norm adds the output to the residual."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        def norm(name: str) -> RmsNorm:
            full_name = f"model.layers.{layer}.{name}_layernorm"
            return RmsNorm(loader, full_name, config.hidden_size, config.rms_norm_eps, config.is_gemma)

        self.input_norm = norm("input")
        self.attention = SelfAttention(config, layer, loader)
        self.mlp_norm = norm("pre_feedforward" if config.is_gemma else "post_attention")
        self.mlp: GatedMlp | RoutedExperts
        if config.experts is not None and config.experts.layers[layer]:
            self.mlp = RoutedExperts(config.experts, config.hidden_size, layer, loader)
        else:
            self.mlp = GatedMlp(config, layer, loader)
        self.output_norms = (norm("post_attention"), norm("post_feedforward")) if config.is_gemma else None

    def __call__(self, residual: torch.Tensor, add: torch.Tensor | None, context: StepContext) -> torch.Tensor:
        """Adds `add`, the output of the layer before, to the residual [T, E]; returns what is to be added next."""
        x = self.input_norm(residual, add, takes_rounded(self.attention.qkv.matrix))
        add = self.attention(x, context)
        if self.output_norms is not None:
            after_attention, after_mlp = self.output_norms
            add = _unrounded(after_attention(add))
            return _unrounded(after_mlp(self.mlp(self.mlp_norm(residual, add))))
        return self.mlp(self.mlp_norm(residual, add, self.mlp.takes_rounded))


def _unrounded(rows: Rows) -> torch.Tensor:
    assert isinstance(rows, torch.Tensor), "rows are rounded that are added to the residual"
    return rows


class Decoder:
    """Token ids in, float32 logits of the wanted rows out."""

    def __init__(self, config: ModelConfig, loader: Loader, report: Callable[[str], None]) -> None:
        embedding = VocabShard(loader, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.tp = loader.tp
        self.embedding = embedding
        self._embed = VocabParallelEmbedding(embedding, loader.tp)
        self._embedding_scale = (
            float(torch.tensor(config.hidden_size**0.5, dtype=loader.dtype)) if config.is_gemma else None
        )
        self.layers = []
        for layer in range(config.num_hidden_layers):
            self.layers.append(DecoderLayer(config, layer, loader))
            report(f"loading weights: {layer + 1} of {config.num_hidden_layers} layers")
        self.norm = RmsNorm(loader, "model.norm", config.hidden_size, config.rms_norm_eps, config.is_gemma)
        self._softcap = config.logit_softcap
        head = embedding
        if not config.tie_word_embeddings:
            head = VocabShard(loader, "lm_head", config.vocab_size, config.hidden_size)
        self.head = VocabParallelHead(head, config.vocab_size, loader)

    def only(self, layers: Sequence[int]) -> Decoder:
        """This decoder without its other layers, sharing the weights."""
        other = copy.copy(self)
        other.layers = [self.layers[layer] for layer in layers]
        return other

    def __call__(self, token_ids: torch.Tensor, context: StepContext) -> Hidden:
        """Runs [T] ids through all layers, which write their KV."""
        residual, add = self._embed(token_ids), None  # [T, E]
        if self._embedding_scale is not None:
            residual *= self._embedding_scale
        for layer in self.layers:
            add = layer(residual, add, context)
        return residual, add

    def logits(self, hidden: Hidden, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of [R] rows of a step; `hidden` is not changed."""
        residual, add = hidden
        last = residual.index_select(0, rows)
        last_add = None if add is None else add.index_select(0, rows)
        logits = self.head(self.norm(last, last_add, takes_rounded(self.head.matrix)))
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


@dataclass(frozen=True)
class MatrixShape:
    """Matrices of one size on one rank, as they are fused above."""

    num_outputs: int
    num_inputs: int
    count: int = 1
    """How many the rank holds, in all layers."""
    is_packed: bool = False
    """Whether a packed checkpoint has it in codes."""
    num_ranks: int = 1
    """Ranks among which its inputs are divided."""
    is_expert: bool = False
    """Whether a token is multiplied with those of its experts only."""
    is_rounded: bool = True
    """Whether `model.quantization` rounds it."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs

    @property
    def num_elements(self) -> int:
        """Of one of them."""
        return self.num_outputs * self.num_inputs


def layer_matrices(config: ModelConfig, tp_size: int) -> list[MatrixShape]:
    """The matrices of all layers on one rank."""
    attended, kv = _head_widths(config, tp_size)
    hidden, num_layers, experts = config.hidden_size, config.num_hidden_layers, config.experts
    matrices = [
        MatrixShape(attended + 2 * kv, hidden, num_layers, is_packed=True),
        MatrixShape(hidden, attended, num_layers, is_packed=True, num_ranks=tp_size),
    ]
    if num_dense := num_layers - (experts.num_layers if experts else 0):
        matrices += _mlp_matrices(config.intermediate_size, num_dense, config, tp_size)
    if experts is None:
        return matrices
    count = experts.num_layers
    routed = _mlp_matrices(experts.intermediate_size, count * experts.num_experts, config, tp_size)
    matrices += [replace(matrix, is_expert=True) for matrix in routed]
    matrices.append(MatrixShape(experts.num_experts, hidden, count, is_rounded=False))
    if shared := experts.shared_intermediate_size:
        matrices += _mlp_matrices(shared, count, config, tp_size)
        matrices.append(MatrixShape(1, hidden, count, is_rounded=False))
    return matrices


def _mlp_matrices(inner: int, count: int, config: ModelConfig, tp_size: int) -> list[MatrixShape]:
    """Of as many MLPs whose middle is `inner` wide on all ranks together."""
    width, hidden = inner // tp_size, config.hidden_size
    return [
        MatrixShape(2 * width, hidden, count, is_packed=True),
        MatrixShape(hidden, width, count, is_packed=True, num_ranks=tp_size),
    ]


def vocabulary_matrix(config: ModelConfig, tp_size: int) -> MatrixShape:
    """One rank's rows of the embedding, and of the head."""
    return MatrixShape(-(-config.vocab_size // tp_size), config.hidden_size)


def layer_vector_elements(config: ModelConfig, tp_size: int) -> int:
    """Elements of the norms and biases of one layer on one rank."""
    attended, kv = _head_widths(config, tp_size)
    count = (4 if config.is_gemma else 2) * config.hidden_size
    if config.qk_norm:
        count += attended + kv
    if config.attention_bias:
        count += attended + 2 * kv
    if config.attention_output_bias:
        count += config.hidden_size
    if config.mlp_bias:
        count += 2 * config.intermediate_size // tp_size + config.hidden_size
    return count


def _head_widths(config: ModelConfig, tp_size: int) -> tuple[int, int]:
    """Elements of one token's query heads, and of its keys, on one rank."""
    num_kv_heads = len(config.kv_head_range(0, tp_size))
    return config.num_attention_heads * config.head_dim // tp_size, num_kv_heads * config.head_dim
