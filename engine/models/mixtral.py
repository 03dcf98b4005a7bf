"""Mixtral (arXiv 2401.04088): Mistral with experts in all layers."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import ModelConfig
from engine.models.experts import ExpertNames, local_experts
from engine.models.family import ModelFamily, one_window, read_decoder


def _mixtral(fields: Fields) -> ModelConfig:
    config = read_decoder(fields)
    experts = local_experts(fields, config.num_hidden_layers, config.intermediate_size)
    names = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
    return replace(config, layer_windows=one_window(fields), experts=replace(experts, names=names))


FAMILIES = (ModelFamily("Mixtral", "MixtralForCausalLM", _mixtral),)
