"""Granite: Llama with factors on the embedding, on attention's scores, on what is added to the residual, on logits."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import ModelConfig
from engine.models.family import ModelFamily, read_decoder


def _granite(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias")
    return replace(
        read_decoder(fields),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias"),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_divisor=fields.number("logits_scaling", 1.0),
    )


FAMILIES = (ModelFamily("Granite", "GraniteForCausalLM", _granite),)
