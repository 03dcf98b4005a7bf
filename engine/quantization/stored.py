"""How a checkpoint stores its linear layers, as `quantization_config` of its config.json says; what would be read
wrongly is refused."""

from __future__ import annotations

from typing import Any

from cluster.errors import CheckpointError
from engine.gguf_files import name_in_folder
from engine.json_fields import Fields
from engine.quantization.blocks import Blocks
from engine.quantization.microscaled import Microscaling
from engine.quantization.packed import Method, Packing
from engine.quantization.scaled import Scaling

Stored = Packing | Scaling | Blocks | Microscaling
"""In integers of four bits, several to a word; in eight bits with scales; in GGUF's blocks; or, of experts alone, in
MXFP4."""

_WHERE = "config.json: quantization_config"
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "gguf")
_BITS = {"awq": (4,), "gptq": (4, 8), "compressed-tensors": (4, 8)}
_LAYOUTS: dict[Method, tuple[str, ...]] = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""The formats of compressed-tensors."""
_STRATEGIES = ("tensor", "channel", "group", "block")


def read_stored(fields: Fields) -> Stored | None:
    """Reads config.json's fields; None: the weights are plain. Raises CheckpointError for what is not supported."""
    if fields.get("quantization_config") is None:
        return None
    values = fields.within("quantization_config")
    method = _one_of(values, "quant_method", METHODS)
    if method == "compressed-tensors":
        return _compressed(values)
    if method == "fp8":
        return _fp8(values)
    if method == "gguf":  # as cluster.gguf.config says it
        types = values.within("types")
        return Blocks(tuple((name_in_folder(name), str(types.get(name))) for name in types.names))
    if method == "mxfp4":
        return Microscaling()
    if method == "fbgemm_fp8":
        return Scaling("fp8", (1, None))
    return _packing(values, method)


def _packing(values: Fields, method: Method) -> Packing:
    bits = _bits(values, "bits", method)
    for name in ("lm_head", "dynamic", "is_marlin_format"):
        _refuse(values, name)
    if values.get("pack_dtype") not in (None, "int32"):
        raise CheckpointError(f"{_WHERE}: pack_dtype {values.get('pack_dtype')!r} is not supported; only int32 is")
    layout = _layout(values, method)
    return Packing(
        method=method,
        bits=bits,
        group_size=None if values.get("group_size") == -1 else values.size("group_size", 128),
        is_symmetric=method == "gptq" and values.flag("sym", True),
        has_lowered_zeros=layout == "gptq",
        has_order=method == "gptq" and values.flag("desc_act"),
    )


def _layout(values: Fields, method: Method) -> str:
    """Named by one of three keys, depending on who wrote the file; the first of each method's when by none."""
    for name in ("checkpoint_format", "version", "format"):
        if values.get(name) is not None:
            return str(_one_of(values, name, _LAYOUTS[method]))
    return _LAYOUTS[method][0]


def _fp8(values: Fields) -> Scaling:
    """DeepSeek's blocks, or one scale for a weight."""
    block = values.get("weight_block_size")
    if block is None:
        return Scaling("fp8", (None, None))
    return Scaling("fp8", _block(block, "weight_block_size"), "weight_scale_inv")


def _block(value: Any, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise CheckpointError(f"{_WHERE}: {name} must be two positive integers (got {value!r})")
    return value[0], value[1]


def _compressed(values: Fields) -> Stored:
    """compressed-tensors, where all layers that are quantized are so in one way."""
    if values.within("sparsity_config").get("format") not in (None, "dense"):
        _refuse(values, "sparsity_config")
    groups = values.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    found = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    if not found or any(weights != found[0] for weights in found) or not isinstance(found[0], dict):
        raise CheckpointError(f"{_WHERE}: config_groups must quantize weights, and all in one way (got {groups!r})")
    form = _one_of(values, "format", _FORMATS)
    weights = Fields(found[0], f"{_WHERE}: weights")
    kind = _one_of(weights, "type", ("int", "float"))
    strategy = _one_of(weights, "strategy", _STRATEGIES)
    is_symmetric = weights.flag("symmetric", True)
    bits = _bits(weights, "num_bits", "compressed-tensors")
    if form == "pack-quantized" and kind == "int" and strategy in ("channel", "group"):
        return Packing(
            method="compressed-tensors",
            bits=bits,
            group_size=weights.size("group_size") if strategy == "group" else None,
            is_symmetric=is_symmetric,
            has_lowered_zeros=False,
            has_order=weights.get("actorder") in ("group", True),
        )
    blocks = {"tensor": (None, None), "channel": (1, None)}
    block = _block(weights.get("block_structure"), "block_structure") if strategy == "block" else blocks.get(strategy)
    if form == "pack-quantized" or block is None or not is_symmetric or bits != 8:
        said = f"{bits} bits of {kind} by {strategy}, {'' if is_symmetric else 'not '}symmetric"
        raise CheckpointError(
            f"{_WHERE}: format {form!r} with {said} is not supported; Baton reads pack-quantized int by channel or "
            "group, and 8 bits by tensor, channel or block, symmetric"
        )
    return Scaling("fp8" if kind == "float" else "int8", block)


def _bits(values: Fields, name: str, method: Method) -> int:
    bits = values.size(name)
    if bits not in _BITS[method]:
        choices = " or ".join(map(str, _BITS[method]))
        raise CheckpointError(f"{_WHERE}: {name} {bits} is not supported for {method}; Baton reads {choices}")
    return bits


def _refuse(values: Fields, name: str) -> None:
    if values.get(name):
        raise CheckpointError(f"{_WHERE}: {name} {values.get(name)!r} is not supported; make a checkpoint without")


def _one_of(values: Fields, name: str, choices: tuple[Any, ...]) -> Any:
    value = values.get(name)
    found = value.lower() if isinstance(value, str) else value
    if found not in choices:
        raise CheckpointError(f"{_WHERE}: {name} {value!r} is not supported; Baton reads {', '.join(choices)}")
    return found
