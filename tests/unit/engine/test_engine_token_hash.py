"""The model of timed steps: the next token is a hash of the tokens before it."""

import random

import numpy as np
import pytest

from engine.token_hash import TokenHash, states_after

TOKENS = [5, 0, 7, 7, 151_935, 1, 0]


def test_a_prefix_leads_to_the_same_token_however_it_was_cut() -> None:
    whole, parts = TokenHash(TOKENS), TokenHash(TOKENS[:3])
    parts.extend(TOKENS[3:])
    assert parts.next_token(1000) == whole.next_token(1000) == 489


def test_any_other_prefix_has_another_state() -> None:
    others = [TOKENS[:-1], [*TOKENS, 0], [0, *TOKENS], TOKENS[::-1], [5, 0, 7, 7, 151_934, 1, 0]]
    assert len({TokenHash(tokens).state for tokens in [TOKENS, *others]}) == 6


@pytest.mark.parametrize("lengths", [(), (1, 1, 1), (1500,), (3, 1, 700, 2)])
def test_states_of_a_whole_step_are_those_of_token_by_token(lengths: tuple[int, ...]) -> None:
    rng = random.Random(3)
    sequences = [[rng.randrange(200_000) for _ in range(length)] for length in lengths]
    before = [TokenHash(TOKENS[: number % 3]) for number in range(len(lengths))]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    tokens = np.array([token for each in sequences for token in each], dtype=np.int32)
    found = states_after(np.array([each.state for each in before], dtype=np.uint64), tokens, starts)
    expected = []
    for state, each in zip(before, sequences, strict=True):
        for token in each:
            state.extend([token])
            expected.append(state.state)
    assert found.tolist() == expected


def test_a_copy_goes_on_by_itself() -> None:
    first = TokenHash(TOKENS)
    second = first.copy()
    second.extend([1])
    assert first.state == TokenHash(TOKENS).state != second.state


def test_excluded_tokens_are_never_chosen() -> None:
    for length in range(50):
        assert TokenHash(range(length)).next_token(8, excluded={0, 1, 2, 4, 5, 6, 7}) == 3


def test_sequences_of_one_request_go_different_ways() -> None:
    assert len({TokenHash(TOKENS).next_token(100_000, index) for index in range(8)}) == 8


def test_tokens_are_spread_over_the_vocabulary() -> None:
    counts = np.zeros(16)
    sequence = TokenHash([1, 2, 3])
    for _ in range(3200):
        token = sequence.next_token(16)
        counts[token] += 1
        sequence.extend([token])
    assert counts.min() > 140 and counts.max() < 260
