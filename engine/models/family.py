"""Reads the part of config.json that all model families have in common, and the parts that several of them share.

A family's file calls `read_decoder` and replaces what distinguishes the family. What would be computed wrongly is a
CheckpointError that names the key, its value and the values that are supported. Reads config.json as transformers 4 and
5 write it. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.errors import CheckpointError
from engine.json_fields import Fields
from engine.models.config import DTYPES, ROPE_TYPES, ModelConfig, RopeConfig

MOST_LAYERS = 10_000
COMMON_ROPE_TYPES = tuple(name for name in ROPE_TYPES if name != "longrope")
"""The types that need nothing of a family's own."""
Windows = tuple[int | None, ...]
"""`ModelConfig.layer_windows`."""


@dataclass(frozen=True)
class ModelFamily:
    """Models whose config.json one function reads."""

    name: str
    """The name as its makers write it."""
    architecture: str
    """The name in config.json's `architectures`."""
    read: Callable[[Fields], ModelConfig]
    """Raises CheckpointError for what is not computed here."""


def read_decoder(
    fields: Fields,
    *,
    head_dim: int | None = None,
    rope: RopeConfig | None = None,
    rms_norm_eps: float = 1e-6,
    ties_embeddings: bool = False,
    activation_key: str = "hidden_act",
    activation: str = "silu",
) -> ModelConfig:
    """Reads the sizes of a plain decoder: no biases, norms before attention and MLP, one rope, no windows.

    `head_dim`, `rms_norm_eps` and `ties_embeddings` are defaults, None: hidden_size over num_attention_heads; `rope`:
    instead of the one that config.json has for all layers; `activation`: the only one that its family has.
    """
    found = fields.get(activation_key)
    if found not in (None, activation):
        raise CheckpointError(
            f"config.json: {activation_key} {found!r} is not supported; Baton computes {activation!r}"
        )
    if fields.flag("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported; Baton generates from left")
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    num_layers = read_num_layers(fields)
    return ModelConfig(
        architecture=str(fields.get("architectures")[0]),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=fields.size("head_dim", head_dim or max(1, hidden_size // num_heads)),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", rms_norm_eps),
        rope=rope or read_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=ties_embeddings),
        dtype=_dtype(fields),
        eos_token_ids=token_ids(fields.get("eos_token_id")),
        layer_windows=(None,) * num_layers,
    )


def read_num_layers(fields: Fields) -> int:
    """Returns num_hidden_layers. Raises CheckpointError for more than any model has: each takes memory here."""
    count = fields.size("num_hidden_layers")
    if count > MOST_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers must be at most {MOST_LAYERS:,} (got {count})")
    return count


def read_rope(fields: Fields, rope_theta: float = 10000.0, partial: float | None = None) -> RopeConfig:
    """Reads the rope of all layers: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`
    (transformers 4). `rope_theta` and `partial` are defaults, as of `rope_of`."""
    return rope_of(rope_values(fields), fields, fields.number("rope_theta", rope_theta), partial)


def rope_values(fields: Fields, layer_type: str = "") -> Fields:
    """Returns the object that has the rope's parameters. `layer_type`: of families with a rope for each type of layer,
    which transformers 5 names, while transformers 4 has but one scaling, that of full attention."""
    parameters = fields.within("rope_parameters")
    if layer_type and (parameters.names or layer_type != "full_attention"):
        return parameters.within(layer_type)
    return parameters if parameters.names else fields.within("rope_scaling")


def rope_of(values: Fields, fields: Fields, rope_theta: float, partial: float | None = None) -> RopeConfig:
    """Reads one rope's parameters.

    `fields` are those of config.json, where some stand; `rope_theta` is the default, and so is `partial`, the share of
    a head's dimensions that is turned; None: the family turns all of them.
    """
    rope_type = values.get("rope_type") or values.get("type") or "default"
    if rope_type not in COMMON_ROPE_TYPES:
        raise CheckpointError(
            f"config.json: rope_type {rope_type!r} is not supported; Baton computes {', '.join(COMMON_ROPE_TYPES)}"
        )
    max_position_embeddings = fields.size("max_position_embeddings")
    original = fields if fields.get("original_max_position_embeddings") is not None else values
    scales = rope_type != "default"
    derived = max_position_embeddings / original.size("original_max_position_embeddings", max_position_embeddings)
    return RopeConfig(
        rope_type=rope_type,
        rope_theta=values.number("rope_theta", rope_theta),
        factor=values.number("factor", derived if rope_type == "yarn" else None) if scales else 1.0,
        original_max_position_embeddings=original.size("original_max_position_embeddings", max_position_embeddings),
        low_freq_factor=values.number("low_freq_factor", None if rope_type == "llama3" else 1.0),
        high_freq_factor=values.number("high_freq_factor", None if rope_type == "llama3" else 4.0),
        beta_fast=values.number("beta_fast", 32.0),
        beta_slow=values.number("beta_slow", 1.0),
        attention_factor=values.optional_number("attention_factor"),
        mscale=values.optional_number("mscale"),
        mscale_all_dim=values.optional_number("mscale_all_dim"),
        truncate=values.flag("truncate", True),
        partial_rotary_factor=read_partial(values, fields, partial),
    )


def read_partial(values: Fields, fields: Fields, default: float | None) -> float:
    """Reads `partial_rotary_factor`; a `default` of None: only 1 is supported."""
    key = "partial_rotary_factor"
    share = (values if values.get(key) is not None else fields).number(key, default or 1.0)
    if default is None and share != 1.0:
        raise CheckpointError(f"config.json: {key} {share!r} is not supported; only 1.0 is")
    if share > 1.0:
        raise CheckpointError(f"config.json: {key} must be at most 1 (got {share!r})")
    return share


def one_window(fields: Fields) -> Windows:
    """Reads `sliding_window`, which all layers have."""
    window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
    return (window,) * read_num_layers(fields)


def read_windows(fields: Fields, window: int, slides: Callable[[int], bool]) -> Windows:
    """Returns `window` for the layers with sliding attention in `layer_types`, None for the others. `slides`: whether
    the layer of a number has a window where config.json names no types."""
    if fields.get("layer_types") is None:
        return tuple(window if slides(layer) else None for layer in range(read_num_layers(fields)))
    by_type = {"sliding_attention": window, "full_attention": None}
    return tuple(by_type[name] for name in read_layer_types(fields, sorted(by_type)))


def read_layer_types(fields: Fields, choices: Sequence[str]) -> list[str]:
    """Returns `layer_types`, which names one of the choices for each layer."""
    num_layers, types = read_num_layers(fields), fields.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers or any(name not in choices for name in types):
        raise CheckpointError(f"config.json: layer_types must name {num_layers} of {list(choices)} (got {types!r})")
    return types


def token_ids(value: object, where: str = "config.json") -> tuple[int, ...]:
    """Reads `eos_token_id`: one, a list of them, or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or not 0 <= token < 2**31 for token in ids):
        raise CheckpointError(f"{where}: eos_token_id must be a token id or a list of them (got {value!r:.100})")
    return tuple(ids)


def _dtype(fields: Fields) -> str:
    key = fields.first("dtype", "torch_dtype")
    value = fields.get(key)
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"config.json: {key} {name!r} is not supported; Baton serves {', '.join(DTYPES)}")
    return name
