"""Numbers as codes of 8 bits in Triton: heads of the KV cache, and whole rows in fp8 for the product that comes next.

Codes are those that plain torch gives on the CPU, on every GPU: they are made by integer operations, and quotients are
rounded as IEEE 754 says. A row whose numbers are not all finite has a scale that is not.

Legend: T rows, I elements of a row.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from engine.quantization.fp8 import round_to_fp8
from engine.quantization.interface import RoundedRows
from engine.triton.target import Case

MAX_COLUMNS = 32_768
"""Of a row that one program rounds: it keeps all of it in registers."""
_MIN_COLUMNS = 256


@triton.jit
def code(x, FORMAT: tl.constexpr):
    """Numbers within the format's range as the bytes of their nearest codes, ties to even, as uint32."""
    if FORMAT == "int8":
        return (x + 12582912.0).to(tl.uint32, bitcast=True) & 0xFF  # 1.5 * 2**23: its last digits count ones
    bits = x.to(tl.uint32, bitcast=True)
    sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # 2**14 is so large that float32 keeps just the digits of float8_e4m3fn's subnormal numbers beside it.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    normal = (bits - 0x3C000000 + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # exponents count from 7, not from 127
    return sign | tl.where(bits < 0x3C800000, small, normal)


@triton.jit
def store_rounded(values, codes, scales, row, column, width):
    """One row of float32 numbers, 0 beyond its width, to its codes in fp8 [T, I] and its scale [T]."""
    # Compared as integers, the size of what is not a number is the largest.
    sizes = (values.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32)
    largest = tl.max(sizes, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, 448.0)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    quotients = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    tl.store(codes + row * width + column, code(quotients, "fp8").to(tl.uint8), mask=column < width)
    tl.store(scales + row, scale)


@triton.jit
def round_rows(x, codes, scales, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid: T."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    values = tl.load(x + row * stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    store_rounded(values, codes, scales, row, column, WIDTH)


def rounded(x: torch.Tensor) -> RoundedRows:
    """[T, I] as `engine.quantization.fp8.round_to_fp8` rounds it, in one launch."""
    num_rows, width = x.shape
    if width > MAX_COLUMNS:
        return RoundedRows(*round_to_fp8(x), x.dtype)
    assert x.stride(1) == 1, "rows lie apart"
    codes, scales = rounded_memory(num_rows, width, x.device)
    columns = num_columns(width)
    round_rows[(num_rows,)](x, codes, scales, x.stride(0), width, columns, num_warps=num_warps(columns))
    return as_rounded(codes, scales, x.dtype)


def rounded_memory(num_rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for codes and scales, which `as_rounded` takes once they are there."""
    codes = torch.empty((num_rows, width), dtype=torch.uint8, device=device)  # a type that every GPU has
    return codes, torch.empty((num_rows, 1), dtype=torch.float32, device=device)


def as_rounded(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> RoundedRows:
    return RoundedRows(codes.view(torch.float8_e4m3fn), scales, dtype)


def num_columns(width: int) -> int:
    """Of a program that has a whole row; eight at least for each thread of a warp, so that no two hold the same one."""
    return max(_MIN_COLUMNS, int(triton.next_power_of_2(width)))


def num_warps(columns: int) -> int:
    """Such that a thread has sixteen numbers, or 32 of the widest rows."""
    return max(1, min(32, columns // 512))


def cases() -> Iterator[Case]:
    """The widths of common models' heads, and the widest."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield _case(dtype, 4096)
    yield _case(torch.bfloat16, MAX_COLUMNS)


def _case(dtype: torch.dtype, width: int) -> Case:
    name = str(dtype).removeprefix("torch.")
    return Case(f"rows of {width} {name} to fp8", lambda: rounded(torch.zeros((2, width), dtype=dtype)))
