"""Mixtral (arXiv 2401.04088): Mistral with experts in all layers."""

from __future__ import annotations

from dataclasses import replace

from engine.json_fields import Fields
from engine.models.config import ModelConfig
from engine.models.experts import ExpertNames, ExpertsConfig, expert_numbers
from engine.models.family import ModelFamily, one_window, read_decoder


def _mixtral(fields: Fields) -> ModelConfig:
    config = read_decoder(fields)
    num_experts, num_per_token = expert_numbers(fields, "num_local_experts")
    experts = ExpertsConfig(
        layers=(True,) * config.num_hidden_layers,
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=config.intermediate_size,
        normalizes=True,
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    )
    return replace(config, layer_windows=one_window(fields), experts=experts)


FAMILIES = (ModelFamily("Mixtral", "MixtralForCausalLM", _mixtral),)
