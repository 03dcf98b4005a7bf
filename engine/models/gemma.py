"""Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786), of the latter the language part.

Norms around attention and MLP whose weights are offsets from 1, a gate of gelu, a scaled embedding, windows in most
layers; soft caps in Gemma 2, norms on each head and a rope of their own for layers with a window in Gemma 3.
"""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import LayerNorms, ModelConfig, RopeConfig
from engine.models.family import ModelFamily, Windows, read_decoder, read_windows, rope_of, rope_values

_NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_HEAD_DIM = 256
_LOCAL_THETA = 10_000.0


def _gemma2(fields: Fields) -> ModelConfig:
    return replace(
        _gemma(fields),
        layer_windows=_windows(fields, 2),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields) -> ModelConfig:
    """transformers leaves out the soft cap of scores, if config.json has one."""
    rope = rope_of(rope_values(fields, "full_attention"), fields, fields.number("rope_theta", 1_000_000.0))
    theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    local = rope_of(rope_values(fields, "sliding_attention"), fields, theta)
    windows = _windows(fields, 6)
    return replace(
        _gemma(fields, rope),
        qk_norm=True,
        layer_windows=windows,
        layer_ropes=tuple(rope if window is None else local for window in windows),
        logit_softcap=_softcap(fields, "final_logit_softcapping", None),
    )


def _gemma(fields: Fields, rope: RopeConfig | None = None) -> ModelConfig:
    has_bias = fields.flag("attention_bias")
    config = read_decoder(
        fields,
        head_dim=_HEAD_DIM,
        rope=rope,
        ties_embeddings=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
    )
    return replace(
        config,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        activation="gelu_tanh",
        norms=_NORMS,
        has_offset_norms=True,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )


def _windows(fields: Fields, default_pattern: int) -> Windows:
    """Reads the windows of the layers in `layer_types`, or of all but each `sliding_window_pattern`-th."""
    window, pattern = fields.size("sliding_window", 4096), fields.size("sliding_window_pattern", default_pattern)
    return read_windows(fields, window, lambda layer: (layer + 1) % pattern != 0)


def _softcap(fields: Fields, key: str, default: float | None) -> float | None:
    return fields.optional_number(key) if key in fields else default


FAMILIES = (
    ModelFamily("Gemma 2", "Gemma2ForCausalLM", _gemma2),
    ModelFamily("Gemma 3", "Gemma3ForCausalLM", _gemma3),
)
