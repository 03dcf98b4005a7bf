"""One weight matrix and the fastest product with it that this machine has. Knows no layer and no rank.

`make_matrix` chooses. On the CPU: in float32 torch multiplies through MKL, which on some processors stays at half of
their rate, and oneDNN reaches it with a weight that was packed once. In bfloat16, few rows are bound by memory, and
Baton's own kernel reads a weight once for all of them; many rows go to oneDNN. A weight in fewer bits is read as it is
for few rows, and unpacked for many, which costs little beside their product.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native import BF16, Native
from engine.quantization import quantize

_PACKED_FROM_ROWS = 6
"""Fewer rows than this multiply faster unpacked."""
_BOTH_FORMS_BYTES = 16 << 20
_PACKED_FOR_ROWS = 32
_NATIVE_UP_TO_ROWS = 64
"""More rows than this multiply faster by oneDNN."""


class Matrix(Protocol):
    """A weight [O, I]; called with [T, I] gives [T, O]."""

    @property
    def nbytes(self) -> int:
        """What it takes."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight.T + bias, in `dtype` or in x's."""
        ...


def make_matrix(weight: Tensor, kernels: Native | None = None, quantization: str = "none") -> Matrix:
    """Takes the tensor over. `kernels` as `engine.ops.choose_native` gives them."""
    if kernels is not None and not kernels.has_products:
        kernels = None
    if quantization != "none":
        return QuantizedMatrix(weight, quantization, kernels)
    if kernels is not None and weight.dtype == torch.bfloat16:
        return NativeMatrix(weight, kernels)
    return TorchMatrix(weight)


class TorchMatrix:
    """In torch. In float32 on the CPU a matrix that fits in a cache keeps both forms, a larger one the packed one:
    a single row is bound by memory and by the cost of the call, and there MKL is quicker."""

    def __init__(self, weight: Tensor) -> None:
        self._num_outputs = weight.shape[0]
        self._packed = _pack(weight)
        keeps_plain = self._packed is None or weight.nbytes <= _BOTH_FORMS_BYTES
        self._plain = weight if keeps_plain else None
        self.nbytes = weight.nbytes * ((self._packed is not None) + keeps_plain)

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        product = self._multiply(x, bias)
        return product if dtype is None else product.to(dtype)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        if self._plain is not None and (self._packed is None or num_rows < _PACKED_FROM_ROWS):
            return F.linear(x, self._plain, bias)
        if num_rows == 0:
            return x.new_empty(0, self._num_outputs)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product


class NativeMatrix:
    """bfloat16 on the CPU."""

    def __init__(self, weight: Tensor, kernels: Native) -> None:
        self._weight = weight
        self._kernels = kernels
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if x.shape[0] <= _NATIVE_UP_TO_ROWS:
            return self._kernels.linear(x, self._weight, None, BF16, 0, bias, dtype or x.dtype)
        product = F.linear(x, self._weight, bias)
        return product if dtype is None else product.to(dtype)


class QuantizedMatrix:
    """int8 or int4, unpacked as it is read; without kernels, whole and before each product.

    With kernels, x is rounded to bfloat16, which costs less than the weight's rounding did.
    """

    def __init__(self, weight: Tensor, quantization: str, kernels: Native | None) -> None:
        self._weight = quantize(weight, quantization)
        self._shape = weight.shape
        self._kernels = kernels
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        weight, kernels, dtype = self._weight, self._kernels, dtype or x.dtype
        if kernels is None:
            return F.linear(x, weight.dequantize(x.dtype), bias).to(dtype)
        x = x.to(torch.bfloat16)
        bias = None if bias is None else bias.to(torch.bfloat16)
        if x.shape[0] <= _NATIVE_UP_TO_ROWS:
            return kernels.linear(x, weight.data, weight.scales, weight.kind, weight.group, bias, dtype)
        whole = torch.empty(self._shape, dtype=torch.bfloat16)
        kernels.unpack(weight.data, weight.scales, weight.kind, weight.group, whole)
        return F.linear(x, whole, bias).to(dtype)


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout; None where that does not apply or this build of torch lacks it."""
    is_float32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not is_float32_on_cpu or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed
