"""Finds a model's shape: by a known name, or in a folder's config.json or such a file by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.config.choices import QuantizationName
from cluster.config.source import nearest
from cluster.errors import CheckpointError, ConfigError
from cluster.model_folder import CONTEXT_NAMES, read_model_json
from engine.json_fields import Fields, architecture_of
from engine.models.config import ModelConfig
from engine.models.deepseek import read_latent
from engine.models.family import read_num_layers
from engine.models.registry import FAMILIES, read_config
from simulate.known_models import KNOWN_MODELS
from simulate.shapes import ExpertsShape, ModelShape

_NOT_GATED = ("OPT", "Bloom", "GPT2", "GPTNeoX", "GPTJ", "GPTBigCode", "Falcon", "Phi", "MPT", "Starcoder2")
"""Families, by how their architectures begin, whose MLP has two matrices of, mostly, four times the hidden size."""
_GATED = ("Phi3", "PhiMoE")
_ALIASES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    CONTEXT_NAMES[0]: CONTEXT_NAMES[1:],
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("experts_per_token", "moe_topk"),
}
_OTHER_LAYERS = ("linear_attention", "mamba", "recurrent", "conv")


def find_shape(model: str) -> ModelShape:
    """`model`: a name of `KNOWN_MODELS`, a folder with config.json, or such a file. Raises ConfigError or
    CheckpointError."""
    if model.lower() in KNOWN_MODELS:
        return read_shape(dict(KNOWN_MODELS[model.lower()]), model.lower(), model.lower())
    path = Path(model)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        return read_shape(read_model_json(file), str(file), (path if path.is_dir() else path.parent).resolve().name)
    close = nearest(model, KNOWN_MODELS)
    guess = f"did you mean {close}? " if close else ""
    raise ConfigError(
        f"--model: {model!r} is no folder, no config.json and no known name; {guess}known are {', '.join(KNOWN_MODELS)}"
    )


def read_shape(values: dict[str, Any], where: str, name: str) -> ModelShape:
    """Reads the fields of a config.json. Raises CheckpointError that names `where` and the field."""
    if isinstance(values.get("text_config"), dict):  # a model that sees images, too: its language part
        values = {**values["text_config"], "architectures": values.get("architectures")}
    _refuse_other_models(values, where)
    for field, others in _ALIASES.items():
        found = next((values[key] for key in (field, *others) if values.get(key) is not None), None)
        values = values if found is None else {**values, field: found}
    fields = Fields(values, where)
    architecture = architecture_of(fields)
    served = _served(fields)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    is_gated = architecture.startswith(_GATED) or not architecture.startswith(_NOT_GATED)
    has_bias = fields.flag("attention_bias")
    shape = ModelShape(
        name=name,
        dtype=_dtype(fields, where),
        quantization=_quantization(fields, where),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", None if is_gated else 4 * hidden),
        num_hidden_layers=read_num_layers(fields),
        num_attention_heads=heads,
        num_key_value_heads=1 if fields.flag("multi_query") else fields.size("num_key_value_heads", heads),
        head_dim=served.head_dim if served else fields.size("head_dim", max(1, hidden // heads)),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=served.max_position_embeddings if served else fields.size("max_position_embeddings"),
        tie_word_embeddings=served.tie_word_embeddings if served else fields.flag("tie_word_embeddings"),
        is_served=architecture in FAMILIES,
        is_gated=is_gated,
        has_qk_norm=served is not None and served.qk_norm,
        has_qkv_bias=served.attention_bias if served else has_bias,
        has_output_bias=served.attention_output_bias if served else has_bias,
        has_mlp_bias=served.mlp_bias if served else fields.flag("mlp_bias"),
        experts=_experts_of(served) if served else _experts(fields),
        latent=None if fields.get("kv_lora_rank") is None else read_latent(fields),
    )
    if shape.latent is None and heads % shape.num_key_value_heads:
        raise CheckpointError(
            f"{where}: num_key_value_heads {shape.num_key_value_heads} does not divide num_attention_heads {heads}"
        )
    return shape


def _served(fields: Fields) -> ModelConfig | None:
    """The model as it is served; None where it is not, in all or with some option."""
    try:
        return read_config(fields)
    except CheckpointError:
        return None


def _refuse_other_models(values: dict[str, Any], where: str) -> None:
    if values.get("is_encoder_decoder"):
        raise CheckpointError(f"{where}: is_encoder_decoder is true; plans are for decoder-only models")
    has_interval = values.get("full_attention_interval") not in (None, 1)  # Qwen3-Next's, which may name no types
    types = values.get("layer_types") or values.get("layers_block_type") or ["linear_attention"] * has_interval
    if not isinstance(types, list):
        raise CheckpointError(f"{where}: layer_types and layers_block_type must be lists (one is {types!r})")
    other = next((t for t in types if str(t).startswith(_OTHER_LAYERS)), None)
    if other is not None:
        raise CheckpointError(
            f"{where}: layers of type {other!r} keep a state of their own; plans are for layers of attention"
        )


def _dtype(fields: Fields, where: str) -> str:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(f"{where}: dtype {name!r} is unknown; plans know float32, bfloat16, float16")
    return name


def _quantization(fields: Fields, where: str) -> QuantizationName:
    """Returns the form of the checkpoint's weights. Packed formats of 4 bits take what Baton's int4 takes, nearly."""
    packed = fields.within("quantization_config")
    method = packed.get("quant_method")
    if method is None:
        return "none"
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method in ("awq", "gptq"):
        return "int8" if packed.get("bits") == 8 else "int4"
    if method == "mxfp4":
        return "int4"
    if method == "compressed-tensors":
        for name in packed.within("config_groups").names:
            weights = packed.within("config_groups").within(name).within("weights")
            return "int4" if weights.get("num_bits") == 4 else "fp8" if weights.get("type") == "float" else "int8"
    raise CheckpointError(
        f"{where}: quantization_config.quant_method {method!r} is not known here; plans know fp8, awq, gptq, "
        "mxfp4, compressed-tensors: "
        "remove it and name --quantization"
    )


def _experts_of(served: ModelConfig) -> ExpertsShape | None:
    experts = served.experts
    if experts is None:
        return None
    return ExpertsShape(
        num_layers=experts.num_layers,
        num_routed=experts.num_experts,
        num_per_token=experts.num_per_token,
        intermediate_size=experts.intermediate_size,
        shared_intermediate_size=experts.shared_intermediate_size,
        has_shared_gate=experts.shared_intermediate_size > 0 and experts.has_shared_gate,
        num_biases=experts.num_biases,
    )


def _experts(fields: Fields) -> ExpertsShape | None:
    """Reads the experts of a model that is not served, by the fields that most have."""
    if fields.get("n_routed_experts") is None:
        return None
    num_layers, inner = read_num_layers(fields), fields.size("moe_intermediate_size", _dense_size(fields))
    shared = fields.count("shared_expert_intermediate_size", 0) or fields.count("n_shared_experts", 0) * inner
    first, step = fields.count("first_k_dense_replace", 0), fields.size("moe_layer_freq", 1)
    every, dense = fields.size("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"{fields.where}: mlp_only_layers must be a list of layers (got {dense!r})")
    layers = [n for n in range(first, num_layers) if n % step == 0 and (n + 1) % every == 0 and n not in dense]
    return ExpertsShape(
        num_layers=len(layers),
        num_routed=fields.size("n_routed_experts"),
        num_per_token=fields.size("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=shared,
        has_shared_gate=fields.get("shared_expert_intermediate_size") is not None,
    )


def _dense_size(fields: Fields) -> int:
    return fields.size("intermediate_size")
