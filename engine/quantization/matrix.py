"""The interfaces of loaded weights, `Matrix`, and of their formats, `WeightFormat`, and the matrix in tiles.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.native import Native
from engine.native.structures import Tiles


class Matrix(Protocol):
    """A weight [O, I]; called with [T, I] gives [T, O]."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight.T + bias, in `dtype` or in x's."""
        ...


@dataclass(frozen=True)
class WeightFormat:
    """A format as `model.quantization` names it; each is declared by one file of this folder."""

    make: Callable[[Tensor, Native | None], Matrix]
    """Takes a weight over. The kernels are those of `engine.layers.ops.choose_native`."""
    size_bytes: Callable[[tuple[int, int], torch.dtype, torch.device, bool], int]
    """The memory that `make` will take for a weight [O, I] of a type on a device, known before it is read; the last
    argument: Baton's kernels multiply with it."""


class TiledMatrix:
    """bfloat16, int8 or int4 by Baton's own kernel. In fewer bits integers are multiplied: each row of x is rounded to
    8 bits, with a scale for every `engine.native.structures.SPAN` inputs."""

    def __init__(self, tiles: Tiles, kernels: Native, order: Tensor | None = None) -> None:
        """`order`, int64 [I]: the input of x that each input of the weight is; None: the natural order."""
        self.tiles = tiles
        self.order = order
        self._kernels = kernels
        self.nbytes = tiles.nbytes + (0 if order is None else order.nbytes)

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        if self.order is not None:
            x = x.index_select(1, self.order)
        bias = None if bias is None else bias.to(torch.bfloat16)
        return self._kernels.linear(x.to(torch.bfloat16), self.tiles, bias, dtype)
