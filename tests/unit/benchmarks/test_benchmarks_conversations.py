"""Conversations from a seed or from a trace: as many as asked for, the same each time, and with something to share."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.conversations import (
    MOST_PROMPT_TOKENS,
    SCALE,
    EndlessCache,
    Session,
    Turn,
    agents,
    generate,
    in_order,
    read_trace,
    working_set,
)


def lengths(session: Session) -> list[int]:
    """Of each turn's prompt, with the answers before it."""
    found, history = [], 0
    for turn in session.turns:
        found.append(history + len(turn.token_ids))
        history = found[-1] + turn.num_output_tokens
    return found


def test_one_seed_gives_one_load_and_another_seed_another() -> None:
    assert generate(50, 1) == generate(50, 1) != generate(50, 2)


@pytest.mark.parametrize("num_requests", [16, 400])
def test_there_are_as_many_requests_as_asked_for_and_all_fit(num_requests: int) -> None:
    sessions = generate(num_requests, 0)
    assert sum(len(s.turns) for s in sessions) == num_requests
    assert all(0 <= s.turns[0].at <= 1 for s in sessions)
    assert all(a.at < b.at for s in sessions for a, b in pairwise(s.turns))
    assert max(max(lengths(s)) for s in sessions) <= MOST_PROMPT_TOKENS


def test_prompts_begin_with_one_of_a_few_system_prompts_and_some_sessions_go_on() -> None:
    sessions = generate(400, 0)
    assert len({s.turns[0].token_ids[:32] for s in sessions}) == 3
    share = sum(len(s.turns) > 1 for s in sessions) / len(sessions)
    assert 0.1 < share < 0.5


def test_a_trace_is_read_with_what_its_requests_share(tmp_path: Path) -> None:
    entries = [
        {"timestamp": 0, "input_length": 1500, "output_length": 320, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 900, "output_length": 16, "hash_ids": [0, 3]},
        {"timestamp": 1000, "input_length": 2000, "output_length": 160, "hash_ids": [0, 1, 2, 4]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, entries)))
    sessions = sorted(read_trace(file, 10, seed=0), key=lambda s: s.turns[0].at)
    assert [[turn.at for turn in s.turns] for s in sessions] == [[0.0, 1.0], [0.5]] and sessions[0].are_whole
    first, last = sessions[0].turns
    assert (len(first.token_ids), len(last.token_ids)) == (1500 // SCALE, 2000 // SCALE)
    assert last.token_ids[: len(first.token_ids)] == first.token_ids
    other = sessions[1].turns[0]
    assert other.token_ids[:32] == first.token_ids[:32] and other.token_ids[32:] != first.token_ids[32:56]
    assert [turn.num_output_tokens for turn in (first, last, other)] == [20, 10, 2]
    assert sum(len(s.turns) for s in read_trace(file, 2, seed=0)) == 2


def test_agents_come_back_in_turn_with_a_system_prompt_of_three() -> None:
    sessions = agents(8, 3, first=200, more=30, num_output=4, seed=1)
    assert [session.session_id for session, _ in in_order(sessions)] == [str(n) for n in range(8)] * 3
    assert [[len(turn.token_ids) for turn in session.turns] for session in sessions] == [[200, 30, 30]] * 8
    systems = [session.turns[0].token_ids[:100] for session in sessions]
    assert len(set(systems)) == 3 and systems[0] == systems[3] != systems[1]
    assert sessions == agents(8, 3, first=200, more=30, num_output=4, seed=1)


def test_an_endless_cache_has_whole_blocks_of_the_longest_beginning_and_never_the_last_token() -> None:
    cache = EndlessCache(4)
    cache.add([*range(10)])
    assert cache.num_tokens == 8
    assert cache.num_cached([*range(10)]) == cache.num_cached([*range(9)]) == 8
    assert cache.num_cached([*range(8)]) == 4
    assert cache.num_cached([0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    assert cache.num_cached([4, 5, 6, 7, 8]) == 0  # a block counts behind the tokens before it only


def test_what_sessions_could_find_again_counts_what_they_share_once() -> None:
    system = tuple(range(100, 108))
    sessions = [Session(name, (Turn(0.0, (*system, *own), 4),)) for name, own in (("a", (1, 2)), ("b", (1, 3)))]
    assert working_set(sessions, 4) == (8 + 2 * 4, 14)  # each one's third block; 2 tokens are no block
    growing = Session("c", (Turn(0.0, (1, 2, 3), 1), Turn(0.5, (4,), 3)))
    assert working_set([growing], 4) == (8, 8)
    whole = Session("d", (Turn(0.0, (1, 2, 3, 4), 4), Turn(0.5, (1, 2, 3, 4, 5), 3)), are_whole=True)
    assert working_set([whole], 4) == (4 + 4 + 4, 8)  # the answer of the first turn, and the rest of the second
