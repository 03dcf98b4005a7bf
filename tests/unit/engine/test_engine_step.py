"""A step lays out ragged sequences as flat arrays, and crosses a process border unchanged."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step_input import SequenceSlice, StepInput, build_step, is_decode


def example() -> StepInput:
    """A prefill chunk of 3 tokens that stops short of its prompt's end, and a decode step of one token."""
    chunk = SequenceSlice((11, 12, 13), start=2, block_table=(7, 4), wants_logits=False)
    decode = SequenceSlice((99,), start=8, block_table=(5, 6, 1), wants_logits=True)
    return build_step([chunk, decode], block_size=4, block_copies=[(2, 3)])


def assert_equal(a: StepInput, b: StepInput) -> None:
    for f in fields(StepInput):
        left, right = getattr(a, f.name), getattr(b, f.name)
        assert left.dtype == right.dtype == np.int32, f.name
        assert left.shape == right.shape, f.name
        assert np.array_equal(left, right), f.name


def test_tokens_positions_and_lengths_follow_the_slices() -> None:
    step = example()
    assert step.token_ids.tolist() == [11, 12, 13, 99]
    assert step.positions.tolist() == [2, 3, 4, 8]
    assert step.cu_seqlens_q.tolist() == [0, 3, 4]
    assert step.seqlens_k.tolist() == [5, 9]


def test_each_new_token_gets_the_slot_that_its_block_table_says() -> None:
    assert example().slot_mapping.tolist() == [7 * 4 + 2, 7 * 4 + 3, 4 * 4 + 0, 1 * 4 + 0]


def test_block_tables_are_padded_to_the_longest() -> None:
    assert example().block_tables.tolist() == [[7, 4, 0], [5, 6, 1]]


def test_logits_come_for_the_last_token_of_the_slices_that_want_them() -> None:
    slices = [SequenceSlice((1, 2), 0, (0,), wants) for wants in (True, False, True)]
    assert build_step(slices, 4).logits_indices.tolist() == [1, 5]
    assert example().logits_indices.tolist() == [3]


def test_block_copies_are_pairs_even_when_there_are_none() -> None:
    assert example().block_copies.tolist() == [[2, 3]]
    assert build_step([SequenceSlice((1,), 0, (0,), True)], 4).block_copies.shape == (0, 2)


def test_every_array_is_int32() -> None:
    assert {getattr(example(), f.name).dtype for f in fields(StepInput)} == {np.dtype(np.int32)}


SLICES = st.lists(
    st.builds(
        lambda count, start, wants: SequenceSlice(
            tuple(range(count)), start, tuple(range(-(-(start + count) // 4) + 1)), wants
        ),
        st.integers(1, 9),
        st.integers(0, 20),
        st.booleans(),
    ),
    max_size=5,
)
COPIES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=3)


@settings(max_examples=60, derandomize=True, database=None)
@given(slices=SLICES, copies=COPIES)
def test_a_step_survives_the_way_through_bytes(slices: list[SequenceSlice], copies: list[tuple[int, int]]) -> None:
    step = build_step(slices, 4, copies)
    assert_equal(StepInput.from_bytes(step.to_bytes()), step)


def test_bytes_are_little_endian_whatever_the_arrays_are() -> None:
    step = example()
    other = replace(step, token_ids=step.token_ids.astype(">i4"))
    assert other.to_bytes() == step.to_bytes()


@pytest.mark.parametrize("damage", [lambda data: data + b"\0\0\0\0", lambda data: data[:-4], lambda data: data[:20]])
def test_bytes_whose_length_is_not_what_their_header_says_are_refused(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(ValueError):
        StepInput.from_bytes(damage(example().to_bytes()))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70)), max_size=9), st.sampled_from([4, 16]))
def test_a_decode_step_is_laid_out_as_any_other(sequences: list[tuple[int, int]], block_size: int) -> None:
    """Its short way against the long one, which a block copy makes it take."""
    slices = [
        SequenceSlice((token,), start, tuple(range(number, number + start // block_size + 1)), True)
        for number, (token, start) in enumerate(sequences)
    ]
    short, long = build_step(slices, block_size), build_step(slices, block_size, [(1, 2)])
    assert_equal(short, replace(long, block_copies=np.zeros((0, 2), dtype=np.int32)))
    assert is_decode(short) == is_decode(long) == bool(slices)
    assert is_decode(StepInput.from_bytes(short.to_bytes())) == bool(slices)


@settings(max_examples=60, deadline=None)
@given(slices=SLICES, sampled=st.lists(st.integers(0, 500), min_size=1, max_size=6), data=st.data())
def test_tokens_that_are_not_read_yet_are_those_that_the_step_before_led_to(
    slices: list[SequenceSlice], sampled: list[int], data: st.DataObject
) -> None:
    """Some of a step's tokens stand for rows of the step before, also in the bytes for other ranks."""
    rows = [data.draw(st.none() | st.integers(0, len(sampled) - 1)) for s in slices for _ in s.token_ids]
    tokens, ids = iter(rows), iter(t for s in slices for t in s.token_ids)
    ahead = [
        replace(s, token_ids=tuple(t if (r := next(tokens)) is None else -1 - r for t in s.token_ids)) for s in slices
    ]
    step = StepInput.from_bytes(build_step(ahead, 4).to_bytes())

    assert step.has_unread_tokens == any(row is not None for row in rows)
    known = step.with_tokens(np.array(sampled, dtype=np.int64))
    assert known.token_ids.tolist() == [next(ids) if row is None else (next(ids), sampled[row])[1] for row in rows]
    assert_equal(replace(known, token_ids=step.token_ids), step)
