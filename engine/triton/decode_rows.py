"""Takes the rows of a decode step one token further, in one launch: the first kernel of a recorded step.

Legend: N rows at most, B blocks of the longest table, G groups of layers with tables of their own.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from engine.decode_inputs import IDLE, DecodeRows
from engine.triton.target import Case


@triton.jit(do_not_specialize=["size", "num_groups"])
def next_tokens(
    sampled,
    kept_tokens,  # [N]
    kept_positions,  # [N]
    tables,  # [G, N, B]
    token_ids,  # [N]
    positions,  # [N]
    slots,  # int64 [G, N]
    lengths,  # [N]
    length_sums,  # [N + 1]
    size,
    num_groups,
    most,
    width,
    block_size,
    NOBODY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: 1, since the sums go over all rows."""
    row = tl.arange(0, ROWS)
    is_there = row < size
    kept = tl.load(kept_positions + row, mask=is_there, other=NOBODY)
    is_used = kept > NOBODY
    tl.store(kept_positions + row, kept + 1, mask=is_there & is_used)
    position = tl.where(is_used, kept + 1, 0)
    token = tl.load(kept_tokens + row, mask=is_there, other=0)
    is_unread = is_there & (token < 0)
    read = tl.load(sampled + tl.where(is_unread, -1 - token, 0), mask=is_unread, other=0)
    length = tl.where(is_there, position + 1, 0)
    tl.store(token_ids + row, tl.where(is_unread, read, token), mask=is_there)
    tl.store(positions + row, position, mask=is_there)
    tl.store(lengths + row, length, mask=is_there)
    tl.store(length_sums + 1 + row, tl.cumsum(length, 0), mask=is_there)
    for group in range(num_groups):
        of_group = group * most + row
        block = tl.load(tables + of_group.to(tl.int64) * width + position // block_size, mask=is_there, other=0)
        tl.store(slots + of_group, block.to(tl.int64) * block_size + position % block_size, mask=is_there)


def advance_rows(rows: DecodeRows, size: int, block_size: int) -> None:
    """`engine.decode_inputs.Advance`."""
    num_groups, most, width = rows.tables.shape
    next_tokens[(1,)](
        rows.sampled,
        rows.kept_tokens,
        rows.kept_positions,
        rows.tables,
        rows.token_ids,
        rows.positions,
        rows.slots,
        rows.lengths,
        rows.length_sums,
        size,
        num_groups,
        most,
        width,
        block_size,
        IDLE,
        triton.next_power_of_2(most),
        num_warps=4,
    )


def cases() -> Iterator[Case]:
    """The most rows of a step, in blocks of the sizes that a GPU takes by itself."""
    for most in (64, 256, 512):
        for block_size in (16, 256):
            yield _case(most, block_size)


def _case(most: int, block_size: int) -> Case:
    def launch() -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        vectors = [zeros(most) for _ in range(5)]
        sampled, tokens, positions, token_ids, lengths = vectors
        slots, sums = zeros(1, most, dtype=torch.int64), zeros(most + 1)
        rows = DecodeRows(sampled, tokens, positions, zeros(1, most, 32), token_ids, zeros(most), slots, lengths, sums)
        advance_rows(rows, most, block_size)

    return Case(f"next tokens of {most} rows, blocks of {block_size}", launch)
