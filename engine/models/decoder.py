"""The decoder that model families (`engine.models.registry`) have in common: it computes what `ModelConfig` says.

Built straight from a checkpoint, sharded as it is read. It names no family, and knows attention as a function and KV as
pages to write; nothing of requests, schedules or serving. Weight names are Hugging Face's. The attention and the MLP of
a layer are chosen by the field of `ModelConfig` that describes them. The shapes of what a rank holds are those of
`engine.models.shapes`.

Legend: T tokens, R rows with logits, E hidden_size, V vocab_size, Hq/H query/KV heads of this rank, D head_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch

from engine.attention.interface import Attention, AttentionBatch
from engine.checkpoint import TensorSlice
from engine.kv.pool import KvCache
from engine.layers.delta_net import GatedDeltaNet
from engine.layers.experts import RoutedExperts
from engine.layers.latent import LatentAttention
from engine.layers.linear import (
    ColumnParallelLinear,
    Linear,
    Loader,
    Projection,
    ProjectionNorm,
    RmsNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabShard,
    takes_rounded,
)
from engine.models.config import ModelConfig
from engine.quantization.interface import Rows

Hidden = tuple[torch.Tensor, torch.Tensor | None]
"""The residual [T, E] after the last layer, and the last layer's output, which is still to be added."""


@dataclass(frozen=True)
class StepContext:
    """The values that all layers of one forward pass share."""

    batches: tuple[AttentionBatch, ...]
    """For each group of layers whose KV lies in blocks of its own."""
    slots: tuple[torch.Tensor, ...]  # int64 [T], likewise
    rope_rows: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """The rows of cos and sin for each of `ModelConfig.ropes`."""
    positions: torch.Tensor  # int32 [T]
    kv: KvCache
    attention: Attention
    on_layer: Callable[[int], None] | None = None
    """Called after each layer with the number of layers whose keys and values are in the pages."""


class LayerAttention(Protocol):
    """Writes the keys and values of a layer's tokens, and attends: one class for each kind of attention."""

    layer: int
    """Its number in the model, of those that have KV."""

    @property
    def takes_rounded(self) -> bool:
        """Whether what computes its input should round it."""
        ...

    def __call__(self, x: Rows, context: StepContext) -> torch.Tensor:
        """[T, E] to [T, E]; calls `context.on_layer` once the keys and values are written."""
        ...


class LayerMlp(Protocol):
    """Computes on each token by itself: one class for each kind of MLP."""

    @property
    def takes_rounded(self) -> bool:
        """Whether what computes its input should round it."""
        ...

    @property
    def linears(self) -> Iterable[Linear]:
        """The layers that kernels must be able to multiply with, to compute it all."""
        ...

    def __call__(self, x: Rows) -> torch.Tensor:
        """[T, E] to [T, E]."""
        ...


class SelfAttention:
    """Grouped-query attention with q, k and v in one projection; of a gated one each query head's gates follow it."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        name = f"model.layers.{layer}.self_attn"
        tp, self._head_dim = loader.tp, config.head_dim
        heads = loader.equal_share(config.num_attention_heads)
        kv_heads = config.kv_head_range(tp.rank, tp.size)
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)
        rope, gates = config.ropes[config.rope_of(layer)], int(config.attention_gate)
        self._head_order = rope.head_order(config.head_dim)
        q = _head_columns(config.num_attention_heads, heads, config.head_dim * (1 + gates))
        kv = _head_columns(config.num_key_value_heads, kv_heads, config.head_dim)
        q_proj, k_proj, v_proj = fused_projections(name, config.tensors.qkv, [q, kv, kv])
        if self._head_order is not None:
            behind = range(config.head_dim, config.head_dim * (1 + gates))
            q_proj = replace(q_proj, head_order=(*self._head_order, *behind))
            k_proj = replace(k_proj, head_order=self._head_order)
        projections = [q_proj, k_proj, v_proj]
        self.qkv = ColumnParallelLinear(loader, projections, config.hidden_size, config.attention_bias)
        self.out = RowParallelLinear(
            loader,
            f"{name}.o_proj",
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            config.attention_output_bias,
        )
        self.head_norm = self._load_head_norm(config, name, loader) if config.qk_norm else None  # [Hq + H, D]
        self._whole_norm = (
            ProjectionNorm(loader, name, [q, kv], config.rms_norm_eps, self._head_order, config.num_key_value_heads)
            if config.projection_norm
            else None
        )
        self._eps = config.rms_norm_eps
        self._has_gate = config.attention_gate
        self._ops = loader.ops
        self.layer = layer
        self.group = config.group_of(layer)
        window = config.layer_windows[layer]
        self._rope = config.rope_of(layer)
        self._scale = config.softmax_scale
        self.sinks = self._load_sinks(config, name, heads, loader) if config.attention_sinks else None  # float32 [Hq]
        self._extras: dict[str, Any] = (
            {} if config.attention_softcap is None else {"soft_cap": config.attention_softcap}
        )
        if self.sinks is not None:
            self._extras["sinks"] = self.sinks
        self.window_size = (-1, -1) if window is None else (window - 1, 0)

    @property
    def takes_rounded(self) -> bool:
        return takes_rounded(self.qkv.matrix)

    def __call__(self, x: Rows, context: StepContext) -> torch.Tensor:
        pages = context.kv.pages(self.layer)
        qkv = self.qkv(x)
        if self._whole_norm is not None:
            self._whole_norm(qkv)
        qkv, gate = self._split_gate(qkv.view(qkv.shape[0], -1, self._head_dim))
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
        return self.out(out.flatten(1) if gate is None else torch.mul(out, gate.sigmoid_()).flatten(1))

    def _split_gate(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, Hq + 2 H, D], and the gates [T, Hq, D] if each query head has them behind it."""
        if not self._has_gate:
            return heads, None
        gated = 2 * self.num_heads
        return torch.cat([heads[:, :gated:2], heads[:, gated:]], dim=1), heads[:, 1:gated:2]

    def _load_sinks(self, config: ModelConfig, name: str, heads: range, loader: Loader) -> torch.Tensor:
        part = TensorSlice(f"{name}.sinks", (config.num_attention_heads,), 0, heads.start, heads.stop)
        return loader.stack([part]).float()

    def _load_head_norm(self, config: ModelConfig, name: str, loader: Loader) -> torch.Tensor:
        """One row for each head, query heads first, so that both norms are one product."""
        size, eps = config.head_dim, config.rms_norm_eps
        q, k = (RmsNorm(loader, f"{name}.{which}_norm", size, eps, config.has_offset_norms).weight for which in "qk")
        norm = torch.cat([q.expand(self.num_heads, -1), k.expand(self.num_kv_heads, -1)])
        if self._head_order is None:
            return norm
        return norm.index_select(1, torch.tensor(self._head_order, device=norm.device))


class StatefulMixer:
    """A layer that keeps a recurrent state instead of keys and values."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        assert config.delta_net is not None
        self.layer = layer
        self._group = config.group_of(layer)
        self._rule = GatedDeltaNet(config.delta_net, config.hidden_size, config.rms_norm_eps, layer, loader)

    @property
    def takes_rounded(self) -> bool:
        return takes_rounded(self._rule.inputs.matrix)

    def __call__(self, x: Rows, context: StepContext) -> torch.Tensor:
        mixed = self._rule.mix(x, context.batches[self._group], context.kv.states(self.layer))
        if context.on_layer is not None:
            context.on_layer(self.layer + 1)
        return self._rule.out(mixed)


class LatentLayer:
    """Latent attention (`engine.layers.latent`), whose pages are a model's one plane."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        self.layer, self._rope = layer, config.rope_of(layer)
        self._group = config.group_of(layer)
        self._attention = LatentAttention(config, layer, loader)

    @property
    def takes_rounded(self) -> bool:
        return self._attention.takes_rounded

    def __call__(self, x: Rows, context: StepContext) -> torch.Tensor:
        pages, _ = context.kv.pages(self.layer)
        batch, slots = context.batches[self._group], context.slots[self._group]
        queries = self._attention.project(x, context.rope_rows[self._rope], slots, pages, batch)
        if context.on_layer is not None:
            context.on_layer(self.layer + 1)
        return self._attention.attend(queries, pages, batch, context.attention)


class GatedMlp:
    """A gated linear unit (arXiv 2002.05202) with gate and up in one projection."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        name = f"model.layers.{layer}.mlp"
        own = loader.equal_share(config.intermediate_size)
        inner = fused_projections(name, config.tensors.gate_up, [(config.intermediate_size, own)] * 2)
        self.gate_up = ColumnParallelLinear(loader, inner, config.hidden_size, config.mlp_bias)
        self.down = RowParallelLinear(
            loader, f"{name}.down_proj", config.intermediate_size, config.hidden_size, config.mlp_bias
        )
        self._ops = loader.ops
        self._has_gelu = config.activation == "gelu_tanh"

    @property
    def takes_rounded(self) -> bool:
        """Whether what computes its input should round it."""
        return takes_rounded(self.gate_up.matrix)

    @property
    def linears(self) -> Sequence[Linear]:
        return self.gate_up, self.down

    def __call__(self, x: Rows) -> torch.Tensor:
        if self._has_gelu:
            return self.down(self._ops.gelu_mul(self.gate_up(x)))
        return self.down(self._ops.silu_mul(self.gate_up(x), takes_rounded(self.down.matrix)))


class DecoderLayer:
    """Attention and MLP, each between norms and beside a residual; the next norm adds the output to the residual."""

    def __init__(self, config: ModelConfig, layer: int, loader: Loader) -> None:
        def norm(name: str | None) -> RmsNorm | None:
            full_name = f"model.layers.{layer}.{name}"
            sizes = config.hidden_size, config.rms_norm_eps, config.has_offset_norms
            return None if name is None else RmsNorm(loader, full_name, *sizes)

        self.input_norm = norm(config.norms.before_attention)
        self.attention = _attention(config, layer, loader)
        self.output_norm = norm(config.norms.after_attention)
        self.mlp_norm = norm(config.norms.before_mlp)
        self.mlp = _mlp(config, layer, loader)
        self.mlp_output_norm = norm(config.norms.after_mlp)
        self._scale = config.residual_scale

    def __call__(self, residual: torch.Tensor, add: torch.Tensor | None, context: StepContext) -> torch.Tensor:
        """Adds `add`, the output of the layer before, to the residual [T, E]; returns what is to be added next."""
        x = _normalize(self.input_norm, residual, add, self.attention.takes_rounded)
        add = self._added(self.output_norm, self.attention(x, context))
        x = _normalize(self.mlp_norm, residual, add, self.mlp.takes_rounded)
        return self._added(self.mlp_output_norm, self.mlp(x))

    def _added(self, norm: RmsNorm | None, rows: torch.Tensor) -> torch.Tensor:
        """The output of attention or MLP, as it is added to the residual. May change `rows`."""
        rows = rows if norm is None else _unrounded(norm(rows))
        return rows if self._scale is None else rows.mul_(self._scale)


def _attention(config: ModelConfig, layer: int, loader: Loader) -> LayerAttention:
    """A family whose layers attend in another way has the class of that chosen here."""
    if layer in config.state_layers:
        return StatefulMixer(config, layer, loader)
    return SelfAttention(config, layer, loader) if config.latent is None else LatentLayer(config, layer, loader)


def _mlp(config: ModelConfig, layer: int, loader: Loader) -> LayerMlp:
    """A family with another kind of MLP has the class of that chosen here."""
    if config.experts is not None and config.experts.layers[layer]:
        return RoutedExperts(config.experts, config.hidden_size, layer, loader)
    return GatedMlp(config, layer, loader)


def fused_projections(block: str, names: Sequence[str], columns: Sequence[tuple[int, range]]) -> list[Projection]:
    """The projections of one input, each of so many outputs, of which this rank computes a range.

    One name for all: they are the rows of one tensor, one projection after another.
    """
    if len(names) > 1:
        parts = zip(names, columns, strict=True)
        return [Projection(f"{block}.{name}", total, own) for name, (total, own) in parts]
    start, whole = 0, sum(total for total, _ in columns)
    projections = []
    for total, own in columns:
        projections.append(Projection(f"{block}.{names[0]}", whole, range(start + own.start, start + own.stop)))
        start += total
    return projections


def _head_columns(num_heads: int, own: range, head_dim: int) -> tuple[int, range]:
    """The outputs of a projection to heads, and those of this rank's heads."""
    return num_heads * head_dim, range(own.start * head_dim, own.stop * head_dim)


def _normalize(norm: RmsNorm | None, residual: torch.Tensor, add: torch.Tensor | None, rounds: bool) -> Rows:
    """The residual behind a norm, after `add` is added to it in place."""
    if norm is not None:
        return norm(residual, add, rounds)
    return residual if add is None else residual.add_(add)


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
        scale = config.embedding_scale
        self.embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=loader.dtype))
        self.layers = []
        for layer in range(config.num_hidden_layers):
            self.layers.append(DecoderLayer(config, layer, loader))
            report(f"loading weights: {layer + 1} of {config.num_hidden_layers} layers")
        self.norm = RmsNorm(loader, "model.norm", config.hidden_size, config.rms_norm_eps, config.has_offset_norms)
        self._softcap, self._divisor = config.logit_softcap, config.logit_divisor
        head = embedding
        if not config.tie_word_embeddings:
            head = VocabShard(loader, "lm_head", config.vocab_size, config.hidden_size)
        self.head = VocabParallelHead(head, config.vocab_size, loader)

    def only(self, layers: Sequence[int]) -> Self:
        """This decoder without its other layers, sharing the weights."""
        other = copy.copy(self)
        other.layers = [self.layers[layer] for layer in layers]
        return other

    def __call__(self, token_ids: torch.Tensor, context: StepContext) -> Hidden:
        """Runs [T] ids through all layers, which write their KV."""
        residual, add = self._embed(token_ids), None  # [T, E]
        if self.embedding_scale is not None:
            residual *= self.embedding_scale
        for layer in self.layers:
            add = layer(residual, add, context)
        return residual, add

    def logits(self, hidden: Hidden, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of [R] rows of a step; `hidden` is not changed."""
        residual, add = hidden
        last = residual.index_select(0, rows)
        last_add = None if add is None else add.index_select(0, rows)
        logits = self.head(self.norm(last, last_add, takes_rounded(self.head.matrix)))
        if self._divisor is not None:
            logits = logits / self._divisor
        return self.capped(logits)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Bounds the head's logits where the model does."""
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap
