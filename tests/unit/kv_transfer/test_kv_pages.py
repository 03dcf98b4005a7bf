"""Ranges of tokens and layers between a paged cache and a buffer, held against copies of one token at a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import lets_other_threads_run

from kv_transfer import pages
from kv_transfer.actions import Range

LAYERS, HEADS, DIM = 3, 4, 3
ALL_HEADS = slice(0, HEADS)
POISON = -77.0

Case = tuple[int, list[int], Range, slice]


def make_cache(num_blocks: int, block_size: int) -> torch.Tensor:
    count = LAYERS * 2 * num_blocks * block_size * HEADS * DIM
    return torch.arange(count, dtype=torch.float32).view(LAYERS, 2, num_blocks, block_size, HEADS, DIM)


def make_buffer(what: Range, heads: slice, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (what.layer_end - what.layer_start, 2, what.num_tokens, heads.stop - heads.start, DIM)
    return torch.full(shape, POISON, dtype=dtype)


def read_tokens(kv: torch.Tensor, table: list[int], what: Range, heads: slice) -> torch.Tensor:
    """One token at a time, [l, 2, T, h, D]."""
    size, layers = kv.shape[3], slice(what.layer_start, what.layer_end)
    tokens = range(what.token_start, what.token_end)
    return torch.stack([kv[layers, :, table[t // size], t % size, heads] for t in tokens], dim=2)


def write_tokens(kv: torch.Tensor, table: list[int], what: Range, heads: slice, source: torch.Tensor) -> torch.Tensor:
    """One token at a time, into a copy."""
    size, layers = kv.shape[3], slice(what.layer_start, what.layer_end)
    written = kv.clone()
    for t in range(what.token_start, what.token_end):
        written[layers, :, table[t // size], t % size, heads] = source[:, :, t - what.token_start].to(kv.dtype)
    return written


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    table = draw(st.one_of(st.permutations(range(7)), st.just(list(range(7)))))[: draw(st.integers(1, 7))]
    end = draw(st.integers(1, len(table) * block_size))
    start = draw(st.integers(0, end - 1))
    layer = draw(st.integers(0, LAYERS - 1))
    first_head = draw(st.integers(0, HEADS - 1))
    what = Range(start, end, layer, draw(st.integers(layer + 1, LAYERS)))
    return block_size, list(table), what, slice(first_head, draw(st.integers(first_head + 1, HEADS)))


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=120)
def test_gather_reads_exactly_the_range_asked_for(case: Case, dtype: torch.dtype) -> None:
    block_size, table, what, heads = case
    kv = make_cache(7, block_size)
    out = make_buffer(what, heads, dtype)
    pages.gather(kv, table, what, heads, out)
    assert torch.equal(out, read_tokens(kv, table, what, heads).to(dtype))


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=120)
def test_scatter_writes_that_range_and_touches_nothing_else(case: Case, dtype: torch.dtype) -> None:
    block_size, table, what, heads = case
    kv = torch.full((LAYERS, 2, 7, block_size, HEADS, DIM), POISON)
    source = torch.randn(make_buffer(what, heads).shape).to(dtype)
    expected = write_tokens(kv, table, what, heads, source)
    pages.scatter(kv, table, what, heads, source)
    assert torch.equal(kv, expected)


def every_small_case() -> Iterator[tuple[list[int], Range]]:
    for table in itertools.permutations(range(3)):
        for start, end in itertools.combinations(range(7), 2):
            for first, last in itertools.combinations(range(LAYERS + 1), 2):
                yield list(table), Range(start, end, first, last)


def test_every_range_of_every_order_of_three_blocks_moves_exactly() -> None:
    kv = make_cache(4, 2)
    for table, what in every_small_case():
        out = make_buffer(what, ALL_HEADS)
        pages.gather(kv, table, what, ALL_HEADS, out)
        assert torch.equal(out, read_tokens(kv, table, what, ALL_HEADS)), (table, what)
        target = torch.full_like(kv, POISON)
        expected = write_tokens(target, table, what, ALL_HEADS, out)
        pages.scatter(target, table, what, ALL_HEADS, out)
        assert torch.equal(target, expected), (table, what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_move_between_caches_of_different_block_sizes_bit_for_bit(dtype: torch.dtype) -> None:
    bits = torch.iinfo(torch.int16) if dtype.itemsize == 2 else torch.iinfo(torch.int32)
    raw = torch.randint(bits.min, bits.max, (LAYERS, 2, 9, 4, HEADS, DIM), dtype=getattr(torch, bits.dtype))
    kv = raw.view(dtype)  # NaNs with payloads and infinities among them
    assert kv.isnan().any()
    other = torch.full((LAYERS, 2, 5, 16, HEADS, DIM), POISON, dtype=dtype)
    table, other_table, what = [8, 0, 3, 5, 1], [4, 1], Range(6, 19, 0, LAYERS)
    buffer = make_buffer(what, ALL_HEADS, dtype)
    pages.gather(kv, table, what, ALL_HEADS, buffer)
    pages.scatter(other, other_table, what, ALL_HEADS, buffer)
    moved, due = read_tokens(other, other_table, what, ALL_HEADS), read_tokens(kv, table, what, ALL_HEADS)
    assert torch.equal(moved.view(torch.uint8), due.view(torch.uint8))


def test_blocks_that_the_range_does_not_need_are_never_looked_at() -> None:
    kv, what = make_cache(7, 4), Range(4, 8, 0, LAYERS)
    out = make_buffer(what, ALL_HEADS)
    pages.gather(kv, [-9, 5, 1 << 40], what, ALL_HEADS, out)
    assert torch.equal(out, kv[:, :, 5])


def test_a_cache_made_in_inference_mode_can_be_written_from_any_thread() -> None:
    with torch.inference_mode():
        kv = torch.zeros(LAYERS, 2, 2, 4, HEADS, DIM)
    for dtype, value in ((torch.float32, 1), (torch.bfloat16, 2)):
        source = torch.full((LAYERS, 2, 4, HEADS, DIM), value, dtype=dtype)
        writer = threading.Thread(target=pages.scatter, args=(kv, [1], Range(0, 4, 0, LAYERS), ALL_HEADS, source))
        writer.start()
        writer.join()
        assert kv[:, :, 1].eq(value).all() and kv[:, :, 0].eq(0).all()


@pytest.mark.parametrize("layers", [1, 12, 32])
def test_other_threads_run_while_a_block_is_copied(layers: int) -> None:
    pool, buffer = (pages._elements(torch.zeros(layers, 2, 64, 4, 64), 16) for _ in range(2))

    def copy_blocks() -> None:
        for row in range(0, 64, 16):
            buffer[:, :, row : row + 16] = pool[:, :, 48 - row : 64 - row]

    assert lets_other_threads_run(copy_blocks)


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
    refuse(table, Range(start, end, 0, LAYERS), message)


@pytest.mark.parametrize(("first", "last"), [(0, LAYERS + 1), (-1, 1), (2, 2), (2, 1)])
def test_layers_that_the_cache_does_not_have_are_refused(first: int, last: int) -> None:
    refuse([0], Range(0, 4, first, last), rf"layers \[{first}, {last}\) are no range of {LAYERS} layers")


def refuse(table: list[int], what: Range, message: str) -> None:
    kv = make_cache(7, 4)
    before = kv.clone()
    out = torch.empty(max(0, what.layer_end - what.layer_start), 2, max(0, what.num_tokens), HEADS, DIM)
    for copy in (pages.gather, pages.scatter):
        with pytest.raises(ValueError, match=message):
            copy(kv, table, what, ALL_HEADS, out)
    assert torch.equal(kv, before)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.empty(LAYERS, 2, 5, HEADS, DIM),
        torch.empty(LAYERS, 2, 4, HEADS, DIM * 2)[..., :DIM],
        torch.empty(LAYERS - 1, 2, 4, HEADS, DIM),
    ],
    ids=["wrong tokens", "not contiguous", "wrong layers"],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: torch.Tensor) -> None:
    for copy in (pages.gather, pages.scatter):
        with pytest.raises(ValueError, match="give a contiguous"):
            copy(make_cache(7, 4), [0], Range(0, 4, 0, LAYERS), ALL_HEADS, buffer)
