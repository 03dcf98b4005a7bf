"""The format `none`: weights as they are, in the layout that this machine multiplies fastest.

On the CPU oneDNN with a weight that was packed once is the fastest: torch's own way, MKL in float32, stays at half of
the rate on some processors, and in bfloat16 reads memory at a third of it. Baton's own kernel is faster still in
bfloat16 on processors that multiply it in vectors, not in tiles (AMX).

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native import Native
from engine.native.structures import BF16, TILE, Tiles
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

_PACKED_FROM_ROWS = 6
"""In float32, fewer rows than this multiply faster unpacked."""
_BOTH_FORMS_BYTES = 16 << 20
_PACKED_FOR_ROWS = 32


class TorchMatrix:
    """In torch. In float32 on the CPU a matrix that fits in a cache keeps both forms, a larger one the packed one:
    a single row is bound by memory and by the cost of the call, and there MKL is quicker. In bfloat16 it never is.

    `is_fixed`: always the packed form, which gives a row the same bits beside any others, but alone: it gets company.
    """

    def __init__(self, weight: Tensor, is_fixed: bool = False) -> None:
        num_outputs, num_inputs = weight.shape
        is_packed, is_plain = _forms((num_outputs, num_inputs), weight.dtype, weight.device)
        self._num_outputs = num_outputs
        self._packed: Tensor | None = None
        if is_packed:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._plain = weight if is_plain else None
        self._is_fixed = is_fixed
        self.nbytes = weight.nbytes * (is_packed + is_plain)

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        product = self._multiply(x, bias)
        return product if dtype is None else product.to(dtype)

    def renew(self, give: Give) -> None:
        if self._packed is None:
            renew(give, self._plain)
            return
        before = self._packed.to_dense() if self._plain is None else self._plain
        if (weight := give(before)) is before:
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        if self._plain is not None:
            self._plain.copy_(weight)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        if self._is_fixed and num_rows == 1:
            return self._multiply(x.expand(2, -1).contiguous(), bias)[:1]
        if self._plain is not None and not self._is_fixed and (self._packed is None or num_rows < _PACKED_FROM_ROWS):
            return F.linear(x, self._plain, bias)
        if num_rows == 0:
            return x.new_empty(0, self._num_outputs)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product


def keeps_plain(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, is_tiled: bool) -> bool:
    """Whether a matrix goes on using the tensor that it was made of, which another may use as well."""
    return not (is_tiled and _fills_pairs(shape)) and _forms(shape, dtype, device)[1]


def multiplies_plain(kernels: Kernels | None, dtype: torch.dtype) -> bool:
    """Whether Baton's kernels multiply with weights of this type, laid out in tiles."""
    if not isinstance(kernels, Native) or not kernels.has_bf16_products:
        return False
    return dtype == torch.bfloat16 and not _multiplies_in_tiles()


def _make(weight: Tensor, kernels: Kernels | None) -> Matrix:
    if isinstance(kernels, Native) and multiplies_plain(kernels, weight.dtype) and _fills_pairs(weight.shape):
        return TiledMatrix(_tile(weight), kernels)
    if isinstance(kernels, TritonProducts) and kernels.is_fixed:
        return TritonMatrix(kernels, weight, None, "plain")
    if not _can_pack(weight.dtype, weight.device):
        check_fixed(kernels, str(weight.dtype).removeprefix("torch."))
    return TorchMatrix(weight, is_fixed=kernels is not None and kernels.is_fixed)


def _size_bytes(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, is_tiled: bool) -> int:
    if is_tiled and _fills_pairs(shape):
        return -(-shape[0] // TILE) * TILE * shape[1] * torch.bfloat16.itemsize
    is_packed, is_plain = _forms(shape, dtype, device)
    return shape[0] * shape[1] * dtype.itemsize * (is_packed + is_plain)


FORMATS = {"none": WeightFormat(_make, _size_bytes, multiplies_plain)}


def _tile(weight: Tensor) -> Tiles:
    """bfloat16 [O, I], I even, as `engine.native` multiplies it."""
    num_outputs, num_inputs = weight.shape
    tiles = -(-num_outputs // TILE)
    rows = F.pad(weight, (0, 0, 0, tiles * TILE - num_outputs))
    data = rows.view(tiles, TILE, -1, 2).transpose(1, 2).contiguous()
    return Tiles(data, None, BF16, 0, num_outputs, num_inputs)


def _fills_pairs(shape: tuple[int, ...]) -> bool:
    """Whether inputs can be taken two at a time, as bfloat16 is."""
    return shape[1] % 2 == 0


def _multiplies_in_tiles() -> bool:
    """Whether this processor has AMX, which oneDNN uses."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return has_amx is not None and bool(has_amx())


def _forms(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[bool, bool]:
    """Which forms of a whole weight are kept: packed, plain."""
    is_packed = _can_pack(dtype, device)
    is_small = dtype == torch.float32 and shape[0] * shape[1] * dtype.itemsize <= _BOTH_FORMS_BYTES
    return is_packed, not is_packed or is_small


def _can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies this type here, and this build of torch exposes its layout."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
    elif dtype != torch.float32:
        return False
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
