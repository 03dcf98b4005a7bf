"""Llama and Mistral: the plain decoder, with biases where config.json asks for them, or a window in all layers."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import ModelConfig
from engine.models.family import ModelFamily, one_window, read_decoder


def read_llama(fields: Fields) -> ModelConfig:
    """Reads a plain decoder with the biases that config.json asks for."""
    has_bias = fields.flag("attention_bias")
    return replace(
        read_decoder(fields),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _mistral(fields: Fields) -> ModelConfig:
    return replace(read_decoder(fields), layer_windows=one_window(fields))


FAMILIES = (
    ModelFamily("Llama", "LlamaForCausalLM", read_llama),
    ModelFamily("Mistral", "MistralForCausalLM", _mistral),
)
