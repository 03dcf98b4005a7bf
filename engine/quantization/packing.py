"""What `quantization_config` says about linear layers that a checkpoint holds as packed integers: AWQ and GPTQ.

Reads the object, refuses what `engine.quantization.packed` would read wrongly, and says what becomes of the codes. It
knows no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cluster.errors import CheckpointError
from engine.models.json_fields import Fields
from engine.native import Native
from engine.native.tiles import INT4_SPAN

Method = Literal["awq", "gptq"]
_WHERE = "config.json: quantization_config"
_BITS = {"awq": (4,), "gptq": (4, 8)}
_LAYOUTS: dict[Method, tuple[str, ...]] = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
WORD_BITS = 32


@dataclass(frozen=True)
class Packing:
    """Weights are (code - zero point) * scale; each group of inputs of an output has its zero point and scale.

    AWQ (arXiv 2306.00978) as AutoAWQ's `gemm`; GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it.
    """

    method: Method
    bits: int
    """Of one code: 4 or 8."""
    group_size: int | None
    """Inputs of one group; None: all of them."""
    is_symmetric: bool
    """Every zero point is the middle of the codes."""
    has_lowered_zeros: bool
    """Zero points are stored less one (GPTQ's first layout)."""
    has_order: bool
    """Inputs of a group do not lie together: g_idx names the group of each (GPTQ's desc_act)."""

    @property
    def per_word(self) -> int:
        """Codes in one int32."""
        return WORD_BITS // self.bits

    def keeps_codes(self, quantization: str, dtype: torch.dtype, kernels: Native | None) -> bool:
        """Whether a model that is loaded so multiplies with codes of four bits as they are, wherever that can be.

        The codes lose nothing by it; kernels round activations to 8 bits for the product, of the size of what bfloat16
        rounds. Without kernels it would cost time, and is done only where less memory is asked for.
        """
        is_free = quantization == "none" and dtype == torch.bfloat16 and kernels is not None and kernels.has_products
        return self.bits == 4 and (is_free or quantization == "int4")

    def kept_group(self, num_inputs: int, num_ranks: int) -> int | None:
        """Inputs of a group where codes are kept, in a layer of so many inputs on each rank; None where they cannot be.

        `num_ranks`: how many divide the layer's inputs among them.
        """
        group = math.gcd(self.group_size or num_inputs, num_inputs)
        if self.bits != 4 or (num_ranks > 1 and self.is_scattered(num_inputs * num_ranks)) or group % INT4_SPAN:
            return None
        return group

    def is_scattered(self, num_inputs: int) -> bool:
        """Whether a layer of so many inputs must bring them into an order first, in which groups lie together."""
        return self.has_order and self.num_groups(num_inputs) > 1

    def num_groups(self, num_inputs: int) -> int:
        return 1 if self.group_size is None else -(-num_inputs // self.group_size)


def read_packing(fields: Fields) -> Packing | None:
    """Of config.json's fields; None: the weights are plain. Raises CheckpointError for what cannot be read."""
    if fields.get("quantization_config") is None:
        return None
    values = fields.within("quantization_config")
    method = _one_of(values, "quant_method", ("awq", "gptq"))
    bits = values.size("bits")
    if bits not in _BITS[method]:
        choices = " or ".join(map(str, _BITS[method]))
        raise CheckpointError(f"{_WHERE}: bits {bits} is not supported for {method}; Baton reads {choices}")
    for name in ("lm_head", "dynamic", "is_marlin_format"):
        if values.get(name):
            raise CheckpointError(f"{_WHERE}: {name} {values.get(name)!r} is not supported; make a checkpoint without")
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


def _one_of(values: Fields, name: str, choices: tuple[Any, ...]) -> Any:
    value = values.get(name)
    found = value.lower() if isinstance(value, str) else value
    if found not in choices:
        raise CheckpointError(f"{_WHERE}: {name} {value!r} is not supported; Baton reads {', '.join(choices)}")
    return found
