"""One tile of attention over paged KV, which the kernels of decode and prefill have in common.

A tile is M query rows against N keys of one sequence and KV head. Keys and values are read where they lie, through the
block table, each token by itself, so that any block size does; rounded heads (`engine.kv.pool`) become numbers in
registers, and their scales go to the scores and to the weights of the values, which are fewer than the heads' elements.
The softmax is the online one of FlashAttention (arXiv 2205.14135), in powers of two.

Legend: M query rows, N keys, D head_dim, C its padding to a power of two, G query heads of a KV head.
"""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from engine.attention.interface import PagedBatch
from engine.kv.pool import cell_size, is_rounded
from engine.triton.target import Case, capability, is_interpreted

LOG2_E = 1.4426950408889634
MIN_ROWS = 16
"""Of a matrix product on a GPU."""
_NATIVE_FP8 = 89
"""From this compute capability on, fp8 is converted by an instruction."""
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dot_type(dtype: torch.dtype) -> object:
    """The type in which a kernel multiplies matrices of `dtype`: another one in the interpreter, see `target`."""
    return tl.float32 if is_interpreted() else _DTYPES[dtype]


def kv_format(pages: torch.Tensor, capability: int) -> str:
    """Says what one element of the pages is, and how it becomes a number."""
    if not is_rounded(pages.dtype):
        return "plain"
    if pages.dtype == torch.int8:
        return "int8"
    return fp8_format(capability)


def fp8_format(capability: int) -> str:
    """Says how codes of fp8 become numbers."""
    return "fp8" if capability >= _NATIVE_FP8 else "fp8 by bits"


def page_arguments(q: torch.Tensor, pages: torch.Tensor) -> tuple[object, ...]:
    """Returns BLOCK_SIZE to DOT of a kernel: how queries' pages [N, K, H, D] lie, and how they become numbers."""
    return pages.shape[1], *pages.stride()[:3], kv_format(pages, capability(q.device)), dot_type(q.dtype)


def score_factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """Returns `scale` and `soft_cap` of a kernel, whose scores are powers of two."""
    return 2.0 * scale / soft_cap if soft_cap else scale * LOG2_E, soft_cap * LOG2_E


@triton.jit
def as_numbers(x, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """Elements of pages as numbers that lack their scale."""
    if FORMAT == "int8":
        # The lowest byte of 2**23, plus 128: a GPU converts few integers at a time.
        bits = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32) | 0x4B000000
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(DOT)
    elif FORMAT == "fp8":
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DOT)
    elif FORMAT == "fp8 by bits":
        # The same bits further left are float16, 256 times too small: exact, subnormal numbers included.
        wide = x.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DOT)
    else:
        return x.to(DOT)


@triton.jit
def load_scales(cells, inside, D: tl.constexpr):
    """[N] float32 behind the D bytes of each head."""
    return tl.load((cells + D).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)


@triton.jit
def attend_tile(
    q,  # [M, C]
    acc,  # [M, C] float32, weighted values
    total,  # [M] float32, sum of weights
    most,  # [M] float32, largest score so far, in powers of two
    k_pages,
    v_pages,
    table,  # of this sequence
    keys,  # [N] positions
    inside,  # [N] whether the sequence has the key; where not IS_MASKED, it has
    visible,  # [M, N], or anything where not IS_MASKED
    head,
    scale,
    soft_cap,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    MAY_BE_BLIND: tl.constexpr,
):
    """Adds N keys. `scale` takes a product to powers of two; with a cap, `soft_cap` does, and `scale` is 2 / cap.

    A row may see none of the keys if MAY_BE_BLIND. Which rows stand beside a row does not change its result, nor does
    IS_MASKED where it sees all keys.
    """
    d = tl.arange(0, C)
    if not IS_MASKED:
        inside = tl.full(keys.shape, True, tl.int1)
    page = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    cells = page * BLOCK_STRIDE + (keys % BLOCK_SIZE) * TOKEN_STRIDE + head * HEAD_STRIDE  # [N]
    is_there = inside[None, :]
    if C > D:
        is_there = is_there & (d < D)[:, None]
    k = tl.load(k_pages + cells[None, :] + d[:, None], mask=is_there, other=0)  # [C, N]
    v = tl.load(v_pages + cells[:, None] + d[None, :], mask=tl.trans(is_there), other=0)  # [N, C]
    scores = tl.dot(q, as_numbers(k, FORMAT, DOT), input_precision="ieee")  # [M, N]
    if FORMAT != "plain":
        scores = scores * load_scales(k_pages + cells, inside, D)[None, :]
    if HAS_CAP:
        scores = 2.0 * tl.sigmoid(scores * scale) - 1.0  # tanh
        scale = soft_cap
    if IS_MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_most = tl.maximum(most, tl.max(scores, 1) * scale)
    base = new_most
    if MAY_BE_BLIND:
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), -base[:, None]))
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 1)
    if FORMAT != "plain":
        weights = weights * load_scales(v_pages + cells, inside, D)[None, :]
    acc = tl.dot(weights.to(DOT), as_numbers(v, FORMAT, DOT), acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_most


@triton.jit
def attend_keys(
    query,
    acc,
    total,
    most,
    low,
    whole,
    high,
    at,  # [M] positions of the rows
    length,
    k_pages,
    v_pages,
    table,
    head,
    scale,
    soft_cap,
    D: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MAY_BE_BLIND: tl.constexpr,
):
    """Adds the keys from `low` to `high`, in tiles from multiples of N on; every row sees those before `whole`."""
    for start in range(low, whole, N):
        keys = start + tl.arange(0, N)
        acc, total, most = attend_tile(
            query,
            acc,
            total,
            most,
            k_pages,
            v_pages,
            table,
            keys,
            keys < length,
            0,
            head,
            scale,
            soft_cap,
            D,
            C,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            TOKEN_STRIDE,
            HEAD_STRIDE,
            FORMAT,
            DOT,
            HAS_CAP,
            False,
            False,
        )
    for start in range(whole, high, N):
        keys = start + tl.arange(0, N)
        visible = (keys < length)[None, :]
        if RIGHT >= 0:
            visible = visible & (keys[None, :] <= at[:, None] + RIGHT)
        if LEFT >= 0:
            visible = visible & (keys[None, :] >= at[:, None] - LEFT)
        acc, total, most = attend_tile(
            query,
            acc,
            total,
            most,
            k_pages,
            v_pages,
            table,
            keys,
            keys < length,
            visible,
            head,
            scale,
            soft_cap,
            D,
            C,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            TOKEN_STRIDE,
            HEAD_STRIDE,
            FORMAT,
            DOT,
            HAS_CAP,
            True,
            MAY_BE_BLIND,
        )
    return acc, total, most


Attend = Callable[..., None]
"""Attends q over pages: (q, k, v, paged, out, *, left, soft_cap, sinks)."""


def attention_cases(kind: str, attend: Attend, cu_seqlens_q: list[int], longest: int, spilled: int) -> Iterator[Case]:
    """The shapes of common models, the types, and what a model may ask for, each as a call of `attend`.

    `longest`: keys that a sequence may have. `spilled`: bytes of a thread at most.
    """
    bf16 = torch.bfloat16

    def case(
        dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, num_heads: int, group: int, has_all: bool = False
    ) -> Case:
        def launch() -> None:
            pages = torch.zeros((2, 16, num_heads, cell_size(head_dim, kv_dtype)), dtype=kv_dtype)
            q = torch.zeros((cu_seqlens_q[-1], num_heads * group, head_dim), dtype=dtype)
            ends = torch.tensor(cu_seqlens_q, dtype=torch.int32)
            lengths, table = ends.diff(), torch.zeros((len(ends) - 1, 64), dtype=torch.int32)
            paged = PagedBatch(ends, ends, lengths, table, int(lengths.max()), longest)
            extras = {"left": 4095, "soft_cap": 50.0, "sinks": q[0, :, 0].contiguous()} if has_all else {}
            attend(q, pages, pages, paged, torch.empty_like(q), scale=0.1, **extras)

        names = [str(each).removeprefix("torch.") for each in (dtype, kv_dtype)]
        extras = ", window 4096, cap, sinks" if has_all else ""
        return Case(f"{kind} {names[0]} over {names[1]}, {head_dim} x {group}{extras}", launch, spilled)

    for head_dim, num_heads, group in ((128, 8, 4), (64, 8, 4), (256, 4, 2), (96, 32, 1), (128, 4, 7)):
        yield case(bf16, bf16, head_dim, num_heads, group)
    for dtype in (torch.float16, torch.float32):
        yield case(dtype, dtype, 128, 8, 4)
    for kv_dtype in (torch.int8, torch.uint8):
        yield case(bf16, kv_dtype, 128, 8, 4)
    yield case(bf16, bf16, 128, 8, 4, has_all=True)
