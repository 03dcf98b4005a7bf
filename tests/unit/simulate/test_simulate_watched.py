"""Pages and a router that tattle: what they take for wrong, and bugs planted in Baton that they find."""

from __future__ import annotations

import pytest
from planted_bugs import BUGS, planted

from cluster.pb import generation_pb2
from engine.step_input import SequenceSlice, StepInput, build_step
from engine.token_hash import TokenHash
from simulate.model import PageAlarm
from simulate.scenario import Scenario
from simulate.watched_pages import WatchedPages
from simulate.watched_router import Told

SIZE = 4
PROMPT = (11, 12, 13, 14, 15, 16)


def step_of(blocks: list[int], tokens: tuple[int, ...], start: int = 0) -> StepInput:
    return build_step([SequenceSlice(tokens, start, tuple(blocks), wants_logits=True)], SIZE)


def pool_with_prompt() -> tuple[WatchedPages, list[int]]:
    """A pool in which a prompt is computed, and its blocks."""
    pages = WatchedPages(8, SIZE, 2)
    blocks = pages.blocks.allocate(2)
    run(pages, step_of(blocks, PROMPT))
    return pages, blocks


def run(pages: WatchedPages, step: StepInput) -> None:
    pages.check_step(step, pages.write_step(step))


def test_a_sequence_goes_on_where_it_was_computed() -> None:
    pages, blocks = pool_with_prompt()
    run(pages, step_of(blocks, (17,), start=6))
    assert pages.read(blocks, 6, 7)[-1] == TokenHash([*PROMPT, 17]).state


def test_a_step_may_not_read_a_block_that_was_freed() -> None:
    pages, blocks = pool_with_prompt()
    pages.blocks.release(blocks)
    with pytest.raises(PageAlarm, match="which nobody holds"):
        pages.write_step(step_of(blocks, (17,), start=6))


def test_a_step_may_not_read_a_block_that_is_anothers_by_now() -> None:
    pages, blocks = pool_with_prompt()
    pages.blocks.release(blocks[:1])
    taken = pages.blocks.allocate(1)
    assert taken == blocks[:1]
    with pytest.raises(PageAlarm, match="at token 0 of 6"):
        pages.write_step(step_of(blocks, (17,), start=6))
    run(pages, step_of(taken, (91, 92, 93, 94)))
    with pytest.raises(PageAlarm, match="at token 4 of 6"):
        pages.write_step(step_of(blocks, (17,), start=6))


def test_no_block_of_a_step_may_be_let_go_before_it_ends() -> None:
    pages, blocks = pool_with_prompt()
    step = step_of(blocks, (17,), start=6)
    last = pages.write_step(step)
    pages.blocks.release(blocks[:1])
    with pytest.raises(PageAlarm, match="let go while a step"):
        pages.check_step(step, last)


def test_kv_that_is_there_is_written_over_by_the_same_only() -> None:
    pages, blocks = pool_with_prompt()
    run(pages, step_of(blocks, PROMPT))
    with pytest.raises(PageAlarm, match="written over"):
        pages.write_step(step_of(blocks, (99, *PROMPT[1:])))


def test_what_is_handed_over_lands_in_blocks_that_are_held_behind_the_same_tokens() -> None:
    pages, blocks = pool_with_prompt()
    other = WatchedPages(8, SIZE, 2)
    first, second = other.blocks.allocate(2)
    other.land([first, second], 0, pages.read(blocks, 0, 4), (0, 2))
    done = other.guarded([first, second], 4, 6, lambda: None)
    other.land([first, second], 4, pages.read(blocks, 4, 6), (0, 2))
    done()
    run(other, step_of([first, second], (17,), start=6))
    other.blocks.release([second])
    with pytest.raises(PageAlarm, match="let go while a transfer"):
        done()
    with pytest.raises(PageAlarm, match="which nobody holds"):
        other.land([first, second], 4, pages.read(blocks, 4, 6), (0, 2))


def test_layers_land_in_any_order_and_a_torn_landing_leaves_nothing_to_read() -> None:
    pages, blocks = pool_with_prompt()
    other = WatchedPages(8, SIZE, 2)
    landing = other.blocks.allocate(2)
    states = pages.read(blocks, 0, 6)
    other.land(landing, 0, states, (1, 2))
    with pytest.raises(PageAlarm, match="some layers have not landed"):
        other.read(landing, 0, 6)
    other.land(landing, 0, states, (0, 1))
    assert other.read(landing, 0, 6).tolist() == states.tolist()
    other.tear(landing, 4, 6)
    assert other.read(landing, 0, 4).tolist() == states[:5].tolist()
    with pytest.raises(PageAlarm, match="some layers have not landed"):
        other.read(landing, 0, 6)


def test_a_gather_of_layers_that_a_step_has_not_written_yet_is_found() -> None:
    pages, blocks = pool_with_prompt()
    step = step_of(blocks, (17,), start=6)
    pages.write_step(step)
    pages.check_apart(step, blocks, 0, 6)
    with pytest.raises(PageAlarm, match="has not written yet"):
        pages.check_apart(step, blocks, 4, 7)


def test_a_prefix_is_found_only_under_the_salt_with_which_it_was_published() -> None:
    pages, blocks = pool_with_prompt()
    pages.blocks.publish(PROMPT, blocks, b"a", 6)
    assert pages.blocks.match_prefix(PROMPT, b"b") == []
    assert pages.blocks.match_prefix(PROMPT, b"a") == blocks[:1]
    pages.blocks._salts[blocks[0]] = b"b"
    with pytest.raises(PageAlarm, match="under another salt"):
        pages.blocks.match_prefix(PROMPT, b"a")


def test_a_client_is_told_each_token_once_and_the_end_last() -> None:
    told = Told()
    told.add(generation_pb2.SequenceDelta(first_token_index=0, token_ids=[10, 11], token_count=2, text="0001000011"))
    with pytest.raises(AssertionError, match="got token 1 after 2"):
        told.add(generation_pb2.SequenceDelta(first_token_index=1, token_ids=[11], token_count=1))
    told.end(generation_pb2.SequenceEnd(token_count=2))
    told.check([10, 11], "", is_finished=True)
    with pytest.raises(AssertionError, match="after 2 of 3"):
        told.check([10, 11, 12], "", is_finished=True)
    with pytest.raises(AssertionError, match="other tokens"):
        told.check([10, 12], "", is_finished=True)
    with pytest.raises(AssertionError, match="cut at the wrong place"):
        told.check([10, 11, 12], "11", is_finished=True)
    told.text = "00010000"
    told.check([10, 11, 12], "11", is_finished=True)


@pytest.mark.parametrize("beginning", ["a block freed early", "a retry that repeats a token"])
def test_a_planted_bug_is_found(beginning: str) -> None:
    bug = next(bug for bug in BUGS if bug.name.startswith(beginning))
    with planted(bug), pytest.raises(AssertionError):
        for seed in range(20):
            Scenario.of(seed).run()
