"""The interfaces of loaded weights, `Matrix`, and of their formats, `WeightFormat`; where formats are found; the
matrices that Baton's kernels multiply with, in tiles on the CPU, as they are on GPUs.

A file of this folder declares the formats that it implements as FORMATS, by the names of `model.quantization`
(`QuantizationName` in `cluster.config.choices`); nothing else needs to know of them.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.native import Native
from engine.native.structures import Tiles


@dataclass(frozen=True)
class TritonProducts:
    """Products by Baton's kernels in Triton, which must be able to run on the weight's device."""

    is_fixed: bool = False
    """Whether a row has the same bits in any number of rows; unrounded weights are then multiplied so, too."""


Kernels = Native | TritonProducts
"""By whose kernels matrices are multiplied, as `engine.layers.ops.choose_kernels` says; else by torch's."""


@dataclass(frozen=True)
class RoundedRows:
    """Rows of activations in fp8, as what computes them can leave them for the product that comes next."""

    codes: Tensor  # float8_e4m3fn [T, I]
    scales: Tensor  # float32 [T, 1], to multiply them with
    dtype: torch.dtype
    """The type that they had."""


Rows = Tensor | RoundedRows
Give = Callable[[Tensor], Tensor]
"""Returns what is to take the place of a tensor."""


def renew(give: Give, *tensors: Tensor | None) -> None:
    """Overwrites each tensor that there is by what is given for it, unless that is the tensor itself."""
    for tensor in tensors:
        if tensor is not None and (given := give(tensor)) is not tensor:
            tensor.copy_(given)


class Matrix(Protocol):
    """A weight [O, I]; called with [T, I] gives [T, O]."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight.T + bias, in `dtype` or in x's."""
        ...

    def renew(self, give: Give) -> None:
        """Becomes another weight of the same form, in the same memory; `give` is called with each tensor of it."""
        ...


@dataclass(frozen=True)
class WeightFormat:
    """A form of weights as `model.quantization` names it."""

    make: Callable[[Tensor, Kernels | None], Matrix]
    """Takes a weight over."""
    size_bytes: Callable[[tuple[int, int], torch.dtype, torch.device, bool], int]
    """The memory that `make` will take for a weight [O, I] of a type on a device, known before it is read; the last
    argument: Baton's kernels multiply with it."""
    is_tiled: Callable[[Kernels | None, torch.dtype], bool]
    """Whether Baton's kernels for the CPU, where there are any, multiply with such weights in a model that computes in
    this type. Otherwise a format other than `none` unpacks each weight before it is multiplied with."""


@cache
def weight_formats() -> dict[str, WeightFormat]:
    """Returns the formats by name: those that the files of this folder declare."""
    names = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [importlib.import_module(f"engine.quantization.{name}") for name in names]
    return {name: form for module in modules for name, form in getattr(module, "FORMATS", {}).items()}


def make_matrix(weight: Tensor, kernels: Kernels | None = None, quantization: str = "none") -> Matrix:
    """Takes the weight over."""
    return weight_formats()[quantization].make(weight, kernels)


def check_fixed(kernels: Kernels | None, form: str) -> None:
    """Raises ConfigError where torch's product, which is all there is, would break what fixed kernels promise."""
    if kernels is not None and kernels.is_fixed:
        raise ConfigError(
            f"engine.deterministic is true, and this machine has no kernel that multiplies weights in {form}: set "
            "model.quantization: none or engine.deterministic: false"
        )


class TiledMatrix:
    """bfloat16, int8 or int4 by Baton's own kernel. In fewer bits integers are multiplied: each row of x is rounded to
    8 bits, with a scale for every `engine.native.structures.SPAN` inputs."""

    def __init__(self, tiles: Tiles, kernels: Native) -> None:
        self.tiles = tiles
        self._kernels = kernels
        self.nbytes = tiles.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        bias = None if bias is None else bias.to(torch.bfloat16)
        return self._kernels.linear(x.to(torch.bfloat16), self.tiles, bias, dtype)

    def renew(self, give: Give) -> None:
        renew(give, self.tiles.data, self.tiles.scales, self.tiles.order)


def native_tiles(matrix: Matrix) -> Tiles | None:
    """Returns what Baton's kernels for the CPU multiply with, if that is what the matrix does."""
    return matrix.tiles if isinstance(matrix, TiledMatrix) else None


class TritonMatrix:
    """A weight of which a kernel in Triton makes numbers as it multiplies; loads Triton when it is made."""

    def __init__(
        self,
        kernels: TritonProducts,
        data: Tensor,
        scales: Tensor | None,
        form: str,
        group: int = 0,
        order: Tensor | None = None,
    ) -> None:
        """All but `order` are those of `engine.triton.products.multiply`.

        `order`, int64 [I]: the input of x that each input of the weight is; None: the natural order.
        """
        self._data, self._scales, self._form, self._group, self._order = data, scales, form, group, order
        self._is_fixed = kernels.is_fixed
        self._multiply = importlib.import_module("engine.triton.products").multiply
        self.nbytes = sum(tensor.nbytes for tensor in (data, scales, order) if tensor is not None)

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        weight = self._data, self._scales, self._form, self._group
        product: Tensor = self._multiply(x, *weight, bias, dtype or x.dtype, self._is_fixed)
        return product

    def renew(self, give: Give) -> None:
        renew(give, self._data, self._scales, self._order)
