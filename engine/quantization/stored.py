"""How a checkpoint stores its linear layers, as `quantization_config` of its config.json says; what would be read
wrongly is refused. Loads no torch: `packed`, `scaled`, `blocks` and `microscaled` beside this read what lies so.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from cluster.errors import CheckpointError
from engine.gguf_files import name_in_folder
from engine.json_fields import Fields, architecture_of
from engine.models.experts import MXFP4_GROUP
from engine.tensor_files import NamedShape, TensorFiles

Method = Literal["awq", "gptq", "compressed-tensors"]
Products = Literal["cpu", "triton"] | None
"""Whose kernels multiply with codes as they are: Baton's for the CPU, those in Triton, or none."""
WORD_BITS = 32
Part = Literal["codes", "zeros", "scales", "groups"]

_EXPERT = re.compile(r"\.experts\.\d+\.")
_WHERE = "config.json: quantization_config"
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "gguf")
_BITS = {"awq": (4,), "gptq": (4, 8), "compressed-tensors": (4, 8)}
_LAYOUTS: dict[Method, tuple[str, ...]] = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""The formats of compressed-tensors."""
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class Packing:
    """Weights are (code - zero point) * scale; each group of inputs of an output has its zero point and scale.

    AWQ (arXiv 2306.00978) as AutoAWQ's `gemm`; GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it;
    compressed-tensors as llm-compressor does.
    """

    method: Method
    bits: int
    """Bits of one code: 4 or 8."""
    group_size: int | None
    """Inputs of one group; None: all of them."""
    is_symmetric: bool
    """Every zero point is the middle of the codes."""
    has_lowered_zeros: bool
    """Zero points are stored less one (GPTQ's first layout)."""
    has_order: bool
    """Inputs of a group do not lie together: g_idx names the group of each (GPTQ's desc_act)."""

    unused_tensors = (".weight_shape",)
    """Endings of tensors that say nothing which config.json does not."""

    def keeps_codes(self, quantization: str, is_bfloat16: bool, products: Products) -> bool:
        """Whether a model that is loaded so multiplies with codes of four bits as they are, wherever that can be.

        The codes lose nothing by it; kernels for the CPU round activations to 8 bits for the product, of the size of
        what bfloat16 rounds, those in Triton round none. Without kernels it would cost time, and is done only where
        less memory is asked for.
        """
        is_free = products == "triton" or (products == "cpu" and is_bfloat16)
        return self.bits == 4 and ((is_free and quantization == "none") or quantization == "int4")

    def tensors_of(self, name: str, shape: tuple[int, ...], files: TensorFiles) -> Iterator[NamedShape]:
        """Yields what a checkpoint has for a weight [O, I]. Raises CheckpointError for one that fills no words."""
        if name in files:
            yield name, shape
            return
        layer, (num_outputs, num_inputs) = name.removesuffix(".weight"), shape
        codes, zeros, scales, groups = (self.name(layer, what) for what in ("codes", "zeros", "scales", "groups"))
        num_groups = self.num_groups(num_inputs)
        if self.method == "awq":
            yield codes, (num_inputs, self.num_words(codes, num_outputs))
        else:
            words = self.num_words(codes, num_inputs)
            yield codes, (num_outputs, words) if self.is_outputs_first else (words, num_outputs)
        yield scales, (num_outputs, num_groups) if self.is_outputs_first else (num_groups, num_outputs)
        if not (self.is_outputs_first and self.is_symmetric):
            words = self.num_words(zeros, num_outputs)
            yield zeros, (words, num_groups) if self.is_outputs_first else (num_groups, words)
        if self.has_order or groups in files:
            yield groups, (num_inputs,)

    def num_words(self, name: str, size: int) -> int:
        """Returns the words of so many codes in a row of a tensor. Raises CheckpointError."""
        if size % self.per_word:
            raise CheckpointError(
                f"{name}: {self.method} packs {self.per_word} values of {self.bits} bits in a word, which do not "
                f"divide the {size} that config.json asks for"
            )
        return size // self.per_word

    @property
    def per_word(self) -> int:
        """Codes in one int32."""
        return WORD_BITS // self.bits

    @property
    def is_outputs_first(self) -> bool:
        return self.method == "compressed-tensors"

    def name(self, layer: str, what: Part) -> str:
        """Returns the name of a layer's tensor."""
        names = ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx")
        names = names if self.method == "compressed-tensors" else ("qweight", "qzeros", "scales", "g_idx")
        return f"{layer}.{dict(zip(('codes', 'zeros', 'scales', 'groups'), names, strict=True))[what]}"

    def is_scattered(self, num_inputs: int) -> bool:
        """Whether a layer of so many inputs must bring them into an order first, in which groups lie together."""
        return self.has_order and self.num_groups(num_inputs) > 1

    def num_groups(self, num_inputs: int) -> int:
        return 1 if self.group_size is None else -(-num_inputs // self.group_size)


@dataclass(frozen=True)
class Scaling:
    """Weights are codes times scales; layers without scales are plain."""

    form: Literal["fp8", "int8"]
    block: tuple[int | None, int | None]
    """Outputs and inputs that share a scale; None: all of them."""
    scale_name: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"

    unused_tensors = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
    """Endings of tensors for activations that are rounded, which are not here."""

    @property
    def scales_by(self) -> str:
        """Says which weights share a scale."""
        rows, columns = self.block
        if rows is not None and columns is not None:
            return f"in blocks of {rows}x{columns}"
        return "by outputs" if rows == 1 else "by tensors"

    def keeps_codes(self, quantization: str, is_bfloat16: bool, products: Products) -> bool:
        """Whether a model that is loaded so multiplies with int8 as it is: it loses nothing by it, and kernels for the
        CPU round activations to 8 bits for the product, of the size of what bfloat16 rounds."""
        if self.form != "int8" or self.block != (1, None) or quantization not in ("none", "int8"):
            return False
        return quantization == "int8" or (products is not None and is_bfloat16)

    def tensors_of(self, name: str, shape: tuple[int, ...], files: TensorFiles) -> Iterator[NamedShape]:
        """Yields what a checkpoint has for a weight [O, I]: without scales it is plain."""
        yield name, shape
        scales = self.scales_of(name)
        if scales in files:
            found = files.shape_of(scales)
            yield scales, found if self.fits(found, shape) else self.scales_shape(shape)

    def scales_of(self, name: str) -> str:
        """Returns the name of a weight's scales."""
        return f"{name.removesuffix('.weight')}.{self.scale_name}"

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the blocks of outputs and of inputs of a weight [O, I]."""
        return tuple(1 if block is None else -(-size // block) for size, block in zip(shape, self.block, strict=True))

    def fits(self, found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether scales of a shape are those of a weight [O, I]; a dimension of one may be left out."""
        wanted = self.scales_shape(shape)
        return math.prod(found) == math.prod(wanted) and (min(wanted) == 1 or found == wanted)


@dataclass(frozen=True)
class Blocks:
    """The types of a GGUF file's matrices."""

    types: tuple[tuple[str, str], ...]
    """(name as in a Hugging Face checkpoint, without the numbers of experts; ggml's name of its type)."""

    unused_tensors = ()
    """Endings of tensors that say nothing."""

    def keeps_codes(self, quantization: str, is_bfloat16: bool, products: Products) -> bool:
        """Whether a model that is loaded so multiplies with codes as they are, wherever that can be.

        On a CPU kernels round activations to 8 bits for the product, as with `Packing`; without any it is slow.
        """
        is_free = products == "triton" or (products == "cpu" and is_bfloat16)
        return (is_free and quantization == "none") or quantization in ("int4", "int8")

    def tensors_of(self, name: str, shape: tuple[int, ...], files: TensorFiles) -> Iterator[NamedShape]:
        """Yields what a checkpoint has for a weight: a tensor of its name."""
        yield name, shape

    def stored_type(self, name: str) -> str:
        """ggml's name of the type of a matrix."""
        return self._type_of.get(_EXPERT.sub(".experts.", name), "")

    @cached_property
    def _type_of(self) -> dict[str, str]:
        return dict(self.types)


@dataclass(frozen=True)
class Microscaling:
    """Experts are in MXFP4 (the OCP's specification of microscaling formats, version 1.0)."""

    unused_tensors = ()
    """Endings of tensors that are not read."""

    def keeps_codes(self, quantization: str, is_bfloat16: bool, products: Products) -> bool:
        """Whether a model that is loaded so multiplies with the experts as they are, wherever that can be: it loses
        nothing by it, and kernels for the CPU round activations to 8 bits for the product, of the size of what bfloat16
        rounds."""
        return products == "cpu" and is_bfloat16 and quantization in ("none", "int4")

    def tensors_of(self, name: str, shape: tuple[int, ...], files: TensorFiles) -> Iterator[NamedShape]:
        """Yields what a checkpoint has for a weight that is no expert's: a tensor of its name."""
        yield name, shape

    def can_keep(self, num_inputs: int) -> bool:
        """Whether so many inputs of a rank are whole groups."""
        return num_inputs % MXFP4_GROUP == 0


Stored = Packing | Scaling | Blocks | Microscaling
"""In integers of four bits, several to a word; in eight bits with scales; in GGUF's blocks; or, of experts alone, in
MXFP4."""


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
        names = {name: name_in_folder(name, architecture_of(fields)) for name in types.names}
        return Blocks(tuple((names[name], str(types.get(name))) for name in types.names))
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
