"""The format `fp8`: float8_e4m3fn, whose steps grow with the value, with one float32 scale for each output.

GPUs that multiply in fp8 do so.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native import Native
from engine.quantization.interface import Matrix, WeightFormat

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""Inputs and outputs must be multiples of it for a product in fp8."""


class Fp8Matrix:
    """In a product in fp8, rows of x are rounded as well, each with a scale of its own, and the sum is bfloat16;
    otherwise the weight is unpacked whole before each product, which is slow."""

    def __init__(self, weight: Tensor, is_multiplied_in_fp8: bool) -> None:
        self._weight, self._scales = round_to_fp8(weight)
        self._in_fp8 = is_multiplied_in_fp8 and all(size % _MULTIPLE == 0 for size in weight.shape)
        self.nbytes = self._weight.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        if not self._in_fp8:
            return F.linear(x, self._weight.float().mul_(self._scales).to(x.dtype), bias).to(dtype)
        rows, scales = round_to_fp8(x)
        bias = None if bias is None else bias.to(torch.bfloat16)
        product: Tensor = torch._scaled_mm(
            rows,
            self._weight.t(),
            scale_a=scales,
            scale_b=self._scales.t(),
            bias=bias,
            out_dtype=torch.bfloat16,
        )
        return product.to(dtype)


def round_to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[T, I] as float8_e4m3fn, and the float32 scales [T, 1] to multiply it with."""
    values = rows.float()
    scales = (values.abs().amax(1, keepdim=True) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (values / scales).to(torch.float8_e4m3fn), scales


def _make(weight: Tensor, kernels: Native | None) -> Matrix:
    return Fp8Matrix(weight, weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= _CAPABILITY)


def _size_bytes(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, is_tiled: bool) -> int:
    return shape[0] * (shape[1] + torch.float32.itemsize)


FORMATS = {"fp8": WeightFormat(_make, _size_bytes, is_tiled=lambda kernels, dtype: False)}
