"""Attention of sequences with one new token over paged KV: the keys of each are split, then the parts combined.

One program attends the query heads of one KV head (they share its keys) to one split after the other of one sequence.
A second kernel combines what the splits gave. A split has a size that the sequence's own length alone decides: a row
is computed to the same bits alone and among any others. What is launched depends on bounds only, never on lengths, and
surplus programs end at once, so that a step can be recorded. Sequences with more new tokens are left out.

Legend: S sequences, Hq/H query/KV heads, G = Hq / H, D head_dim, C its padding to a power of two, M query rows of a
tile, N keys of a tile, P splits at most.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.attention.interface import PagedBatch
from engine.triton.paged_tile import MIN_ROWS, attend_tile, attention_cases, page_arguments, score_factors
from engine.triton.target import Case, capability

SPLIT_TOKENS = 256
"""Tokens of a split, and of what a longer one is a multiple of."""
MAX_SPLITS = 32
"""Splits of one sequence: with the 8 KV heads of common models, two programs for each multiprocessor of an H100."""
_PROGRAMS = 4096
"""About so many programs are launched: more than run at a time, few enough that those without work cost little."""


class DecodeTuning(NamedTuple):
    """How a tile is computed."""

    tile_bytes: int
    """Of the keys of a tile, or of its values, as they are multiplied."""
    num_warps: int
    num_stages: int
    """Triton gives half of those beyond two to the block table, the others to tiles on their way: 5 make two tiles."""


TUNING = {80: DecodeTuning(16_384, 4, 5), 86: DecodeTuning(8_192, 4, 5), 90: DecodeTuning(16_384, 4, 5)}
"""By the compute capability from which on it holds."""


@triton.jit
def _splits(length, LEFT: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """The first key that the last token of a sequence sees, and size and number of its splits."""
    begin = 0
    if LEFT >= 0:
        begin = tl.maximum(length - 1 - LEFT, 0)
    count = tl.maximum(length - begin, 1)
    size = tl.cdiv(tl.cdiv(count, MAX_SPLITS), SPLIT_TOKENS) * SPLIT_TOKENS
    return begin, size, tl.cdiv(count, size)


@triton.jit(do_not_specialize=["table_stride", "num_parts"])
def decode_splits(
    q,  # [T, Hq, D]
    k_pages,
    v_pages,
    out,  # [T, Hq, D]
    parts,  # float32 [S, H, P, G, D]
    logs,  # float32 [S, H, P, G], logarithm of the sum of weights, in powers of two
    sinks,  # [Hq]
    cu_seqlens_q,
    seqlens_k,
    block_table,
    q_stride,
    table_stride,
    num_parts,
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
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Grid: H, programs of each KV head, S. Where a sequence has one split, its result is final."""
    head, first, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(0)
    row = tl.load(cu_seqlens_q + sequence)
    if tl.load(cu_seqlens_q + sequence + 1) - row != 1:
        return
    length = tl.load(seqlens_k + sequence)
    begin, size, count = _splits(length, LEFT, SPLIT_TOKENS, MAX_SPLITS)
    if first >= count:
        return
    r, d = tl.arange(0, M), tl.arange(0, C)
    is_row = (r < G)[:, None] & (d < D)[None, :]
    at = (head * G + r)[:, None] * D + d[None, :]
    query = tl.load(q + row.to(tl.int64) * q_stride + at, mask=is_row, other=0).to(DOT)
    table = block_table + sequence.to(tl.int64) * table_stride
    for split in range(first, count, tl.num_programs(1)):
        low = begin + split * size
        high = tl.minimum(low + size, length)
        most = tl.full([M], float("-inf"), tl.float32)
        total = tl.full([M], 0.0, tl.float32)
        if HAS_SINKS and split == 0:  # as if there were one key of this score before all others, without a value
            most = tl.load(sinks + head * G + r, mask=r < G, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full([M], 1.0, tl.float32)
        acc = tl.full([M, C], 0.0, tl.float32)
        for start in range(low, high, N):
            keys = start + tl.arange(0, N)
            inside = keys < high
            acc, total, most = attend_tile(
                query,
                acc,
                total,
                most,
                k_pages,
                v_pages,
                table,
                keys,
                inside,
                inside[None, :],
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
                False,
            )
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a sequence without keys
        if count == 1:
            tl.store(out + row.to(tl.int64) * num_heads * G * D + at, acc.to(out.dtype.element_ty), mask=is_row)
        else:
            part = ((sequence.to(tl.int64) * num_heads + head) * num_parts + split) * G
            tl.store(parts + (part + r)[:, None] * D + d[None, :], acc, mask=is_row)
            tl.store(logs + part + r, most + tl.log2(total), mask=r < G)


@triton.jit(do_not_specialize=["num_parts"])
def decode_combine(
    out,
    parts,
    logs,
    cu_seqlens_q,
    seqlens_k,
    num_parts,
    G: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    LEFT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Grid: Hq, S. Parts are added in their order, whichever was computed first."""
    q_head, sequence = tl.program_id(0), tl.program_id(1)
    num_q_heads = tl.num_programs(0)
    row = tl.load(cu_seqlens_q + sequence)
    if tl.load(cu_seqlens_q + sequence + 1) - row != 1:
        return
    _, _, count = _splits(tl.load(seqlens_k + sequence), LEFT, SPLIT_TOKENS, MAX_SPLITS)
    if count == 1:
        return
    p, d = tl.arange(0, MAX_SPLITS), tl.arange(0, C)
    head, r = q_head // G, q_head % G
    part = ((sequence.to(tl.int64) * (num_q_heads // G) + head) * num_parts + p) * G + r
    log = tl.load(logs + part, mask=p < count, other=float("-inf"))
    weights = tl.exp2(log - tl.max(log, 0))
    is_part = (p < count)[:, None] & (d < D)[None, :]
    values = tl.load(parts + part[:, None] * D + d[None, :], mask=is_part, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    at = (row.to(tl.int64) * num_q_heads + q_head) * D + d
    tl.store(out + at, result.to(out.dtype.element_ty), mask=d < D)


def paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    paged: PagedBatch,
    out: torch.Tensor,
    *,
    scale: float,
    left: int = -1,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attends [T, Hq, D] queries of the sequences with one new token to pages [N, K, H, D]; fills their rows of `out`.

    `left`: how many earlier tokens are seen, -1 all. `soft_cap`: scores become soft_cap * tanh(score / soft_cap),
    0 leaves them. `sinks` [Hq]: a score for each head that takes its share of the softmax and adds no value.
    """
    num_sequences, num_heads, num_q_heads, head_dim = len(paged.seqlens_k), k.shape[2], q.shape[1], q.shape[2]
    group, padded = num_q_heads // num_heads, max(MIN_ROWS, triton.next_power_of_2(head_dim))
    tuning = TUNING[max(known for known in TUNING if known <= capability(q.device))]
    most_seen = paged.max_seqlen_k if left < 0 else min(paged.max_seqlen_k, left + 1)
    num_parts = max(1, min(MAX_SPLITS, triton.cdiv(most_seen, SPLIT_TOKENS)))
    num_programs = max(4, _PROGRAMS // (num_sequences * num_heads))
    shape = (num_sequences, num_heads, num_parts, group)
    parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    logs = torch.empty(shape, dtype=torch.float32, device=q.device)
    decode_splits[(num_heads, min(num_parts, num_programs), num_sequences)](
        q,
        k,
        v,
        out,
        parts,
        logs,
        q if sinks is None else sinks,
        paged.cu_seqlens_q,
        paged.seqlens_k,
        paged.block_table,
        q.stride(0),
        paged.block_table.stride(0),
        num_parts,
        *score_factors(scale, soft_cap),
        group,
        head_dim,
        padded,
        max(MIN_ROWS, triton.next_power_of_2(group)),
        max(MIN_ROWS, min(128, tuning.tile_bytes // (padded * q.itemsize))),
        *page_arguments(q, k),
        left,
        bool(soft_cap),
        sinks is not None,
        SPLIT_TOKENS,
        MAX_SPLITS,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if num_parts > 1:
        decode_combine[(num_q_heads, num_sequences)](
            out,
            parts,
            logs,
            paged.cu_seqlens_q,
            paged.seqlens_k,
            num_parts,
            group,
            head_dim,
            padded,
            left,
            SPLIT_TOKENS,
            MAX_SPLITS,
            num_warps=4,
        )


def cases() -> Iterator[Case]:
    return attention_cases("decode", paged_decode, [0, 1, 2], longest=8192, spilled=0)
