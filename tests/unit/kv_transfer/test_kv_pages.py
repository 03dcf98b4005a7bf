"""Token ranges between a paged cache and a buffer, held against copies of one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import pages

LAYERS, HEADS, DIM = 2, 4, 3
POISON = -77.0


def make_cache(num_blocks: int, block_size: int) -> torch.Tensor:
    count = LAYERS * 2 * num_blocks * block_size * HEADS * DIM
    return torch.arange(count, dtype=torch.float32).view(LAYERS, 2, num_blocks, block_size, HEADS, DIM)


def read_tokens(kv: torch.Tensor, table: list[int], start: int, end: int, heads: slice) -> torch.Tensor:
    """One token at a time, [L, 2, T, h, D]."""
    size = kv.shape[3]
    return torch.stack([kv[:, :, table[t // size], t % size, heads] for t in range(start, end)], dim=2)


@st.composite
def token_ranges(draw: st.DrawFn) -> tuple[int, list[int], int, int, slice]:
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    table = draw(st.permutations(range(7)))[: draw(st.integers(1, 7))]
    end = draw(st.integers(1, len(table) * block_size))
    start = draw(st.integers(0, end - 1))
    first_head = draw(st.integers(0, HEADS - 1))
    return block_size, table, start, end, slice(first_head, draw(st.integers(first_head + 1, HEADS)))


@given(token_ranges())
@settings(max_examples=60, deadline=None)
def test_gather_reads_exactly_the_tokens_and_heads_asked_for(case: tuple[int, list[int], int, int, slice]) -> None:
    block_size, table, start, end, heads = case
    kv = make_cache(7, block_size)
    out = torch.full((LAYERS, 2, end - start, heads.stop - heads.start, DIM), POISON)
    pages.gather(kv, table, start, end, heads, out)
    assert torch.equal(out, read_tokens(kv, table, start, end, heads))


@given(token_ranges())
@settings(max_examples=60, deadline=None)
def test_scatter_writes_those_tokens_and_touches_nothing_else(case: tuple[int, list[int], int, int, slice]) -> None:
    block_size, table, start, end, heads = case
    kv = torch.full((LAYERS, 2, 7, block_size, HEADS, DIM), POISON)
    source = torch.randn(LAYERS, 2, end - start, heads.stop - heads.start, DIM)
    expected = kv.clone()
    for t in range(start, end):
        expected[:, :, table[t // block_size], t % block_size, heads] = source[:, :, t - start]
    pages.scatter(kv, table, start, end, heads, source)
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_move_between_caches_of_different_block_sizes_bit_for_bit(dtype: torch.dtype) -> None:
    kv = torch.randn(LAYERS, 2, 9, 4, HEADS, DIM).to(dtype)
    other = torch.full((LAYERS, 2, 5, 16, HEADS, DIM), POISON, dtype=dtype)
    table, other_table = [8, 0, 3, 5, 1], [4, 1]
    buffer = torch.empty(LAYERS, 2, 13, HEADS, DIM, dtype=dtype)
    pages.gather(kv, table, 6, 19, slice(0, HEADS), buffer)
    pages.scatter(other, other_table, 6, 19, slice(0, HEADS), buffer)
    moved = read_tokens(other, other_table, 6, 19, slice(0, HEADS))
    assert torch.equal(moved.view(torch.uint8), read_tokens(kv, table, 6, 19, slice(0, HEADS)).view(torch.uint8))


def test_a_cache_made_in_inference_mode_can_be_written_from_any_thread() -> None:
    with torch.inference_mode():
        kv = torch.zeros(LAYERS, 2, 2, 4, HEADS, DIM)
    pages.scatter(kv, [1], 0, 4, slice(0, HEADS), torch.ones(LAYERS, 2, 4, HEADS, DIM))
    assert kv[:, :, 1].eq(1).all() and kv[:, :, 0].eq(0).all()


@pytest.mark.parametrize(
    ("table", "start", "end", "message"),
    [
        ([0, 1], 0, 9, r"tokens \[0, 9\) need 3 blocks of 4, but the block table has 2"),
        ([0, 7], 0, 8, r"names a block outside the pool of 7"),
        ([0, -1], 0, 8, r"names a block outside the pool of 7"),
        ([0], 3, 3, r"tokens \[3, 3\) are no range"),
        ([0], -1, 3, r"tokens \[-1, 3\) are no range"),
    ],
)
def test_a_range_that_the_block_table_does_not_cover_is_refused(
    table: list[int], start: int, end: int, message: str
) -> None:
    kv = make_cache(7, 4)
    out = torch.empty(LAYERS, 2, max(0, end - start), HEADS, DIM)
    with pytest.raises(ValueError, match=message):
        pages.gather(kv, table, start, end, slice(0, HEADS), out)
    with pytest.raises(ValueError, match=message):
        pages.scatter(kv, table, start, end, slice(0, HEADS), out)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.empty(LAYERS, 2, 5, HEADS, DIM), "give a contiguous"),
        (torch.empty(LAYERS, 2, 4, HEADS, DIM * 2)[..., :DIM], "give a contiguous"),
        (torch.empty(LAYERS, 2, 4, HEADS, DIM, dtype=torch.float16), "both must agree"),
    ],
    ids=["wrong shape", "not contiguous", "wrong dtype"],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: torch.Tensor, message: str) -> None:
    kv = make_cache(7, 4)
    with pytest.raises(ValueError, match=message):
        pages.gather(kv, [0], 0, 4, slice(0, HEADS), buffer)
    with pytest.raises(ValueError, match=message):
        pages.scatter(kv, [0], 0, 4, slice(0, HEADS), buffer)
