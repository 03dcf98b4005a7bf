"""Products with weights in fewer bits, which become numbers in registers: no unpacked weight is ever in memory; and
products whose rows have the same bits in any number, with weights as they are, too.

One program multiplies N outputs of the weight with M rows. It goes through the inputs in steps of K: the weight's bytes
are loaded, turned into numbers of the type that is computed in, and multiplied there (the weight is the left operand,
so that few rows fill the narrow side of a tile). int8 and fp8 have one scale for each output, which the sum is
multiplied with; int4 has one for each group of inputs, which the numbers are. Sums are float32, in an order that only
the number of rows of the step, by its bucket in `TUNING`, can change. Fixed products have one tile for any number of
rows: each element then comes from the same instructions, whatever is computed beside it.

Legend: T rows, I inputs, O outputs, G groups of inputs, N outputs, M rows and K inputs of a tile.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.triton.paged_tile import as_numbers, dot_type, fp8_format
from engine.triton.target import Case, capability


class ProductTuning(NamedTuple):
    """How a tile is computed. K is in inputs of one byte; int4 takes twice as many where rows are few."""

    num_outputs: int
    num_rows: int
    num_inputs: int
    num_warps: int
    num_stages: int


TUNING = {
    16: ProductTuning(32, 16, 128, 4, 5),
    32: ProductTuning(32, 32, 128, 4, 4),
    64: ProductTuning(64, 64, 64, 4, 4),
    128: ProductTuning(128, 128, 64, 8, 3),
}
"""By the rows of the step, up to which it holds; the last for more as well. Chosen without a GPU, for all of them."""
FIXED = ProductTuning(64, 64, 64, 4, 5)
"""For any number of rows: as many as still leave a GPU waiting for the weights of a decode step, not for its sums."""
FIXED_WIDE = ProductTuning(128, 64, 64, 8, 4)
"""For a weight of so many outputs that larger tiles still give every multiprocessor work."""
_WIDE_OUTPUTS = 16_384
_FIXED_FLOAT32 = ProductTuning(64, 64, 32, 4, 3)
_NEIGHBOURS = 8
"""Tiles of rows that are computed side by side, so that both they and the weight's tiles are found in the L2 cache."""


@triton.jit(do_not_specialize=["num_rows"])
def quantized_product(
    x,  # [T, I]
    data,  # [O, I], int8, codes of fp8, numbers; or uint8 [O, I / 2], the first of two inputs in the low half
    scales,  # float32 [O], bfloat16 [O, G] or float16 [O, G, 2]; anything for numbers
    bias,  # [O]
    out,  # [T, O]
    num_rows,
    x_stride,
    num_outputs,
    num_inputs,
    group,
    N: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Grid: tiles, NEIGHBOURS of rows with each of outputs. `SHARED`: inputs that surely lie in one group, a power of
    two."""
    tile, output_tiles = tl.program_id(0), tl.cdiv(num_outputs, N)
    first_tile = tile // (NEIGHBOURS * output_tiles) * NEIGHBOURS
    neighbours = tl.minimum(tl.cdiv(num_rows, M) - first_tile, NEIGHBOURS)
    within = tile % (NEIGHBOURS * output_tiles)
    row = (first_tile + within % neighbours) * M + tl.arange(0, M)
    output = (within // neighbours * N + tl.arange(0, N)).to(tl.int64)
    is_row, is_output = row < num_rows, output < num_outputs
    x_rows = x + row.to(tl.int64)[None, :] * x_stride
    acc = tl.full([N, M], 0.0, tl.float32)
    for start in range(0, num_inputs, K):
        inputs = start + tl.arange(0, K)
        part = tl.load(x_rows + inputs[:, None], mask=(inputs < num_inputs)[:, None] & is_row[None, :], other=0.0)
        if FORMAT == "plain" or FORMAT == "int8" or FORMAT == "fp8" or FORMAT == "fp8 by bits":
            at = data + output[:, None] * num_inputs + inputs[None, :]
            codes = tl.load(at, mask=is_output[:, None] & (inputs < num_inputs)[None, :], other=0)
            weight = as_numbers(codes, FORMAT, DOT)
        else:
            pairs = start // 2 + tl.arange(0, K // 2)
            at = data + output[:, None] * (num_inputs // 2) + pairs[None, :]
            both = tl.load(at, mask=is_output[:, None] & (pairs < num_inputs // 2)[None, :], other=0)
            codes = tl.join(both & 15, both >> 4).reshape(N, K // SHARED, SHARED)
            # Codes are the lowest bits of 2**23: a GPU converts few integers at a time.
            steps = (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
            first = start + tl.arange(0, K // SHARED) * SHARED
            inside = is_output[:, None] & (first < num_inputs)[None, :]
            where = output[:, None] * (num_inputs // group) + (first // group)[None, :]
            if FORMAT == "int4":
                scale = tl.load(scales + where, mask=inside, other=0.0).to(tl.float32)
                numbers = (steps - 8.0) * scale[:, :, None]
            else:
                scale = tl.load(scales + 2 * where, mask=inside, other=0.0).to(tl.float32)
                zero = tl.load(scales + 2 * where + 1, mask=inside, other=0.0).to(tl.float32)
                numbers = (steps - zero[:, :, None]) * scale[:, :, None]
            weight = numbers.reshape(N, K).to(DOT)
        acc = tl.dot(weight, part.to(DOT), acc, input_precision="ieee")
    if FORMAT == "int8" or FORMAT == "fp8" or FORMAT == "fp8 by bits":
        acc = acc * tl.load(scales + output, mask=is_output, other=0.0)[:, None]
    if HAS_BIAS:
        acc = acc + tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def multiply(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    form: str,
    group: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    is_fixed: bool = False,
) -> torch.Tensor:
    """x [T, I] times a weight, plus bias: [T, O] in `dtype`.

    `form` is `int8`, `int4` or `int4 with zeros`, as `engine.quantization.integers.Quantized` keeps them in groups;
    `fp8`: bytes of float8_e4m3fn [O, I] and float32 scales [O]; or `plain`: numbers of x's type, without scales.
    """
    num_rows, num_inputs = x.shape
    num_outputs = data.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    tuning = _fixed(num_outputs, x.dtype) if is_fixed else TUNING[min(n for n in TUNING if n >= min(num_rows, 128))]
    is_halved = form.startswith("int4")
    width = tuning.num_inputs * (2 if is_halved and tuning.num_rows <= 32 else 1)
    num_tiles = triton.cdiv(num_rows, tuning.num_rows) * triton.cdiv(num_outputs, tuning.num_outputs)
    quantized_product[(num_tiles,)](
        x,
        data,
        x if scales is None else scales,
        x if bias is None else bias,
        out,
        num_rows,
        x.stride(0),
        num_outputs,
        num_inputs,
        max(group, 1),
        tuning.num_outputs,
        tuning.num_rows,
        width,
        math.gcd(group, width) if is_halved else width,
        fp8_format(capability(x.device)) if form == "fp8" else form,
        dot_type(x.dtype),
        bias is not None,
        _NEIGHBOURS,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out


def _fixed(num_outputs: int, dtype: torch.dtype) -> ProductTuning:
    """By the weight and the type alone."""
    if dtype == torch.float32:
        return _FIXED_FLOAT32
    return FIXED_WIDE if num_outputs >= _WIDE_OUTPUTS else FIXED


def cases() -> Iterator[Case]:
    """Each kind of weight with each number of rows that has tiles of its own, and the other types."""
    for form, group in (("int8", 0), ("int4", 32), ("int4 with zeros", 128), ("fp8", 0)):
        for num_rows in TUNING:
            yield _case(torch.bfloat16, form, group, num_rows)
    for dtype in (torch.float16, torch.float32):
        yield _case(dtype, "int4 with zeros", 128, 16)
    for form in ("int8", "fp8"):
        yield _case(torch.float16, form, 0, 128)
    for form, group in (("plain", 0), ("int8", 0), ("int4", 32), ("int4 with zeros", 128), ("fp8", 0)):
        for num_outputs in (256, _WIDE_OUTPUTS):
            yield _fixed_case(torch.bfloat16, form, group, num_outputs)
        yield _fixed_case(torch.float32, form, group, 256)
    yield _fixed_case(torch.float16, "plain", 0, 256)


def _case(dtype: torch.dtype, form: str, group: int, num_rows: int) -> Case:
    return Case(f"{_named(dtype, form, group)}, {num_rows} rows", lambda: _multiply(dtype, form, group, num_rows))


def _fixed_case(dtype: torch.dtype, form: str, group: int, num_outputs: int) -> Case:
    return Case(
        f"{_named(dtype, form, group)}, {num_outputs} outputs, fixed",
        lambda: _multiply(dtype, form, group, 2, num_outputs, is_fixed=True),
    )


def _named(dtype: torch.dtype, form: str, group: int) -> str:
    groups = f", groups of {group}" if group else ""
    return f"{form}{groups} in {str(dtype).removeprefix('torch.')}"


def _multiply(
    dtype: torch.dtype, form: str, group: int, num_rows: int, num_outputs: int = 256, is_fixed: bool = False
) -> None:
    x, data, scales = torch.zeros((num_rows, 512), dtype=dtype), torch.zeros((num_outputs, 512), dtype=dtype), None
    if form != "plain":
        data, scales = _storage(form, group, num_outputs, 512)
    multiply(x, data, scales, form, group, None, dtype, is_fixed)


def _storage(form: str, group: int, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not group:
        dtype = torch.int8 if form == "int8" else torch.uint8
        return torch.zeros((num_outputs, num_inputs), dtype=dtype), torch.zeros(num_outputs)
    data = torch.zeros((num_outputs, num_inputs // 2), dtype=torch.uint8)
    if form == "int4":
        return data, torch.zeros((num_outputs, num_inputs // group), dtype=torch.bfloat16)
    return data, torch.zeros((num_outputs, num_inputs // group, 2), dtype=torch.float16)
