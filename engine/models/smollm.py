"""SmolLM3: Llama with layers that know no positions, which may have a window."""

from __future__ import annotations

from dataclasses import replace

from cluster.errors import CheckpointError
from engine.json_fields import Fields
from engine.models.config import NO_ROPE, ModelConfig
from engine.models.family import ModelFamily, Windows, read_decoder, read_num_layers, read_rope, read_windows

_THETA = 2_000_000.0
_INTERVAL = 4


def _smollm3(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias")
    has_rope = _has_rope(fields)
    rope = read_rope(fields, _THETA)
    return replace(
        read_decoder(fields, rope=rope, ties_embeddings=True),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias"),
        layer_windows=_windows(fields, has_rope),
        layer_ropes=() if all(has_rope) else tuple(rope if turns else NO_ROPE for turns in has_rope),
    )


def _has_rope(fields: Fields) -> tuple[bool, ...]:
    """Reads whether each layer has rope: `no_rope_layers` has a 0 for those without, or each `no_rope_layer_interval`th
    is one."""
    num_layers, named = read_num_layers(fields), fields.get("no_rope_layers")
    if named is None:
        interval = fields.size("no_rope_layer_interval", _INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(named, list) or len(named) < num_layers or any(value not in (0, 1) for value in named):
        raise CheckpointError(f"config.json: no_rope_layers must have a 0 or 1 for {num_layers} layers (got {named!r})")
    return tuple(bool(value) for value in named[:num_layers])


def _windows(fields: Fields, has_rope: tuple[bool, ...]) -> Windows:
    """Reads the windows of the layers in `layer_types`, or of those without rope, if `use_sliding_window`."""
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        return (None,) * len(has_rope)
    return read_windows(fields, fields.size("sliding_window"), lambda layer: not has_rope[layer])


FAMILIES = (ModelFamily("SmolLM3", "SmolLM3ForCausalLM", _smollm3),)
