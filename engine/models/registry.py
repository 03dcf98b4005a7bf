"""The model families that are served: what distinguishes each from the decoder that they have in common.

A dense family whose weights have Llama's names in Hugging Face's checkpoints is an entry here. One that computes
something else needs a field of its own, which `engine.models.config` reads and `engine.models.decoder` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import CheckpointError
from engine.json_fields import Fields
from engine.models.experts import ExpertsConfig, mixtral_experts, no_experts, qwen2_experts, qwen_experts

Windows = tuple[int | None, ...]
"""For each layer, how many tokens a token sees, itself included; None: all before it."""


def _no_windows(fields: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


def _one_window(fields: Fields, num_layers: int) -> Windows:
    """`sliding_window` in all layers."""
    slides = fields.get("sliding_window") is not None
    return (fields.size("sliding_window") if slides else None,) * num_layers


def _used_window(fields: Fields, num_layers: int) -> Windows:
    """`sliding_window` in all layers, if `use_sliding_window`."""
    return _one_window(fields, num_layers) if fields.flag("use_sliding_window") else (None,) * num_layers


def _gemma_windows(default_pattern: int) -> Callable[[Fields, int], Windows]:
    """In the layers that `layer_types` names, or in all but each `sliding_window_pattern`-th."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        window, pattern = fields.size("sliding_window", 4096), fields.size("sliding_window_pattern", default_pattern)
        if fields.get("layer_types") is not None:
            return _windows_by_type(fields, num_layers, window)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))

    return windows


def _qwen_windows(fields: Fields, num_layers: int) -> Windows:
    """In the layers that `layer_types` names, or (transformers 4) from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.size("sliding_window")
    if fields.get("layer_types") is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _windows_by_type(fields, num_layers, window)


def _windows_by_type(fields: Fields, num_layers: int, window: int) -> Windows:
    types, by_type = fields.get("layer_types"), {"sliding_attention": window, "full_attention": None}
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(by_type):
        raise CheckpointError(f"config.json: layer_types must name {num_layers} of {sorted(by_type)} (got {types!r})")
    return tuple(by_type[name] for name in types)


@dataclass(frozen=True)
class ModelFamily:
    """The peculiarities of a family, with which its config.json is read."""

    default_head_dim: int | None = None
    """None: hidden_size over num_attention_heads."""
    has_qkv_bias: bool = False
    """The q, k and v projections always have biases."""
    reads_attention_bias: bool = False
    """`attention_bias` gives biases to all four projections of attention."""
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each query and key head before rope."""
    is_gemma: bool = False
    """Norms around attention and MLP whose weights are offsets from 1, a gate of gelu, a scaled embedding, attention
    scaled by `query_pre_attn_scalar`, and soft caps where config.json gives them."""
    has_local_rope: bool = False
    """Layers with a window have a rope of their own."""
    default_softcaps: tuple[float | None, float | None] = (None, None)
    """Of attention's scores and of logits, where config.json says nothing."""
    layer_windows: Callable[[Fields, int], Windows] = _no_windows
    experts: Callable[[Fields, int], ExpertsConfig | None] = no_experts
    """Of a model of as many layers."""


FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": ModelFamily(layer_windows=_one_window),
    "MixtralForCausalLM": ModelFamily(layer_windows=_one_window, experts=mixtral_experts),
    "Qwen2ForCausalLM": ModelFamily(has_qkv_bias=True, layer_windows=_qwen_windows),
    "Qwen2MoeForCausalLM": ModelFamily(has_qkv_bias=True, layer_windows=_qwen_windows, experts=qwen2_experts),
    "Qwen3ForCausalLM": ModelFamily(
        default_head_dim=128, reads_attention_bias=True, qk_norm=True, layer_windows=_qwen_windows
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        reads_attention_bias=True, qk_norm=True, layer_windows=_used_window, experts=qwen_experts
    ),
    "Gemma2ForCausalLM": ModelFamily(
        default_head_dim=256,
        reads_attention_bias=True,
        is_gemma=True,
        default_softcaps=(50.0, 30.0),
        layer_windows=_gemma_windows(2),
    ),
    "Gemma3ForCausalLM": ModelFamily(
        default_head_dim=256,
        reads_attention_bias=True,
        qk_norm=True,
        is_gemma=True,
        has_local_rope=True,
        layer_windows=_gemma_windows(6),
    ),
}
"""By the first of config.json's `architectures`."""
