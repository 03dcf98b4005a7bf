"""What a sequence hides from others, blocks under a salt of its own; what it is while a token of it is unread; and
which blocks it holds where some layers keep a window.
"""

from __future__ import annotations

import pytest

from cluster.kv_groups import KvGroup
from cluster.lifecycle import RequestKey
from engine.kv.block_manager import BlockManager
from engine.kv.tiered_blocks import TieredBlocks
from engine.sampling.params import SamplingParams
from engine.sequence import Request, Sequence, claim_blocks, cover_blocks, most_blocks, settle_blocks, take_arrived
from engine.step_input import table_of

GROUPS = (KvGroup((0,)), KvGroup((1,), window=6))


@pytest.mark.parametrize("request_id", ["r1", "", "\u00ff", "attempts of r1"])
def test_no_client_can_set_the_salt_of_anothers_attempts(request_id: str) -> None:
    request = Request(RequestKey(request_id, 1), (1, 2), SamplingParams(max_output_tokens=1))
    assert request.private_salt.endswith(request_id.encode())
    with pytest.raises(UnicodeDecodeError):  # a client's salt is the UTF-8 of a string
        request.private_salt.decode()


def test_a_token_that_is_not_read_is_fed_by_the_row_it_is_sampled_from() -> None:
    request = Request(RequestKey("r", 1), (5, 6, 7), SamplingParams(max_output_tokens=3))
    sequence = Sequence(request, 0, 0, output_token_ids=[8], block_table=table_of([2]), num_computed_tokens=3)
    sequence.count_ahead(1, row=4)
    assert (sequence.num_tokens, sequence.num_remaining) == (5, 1)
    ahead = sequence.slice(1)
    assert (ahead.token_ids, ahead.start, ahead.wants_logits) == ((-5,), 4, True)
    assert [(row.position, row.num_unread) for row in sequence.sample_rows()] == [(2, 1)], "what comes behind it"


def test_a_token_that_is_the_last_in_any_case_is_not_fed() -> None:
    request = Request(RequestKey("r", 1), (5, 6, 7), SamplingParams(max_output_tokens=2))
    sequence = Sequence(request, 0, 0, output_token_ids=[8], block_table=table_of([2]), num_computed_tokens=3)
    sequence.count_ahead(1, row=0)
    assert sequence.num_remaining == 0


def test_tokens_in_the_middle_of_a_prompt_lead_to_none() -> None:
    request = Request(RequestKey("r", 1), (5, 6, 7), SamplingParams(max_output_tokens=2))
    sequence = Sequence(request, 0, 0, block_table=table_of([2]))
    sequence.count_ahead(2, row=None)
    assert (sequence.num_tokens, sequence.num_remaining) == (3, 1)
    assert sequence.slice(1).token_ids == (7,)


@pytest.fixture
def few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sequence.AHEAD_TOKENS", 8)


def sequence_of(num_tokens: int) -> Sequence:
    return Sequence(Request(RequestKey("r", 1), tuple(range(num_tokens)), SamplingParams()), 0, 0)


def rows_of(sequence: Sequence) -> list[list[int]]:
    """The rows of its table in which each group has a block."""
    table = sequence.block_table
    return [[row for row, block in enumerate(table[place::2]) if block >= 0] for place in range(2)]


def test_kv_that_lands_takes_of_a_window_only_the_blocks_that_the_next_token_sees() -> None:
    blocks, landing = BlockManager(32, 4, groups=GROUPS), sequence_of(30)
    assert claim_blocks(landing, blocks, is_landing=True)
    assert rows_of(landing) == [[*range(8)], [6, 7]], "the token behind 30 sees 25 to 29"


def test_a_windows_blocks_are_taken_a_few_tokens_ahead_of_those_that_are_computed(few_ahead: None) -> None:
    blocks, sequence = BlockManager(32, 4, groups=GROUPS), sequence_of(30)
    assert claim_blocks(sequence, blocks)
    assert rows_of(sequence) == [[*range(8)], [0, 1]]
    for num_computed, covered in ((4, [0, 1, 2]), (8, [0, 1, 2, 3]), (16, [2, 3, 4, 5]), (21, [4, 5, 6, 7])):
        before, sequence.num_computed_tokens = sequence.num_computed_tokens, num_computed
        settle_blocks(sequence, blocks, before)
        assert rows_of(sequence) == [[*range(8)], covered]
        assert cover_blocks(sequence, blocks) == min(30, 4 * (covered[-1] + 1)) - num_computed
    blocks.check()


def test_a_sequence_holds_what_everything_and_its_windows_take_and_no_more(few_ahead: None) -> None:
    assert most_blocks(GROUPS, 100, 4) == 25 + 5, "6 tokens, 8 ahead and those of a block's beginning"
    assert most_blocks(GROUPS, 10, 4) == 3 + 3


def test_a_cached_prefix_counts_its_tokens_once_however_many_groups_have_blocks_of_them() -> None:
    blocks, first = BlockManager(32, 4, groups=GROUPS), sequence_of(16)
    assert claim_blocks(first, blocks)
    first.num_computed_tokens = 16
    settle_blocks(first, blocks, 0)
    second = sequence_of(20)
    assert claim_blocks(second, blocks)
    assert second.num_cached_tokens == second.num_computed_tokens == 16 and len(second.block_table) == 2 * 5


def test_hits_are_counted_in_tokens_by_where_they_were_found_and_only_if_the_prompt_fits() -> None:
    def settle() -> None:
        while moves := blocks.take_moves():
            for move in moves:
                blocks.moved(move)

    def ask(first: int, num_tokens: int = 5) -> bool:
        request = Request(RequestKey("r", 1), (first, *range(1, num_tokens)), SamplingParams(max_output_tokens=1))
        sequence = Sequence.root(request, 0)
        if not claim_blocks(sequence, blocks):
            return False
        loading = [sequence]
        if not take_arrived(loading, blocks)[0]:
            settle()
            take_arrived(loading, blocks)
        sequence.num_computed_tokens = num_tokens
        settle_blocks(sequence, blocks, sequence.num_cached_tokens)
        blocks.release(sequence.block_table)
        settle()
        return True

    blocks = TieredBlocks(4, 2, num_slots=8, num_disk_slots=32, num_ahead=4)
    assert all(map(ask, range(100, 106))) and not blocks.hit_tokens.total()
    assert not ask(105, num_tokens=11) and not blocks.hit_tokens.total()
    for first, tier in ((105, "device"), (102, "host"), (100, "disk")):
        assert ask(first) and blocks.hit_tokens.pop(tier) == 4 and not blocks.hit_tokens.total()


def test_a_load_that_fails_is_no_hit() -> None:
    def move(error: str = "") -> None:
        for each in blocks.take_moves():
            blocks.moved(each, error)

    def claim(first: int) -> Sequence:
        request = Request(RequestKey("r", 1), tuple(range(first, first + 5)), SamplingParams(max_output_tokens=1))
        sequence = Sequence.root(request, 0)
        assert claim_blocks(sequence, blocks)
        return sequence

    blocks = TieredBlocks(4, 2, num_slots=8, num_ahead=4)
    for first in (100, 200):
        sequence = claim(first)
        sequence.num_computed_tokens = 5
        settle_blocks(sequence, blocks, 0)
        blocks.release(sequence.block_table)
        move()
    sequence = claim(100)
    move("it fails")
    arrived, lost = take_arrived([sequence], blocks)
    assert sequence.hits == {"device": 2, "host": 2}
    assert lost == [sequence] and not arrived
    assert not blocks.hit_tokens.total()
