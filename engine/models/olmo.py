"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and MLP alone, and on all query heads together.

OLMo 3 has windows in three of four layers, whose rope is not scaled.
"""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import LayerNorms, ModelConfig, RopeConfig
from engine.models.family import ModelFamily, read_decoder, read_windows, rope_of, rope_values

_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_OLMO3_THETA = 500_000.0
_OLMO3_WINDOW = 4096
_OLMO3_PATTERN = 4


def _olmo2(fields: Fields) -> ModelConfig:
    return _with_norms_after(fields)


def _olmo3(fields: Fields) -> ModelConfig:
    theta = fields.number("rope_theta", _OLMO3_THETA)
    rope = rope_of(rope_values(fields, "full_attention"), fields, theta)
    local = rope_of(rope_values(fields, "sliding_attention"), fields, theta)
    config = _with_norms_after(fields, rope)
    window = fields.size("sliding_window", _OLMO3_WINDOW)
    windows = read_windows(fields, window, lambda layer: (layer + 1) % _OLMO3_PATTERN != 0)
    ropes = tuple(rope if window is None else local for window in windows)
    return replace(config, layer_windows=windows, layer_ropes=() if local == rope else ropes)


def _with_norms_after(fields: Fields, rope: RopeConfig | None = None) -> ModelConfig:
    has_bias = fields.flag("attention_bias")
    return replace(
        read_decoder(fields, rope=rope, rms_norm_eps=1e-5),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        projection_norm=True,
        norms=_NORMS,
    )


FAMILIES = (
    ModelFamily("OLMo 2", "Olmo2ForCausalLM", _olmo2),
    ModelFamily("OLMo 3", "Olmo3ForCausalLM", _olmo3),
)
