"""Attention of sequences with several new tokens over paged KV, their prefix included, without gathering.

One program attends a tile of queries of one KV head: neighbouring tokens, each with all query heads that share its
keys. Tiles of keys begin at multiples of their size, whatever a chunk begins with, so that a token is computed to the
same bits in whichever chunk and batch it comes. Programs with most keys start first. Sequences with one new token are
left out.

Legend: T tokens, S sequences, Hq/H query/KV heads, G = Hq / H, D head_dim, C its padding to a power of two, M query
rows of a tile, N keys of a tile.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.attention.interface import PagedBatch
from engine.kv.pool import is_rounded
from engine.triton.paged_tile import MIN_ROWS, attend_keys, attention_cases, page_arguments, score_factors
from engine.triton.target import Case, capability

_MOST_SPILLED = 128  # bytes of a thread, of 1020 that it has in registers


class PrefillTuning(NamedTuple):
    """How a tile is computed."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    """Triton gives half of those beyond two to the block table, the others to tiles on their way: 5 make two tiles."""


Tuning = dict[int, dict[int, PrefillTuning]]
TUNING: Tuning = {
    80: {64: PrefillTuning(128, 64, 8, 5), 128: PrefillTuning(128, 64, 8, 5), 256: PrefillTuning(64, 32, 8, 5)},
    86: {64: PrefillTuning(128, 64, 8, 5), 128: PrefillTuning(64, 32, 4, 5), 256: PrefillTuning(64, 16, 8, 5)},
    90: {64: PrefillTuning(128, 128, 8, 5), 128: PrefillTuning(128, 64, 8, 5), 256: PrefillTuning(128, 32, 8, 5)},
}
"""By the compute capability from which on it holds, then by the largest padded head_dim; of 16-bit types."""
_FLOAT32 = PrefillTuning(32, 16, 8, 2)
"""float32 has no tensor cores that keep its precision, and 256 dimensions of it must fit."""
_MOST_ROUNDED_KEYS = 32
"""Rounded heads take registers while they become numbers."""


@triton.jit
def sequence_of(tile, cu_seqlens_q, num_sequences, TOKENS: tl.constexpr):
    """The sequence of a tile, where each has its tokens' tiles, counted from cu_seqlens_q // TOKENS + sequence."""
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def prefill_tiles(
    q,  # [T, Hq, D]
    k_pages,
    v_pages,
    out,  # [T, Hq, D]
    sinks,  # [Hq]
    cu_seqlens_q,
    seqlens_k,
    block_table,
    num_sequences,
    q_stride,
    table_stride,
    scale,
    soft_cap,
    G: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
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
    HAS_SINKS: tl.constexpr,
):
    """Grid: H, at least as many tiles as all sequences have."""
    TOKENS: tl.constexpr = M // G
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = sequence_of(tile, cu_seqlens_q, num_sequences, TOKENS)
    begin = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - begin
    first = (tile - begin // TOKENS - sequence) * TOKENS
    if num_queries <= 1:
        return
    if first >= num_queries:
        return
    length = tl.load(seqlens_k + sequence)
    r, d = tl.arange(0, M), tl.arange(0, C)
    token = first + r // G
    is_row = ((r // G < TOKENS) & (token < num_queries))[:, None] & (d < D)[None, :]
    q_head = head * G + r % G
    row = (begin + token).to(tl.int64)
    query = tl.load(q + (row * q_stride + q_head * D)[:, None] + d[None, :], mask=is_row, other=0).to(DOT)
    at = length - num_queries + token
    first_at = length - num_queries + first
    last_at = tl.minimum(first_at + TOKENS, length) - 1
    low, high = 0, length
    whole = length // N * N  # up to here, every row sees every key
    if RIGHT >= 0:
        high = tl.minimum(last_at + RIGHT + 1, length)
        whole = tl.minimum(first_at + RIGHT + 1, length) // N * N
    if LEFT >= 0:
        low = tl.maximum(first_at - LEFT, 0) // N * N
        whole = low
    table = block_table + sequence.to(tl.int64) * table_stride
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.full([M], 0.0, tl.float32)
    if HAS_SINKS:
        most = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
        total = tl.full([M], 1.0, tl.float32)
    acc = tl.full([M, C], 0.0, tl.float32)
    acc, total, most = attend_keys(
        query,
        acc,
        total,
        most,
        low,
        whole,
        high,
        at,
        length,
        k_pages,
        v_pages,
        table,
        head,
        scale,
        soft_cap,
        D,
        C,
        N,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        TOKEN_STRIDE,
        HEAD_STRIDE,
        FORMAT,
        DOT,
        LEFT,
        RIGHT,
        HAS_CAP,
        LEFT >= 0,
    )
    place = (row * num_heads * G + q_head)[:, None] * D + d[None, :]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows of no token have seen nothing
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_row)


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    paged: PagedBatch,
    out: torch.Tensor,
    *,
    scale: float,
    window: tuple[int, int] = (-1, 0),
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attends [T, Hq, D] queries of the sequences with several new tokens to pages [N, K, H, D]; fills their rows of
    `out`. `window` as in `engine.attention.interface`, causal being (-1, 0); the rest as in `paged_decode`."""
    num_sequences, num_heads, num_q_heads, head_dim = len(paged.seqlens_k), k.shape[2], q.shape[1], q.shape[2]
    padded, tuning, num_tiles = tiles_of(TUNING, q, k, num_sequences)
    prefill_tiles[(num_heads, num_tiles)](
        q,
        k,
        v,
        out,
        q if sinks is None else sinks,
        paged.cu_seqlens_q,
        paged.seqlens_k,
        paged.block_table,
        num_sequences,
        q.stride(0),
        paged.block_table.stride(0),
        *score_factors(scale, soft_cap),
        num_q_heads // num_heads,
        head_dim,
        padded,
        tuning.rows,
        tuning.keys,
        *page_arguments(q, k),
        *window,
        bool(soft_cap),
        sinks is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def tiles_of(table: Tuning, q: torch.Tensor, pages: torch.Tensor, num_sequences: int) -> tuple[int, PrefillTuning, int]:
    """Returns C, how a tile of these queries [T, Hq, D] and pages [N, K, H, D] is computed by a table like `TUNING`,
    and how many tiles so many sequences have at most."""
    group, padded = q.shape[1] // pages.shape[2], max(MIN_ROWS, triton.next_power_of_2(q.shape[2]))
    tuning = _tuning_of(table, q.dtype, padded, capability(q.device))
    rows = max(tuning.rows, triton.next_power_of_2(group))
    keys = min(tuning.keys, _MOST_ROUNDED_KEYS) if is_rounded(pages.dtype) else tuning.keys
    return padded, tuning._replace(rows=rows, keys=keys), q.shape[0] // (rows // group) + num_sequences


def _tuning_of(table: Tuning, dtype: torch.dtype, padded: int, arch: int) -> PrefillTuning:
    if dtype == torch.float32:
        return _FLOAT32
    sizes = table[max(known for known in table if known <= arch)]
    return sizes[min((size for size in sizes if size >= padded), default=max(sizes))]


def cases() -> Iterator[Case]:
    return attention_cases("prefill", _with_window, [0, 32], longest=32, spilled=_MOST_SPILLED)


def _with_window(*args: Any, left: int = -1, **options: Any) -> None:
    paged_prefill(*args, window=(left, 0), **options)
