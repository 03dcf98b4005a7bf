"""The format `fp8`: float8_e4m3fn, whose steps grow with the value, with one float32 scale for each output.

GPUs that multiply in fp8 do so, by rows of activations that are rounded as well. On other GPUs Baton's kernels in
Triton make numbers of the weight in registers and round no row; so do those whose rows must not depend on one another.
Without either it is unpacked before each product.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quantization.interface import (
    Give,
    Kernels,
    Matrix,
    RoundedRows,
    Rows,
    TritonMatrix,
    TritonProducts,
    WeightFormat,
    check_fixed,
    renew,
)

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""Inputs and outputs must be multiples of it for a product in fp8."""


class Fp8Matrix:
    """Unpacked whole before each product, which is slow."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._scales = round_to_fp8(weight)
        self.nbytes = self._weight.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return F.linear(x, self._weight.float().mul_(self._scales).to(x.dtype), bias).to(dtype or x.dtype)

    def renew(self, give: Give) -> None:
        renew(give, self._weight, self._scales)


class ScaledFp8Matrix:
    """Multiplied in fp8: rows of x are rounded as well, each with a scale of its own, and the sum is bfloat16."""

    def __init__(self, weight: Tensor, round_rows: Callable[[Tensor], RoundedRows] | None = None) -> None:
        """`round_rows` rounds those that come unrounded as `round_to_fp8` does, which it is by default."""
        self._weight, scales = round_to_fp8(weight)
        self._scales = scales.t()
        self._round = round_rows
        self.nbytes = self._weight.nbytes + self._scales.nbytes

    def __call__(self, x: Rows, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(x, Tensor):
            x = RoundedRows(*round_to_fp8(x), x.dtype) if self._round is None else self._round(x)
        product: Tensor = torch._scaled_mm(
            x.codes,
            self._weight.t(),
            scale_a=x.scales,
            scale_b=self._scales,
            bias=None if bias is None else bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
        )
        return product.to(dtype or x.dtype)

    def renew(self, give: Give) -> None:
        renew(give, self._weight, self._scales)


def round_to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[T, I] as float8_e4m3fn, and the float32 scales [T, 1] to multiply it with."""
    values = rows.float()
    scales = (values.abs().amax(1, keepdim=True) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (values / scales).to(torch.float8_e4m3fn), scales


def _make(weight: Tensor, kernels: Kernels | None) -> Matrix:
    if isinstance(kernels, TritonProducts) and (kernels.is_fixed or not _multiplies_in_fp8(weight)):
        codes, scales = round_to_fp8(weight)
        return TritonMatrix(kernels, codes.view(torch.uint8), scales.flatten(), "fp8")
    if not _multiplies_in_fp8(weight):
        check_fixed(kernels, "fp8")
        return Fp8Matrix(weight)
    if kernels is None:
        return ScaledFp8Matrix(weight)
    return ScaledFp8Matrix(weight, importlib.import_module("engine.triton.rounding").rounded)


def _multiplies_in_fp8(weight: Tensor) -> bool:
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < _CAPABILITY:
        return False
    return all(size % _MULTIPLE == 0 for size in weight.shape)


def _size_bytes(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, is_tiled: bool) -> int:
    return shape[0] * (shape[1] + torch.float32.itemsize)


FORMATS = {"fp8": WeightFormat(_make, _size_bytes, is_tiled=lambda kernels, dtype: False)}
