"""Weights in fewer bits: what is stored, and how it is made from a weight and turned into one again.

Symmetric and to nearest. int8 has one scale for each output (its rows stay exact integers until the sum is scaled);
int4 one for each group of inputs of each output, since sixteen steps are too few for a whole row. Codes that a
checkpoint brings along keep their own zero points and groups. `tile` lays a weight out for `engine.native`, `tile_bf16`
one that is kept whole. fp8 is float8_e4m3fn, whose steps grow with the value, with one scale for each row.

Legend: O outputs, I inputs, G groups of inputs, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native.tiles import BF16, INT4, INT4_ZEROS, INT8, SPAN, TILE, Tiles

FORMATS = ("none", "int8", "int4", "fp8")
INT4_GROUP = 32
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Quantized:
    """A weight: `data` int8 [O, I] or uint8 [O, I / 2], `scales` float32 [O], bfloat16 [O, G] or float16 [O, G, 2]."""

    data: Tensor
    scales: Tensor
    kind: int
    """INT8, INT4 or INT4_ZEROS of `engine.native.tiles`."""
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        num_outputs, width = self.data.shape
        return num_outputs, width if self.kind == INT8 else 2 * width

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> Quantized:
        return replace(self, data=self.data.to(device), scales=self.scales.to(device))

    def codes(self) -> Tensor:
        """[O, I]: int8, or uint8 below 16."""
        return self.data if self.kind == INT8 else torch.stack((self.data & 15, self.data >> 4), dim=2).flatten(1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[O, I], as near to the weight as the format gets."""
        if self.kind == INT8:
            return (self.data.float() * self.scales[:, None]).to(dtype)
        num_outputs = self.data.shape[0]
        codes = self.codes().float().view(num_outputs, -1, self.group)
        pairs = self.scales.float().view(num_outputs, codes.shape[1], -1)
        zeros = 8 if self.kind == INT4 else pairs[:, :, 1:]
        return ((codes - zeros) * pairs[:, :, :1]).view(num_outputs, -1).to(dtype)


def quantize(weight: Tensor, wanted: str) -> Quantized:
    """`wanted` is int8 or int4. Inputs that do not fill whole groups stay at int8, in either case."""
    if _fills_groups(weight.shape[1], wanted):
        return _int4(weight.float(), INT4_GROUP)
    rows = weight.float()
    scales = (rows.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return Quantized((rows / scales[:, None]).round_().to(torch.int8), scales, INT8, 0)


def round_to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[T, I] as float8_e4m3fn, and the float32 scales [T, 1] that it is to be multiplied with."""
    values = rows.float()
    scales = (values.abs().amax(1, keepdim=True) / _LARGEST_FP8).clamp_(min=torch.finfo(torch.float32).tiny)
    return (values / scales).to(torch.float8_e4m3fn), scales


def quantized_bytes(shape: tuple[int, int], wanted: str, is_tiled: bool) -> int:
    """What one of FORMATS but `none` makes of a weight [O, I]; `is_tiled`: laid out by `tile`, which fp8 never is."""
    if wanted == "fp8":
        return shape[0] * (shape[1] + torch.float32.itemsize)
    kind, group = (INT4, INT4_GROUP) if _fills_groups(shape[1], wanted) else (INT8, 0)
    return stored_bytes(shape, kind, group, is_tiled)


def stored_bytes(shape: tuple[int, int], kind: int, group: int, is_tiled: bool) -> int:
    """Of data and scales of a weight [O, I] as in `Quantized`, or as `tile` pads them."""
    num_outputs, num_inputs = shape
    if is_tiled:
        num_outputs, num_inputs = -(-num_outputs // TILE) * TILE, -(-num_inputs // SPAN) * SPAN
    if kind == INT8:
        return num_outputs * (num_inputs + torch.float32.itemsize)
    scale_bytes = torch.bfloat16.itemsize if kind == INT4 else 2 * torch.float16.itemsize
    return num_outputs * (num_inputs // 2 + -(-num_inputs // group) * scale_bytes)


def _fills_groups(num_inputs: int, wanted: str) -> bool:
    return wanted == "int4" and num_inputs % INT4_GROUP == 0


def _int4(rows: Tensor, group: int) -> Quantized:
    num_outputs = rows.shape[0]
    groups = rows.view(num_outputs, -1, group)
    # The value of largest size becomes -8, the one step that has no opposite: that uses all sixteen.
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (extreme / -8).to(torch.bfloat16)
    step = scales.float()
    steps = torch.where(step == 0, 0, groups / step).round_().clamp_(-8, 7) + 8
    return Quantized(_pack(steps.to(torch.uint8).view(num_outputs, -1)), scales[:, :, 0].contiguous(), INT4, group)


def keep(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Quantized:
    """(codes - zeros) * scales as it is: uint8 [O, I] below 16, uint8 [O, G], float16 [O, G].

    `group` is a multiple of `engine.native.tiles.INT4_SPAN`.
    """
    return Quantized(_pack(codes), torch.stack((scales, zeros.to(torch.float16)), dim=2), INT4_ZEROS, group)


def tile(weight: Quantized) -> Tiles:
    """As `engine.native` multiplies it. What pads it has no scale."""
    num_outputs, num_inputs = weight.shape
    tiles, width = -(-num_outputs // TILE), -(-num_inputs // SPAN) * SPAN
    codes = weight.codes()
    if weight.kind == INT8:
        codes = (codes.to(torch.int16) + 128).to(torch.uint8)
    codes = F.pad(codes, (0, width - num_inputs, 0, tiles * TILE - num_outputs))
    if weight.kind == INT8:
        data = codes.view(tiles, TILE, -1, 4).transpose(1, 2).contiguous()
        scales = F.pad(weight.scales, (0, tiles * TILE - num_outputs))
        return Tiles(data, scales, INT8, 0, num_outputs, num_inputs)
    halves = codes.view(tiles, TILE, -1, 2, 4)
    data = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(1, 2).contiguous()
    pairs = weight.scales.view(num_outputs, -1, 1 if weight.kind == INT4 else 2)
    groups = -(-width // weight.group)
    pairs = F.pad(pairs, (0, 0, 0, groups - pairs.shape[1], 0, tiles * TILE - num_outputs))
    scales = pairs.view(tiles, TILE, groups, -1).permute(0, 2, 3, 1).contiguous()
    return Tiles(data, scales, weight.kind, weight.group, num_outputs, num_inputs)


def tile_bf16(weight: Tensor) -> Tiles:
    """bfloat16 [O, I], I even, as `engine.native` multiplies it."""
    num_outputs, num_inputs = weight.shape
    tiles = -(-num_outputs // TILE)
    rows = F.pad(weight, (0, 0, 0, tiles * TILE - num_outputs))
    data = rows.view(tiles, TILE, -1, 2).transpose(1, 2).contiguous()
    return Tiles(data, None, BF16, 0, num_outputs, num_inputs)


def tiled_bf16_bytes(shape: tuple[int, int]) -> int:
    """What `tile_bf16` makes of a weight [O, I]."""
    return -(-shape[0] // TILE) * TILE * shape[1] * torch.bfloat16.itemsize


def _pack(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4
