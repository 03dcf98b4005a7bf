"""A model's shape, read from any Hugging Face config.json: dense, grouped heads, latent attention, experts.

Knows which matrices a device holds under a layout, and the bytes that they and a token's KV take; families that Baton
does not serve are read, too, since a plan needs no more than shapes. `engine.model_cost` computes the same for the
families that are served, from the tensors that they are loaded into; a test holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.config.choices import QuantizationName
from cluster.errors import ConfigError
from engine.models.latent import LatentConfig

MatrixKind = Literal["attention", "mlp", "experts", "unrounded", "embedding", "head"]
KV_CELL_BYTES = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "int8": (1, 4), "fp8": (1, 4)}
"""Bytes of an element, and of the scale of each head of each token, by the KV cache's type."""
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCALE_BYTES = 4
_INT4_GROUP = 32
_INT4_SCALE_BYTES = 2
LARGEST_TP = 128


@dataclass(frozen=True)
class DeviceLayout:
    """The devices of one worker: attention and dense layers are sliced over `tp_size` of them, experts over `ep_size`.

    With `ep_size` 1 each expert is sliced like a dense layer. Otherwise each device holds whole experts, and where
    there are more devices than `tp_size`, attention is repeated: each group of `tp_size` has requests of its own.
    """

    tp_size: int = 1
    ep_size: int = 1

    @property
    def num_devices(self) -> int:
        return max(self.tp_size, self.ep_size)

    @property
    def num_groups(self) -> int:
        """Groups of devices that hold requests of their own."""
        return self.num_devices // self.tp_size

    def __str__(self) -> str:
        return f"TP {self.tp_size}" + (f" EP {self.ep_size}" if self.ep_size > 1 else "")


@dataclass(frozen=True)
class MatrixGroup:
    """`count` matrices of one size on one device."""

    kind: MatrixKind
    num_outputs: int
    num_inputs: int
    count: int

    @property
    def num_elements(self) -> int:
        return self.count * self.num_outputs * self.num_inputs


@dataclass(frozen=True)
class ExpertsShape:
    """The layers that choose among experts."""

    num_layers: int
    num_routed: int
    num_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    """The width of the expert that every token takes; 0: there is none."""
    num_biases: int = 0
    """Float32 numbers of all layers that are added to the experts' scores for the choice."""
    has_shared_gate: bool = False
    """Whether that one's output is weighed by a gate of its own."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the whole model. `num_key_value_heads` and `head_dim` mean nothing with latent attention."""

    name: str
    dtype: str
    quantization: QuantizationName
    """The form that the checkpoint's own weights are rounded to."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    is_served: bool = True
    """Whether Baton serves the family."""
    is_gated: bool = True
    """The MLP multiplies with three matrices, not two."""
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    experts: ExpertsShape | None = None
    latent: LatentConfig | None = None

    @property
    def num_dense_layers(self) -> int:
        return self.num_hidden_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Elements of all matrices."""
        return sum(group.num_elements for group in self.matrices(DeviceLayout()))

    @property
    def num_active_parameters(self) -> int:
        """Elements that one token is multiplied with, and its row of the embedding."""
        total = 0
        for group in self.matrices(DeviceLayout()):
            is_routed = group.kind == "experts" and self.experts is not None
            share = self.experts.num_per_token / self.experts.num_routed if self.experts and is_routed else 1.0
            total += round(group.num_elements * share)
        return total

    def check_layout(self, layout: DeviceLayout) -> None:
        """Raises ConfigError with the sizes that work."""
        if not self._allows_tp(layout.tp_size, layout.ep_size):
            sizes = [n for n in range(1, LARGEST_TP + 1) if self._allows_tp(n, layout.ep_size)]
            inner = "" if self.latent else f", {self.num_key_value_heads} KV heads"
            raise ConfigError(
                f"--tp: {layout.tp_size} does not divide {self.num_attention_heads} attention heads{inner} and the "
                f"layers' inner sizes of {self.name}; use {', '.join(map(str, sizes))}"
            )
        if layout.ep_size == 1:
            return
        if self.experts is None:
            raise ConfigError(f"--ep: {layout.ep_size}, and {self.name} has no experts; leave it out")
        allowed = [n for n in range(2, self.experts.num_routed + 1) if self._allows_ep(n, layout.tp_size)]
        if layout.ep_size not in allowed:
            raise ConfigError(
                f"--ep: {layout.ep_size} does not divide {self.experts.num_routed} experts into multiples of "
                f"--tp {layout.tp_size}; use {', '.join(map(str, allowed)) or 'a smaller --tp'}"
            )

    def _allows_tp(self, tp_size: int, ep_size: int) -> bool:
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        splits_kv = self.latent is not None or kv % tp_size == 0 or tp_size % kv == 0
        inner = [self.intermediate_size] if self.num_dense_layers else []
        if self.experts is not None:
            inner += [self.experts.shared_intermediate_size]
            inner += [self.experts.intermediate_size] if ep_size == 1 else []
        return heads % tp_size == 0 and splits_kv and not any(size % tp_size for size in inner)

    def _allows_ep(self, ep_size: int, tp_size: int) -> bool:
        return self.experts is not None and self.experts.num_routed % ep_size == 0 and ep_size % tp_size == 0

    def kv_heads(self, tp_size: int) -> int:
        """KV heads of one device."""
        return max(1, self.num_key_value_heads // tp_size)

    def kv_bytes_per_token(self, tp_size: int, kv_dtype: str) -> int:
        """Bytes of one token's KV in all layers on one device. A latent vector is whole on a device that
        keeps it."""
        size, scale = KV_CELL_BYTES[kv_dtype]
        if self.latent is not None:
            return self.num_hidden_layers * (self.latent.width * size + scale)
        return 2 * self.num_hidden_layers * self.kv_heads(tp_size) * (self.head_dim * size + scale)

    def matrices(self, layout: DeviceLayout) -> list[MatrixGroup]:
        """The matrices of one device; with a tied head, its one matrix counts as both embedding and head."""
        rows = -(-self.vocab_size // layout.tp_size)
        return [
            *self._attention(layout.tp_size),
            *self._mlps(self.num_dense_layers, self.intermediate_size // layout.tp_size),
            *self._experts(layout),
            *([] if self.tie_word_embeddings else [MatrixGroup("embedding", rows, self.hidden_size, 1)]),
            MatrixGroup("head", rows, self.hidden_size, 1),
        ]

    def _attention(self, tp_size: int) -> list[MatrixGroup]:
        layers, hidden, heads = self.num_hidden_layers, self.hidden_size, self.num_attention_heads // tp_size

        def of(num_outputs: int, num_inputs: int) -> MatrixGroup:
            return MatrixGroup("attention", num_outputs, num_inputs, layers)

        if self.latent is None:
            attended, kv = heads * self.head_dim, self.kv_heads(tp_size) * self.head_dim
            return [of(attended + 2 * kv, hidden), of(hidden, attended)]
        latent = self.latent
        query, rank = heads * latent.qk_head_dim, latent.q_lora_rank
        return [
            *([of(rank, hidden), of(query, rank)] if rank else [of(query, hidden)]),
            of(latent.width, hidden),
            MatrixGroup("unrounded", heads * latent.made_dim, latent.kv_lora_rank, layers),
            of(hidden, heads * latent.v_head_dim),
        ]

    def _mlps(self, count: int, inner: int, kind: MatrixKind = "mlp") -> list[MatrixGroup]:
        if not count or not inner:
            return []
        width = 2 if self.is_gated else 1
        return [
            MatrixGroup(kind, width * inner, self.hidden_size, count),
            MatrixGroup(kind, self.hidden_size, inner, count),
        ]

    def _experts(self, layout: DeviceLayout) -> list[MatrixGroup]:
        experts = self.experts
        if experts is None:
            return []
        sliced = layout.tp_size if layout.ep_size == 1 else 1
        held = experts.num_layers * experts.num_routed // layout.ep_size
        return [
            *self._mlps(held, experts.intermediate_size // sliced, "experts"),
            *self._mlps(experts.num_layers, experts.shared_intermediate_size // layout.tp_size),
            MatrixGroup(
                "unrounded", experts.num_routed + experts.has_shared_gate, self.hidden_size, experts.num_layers
            ),
        ]

    def vector_elements(self, tp_size: int) -> int:
        """Elements of all norms and biases of one device, as far as Baton's families have them."""
        attended = self.num_attention_heads // tp_size * self.head_dim
        kv = self.kv_heads(tp_size) * self.head_dim
        count = 2 * self.hidden_size
        count += 0 if self.latent is None else (self.latent.q_lora_rank or 0) + self.latent.kv_lora_rank
        count += attended + kv if self.has_qk_norm else 0
        count += attended + 2 * kv if self.has_qkv_bias else 0
        count += self.hidden_size if self.has_output_bias else 0
        count += 2 * self.intermediate_size // tp_size + self.hidden_size if self.has_mlp_bias else 0
        return self.num_hidden_layers * count + self.hidden_size

    def group_bytes(self, group: MatrixGroup, quantization: QuantizationName) -> int:
        """Bytes of matrices as a GPU keeps them; the embedding, gates and what expands latents are never rounded."""
        if quantization == "none" or group.kind in ("embedding", "unrounded"):
            return group.num_elements * self.element_bytes
        rows = group.count * group.num_outputs
        if quantization == "int4" and group.num_inputs % _INT4_GROUP == 0:
            return rows * (group.num_inputs // 2 + group.num_inputs // _INT4_GROUP * _INT4_SCALE_BYTES)
        return rows * (group.num_inputs + _SCALE_BYTES)

    def weight_bytes(self, layout: DeviceLayout, quantization: QuantizationName) -> int:
        """Bytes of one device's weights. A tied head that is rounded is kept beside the embedding."""
        total = self.vector_elements(layout.tp_size) * self.element_bytes
        total += _ELEMENT_BYTES["float32"] * self.experts.num_biases if self.experts else 0
        for group in self.matrices(layout):
            total += self.group_bytes(group, quantization)
            if group.kind == "head" and self.tie_word_embeddings and quantization != "none":
                total += group.num_elements * self.element_bytes
        return total
