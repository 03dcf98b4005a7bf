"""Qwen3-Next: three of four layers keep a recurrent state by the gated delta rule, the fourth attends with gates.

Norms are stored as how far they are from 1, rope turns a quarter of each head, and each token takes a shared expert
beside those it chooses. Layers that predict several tokens (`mtp.*`) are left out.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.kv_groups import STATE_WINDOW
from engine.json_fields import Fields
from engine.models.config import ModelConfig
from engine.models.delta_net import read_delta_net
from engine.models.family import ModelFamily, read_decoder, read_layer_types, read_num_layers, read_rope
from engine.models.qwen import read_experts


def _qwen3_next(fields: Fields) -> ModelConfig:
    has_bias, has_state = fields.flag("attention_bias"), _state_layers(fields)
    return replace(
        read_decoder(fields, head_dim=256, rope=read_rope(fields, partial=0.25)),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        qk_norm=True,
        attention_gate=True,
        has_offset_norms=True,
        layer_windows=tuple(STATE_WINDOW if is_one else None for is_one in has_state),
        delta_net=read_delta_net(fields, has_state) if any(has_state) else None,
        experts=read_experts(fields, fields.size("shared_expert_intermediate_size", 512)),
        left_out=("mtp.",),
    )


def _state_layers(fields: Fields) -> tuple[bool, ...]:
    """Returns for each layer whether `layer_types` says so; without that, all but each `full_attention_interval`-th."""
    if fields.get("layer_types") is None:
        interval = fields.size("full_attention_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(read_num_layers(fields)))
    return tuple(
        name == "linear_attention" for name in read_layer_types(fields, ("full_attention", "linear_attention"))
    )


FAMILIES = (ModelFamily("Qwen3-Next", "Qwen3NextForCausalLM", _qwen3_next),)
