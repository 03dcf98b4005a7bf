"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate in all layers, attention sinks, and a window in
every other layer."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import ModelConfig, RopeConfig
from engine.models.experts import ClampedGate, ExpertNames, local_experts
from engine.models.family import ModelFamily, read_decoder, read_rope, read_windows

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
    experts = replace(
        local_experts(fields, config.num_hidden_layers, config.intermediate_size),
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
        layer_windows=read_windows(fields, fields.size("sliding_window", 128), lambda layer: layer % 2 == 0),
        experts=experts,
    )


FAMILIES = (ModelFamily("gpt-oss", "GptOssForCausalLM", _gpt_oss),)
