"""GLM-4-MoE (GLM-4.5 and 4.6): grouped queries of which rope turns a part, and experts chosen as in DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import ModelConfig
from engine.models.deepseek import biased_routing, predicting_layers, read_experts
from engine.models.family import ModelFamily, read_decoder, read_rope


def _glm4_moe(fields: Fields) -> ModelConfig:
    experts = read_experts(
        fields,
        biased_routing(fields, num_groups=1, num_chosen_groups=1, scale=1.0),
        normalizes=fields.flag("norm_topk_prob", True),
        num_dense=fields.count("first_k_dense_replace", 1),
    )
    return replace(
        read_decoder(fields, rope=read_rope(fields, partial=0.5)),
        attention_bias=fields.flag("attention_bias"),
        qk_norm=fields.flag("use_qk_norm"),
        experts=experts,
        left_out=predicting_layers(fields),
    )


FAMILIES = (ModelFamily("GLM-4-MoE", "Glm4MoeForCausalLM", _glm4_moe),)
