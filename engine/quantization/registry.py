"""The formats of weights, by the names that `model.quantization` has for them in `cluster.config.schema`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.native import Native
from engine.quantization.fp8 import FP8_FORMAT
from engine.quantization.integers import INT4_FORMAT, INT8_FORMAT
from engine.quantization.matrix import Matrix, WeightFormat
from engine.quantization.plain import PLAIN_FORMAT

WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "none": PLAIN_FORMAT,
    "int8": INT8_FORMAT,
    "int4": INT4_FORMAT,
    "fp8": FP8_FORMAT,
}


def make_matrix(weight: Tensor, kernels: Native | None = None, quantization: str = "none") -> Matrix:
    """Takes the weight over. The kernels are those of `engine.layers.ops.choose_native`."""
    return WEIGHT_FORMATS[quantization].make(weight, kernels)


def matrix_bytes(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, quantization: str = "none", is_tiled: bool = False
) -> int:
    """The memory that `make_matrix` will take for a weight [O, I]; `is_tiled`: Baton's kernels multiply with it."""
    return WEIGHT_FORMATS[quantization].size_bytes(shape, dtype, device, is_tiled)
