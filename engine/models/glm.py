"""GLM-4 (arXiv 2406.12793) in both of its layouts: rope of neighbouring dimensions on half of each head, a fused gate
and up; the later one has norms around attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import LayerNorms, ModelConfig, TensorNames
from engine.models.family import ModelFamily, read_decoder, read_rope

_TENSORS = TensorNames(gate_up=("gate_up_proj",))
_NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)
_PARTIAL = 0.5


def _glm(fields: Fields) -> ModelConfig:
    rope = replace(read_rope(fields, partial=_PARTIAL), is_interleaved=True)
    return replace(
        read_decoder(fields, head_dim=128, rope=rope, rms_norm_eps=1.5625e-7),
        attention_bias=fields.flag("attention_bias", default=True),
        tensors=_TENSORS,
    )


def _glm4(fields: Fields) -> ModelConfig:
    return replace(_glm(fields), norms=_NORMS)


FAMILIES = (
    ModelFamily("GLM-4 (2024)", "GlmForCausalLM", _glm),
    ModelFamily("GLM-4 (0414)", "Glm4ForCausalLM", _glm4),
)
