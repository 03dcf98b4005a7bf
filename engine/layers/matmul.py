"""One weight matrix and the fastest product with it that this machine has. Knows no layer and no rank.

`make_matrix` chooses. On the CPU oneDNN with a weight that was packed once is the fastest: torch's own way, MKL in
float32, stays at half of the rate on some processors, and in bfloat16 reads memory at a third of it. Baton's own kernel
is faster still in bfloat16 on processors that multiply it in vectors, not in tiles (AMX), and multiplies a weight in
fewer bits as it is, rounding the rows to 8 bits for it.
GPUs that multiply in fp8 do so; int8 and int4 are unpacked before each product there.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native import Native
from engine.native.tiles import Tiles
from engine.quantization.formats import (
    Quantized,
    quantize,
    quantized_bytes,
    round_to_fp8,
    tile,
    tile_bf16,
    tiled_bf16_bytes,
)

_PACKED_FROM_ROWS = 6
"""In float32, fewer rows than this multiply faster unpacked."""
_BOTH_FORMS_BYTES = 16 << 20
_PACKED_FOR_ROWS = 32
_FP8_CAPABILITY = (8, 9)
_FP8_MULTIPLE = 16
"""Of inputs and outputs, for a product in fp8."""


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
    """Takes the tensor over. `kernels` as `engine.layers.ops.choose_native` gives them."""
    if quantization == "fp8":
        return Fp8Matrix(weight, weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= _FP8_CAPABILITY)
    if quantization != "none":
        return make_quantized(quantize(weight, quantization), kernels)
    if kernels is not None and multiplies_plain(kernels, weight.dtype) and _fills_pairs(weight.shape):
        return TiledMatrix(tile_bf16(weight), kernels)
    return TorchMatrix(weight)


def make_quantized(weight: Quantized, kernels: Native | None, order: Tensor | None = None) -> Matrix:
    """Of a weight in int8 or int4, which is taken over.

    `order` (int64 [I]) says which input of x each input of the weight is, where those are in an order of their own.
    """
    if kernels is not None and multiplies_quantized(kernels):
        return TiledMatrix(tile(weight), kernels, order)
    return QuantizedMatrix(weight, order)


def matrix_bytes(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, quantization: str = "none", is_tiled: bool = False
) -> int:
    """What `make_matrix` will keep of a weight [O, I] of this type on this device, told before it is read.

    `is_tiled`: Baton's kernels multiply with it (`multiplies_quantized`, `multiplies_plain`).
    """
    if quantization != "none":
        return quantized_bytes(shape, quantization, is_tiled)
    if is_tiled and _fills_pairs(shape):
        return tiled_bf16_bytes(shape)
    is_packed, is_plain = _forms(shape, dtype, device)
    return shape[0] * shape[1] * dtype.itemsize * (is_packed + is_plain)


def keeps_plain(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, quantization: str = "none", is_tiled: bool = False
) -> bool:
    """Whether `make_matrix` will go on using the tensor that it is given, which may be another's as well."""
    is_own = is_tiled and _fills_pairs(shape)
    return quantization == "none" and not is_own and _forms(shape, dtype, device)[1]


def multiplies_quantized(kernels: Native | None) -> bool:
    """Whether int8 and int4 are multiplied as they are, laid out by `engine.quantization.formats.tile`."""
    return kernels is not None and kernels.has_products


def multiplies_plain(kernels: Native | None, dtype: torch.dtype) -> bool:
    """Whether Baton's kernels multiply with what is not quantized, laid out by
    `engine.quantization.formats.tile_bf16`."""
    return kernels is not None and kernels.has_bf16_products and dtype == torch.bfloat16 and not _multiplies_in_tiles()


class TorchMatrix:
    """In torch. In float32 on the CPU a matrix that fits in a cache keeps both forms, a larger one the packed one:
    a single row is bound by memory and by the cost of the call, and there MKL is quicker. In bfloat16 it never is."""

    def __init__(self, weight: Tensor) -> None:
        num_outputs, num_inputs = weight.shape
        is_packed, is_plain = _forms((num_outputs, num_inputs), weight.dtype, weight.device)
        self._num_outputs = num_outputs
        self._packed: Tensor | None = None
        if is_packed:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._plain = weight if is_plain else None
        self.nbytes = weight.nbytes * (is_packed + is_plain)

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


class TiledMatrix:
    """bfloat16, int8 or int4 by Baton's own kernel. In fewer bits integers are multiplied: each row of x is rounded to
    8 bits, with a scale for every `engine.native.tiles.SPAN` inputs."""

    def __init__(self, tiles: Tiles, kernels: Native, order: Tensor | None = None) -> None:
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


class Fp8Matrix:
    """float8_e4m3fn with a scale for each output. In a product in fp8, rows of x are rounded as well, each with a scale
    of its own, and the sum is bfloat16; without, the weight is unpacked whole before each product, which is slow."""

    def __init__(self, weight: Tensor, is_multiplied_in_fp8: bool) -> None:
        self._weight, self._scales = round_to_fp8(weight)
        self._in_fp8 = is_multiplied_in_fp8 and all(size % _FP8_MULTIPLE == 0 for size in weight.shape)
        self.nbytes = self._weight.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        if not self._in_fp8:
            return F.linear(x, (self._weight.float() * self._scales).to(x.dtype), bias).to(dtype)
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
    """Whether oneDNN multiplies this type here, and this build of torch hands its layout out."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
    elif dtype != torch.float32:
        return False
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
