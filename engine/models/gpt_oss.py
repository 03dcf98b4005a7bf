"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate in all layers, attention sinks, and a window in
every other layer."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import ModelConfig, RopeConfig
from engine.models.experts import ClampedGate, ExpertNames, ExpertsConfig, expert_numbers
from engine.models.family import ModelFamily, Windows, read_decoder, read_rope, windows_by_type

_ROPE = RopeConfig(
    rope_type="yarn",
    rope_theta=150_000.0,
    factor=32.0,
    original_max_position_embeddings=4096,
    truncate=False,
)
"""The rope where config.json has none."""


def _gpt_oss(fields: Fields) -> ModelConfig:
    has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    config = read_decoder(fields, head_dim=64, rope=read_rope(fields, _ROPE.rope_theta) if has_rope else _ROPE)
    has_bias = fields.flag("attention_bias", True)
    num_experts, num_per_token = expert_numbers(fields, "num_local_experts")
    experts = ExpertsConfig(
        layers=(True,) * config.num_hidden_layers,
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=config.intermediate_size,
        normalizes=True,
        names=ExpertNames(router="router"),
        has_biases=True,
        is_interleaved=True,
        clamped_gate=ClampedGate(fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)),
    )
    return replace(
        config,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        attention_sinks=True,
        layer_windows=_windows(fields, config.num_hidden_layers),
        experts=experts,
    )


def _windows(fields: Fields, num_layers: int) -> Windows:
    """Reads the windows of the layers in `layer_types`, or of every other one from the first on."""
    window = fields.size("sliding_window", 128)
    if fields.get("layer_types") is not None:
        return windows_by_type(fields, window)
    return tuple(None if layer % 2 else window for layer in range(num_layers))


FAMILIES = (ModelFamily("gpt-oss", "GptOssForCausalLM", _gpt_oss),)
