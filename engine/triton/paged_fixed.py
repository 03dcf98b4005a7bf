"""Attention over paged KV in which a token has the same bits generated and as a part of a prompt.

Keys are split at multiples of `SPLIT_TOKENS` from position 0 on, whatever a sequence's length and chunk. A split is
computed by itself, in tiles of one shape and by one kernel, and splits are joined in their order. A token of a prompt
goes through its splits one after the other in one program; a generated one has a program for each, and a second kernel
joins what they gave: with the same operations on each number, which the compiler may not fuse. Programs without work
end at once, as in `paged_decode`, so that a step can be recorded.

Legend: T tokens, S sequences, Hq/H query/KV heads, G = Hq / H, D head_dim, C its padding to a power of two, M query
rows of a tile, N keys of a tile, P splits at most.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from engine.attention.interface import PagedBatch
from engine.triton.paged_prefill import PrefillTuning, Tuning, sequence_of, tiles_of
from engine.triton.paged_tile import attend_keys, attention_cases, page_arguments, score_factors
from engine.triton.target import Case

SPLIT_TOKENS = 2048
"""Long enough that joining costs a prompt little, short enough that one generated token waits for few tiles."""
_PROGRAMS = 4096


TUNING: Tuning = {
    80: {64: PrefillTuning(128, 64, 8, 5), 128: PrefillTuning(64, 64, 8, 5), 256: PrefillTuning(64, 32, 8, 5)},
    86: {64: PrefillTuning(128, 64, 8, 5), 128: PrefillTuning(64, 32, 8, 5), 256: PrefillTuning(64, 16, 8, 5)},
    90: {64: PrefillTuning(128, 64, 8, 5), 128: PrefillTuning(128, 64, 8, 5), 256: PrefillTuning(64, 32, 8, 5)},
}
"""As `paged_prefill.TUNING`: two tiles of values must fit in registers."""
_MOST_SPILLED = 128  # bytes of a thread


@triton.jit
def _join(acc, total, most, more_acc, more_total, more_most):
    """Adds a split's values, sum of weights and largest score [M, C], [M], [M] to those of the splits before it."""
    new_most = tl.maximum(most, more_most)
    base = tl.where(new_most == float("-inf"), 0.0, new_most)  # neither has seen a key
    before, now = tl.exp2(most - base), tl.exp2(more_most - base)
    total = tl.fma(more_total, now, total * before)
    wide = tl.broadcast_to(tl.expand_dims(now, -1), acc.shape)
    acc = tl.fma(more_acc, wide, acc * tl.expand_dims(before, -1))
    return acc, total, new_most


@triton.jit(do_not_specialize=["num_sequences", "table_stride", "num_parts"])
def fixed_tiles(
    q,  # [T, Hq, D]
    k_pages,
    v_pages,
    out,  # [T, Hq, D]
    parts,  # float32 [S, Hq, P, D], values of splits of generated tokens
    sums,  # float32 [S, Hq, P, 2], their sum of weights and largest score
    sinks,  # [Hq]
    cu_seqlens_q,
    seqlens_k,
    block_table,
    num_sequences,
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
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    LEFT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid: H, at least as many tiles as all sequences have, programs of a sequence with one new token."""
    TOKENS: tl.constexpr = M // G
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = sequence_of(tile, cu_seqlens_q, num_sequences, TOKENS)
    begin = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - begin
    first = (tile - begin // TOKENS - sequence) * TOKENS
    if first >= num_queries:
        return
    is_generated = num_queries == 1
    if (tl.program_id(2) > 0) & (num_queries > 1):
        return
    length = tl.load(seqlens_k + sequence)
    r, d = tl.arange(0, M), tl.arange(0, C)
    token = first + r // G
    is_mine = (r // G < TOKENS) & (token < num_queries)
    is_row = is_mine[:, None] & (d < D)[None, :]
    q_head = head * G + r % G
    first_row = (begin + first).to(tl.int64)
    at_query = ((r // G) * q_stride + q_head * D)[:, None] + d[None, :]
    query = tl.load(q + first_row * q_stride + at_query, mask=is_row, other=0).to(DOT)
    at = length - num_queries + token
    first_at = length - num_queries + first
    low, high = 0, tl.minimum(first_at + TOKENS, length)
    whole = tl.minimum(first_at + 1, length) // N * N  # up to here, every row sees every key
    if LEFT >= 0:
        low = tl.maximum(first_at - LEFT, 0) // N * N
        whole = low
    step = tl.where(is_generated, tl.num_programs(2), 1)
    table = block_table + sequence.to(tl.int64) * table_stride
    acc = tl.full([M, C], 0.0, tl.float32)
    total = tl.full([M], 0.0, tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    if HAS_SINKS:
        most = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
        total = tl.full([M], 1.0, tl.float32)
    for part in range(low // SPLIT + tl.program_id(2), tl.cdiv(high, SPLIT), step):
        part_low, part_high = tl.maximum(low, part * SPLIT), tl.minimum(high, (part + 1) * SPLIT)
        more_acc, more_total, more_most = attend_keys(
            query,
            tl.full([M, C], 0.0, tl.float32),
            tl.full([M], 0.0, tl.float32),
            tl.full([M], float("-inf"), tl.float32),
            part_low,
            tl.minimum(tl.maximum(whole, part_low), part_high),
            part_high,
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
            0,
            HAS_CAP,
            True,  # of a split, where not of a sequence
        )
        if is_generated:
            first_place = sequence.to(tl.int64) * num_heads * G * num_parts
            place = q_head * num_parts + part
            tl.store(parts + first_place * D + place[:, None] * D + d[None, :], more_acc, mask=is_row)
            tl.store(sums + 2 * (first_place + place), more_total, mask=is_mine)
            tl.store(sums + 2 * (first_place + place) + 1, more_most, mask=is_mine)
        else:
            acc, total, most = _join(acc, total, most, more_acc, more_total, more_most)
    if num_queries > 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows of no token have seen nothing
        at_row = ((r // G) * num_heads * G + q_head)[:, None] * D + d[None, :]
        tl.store(out + first_row * num_heads * G * D + at_row, acc.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_parts"])
def fixed_join(
    out,
    parts,
    sums,
    sinks,
    cu_seqlens_q,
    seqlens_k,
    num_parts,
    D: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    LEFT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid: Hq, S. The splits of a generated token, in their order."""
    q_head, sequence = tl.program_id(0), tl.program_id(1)
    num_q_heads = tl.num_programs(0)
    row = tl.load(cu_seqlens_q + sequence)
    if tl.load(cu_seqlens_q + sequence + 1) - row != 1:
        return
    length = tl.load(seqlens_k + sequence)
    low = 0
    if LEFT >= 0:
        low = tl.maximum(length - 1 - LEFT, 0) // N * N
    one, d = tl.arange(0, 1), tl.arange(0, C)
    acc = tl.full([1, C], 0.0, tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    most = tl.full([1], float("-inf"), tl.float32)
    if HAS_SINKS:
        most = tl.load(sinks + q_head + one).to(tl.float32) * 1.4426950408889634
        total = tl.full([1], 1.0, tl.float32)
    for part in range(low // SPLIT, tl.cdiv(length, SPLIT)):
        place = (sequence.to(tl.int64) * num_q_heads + q_head) * num_parts + part
        values = tl.load(parts + place * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        more_total, more_most = tl.load(sums + 2 * place + one), tl.load(sums + 2 * place + 1 + one)
        acc, total, most = _join(acc, total, most, values, more_total, more_most)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (row.to(tl.int64) * num_q_heads + q_head) * D + d[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(d < D)[None, :])


def paged_fixed(
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
    has_generated: bool = True,
) -> None:
    """Attends [T, Hq, D] queries to pages [N, K, H, D]; fills `out`. The rest is as in `paged_decode`.

    `has_generated`: whether the step may have sequences with one new token.
    """
    num_sequences, num_heads, num_q_heads, head_dim = len(paged.seqlens_k), k.shape[2], q.shape[1], q.shape[2]
    padded, tuning, num_tiles = tiles_of(TUNING, q, k, num_sequences)
    assert SPLIT_TOKENS % tuning.keys == 0, "a tile would reach into the next split"
    num_parts = triton.cdiv(paged.max_seqlen_k, SPLIT_TOKENS) if has_generated else 0
    shape = (num_sequences, num_q_heads, num_parts)
    parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    sinks_or_any = q if sinks is None else sinks
    programs = 1
    if has_generated:
        most_seen = num_parts if left < 0 else min(num_parts, triton.cdiv(left + 1, SPLIT_TOKENS) + 1)
        programs = min(most_seen, max(4, _PROGRAMS // (num_sequences * num_heads)))
    fixed_tiles[(num_heads, num_tiles, programs)](
        q,
        k,
        v,
        out,
        parts,
        sums,
        sinks_or_any,
        paged.cu_seqlens_q,
        paged.seqlens_k,
        paged.block_table,
        num_sequences,
        q.stride(0),
        paged.block_table.stride(0),
        num_parts,
        *score_factors(scale, soft_cap),
        num_q_heads // num_heads,
        head_dim,
        padded,
        tuning.rows,
        tuning.keys,
        SPLIT_TOKENS,
        *page_arguments(q, k),
        left,
        bool(soft_cap),
        sinks is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        enable_fp_fusion=False,
    )
    if has_generated:
        fixed_join[(num_q_heads, num_sequences)](
            out,
            parts,
            sums,
            sinks_or_any,
            paged.cu_seqlens_q,
            paged.seqlens_k,
            num_parts,
            head_dim,
            padded,
            tuning.keys,
            SPLIT_TOKENS,
            left,
            sinks is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )


def cases() -> Iterator[Case]:
    return attention_cases("fixed", paged_fixed, [0, 1, 33], longest=8192, spilled=_MOST_SPILLED)
