"""Phi-3 and Phi-4, whose checkpoints fuse q, k and v, and gate and up; a window in all layers, partial rope, longrope.

With longrope transformers computes a whole sequence by other factors as soon as it is longer than the original context,
which no cached keys survive. Served here is what is exact: sequences up to the original context, by the short factors.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.errors import CheckpointError
from cluster.model_folder import LONGROPE_CONTEXT
from engine.json_fields import Fields
from engine.models.config import ModelConfig, RopeConfig, TensorNames
from engine.models.family import ModelFamily, one_window, read_decoder, read_partial, rope_values

_TENSORS = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
_LONGROPE = ("longrope", "su", "yarn")
"""Names of longrope, the last two of which older files have."""
_MOST = 1e30
"""The largest factor: it stays a number in float32."""


def _phi3(fields: Fields) -> ModelConfig:
    rope = _rope(fields)
    config = read_decoder(fields, rope=rope, rms_norm_eps=1e-5)
    turned = rope.rotary_dim(config.head_dim) // 2
    if rope.rope_type == "longrope" and len(rope.frequency_factors) != turned:
        raise CheckpointError(
            f"config.json: short_factor has {len(rope.frequency_factors)} numbers; there are {turned} pairs of "
            "dimensions that are turned"
        )
    longest = config.max_position_embeddings
    if rope.rope_type == "longrope":
        longest = min(longest, rope.original_max_position_embeddings)
    return replace(config, layer_windows=one_window(fields), tensors=_TENSORS, max_position_embeddings=longest)


def _rope(fields: Fields) -> RopeConfig:
    values = rope_values(fields)
    rope_type = values.get("rope_type") or values.get("type") or "default"
    if rope_type not in ("default", *_LONGROPE):
        raise CheckpointError(
            f"config.json: rope_type {rope_type!r} is not supported for Phi-3; Baton computes default, longrope"
        )
    theta = values.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = read_partial(values, fields, 1.0)
    if rope_type == "default":
        return RopeConfig(rope_theta=theta, partial_rotary_factor=partial)
    source = fields if fields.get("original_max_position_embeddings") is not None else values
    original = source.size("original_max_position_embeddings", LONGROPE_CONTEXT)
    return RopeConfig(
        rope_type="longrope",
        rope_theta=theta,
        factor=values.number("factor", fields.size("max_position_embeddings") / original),
        original_max_position_embeddings=original,
        attention_factor=values.optional_number("attention_factor"),
        frequency_factors=_factors(values, "short_factor"),
        partial_rotary_factor=partial,
    )


def _factors(values: Fields, key: str) -> tuple[float, ...]:
    found = values.get(key)
    if not isinstance(found, list) or any(type(x) not in (int, float) or not 0 < x < _MOST for x in found):
        raise CheckpointError(f"config.json: {key} must be a list of positive numbers (got {found!r})")
    return tuple(map(float, found))


FAMILIES = (ModelFamily("Phi-3 and Phi-4", "Phi3ForCausalLM", _phi3),)
