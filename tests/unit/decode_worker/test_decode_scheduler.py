"""Which sequences a decode step runs, and who gives way."""

from __future__ import annotations

import pytest

from cluster.kv_groups import KvGroup
from cluster.lifecycle import RequestKey
from decode_worker.scheduler import DecodeScheduler
from engine.kv.block_manager import BlockManager
from engine.kv.tiered_blocks import TieredBlocks
from engine.sampling.params import SamplingParams
from engine.sequence import Request, Sequence, claim_blocks, settle_blocks
from engine.step_budget import StepBudget
from engine.step_input import table_of


def running(scheduler: DecodeScheduler, blocks: BlockManager, length: int, arrival: int) -> Sequence:
    """A sequence whose prompt is computed, with its first token sampled."""
    request = Request(RequestKey(f"r{arrival}", 1), tuple(range(length)), SamplingParams(), use_prefix_cache=False)
    sequence = Sequence(request, 0, arrival, output_token_ids=[1])
    sequence.block_table = table_of(blocks.allocate(-(-length // blocks.block_size)))
    sequence.num_computed_tokens = length
    scheduler.join(sequence)
    return sequence


def test_every_running_sequence_gets_one_token_a_step() -> None:
    blocks = BlockManager(16, 4)
    scheduler = DecodeScheduler(blocks, 8)
    for arrival in range(3):
        running(scheduler, blocks, 5, arrival)
    scheduled, preempted = scheduler.plan(StepBudget(100))
    assert [p.num_tokens for p in scheduled] == [1, 1, 1] and not preempted


def test_the_youngest_gives_way_when_the_pool_is_full() -> None:
    blocks = BlockManager(3, 4)
    scheduler = DecodeScheduler(blocks, 8)
    old, _, young = (running(scheduler, blocks, 4, arrival) for arrival in range(3))
    scheduled, preempted = scheduler.plan(StepBudget(100))
    assert preempted[0] is young and scheduled[0].sequence is old
    assert not young.block_table and young.num_computed_tokens == 0
    assert scheduler.num_waiting == len(preempted) == scheduler.num_preemptions


def test_the_oldest_alone_takes_the_whole_pool() -> None:
    blocks = BlockManager(2, 4)
    scheduler = DecodeScheduler(blocks, 8)
    old = running(scheduler, blocks, 4, 0)
    running(scheduler, blocks, 4, 1)
    scheduled, _ = scheduler.plan(StepBudget(100))
    assert [p.sequence for p in scheduled] == [old] and len(old.block_table) == 2


def test_only_landings_are_left_once_nothing_runs_beside_them() -> None:
    blocks = BlockManager(4, 4)
    scheduler = DecodeScheduler(blocks, 8)
    assert not scheduler.is_only_landing
    last = running(scheduler, blocks, 4, 0)
    scheduler.num_reserved_seqs = 2
    assert not scheduler.is_only_landing
    scheduler.remove(last)
    assert scheduler.is_only_landing


def test_newcomers_wait_while_a_preempted_sequence_does() -> None:
    blocks = BlockManager(2, 4)
    scheduler = DecodeScheduler(blocks, 8)
    running(scheduler, blocks, 4, 0)
    running(scheduler, blocks, 4, 1)
    assert scheduler.has_room(1)
    scheduler.plan(StepBudget(100))
    assert not scheduler.has_room(1)


def test_a_preempted_sequence_is_computed_again_before_its_next_token() -> None:
    blocks = BlockManager(2, 4)
    scheduler = DecodeScheduler(blocks, 8)
    old, young = (running(scheduler, blocks, 4, arrival) for arrival in range(2))
    scheduler.plan(StepBudget(100))
    scheduler.remove(old)
    assert scheduler.admit() == [young]
    (scheduled,), _ = scheduler.plan(StepBudget(3))
    assert scheduled.num_tokens == 3 and young.num_remaining == 5


def test_no_more_sequences_run_than_allowed() -> None:
    blocks = BlockManager(32, 4)
    scheduler = DecodeScheduler(blocks, 4)
    running(scheduler, blocks, 4, 0)
    scheduler.num_reserved_seqs = 2
    assert scheduler.has_room(1) and not scheduler.has_room(2)


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    blocks = BlockManager(16, 4)
    scheduler = DecodeScheduler(blocks, 8)
    parent = running(scheduler, blocks, 6, 0)
    child = Sequence(parent.request, 1, 0, output_token_ids=[2])
    scheduler.fork(parent, [child], [])
    assert child.block_table[0] == parent.block_table[0] and child.block_table[1] != parent.block_table[1]
    assert scheduler.take_copies() == [(parent.block_table[1], child.block_table[1])]


def test_a_fork_for_which_no_block_is_left_waits_and_is_computed_anew() -> None:
    blocks = BlockManager(2, 4)
    scheduler = DecodeScheduler(blocks, 8)
    parent = running(scheduler, blocks, 6, 0)
    child = Sequence(parent.request, 1, 0, output_token_ids=[2])
    scheduler.fork(parent, [child], [])
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert not child.block_table and not scheduler.take_copies()


def test_a_fork_takes_the_blocks_that_were_put_aside_for_it() -> None:
    blocks = BlockManager(3, 4)
    scheduler = DecodeScheduler(blocks, 8)
    parent, spare = running(scheduler, blocks, 6, 0), blocks.allocate(1)
    child = Sequence(parent.request, 1, 0, output_token_ids=[2])
    scheduler.fork(parent, [child], [*spare])
    assert scheduler.num_running == 2 and child.block_table[1] == spare[0]


def test_a_sequence_that_waits_and_is_taken_out_never_runs() -> None:
    blocks = BlockManager(8, 4)
    scheduler = DecodeScheduler(blocks, 8)
    waits = Sequence(Request(RequestKey("r", 1), (1, 2, 3), SamplingParams()), 0, 0)
    scheduler.add(waits)
    scheduler.remove(waits)
    assert scheduler.num_waiting == 0 and scheduler.admit() == []


def test_the_youngest_gives_way_when_a_window_has_no_block_for_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sequence.AHEAD_TOKENS", 4)
    blocks = BlockManager(5, 4, groups=(KvGroup((0,)), KvGroup((1,), window=6)))
    scheduler = DecodeScheduler(blocks, 8)
    old, young = (
        Sequence(Request(RequestKey(f"r{arrival}", 1), prompt, SamplingParams()), 0, arrival, output_token_ids=[1])
        for arrival, prompt in enumerate([(5, 6, 7, 8), (5, 6)])
    )
    for sequence in (old, young):
        assert claim_blocks(sequence, blocks)
        sequence.num_computed_tokens = len(sequence.request.prompt_token_ids)
        scheduler.join(sequence)
    assert blocks.num_free == 0 and old.block_table[3] < 0
    assert not scheduler.can_plan_ahead()
    scheduled, preempted = scheduler.plan(StepBudget(100))
    assert preempted == [young] and [p.sequence for p in scheduled] == [old]
    assert old.block_table[3] >= 0


def forked(scheduler: DecodeScheduler, blocks: BlockManager, num_forks: int) -> tuple[Sequence, list[Sequence]]:
    """A prompt of 6 tokens and its forks, each of which waits for a copy of the second page."""
    parent = running(scheduler, blocks, 6, 0)
    children = [Sequence(parent.request, index, 0, output_token_ids=[2]) for index in range(1, num_forks + 1)]
    scheduler.fork(parent, children, [])
    return parent, children


def test_a_page_waits_to_be_copied_when_its_source_has_left_and_not_when_the_fork_has() -> None:
    blocks = BlockManager(4, 4)
    scheduler = DecodeScheduler(blocks, 8)
    parent, (child,) = forked(scheduler, blocks, 1)
    scheduler.remove(parent)
    assert blocks.num_held == 3 and scheduler._copies
    scheduler.remove(child)
    assert blocks.num_held == 0 and not scheduler.has_work and not scheduler.take_copies()


def test_a_page_stays_until_it_is_copied_when_the_step_has_begun_and_both_sequences_leave() -> None:
    blocks = BlockManager(4, 4)
    scheduler = DecodeScheduler(blocks, 8)
    parent, (child,) = forked(scheduler, blocks, 1)
    copies = scheduler.take_copies()
    scheduler.remove(parent)
    scheduler.remove(child)
    assert blocks.num_held == 2 and not scheduler.has_work
    scheduler.copied(copies)
    assert blocks.num_held == 0


def test_pages_of_preempted_forks_do_not_hold_up_the_oldest() -> None:
    """They were left to copies that no step made, as the oldest gave way to them and nothing ran: until something else
    woke the worker, all of them waited."""
    blocks = BlockManager(6, 4)
    scheduler = DecodeScheduler(blocks, 8)
    oldest, children = forked(scheduler, blocks, 2)
    blocks.allocate(2)  # somebody else's
    oldest.output_token_ids += range(9)  # known from elsewhere, to be computed
    scheduled, preempted = scheduler.plan(StepBudget(64))
    assert [share.sequence for share in scheduled] == [oldest] and preempted == [*reversed(children)]
    assert not scheduler.take_copies()


@pytest.fixture
def tiered() -> TieredBlocks:
    """A pool of 16 blocks of 4 tokens above 64 slots, in which nothing is copied down before somebody is preempted."""
    return TieredBlocks(16, 4, num_slots=64, num_ahead=16)


def computed(scheduler: DecodeScheduler, blocks: BlockManager, length: int, arrival: int, **more: bool) -> Sequence:
    """As `running`, of other tokens than any other sequence, which can be found."""
    prompt = tuple(range(100 * arrival, 100 * arrival + length))
    sequence = Sequence(Request(RequestKey(f"r{arrival}", 1), prompt, SamplingParams(), **more), 0, arrival)
    sequence.output_token_ids.append(1)
    sequence.block_table = table_of(blocks.allocate(-(-length // blocks.block_size)))
    sequence.num_computed_tokens = length
    settle_blocks(sequence, blocks, 0)
    scheduler.join(sequence)
    return sequence


def run(scheduler: DecodeScheduler, blocks: TieredBlocks, num_steps: int, *, fails: bool = False) -> None:
    """Steps of at most 32 tokens; what is copied beside one is there when it ends."""
    for _ in range(num_steps):
        scheduler.admit()
        scheduled, _ = scheduler.plan(StepBudget(32))
        moves = blocks.take_moves()
        for share in scheduled:
            sequence, before = share.sequence, share.sequence.num_computed_tokens
            sequence.num_computed_tokens += share.num_tokens
            settle_blocks(sequence, blocks, before)
            if not sequence.num_remaining:
                sequence.output_token_ids.append(1 + len(sequence.output_token_ids))
        for move in moves:
            blocks.moved(move, "it fails" if fails and move.kind.is_up else "")
        blocks.check()


@pytest.mark.parametrize("uses_cache", [True, False])
@pytest.mark.parametrize("is_quicker", [True, False])
def test_a_preempted_sequence_is_loaded_where_that_is_quicker_and_else_computed(
    is_quicker: bool, uses_cache: bool, tiered: TieredBlocks
) -> None:
    scheduler = DecodeScheduler(tiered, 8)
    tiered.is_quicker = lambda num_moves, num_tokens, num_before: is_quicker
    old, young = (computed(scheduler, tiered, 32, arrival, use_prefix_cache=uses_cache) for arrival in range(2))
    run(scheduler, tiered, 32)
    assert (scheduler.num_preemptions, scheduler.num_running) == (1, 1), "the old one has all blocks"
    num_had = young.num_preempted_tokens
    scheduler.remove(old)
    run(scheduler, tiered, 3)
    assert scheduler.num_running == 1 and young.num_remaining == 1 and not young.num_preempted_tokens
    resumed = scheduler.resumed_tokens
    assert resumed.total() == num_had >= 32 and resumed["host"] == tiered.counts.loaded * 4
    assert (resumed["host"] >= 24) is is_quicker and (tiered.counts.declined > 0) is not is_quicker
    scheduler.remove(young)
    assert not tiered.num_held


def test_a_preempted_sequence_whose_load_fails_is_computed(tiered: TieredBlocks) -> None:
    scheduler = DecodeScheduler(tiered, 8)
    old, young = (computed(scheduler, tiered, 32, arrival) for arrival in range(2))
    run(scheduler, tiered, 32)
    scheduler.remove(old)
    run(scheduler, tiered, 4, fails=True)
    assert tiered.counts.failed and young.num_remaining == 1 and scheduler.resumed_tokens["computed"] >= 24
    assert not scheduler.resumed_tokens["host"] and not tiered.hit_tokens["host"]


def test_as_many_as_wait_are_admitted_as_there_are_places(tiered: TieredBlocks) -> None:
    scheduler = DecodeScheduler(tiered, 2)
    for arrival in range(3):
        scheduler.add(Sequence(Request(RequestKey(f"r{arrival}", 1), (1, 2, arrival), SamplingParams()), 0, arrival))
    assert len(scheduler.admit()) == scheduler.num_running == 2 and scheduler.num_waiting == 1


def test_one_whose_blocks_are_on_their_way_gives_way_to_an_older_one(tiered: TieredBlocks) -> None:
    scheduler = DecodeScheduler(tiered, 8)
    old, young = (computed(scheduler, tiered, 32, arrival) for arrival in range(2))
    run(scheduler, tiered, 28)
    taken = tiered.allocate(tiered.num_available - 1)
    scheduler.remove(old)
    other = computed(scheduler, tiered, 4, 0)
    scheduler.admit()
    assert scheduler.num_waiting == 1 and young.block_table, "it is being loaded"
    more = tiered.allocate(tiered.num_available)
    other.output_token_ids += [1] * 4
    _, preempted = scheduler.plan(StepBudget(32))
    assert preempted == [young] and other in scheduler.running and not young.block_table
    tiered.release(taken + more)
    run(scheduler, tiered, 4)
    assert scheduler.num_running == 2 and young.num_remaining == 1
