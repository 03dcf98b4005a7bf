"""The formats `int8` and `int4`, and codes that a checkpoint brings along: integers, symmetric and to nearest.

int8 has one scale for each output (its rows stay exact integers until the sum is scaled); int4 one for each group of
inputs of each output, since sixteen steps are too few for a whole row. Codes of a checkpoint keep their own zero points
and groups. Baton's kernels for the CPU multiply such a weight as it is, rounding the rows to 8 bits for it; those in
Triton make numbers of it in registers and round no row. Without either it is unpacked before each product.

Legend: O outputs, I inputs, G groups of inputs, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native import Native
from engine.native.structures import INT4, INT4_ZEROS, INT8, INT8_GROUPS, MXFP4, SPAN, TILE, Tiles
from engine.quantization.interface import (
    Give,
    Kernels,
    Matrix,
    TiledMatrix,
    TritonMatrix,
    TritonProducts,
    WeightFormat,
    check_fixed,
    renew,
)

_GROUP = 32
"""Inputs that share a scale in int4."""
_IN_TRITON = {INT8: "int8", INT4: "int4", INT4_ZEROS: "int4 with zeros"}
"""The names of the kinds in `engine.triton.products`."""
_OF_BYTES = (INT8, INT8_GROUPS)
"""Kinds with a byte for each code."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


@dataclass(frozen=True)
class Quantized:
    """A weight: `data` int8 [O, I] or uint8 [O, I / 2], `scales` float32 [O], bfloat16 or float16 [O, G], float16
    [O, G, 2] or uint8 [O, G] (E8M0)."""

    data: Tensor
    scales: Tensor
    kind: int
    """INT8, INT4, INT4_ZEROS, INT8_GROUPS or MXFP4 of `engine.native.structures`."""
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's outputs and inputs."""
        num_outputs, width = self.data.shape
        return num_outputs, width if self.kind in _OF_BYTES else 2 * width

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def codes(self) -> Tensor:
        """[O, I]: int8, or uint8 below 16."""
        return self.data if self.kind in _OF_BYTES else torch.stack((self.data & 15, self.data >> 4), dim=2).flatten(1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[O, I], the weight as far as the format keeps it."""
        if self.kind == INT8:
            return self.data.float().mul_(self.scales[:, None]).to(dtype)
        num_outputs = self.data.shape[0]
        if self.kind == MXFP4:
            numbers = self.data.new_tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.float32)
            groups = numbers[self.codes().int()].view(num_outputs, -1, self.group)
            return groups.ldexp_(self.scales.int()[:, :, None] - _E8M0_BIAS).view(num_outputs, -1).to(dtype)
        codes = self.codes().float().view(num_outputs, -1, self.group)
        pairs = self.scales.float().view(num_outputs, codes.shape[1], -1)
        zeros = {INT4: 8, INT8_GROUPS: 0}.get(self.kind, pairs[:, :, 1:])
        return codes.sub_(zeros).mul_(pairs[:, :, :1]).view(num_outputs, -1).to(dtype)


class QuantizedMatrix:
    """int8 or int4, unpacked whole before each product, which is slow."""

    def __init__(self, weight: Quantized, order: Tensor | None = None) -> None:
        self._weight = weight
        self._order = order
        self.nbytes = weight.nbytes + (0 if order is None else order.nbytes)

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        return F.linear(x, self._weight.dequantize(x.dtype), bias).to(dtype or x.dtype)

    def renew(self, give: Give) -> None:
        renew(give, self._weight.data, self._weight.scales, self._order)


def make_quantized(weight: Quantized, kernels: Kernels | None, order: Tensor | None = None) -> Matrix:
    """Takes over a weight in int8 or int4.

    `order`, int64 [I]: the input of x that each input of the weight is, where those are in an order of their own.
    """
    if isinstance(kernels, TritonProducts):
        return TritonMatrix(kernels, weight.data, weight.scales, _IN_TRITON[weight.kind], weight.group, order)
    if kernels is not None and kernels.has_products:
        return TiledMatrix(replace(_tile(weight), order=order), kernels)
    check_fixed(kernels, "int8 or int4")
    return QuantizedMatrix(weight, order)


def multiplies_quantized(kernels: Kernels | None) -> bool:
    """Whether int8 and int4 are multiplied as they are, laid out in tiles."""
    return isinstance(kernels, Native) and kernels.has_products


def quantize(weight: Tensor, wanted: str) -> Quantized:
    """`wanted` is int8 or int4. Inputs that do not fill whole groups stay at int8 in either case."""
    if _fills_groups(weight.shape[1], wanted):
        return _int4(weight.float(), _GROUP)
    rows = weight.float()
    scales = (rows.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return Quantized((rows / scales[:, None]).round_().to(torch.int8), scales, INT8, 0)


def keep(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Quantized:
    """Keeps (codes - zeros) * scales as it is: uint8 [O, I] below 16, uint8 [O, G], float16 [O, G].

    `group` is a multiple of `engine.native.structures.INT4_SPAN`.
    """
    return Quantized(_pack(codes), torch.stack((scales, zeros.to(torch.float16)), dim=2), INT4_ZEROS, group)


def stored_bytes(shape: tuple[int, int], kind: int, group: int, is_tiled: bool) -> int:
    """Bytes of data and scales of a weight [O, I] as in `Quantized`, or as tiles pad them."""
    num_outputs, num_inputs = shape
    if is_tiled:
        num_outputs, num_inputs = -(-num_outputs // TILE) * TILE, -(-num_inputs // SPAN) * SPAN
    if kind == INT8:
        return num_outputs * (num_inputs + torch.float32.itemsize)
    scale_bytes = {INT4_ZEROS: 4, MXFP4: 1}.get(kind, 2)
    code_bytes = num_inputs if kind in _OF_BYTES else num_inputs // 2
    return num_outputs * (code_bytes + -(-num_inputs // group) * scale_bytes)


def _format(name: str) -> WeightFormat:
    def make(weight: Tensor, kernels: Kernels | None) -> Matrix:
        return make_quantized(quantize(weight, name), kernels)

    def size_bytes(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, is_tiled: bool) -> int:
        kind, group = (INT4, _GROUP) if _fills_groups(shape[1], name) else (INT8, 0)
        return stored_bytes(shape, kind, group, is_tiled)

    return WeightFormat(make, size_bytes, is_tiled=lambda kernels, dtype: multiplies_quantized(kernels))


FORMATS = {name: _format(name) for name in ("int8", "int4")}


def _fills_groups(num_inputs: int, wanted: str) -> bool:
    return wanted == "int4" and num_inputs % _GROUP == 0


def _int4(rows: Tensor, group: int) -> Quantized:
    num_outputs = rows.shape[0]
    groups = rows.view(num_outputs, -1, group)
    # The value of largest size becomes -8, the one step that has no opposite: that uses all sixteen.
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (extreme / -8).to(torch.bfloat16)
    step = scales.float()
    steps = torch.where(step == 0, 0, groups / step).round_().clamp_(-8, 7) + 8
    return Quantized(_pack(steps.to(torch.uint8).view(num_outputs, -1)), scales[:, :, 0].contiguous(), INT4, group)


def _tile(weight: Quantized) -> Tiles:
    """The layout that `engine.native` multiplies with. Padding has no scale."""
    num_outputs, num_inputs = weight.shape
    tiles, width = -(-num_outputs // TILE), -(-num_inputs // SPAN) * SPAN
    codes = weight.codes()
    if weight.kind in _OF_BYTES:
        codes = (codes.to(torch.int16) + 128).to(torch.uint8)
    codes = F.pad(codes, (0, width - num_inputs, 0, tiles * TILE - num_outputs))
    if weight.kind == INT8:
        data = codes.view(tiles, TILE, -1, 4).transpose(1, 2).contiguous()
        scales = F.pad(weight.scales, (0, tiles * TILE - num_outputs))
        return Tiles(data, scales, INT8, 0, num_outputs, num_inputs)
    if weight.kind == INT8_GROUPS:
        data = codes.view(tiles, TILE, -1, 4).transpose(1, 2).contiguous()
    else:
        halves = codes.view(tiles, TILE, -1, 2, 4)
        data = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(1, 2).contiguous()
    pairs = weight.scales.view(num_outputs, -1, 2 if weight.kind == INT4_ZEROS else 1)
    if weight.kind == MXFP4:  # of half the scale, since kernels multiply with twice the numbers
        pairs = pairs.clamp(min=1) - 1
    groups = -(-width // weight.group)
    pairs = F.pad(pairs, (0, 0, 0, groups - pairs.shape[1], 0, tiles * TILE - num_outputs))
    scales = pairs.view(tiles, TILE, groups, -1).permute(0, 2, 3, 1).contiguous()
    return Tiles(data, scales, weight.kind, weight.group, num_outputs, num_inputs)


def _pack(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4
