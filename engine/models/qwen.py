"""Qwen2 and Qwen3, dense and with experts: biases on q, k and v (Qwen2) or norms on each head (Qwen3)."""

from __future__ import annotations

from dataclasses import replace

from cluster.errors import CheckpointError
from engine.json_fields import Fields
from engine.models.config import ModelConfig
from engine.models.experts import ExpertsConfig, expert_numbers
from engine.models.family import ModelFamily, Windows, one_window, read_decoder, read_num_layers, read_windows

_DEFAULT_MAX_WINDOW_LAYERS = 28


def _qwen2(fields: Fields) -> ModelConfig:
    return replace(read_decoder(fields), attention_bias=True, layer_windows=_windows(fields))


def _qwen2_moe(fields: Fields) -> ModelConfig:
    """Reads experts beside one that every token takes."""
    return replace(_qwen2(fields), experts=read_experts(fields, fields.size("shared_expert_intermediate_size")))


def _qwen3(fields: Fields) -> ModelConfig:
    return replace(_with_head_norms(fields, head_dim=128), layer_windows=_windows(fields))


def _qwen3_moe(fields: Fields) -> ModelConfig:
    config = replace(_with_head_norms(fields), experts=read_experts(fields))
    return replace(config, layer_windows=one_window(fields)) if fields.flag("use_sliding_window") else config


def _with_head_norms(fields: Fields, head_dim: int | None = None) -> ModelConfig:
    has_bias = fields.flag("attention_bias")
    config = read_decoder(fields, head_dim=head_dim)
    return replace(config, attention_bias=has_bias, attention_output_bias=has_bias, qk_norm=True)


def _windows(fields: Fields) -> Windows:
    """Reads the windows of the layers in `layer_types`, or (transformers 4) from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        return (None,) * read_num_layers(fields)
    return read_windows(
        fields,
        fields.size("sliding_window"),
        lambda layer: layer >= fields.count("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS),
    )


def read_experts(fields: Fields, shared_intermediate_size: int = 0) -> ExpertsConfig | None:
    """Reads the experts of each `decoder_sparse_step`th layer that `mlp_only_layers` does not name. Raises
    CheckpointError naming the field."""
    dense = fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of layers (got {dense!r})")
    step, num_layers = fields.size("decoder_sparse_step", 1), read_num_layers(fields)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    if not any(layers):
        return None
    num_experts, num_per_token = expert_numbers(fields, fields.first("num_experts", "num_local_experts"))
    return ExpertsConfig(
        layers=layers,
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=fields.size("moe_intermediate_size"),
        normalizes=fields.flag("norm_topk_prob"),
        shared_intermediate_size=shared_intermediate_size,
    )


FAMILIES = (
    ModelFamily("Qwen2", "Qwen2ForCausalLM", _qwen2),
    ModelFamily("Qwen2-MoE", "Qwen2MoeForCausalLM", _qwen2_moe),
    ModelFamily("Qwen3", "Qwen3ForCausalLM", _qwen3),
    ModelFamily("Qwen3-MoE", "Qwen3MoeForCausalLM", _qwen3_moe),
)
