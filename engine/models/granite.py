"""Granite: Llama with factors on the embedding, on attention's scores, on what is added to the residual, on logits."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import ModelConfig
from engine.models.family import ModelFamily
from engine.models.llama import read_llama


def _granite(fields: Fields) -> ModelConfig:
    return replace(
        read_llama(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_divisor=fields.number("logits_scaling", 1.0),
    )


FAMILIES = (ModelFamily("Granite", "GraniteForCausalLM", _granite),)
