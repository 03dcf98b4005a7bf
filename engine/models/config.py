"""Reads a checkpoint folder's config.json into a frozen `ModelConfig` with Hugging Face's own field names.

Reads config.json and generation_config.json as transformers 4 and 5 write them, and refuses what
`engine.models.decoder` would compute wrongly. It knows nothing of weights, devices or serving.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from cluster.errors import CheckpointError, ConfigError
from cluster.kv_groups import KvGroup, group_layers
from engine.json_fields import Fields, read_json
from engine.models.experts import ExpertsConfig
from engine.models.registry import FAMILIES, ModelFamily
from engine.quantization.stored import Stored, read_stored

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")
_COMMON = frozenset(
    {
        *("architecture", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope"),
        *("tie_word_embeddings", "dtype", "eos_token_ids", "packing"),
    }
)
"""Fields of `ModelConfig` that every model has; each of the others is a feature."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `rope_type` is one of ROPE_TYPES; fields that a type does not use keep their defaults."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are of the whole model, not of one tensor-parallel rank.

    A family that computes something new has a field of its own here, which says so by a value other than None, False
    or a tuple of None. Code that computes a model in a way of its own, as the kernels' decode step does, names the
    `features` that it knows, and leaves other models to `engine.models.decoder`.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on the q, k and v projections."""
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm on each query and key head before rope (Qwen3)."""
    layer_windows: tuple[int | None, ...]
    """For each layer, how many tokens a token sees, itself included; None: all before it."""
    dtype: str
    eos_token_ids: tuple[int, ...]
    is_gemma: bool = False
    """As `engine.models.registry.ModelFamily` says."""
    query_scalar: float | None = None
    """Attention's scores are divided by its root; None: by that of head_dim."""
    local_rope: RopeConfig | None = None
    """The rope of layers with a window; None: that of the others."""
    attention_softcap: float | None = None
    """Attention's scores are bounded by it: c * tanh(score / c)."""
    attention_sinks: bool = False
    """Each query head has a score of its own that takes its share of attention's softmax and adds no value."""
    logit_softcap: float | None = None
    packing: Stored | None = None
    """How its checkpoint stores the linear layers; None: as plain weights."""
    experts: ExpertsConfig | None = None

    @cached_property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The groups of layers whose KV lies in blocks of their own."""
        return group_layers(self.layer_windows)

    @property
    def features(self) -> frozenset[str]:
        """The names of the fields by which this model computes something that not every model does."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _COMMON}
        return frozenset(name for name, value in values.items() if _is_used(value))

    @property
    def attention_extras(self) -> tuple[str, ...]:
        """What it needs, in words, that not every attention backend takes."""
        needs = {"soft caps": self.attention_softcap is not None, "attention sinks": self.attention_sinks}
        return tuple(name for name, is_needed in needs.items() if is_needed)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The first layer of each kind that the model has."""
        has_experts = self.experts.layers if self.experts else (False,) * self.num_hidden_layers
        first: dict[tuple[int | None, bool], int] = {}
        for layer, kind in enumerate(zip(self.layer_windows, has_experts, strict=True)):
            first.setdefault(kind, layer)
        return tuple(first.values())

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Raises CheckpointError naming the file, the field and the remedy."""
        folder = Path(path)
        fields = Fields(read_json(folder / "config.json"), "config.json")
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        has_bias = fields.flag("attention_bias")
        num_layers = fields.size("num_hidden_layers")
        num_heads = fields.size("num_attention_heads")
        hidden_size = fields.size("hidden_size")
        max_position_embeddings = fields.size("max_position_embeddings")
        attention_softcap, logit_softcap = _softcaps(fields, family)
        config = cls(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=fields.size("num_key_value_heads", num_heads),
            head_dim=fields.size("head_dim", family.default_head_dim or hidden_size // num_heads),
            vocab_size=fields.size("vocab_size"),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields, max_position_embeddings, family),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=family.is_gemma),
            attention_bias=family.has_qkv_bias or (has_bias and family.reads_attention_bias),
            attention_output_bias=has_bias and family.reads_attention_bias,
            mlp_bias=fields.flag("mlp_bias") and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            layer_windows=family.layer_windows(fields, num_layers),
            is_gemma=family.is_gemma,
            query_scalar=fields.number("query_pre_attn_scalar", 256.0) if family.is_gemma else None,
            local_rope=_local_rope(fields, max_position_embeddings) if family.has_local_rope else None,
            attention_softcap=attention_softcap,
            logit_softcap=logit_softcap,
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(folder, fields),
            packing=read_stored(fields),
            experts=family.experts(fields, num_layers),
        )
        config._check_heads()
        return config

    def _check_heads(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"config.json: num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim {self.head_dim} is odd; rotary embeddings need an even one")

    def allows_tp_size(self, tp_size: int) -> bool:
        """Whether query heads and MLP columns split evenly, and KV heads split or replicate evenly."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        splits_kv = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
        return heads % tp_size == 0 and splits_kv and not any(size % tp_size for size in self._inner_sizes())

    def _inner_sizes(self) -> list[int]:
        """Sizes of the MLPs that the model has."""
        experts = self.experts
        if experts is None:
            return [self.intermediate_size]
        dense = [] if all(experts.layers) else [self.intermediate_size]
        return [*dense, experts.intermediate_size, experts.shared_intermediate_size]

    def check_tp_size(self, tp_size: int) -> None:
        """Raises ConfigError naming the sizes that work."""
        if self.allows_tp_size(tp_size):
            return
        sizes = [str(n) for n in range(1, self.num_attention_heads + 1) if self.allows_tp_size(n)]
        inner = ", ".join(str(size) for size in self._inner_sizes() if size)
        choices = " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
        raise ConfigError(
            f"tensor_parallel: {tp_size} does not divide {self.num_attention_heads} attention heads, "
            f"{self.num_key_value_heads} KV heads and MLPs of {inner}; use {choices}"
        )

    def kv_head_range(self, tp_rank: int, tp_size: int) -> range:
        """The KV heads that a rank holds: an equal slice, or one replicated head where ranks outnumber heads."""
        kv_heads = self.num_key_value_heads
        if tp_size > kv_heads:
            head = tp_rank * kv_heads // tp_size
            return range(head, head + 1)
        count = kv_heads // tp_size
        return range(tp_rank * count, (tp_rank + 1) * count)


def _is_used(value: object) -> bool:
    return any(map(_is_used, value)) if isinstance(value, tuple) else value is not None and value is not False


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name not in FAMILIES:
        raise CheckpointError(
            f"config.json: architecture {name!r} is not supported; Baton serves {', '.join(FAMILIES)}"
        )
    is_gemma = FAMILIES[name].is_gemma
    key, computed = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    if (activation := fields.get(key)) not in (None, computed):
        raise CheckpointError(f"config.json: {key} {activation!r} is not supported; Baton computes {computed!r}")
    if fields.flag("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported; Baton generates from left")
    return str(name)


def _softcaps(fields: Fields, family: ModelFamily) -> tuple[float | None, float | None]:
    """Of attention's scores and of logits. transformers leaves out the former for Gemma 3."""
    if not family.is_gemma:
        return None, None
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    of_scores, of_logits = (
        fields.optional_number(key) if key in fields else default
        for key, default in zip(keys, family.default_softcaps, strict=True)
    )
    return None if family.has_local_rope else of_scores, of_logits


def _local_rope(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """`rope_parameters` of `sliding_attention`, or `rope_local_base_freq`."""
    values = fields.within("rope_parameters").within("sliding_attention")
    return _rope_of(values, fields, max_position_embeddings, fields.number("rope_local_base_freq", 10000.0))


def _rope(fields: Fields, max_position_embeddings: int, family: ModelFamily) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4)."""
    values = fields.within("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    if family.has_local_rope and fields.get("rope_parameters"):
        values = values.within("full_attention")
    default_theta = 1_000_000.0 if family.has_local_rope else 10000.0
    return _rope_of(values, fields, max_position_embeddings, fields.number("rope_theta", default_theta))


def _rope_of(values: Fields, fields: Fields, max_position_embeddings: int, rope_theta: float) -> RopeConfig:
    rope_type = values.get("rope_type") or values.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"config.json: rope_type {rope_type!r} is not supported; Baton computes {', '.join(ROPE_TYPES)}"
        )
    for source in (fields, values):
        if (partial := source.get("partial_rotary_factor")) not in (None, 1.0):
            raise CheckpointError(f"config.json: partial_rotary_factor {partial!r} is not supported; only 1.0 is")
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
    )


def _dtype(fields: Fields) -> str:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"config.json: dtype {name!r} is not supported; Baton serves {', '.join(DTYPES)}")
    return name


def _eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """generation_config.json's end-of-text ids if it names any, else config.json's."""
    path = folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them (got {value!r})")
    return tuple(ids)
