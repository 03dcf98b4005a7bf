"""What a decoder layer computes between its products and attention, one kernel each: `engine.layers.ops.Ops`.

Numbers are computed in float32 and rounded where plain torch rounds them in transformers' order. A row is computed to
the same bits alone and among any others. Rounded pages get the bits that `engine.kv.pool.encode` gives on the CPU. What
a product in fp8 takes next is rounded here (`engine.triton.rounding`): norms have the whole row anyway, gates then get
a program that has.

No program writes what another thread of it may still read: tiles have no fewer elements than its threads hold, and
queries go to a tensor of their own.

Legend: T tokens, E hidden_size, W width of the MLP, Hq/H query/KV heads, D head_dim, F elements of a half of a head,
padded to a power of two, M heads of a tile, N blocks, K block_size.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.kv.pool import cell_size, is_rounded
from engine.quantization.interface import Rows
from engine.triton.rounding import (
    MAX_COLUMNS,
    as_rounded,
    code,
    num_columns,
    num_warps,
    rounded,
    rounded_memory,
    store_rounded,
)
from engine.triton.target import Case

_SILU_COLUMNS = 1024
_TILE_ELEMENTS = 1024


@triton.jit
def _rounded(x, like):
    """Float32 numbers as they would be after a store to memory of this type."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def add_rms_norm(
    x,  # [T, E]
    add,  # [T, E]
    weight,  # [E]
    out,  # [T, E], codes if ROUNDS
    scales,  # [T], if ROUNDS
    x_stride,
    add_stride,
    eps,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_ADD: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Grid: T."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_there = column < E
    values = tl.load(x + row * x_stride + column, mask=is_there, other=0.0).to(tl.float32)
    if HAS_ADD:
        values = _rounded(values + tl.load(add + row * add_stride + column, mask=is_there, other=0.0).to(tl.float32), x)
        tl.store(x + row * x_stride + column, values.to(x.dtype.element_ty), mask=is_there)
    normed = _rounded(values * tl.rsqrt(tl.sum(values * values, 0) / E + eps), x)
    scaled = normed * tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    if ROUNDS:
        store_rounded(_rounded(scaled, x), out, scales, row, column, E)
    else:
        tl.store(out + row * E + column, scaled.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def silu_and_mul(gate_up, out, scales, stride, W: tl.constexpr, COLUMNS: tl.constexpr, ROUNDS: tl.constexpr):
    """Grid: T, tiles of columns; if ROUNDS, one tile, whose codes and scale `out` and `scales` get."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = column < W
    gate = tl.load(gate_up + row * stride + column, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + W + column, mask=is_there, other=0.0).to(tl.float32)
    turned = _rounded(gate / (1.0 + tl.exp(-gate)), gate_up)
    if ROUNDS:
        store_rounded(_rounded(turned * up, gate_up), out, scales, row, column, W)
    else:
        tl.store(out + row * W + column, (turned * up).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _store_heads(pages, cells, first, second, d, is_mine, D: tl.constexpr, FORMAT: tl.constexpr):
    """Both halves [M, F] of heads to their cells [M]."""
    at = cells[:, None] + d[None, :]
    inside = is_mine[:, None] & (d < D // 2)[None, :]
    if FORMAT == "plain":
        tl.store(pages + at, first.to(pages.dtype.element_ty), mask=inside)
        tl.store(pages + at + D // 2, second.to(pages.dtype.element_ty), mask=inside)
    else:
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)  # what lies outside is 0
        limit = 127.0 if FORMAT == "int8" else 448.0
        scale = tl.div_rn(tl.maximum(largest, 1e-30), tl.full(largest.shape, limit, tl.float32))
        wide = tl.broadcast_to(scale[:, None], first.shape)
        kind = pages.dtype.element_ty
        tl.store(pages + at, code(tl.div_rn(first, wide), FORMAT).to(tl.uint8).to(kind, bitcast=True), mask=inside)
        codes = code(tl.div_rn(second, wide), FORMAT).to(tl.uint8).to(kind, bitcast=True)
        tl.store(pages + at + D // 2, codes, mask=inside)
        tl.store((pages + cells + D).to(tl.pointer_type(tl.float32)), scale, mask=is_mine)


@triton.jit
def turn_and_store(
    qkv,  # [T, Hq + 2 H, D]
    out,  # [T, Hq, D]
    head_norm,  # [Hq + H, D]
    cos,  # [T, 1, D]
    sin,  # [T, 1, D]
    slots,  # int64 [T]
    k_pages,
    v_pages,
    stride,
    eps,
    HQ: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    F: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid: T, tiles of heads: query heads, then keys, then values. A tile may have some of each."""
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, F)
    at = head[:, None] * D + d[None, :]
    is_half = (d < D // 2)[None, :]
    inside = (head < HQ + 2 * H)[:, None] & is_half
    first = tl.load(qkv + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + row * stride + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    is_turned = (head < HQ + H)[:, None]
    if HAS_NORM:
        is_normed = is_turned & is_half
        factor = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        one = tl.load(head_norm + at, mask=is_normed, other=0.0).to(tl.float32)
        other = tl.load(head_norm + at + D // 2, mask=is_normed, other=0.0).to(tl.float32)
        first = tl.where(is_turned, _rounded(_rounded(first * factor, qkv) * one, qkv), first)
        second = tl.where(is_turned, _rounded(_rounded(second * factor, qkv) * other, qkv), second)
    rope = row * D + d
    cos_first = tl.load(cos + rope, mask=d < D // 2, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + rope + D // 2, mask=d < D // 2, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + rope, mask=d < D // 2, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + rope + D // 2, mask=d < D // 2, other=0.0).to(tl.float32)[None, :]
    turned = _rounded(_rounded(first * cos_first, qkv) + second * sin_first, qkv)
    turned_second = _rounded(_rounded(second * cos_second, qkv) + first * sin_second, qkv)
    queries = out + row * HQ * D + at
    is_query = (head < HQ)[:, None] & is_half
    tl.store(queries, turned.to(out.dtype.element_ty), mask=is_query)
    tl.store(queries + D // 2, turned_second.to(out.dtype.element_ty), mask=is_query)
    slot = tl.load(slots + row) * TOKEN_STRIDE
    is_key, is_value = (head >= HQ) & (head < HQ + H), (head >= HQ + H) & (head < HQ + 2 * H)
    keys, values = slot + (head - HQ) * HEAD_STRIDE, slot + (head - HQ - H) * HEAD_STRIDE
    _store_heads(k_pages, keys, turned, turned_second, d, is_key, D, FORMAT)
    _store_heads(v_pages, values, first, second, d, is_value, D, FORMAT)


class TritonOps:
    """`engine.layers.ops.Ops`, one launch each. Rows are contiguous; heads have a multiple of four dimensions."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        add: torch.Tensor | None = None,
        rounds: bool = False,
    ) -> Rows:
        num_tokens, width = x.shape
        assert x.stride(1) == 1 and (add is None or add.stride(1) == 1), "rows lie apart"
        out, scales = _results(x, width, rounds)
        columns = num_columns(width)
        add_rms_norm[(num_tokens,)](
            x,
            x if add is None else add,
            weight,
            out,
            scales,
            x.stride(0),
            0 if add is None else add.stride(0),
            eps,
            width,
            columns,
            add is not None,
            rounds,
            num_warps=min(16, num_warps(columns)),
        )
        return as_rounded(out, scales, x.dtype) if rounds else out

    def silu_mul(self, gate_up: torch.Tensor, rounds: bool = False) -> Rows:
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1, "rows lie apart"
        if rounds and width > MAX_COLUMNS:
            unrounded = self.silu_mul(gate_up)
            assert isinstance(unrounded, torch.Tensor)
            return rounded(unrounded)
        out, scales = _results(gate_up, width, rounds)
        columns = num_columns(width) if rounds else _SILU_COLUMNS
        silu_and_mul[(num_tokens, triton.cdiv(width, columns))](
            gate_up, out, scales, gate_up.stride(0), width, columns, rounds, num_warps=max(4, num_warps(columns))
        )
        return as_rounded(out, scales, gate_up.dtype) if rounds else out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        width = gate_up.shape[1] // 2
        return F.gelu(gate_up[:, :width], approximate="tanh").mul_(gate_up[:, width:])

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        head_norm: torch.Tensor | None,
        eps: float,
        rope_rows: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        num_heads: int,
    ) -> torch.Tensor:
        num_tokens, all_heads, head_dim = qkv.shape
        (cos, sin), (k, v) = rope_rows, pages
        assert qkv.stride()[1:] == (head_dim, 1) and head_dim % 4 == 0, "heads lie apart, or are of odd sizes"
        assert cos.is_contiguous() and sin.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        half = triton.next_power_of_2(head_dim // 2)
        tile = max(1, _TILE_ELEMENTS // (2 * half))
        turn_and_store[(num_tokens, triton.cdiv(all_heads, tile))](
            qkv,
            out,
            qkv if head_norm is None else head_norm,
            cos,
            sin,
            slots,
            k,
            v,
            qkv.stride(0),
            eps,
            num_heads,
            (all_heads - num_heads) // 2,
            head_dim,
            tile,
            half,
            k.stride(1),
            k.stride(2),
            head_norm is not None,
            ("int8" if k.dtype == torch.int8 else "fp8") if is_rounded(k.dtype) else "plain",
            num_warps=4,
        )
        return out


def _results(like: torch.Tensor, width: int, rounds: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for rows and, where they are to be rounded, for their scales."""
    if rounds:
        return rounded_memory(len(like), width, like.device)
    out = torch.empty((len(like), width), dtype=like.dtype, device=like.device)
    return out, out


def cases() -> Iterator[Case]:
    """The shapes of common models, the types, and every format of pages."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (4096, 16_384):
            yield _norm_case(dtype, width)
            yield _norm_case(dtype, width, rounds=True)
        yield _silu_case(dtype, 14_336)
        yield _silu_case(dtype, 14_336, rounds=True)
        for kv_dtype in (dtype, torch.int8, torch.uint8):
            yield _turn_case(dtype, kv_dtype, 128, False)
    for width in (896, 8192):
        yield _norm_case(torch.bfloat16, width)
    for width in (896, MAX_COLUMNS):
        yield _silu_case(torch.bfloat16, width, rounds=True)
    for kv_dtype in (torch.bfloat16, torch.int8, torch.uint8):
        yield _turn_case(torch.bfloat16, kv_dtype, 128, True)
    for head_dim in (64, 80, 96, 256):
        yield _turn_case(torch.bfloat16, torch.bfloat16, head_dim, False)


def _norm_case(dtype: torch.dtype, width: int, rounds: bool = False) -> Case:
    def launch() -> None:
        x = torch.zeros((2, width), dtype=dtype)
        TritonOps().rms_norm(x, x[0], 1e-5, None, rounds)
        TritonOps().rms_norm(x, x[0], 1e-5, torch.zeros_like(x), rounds)

    return Case(f"norm of {width} {_name(dtype)}{' to fp8' * rounds}", launch)


def _silu_case(dtype: torch.dtype, width: int, rounds: bool = False) -> Case:
    def launch() -> None:
        TritonOps().silu_mul(torch.zeros((2, 2 * width), dtype=dtype), rounds)

    return Case(f"silu * mul of {width} {_name(dtype)}{' to fp8' * rounds}", launch)


def _turn_case(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, has_norm: bool) -> Case:
    def launch() -> None:
        qkv, rope = torch.zeros((2, 48, head_dim), dtype=dtype), torch.zeros((2, 1, head_dim), dtype=dtype)
        pages = torch.zeros((2, 16, 8, cell_size(head_dim, kv_dtype)), dtype=kv_dtype)
        norm = torch.zeros((40, head_dim), dtype=dtype) if has_norm else None
        slots = torch.arange(2)
        TritonOps().rotate_and_store(qkv, norm, 1e-6, (rope, rope), slots, (pages, pages.clone()), 32)

    norm = ", normed" if has_norm else ""
    return Case(f"rope {_name(dtype)} to {_name(kv_dtype)}, {head_dim}{norm}", launch)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
