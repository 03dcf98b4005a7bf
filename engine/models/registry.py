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


def _qwen_windows(fields: Fields, num_layers: int) -> Windows:
    """In the layers that `layer_types` names, or (transformers 4) from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.size("sliding_window")
    types = fields.get("layer_types")
    if types is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        return tuple(window if layer >= first else None for layer in range(num_layers))
    by_type = {"sliding_attention": window, "full_attention": None}
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
}
"""By the first of config.json's `architectures`."""
