"""Which prompts a prefill step computes."""

from __future__ import annotations

from cluster.lifecycle import RequestKey
from engine.kv.block_manager import BlockManager
from engine.sampling.params import SamplingParams
from engine.sequence import Request, Sequence
from engine.step_budget import StepBudget
from prefill_worker.scheduler import PrefillScheduler


def sequence(name: str, length: int, arrival: int = 0, salt: bytes = b"") -> Sequence:
    prompt = tuple(range(1, length + 1))
    return Sequence(Request(RequestKey(name, 1), prompt, SamplingParams(), salt), 0, arrival)


def test_several_prompts_share_a_step_and_the_last_is_cut_to_the_budget() -> None:
    scheduler = PrefillScheduler(BlockManager(64, 4))
    for name, salt in (("a", b"1"), ("b", b"2"), ("c", b"3")):
        scheduler.add(sequence(name, 10, salt=salt))
    scheduler.admit()
    scheduled = scheduler.plan(StepBudget(24))
    assert [(p.sequence.request.key.request_id, p.num_tokens) for p in scheduled] == [("a", 10), ("b", 10), ("c", 4)]


def test_a_prompt_starts_only_when_all_its_blocks_fit() -> None:
    scheduler = PrefillScheduler(BlockManager(5, 4))
    for name, salt in (("a", b"1"), ("b", b"2")):
        scheduler.add(sequence(name, 12, salt=salt))
    assert [s.request.key.request_id for s in scheduler.admit()] == ["a"]
    assert scheduler.num_waiting == 1


def test_a_removed_prompt_is_not_planned_again() -> None:
    scheduler = PrefillScheduler(BlockManager(8, 4))
    one = sequence("a", 8)
    scheduler.add(one)
    scheduler.admit()
    scheduler.remove(one)
    scheduler.remove(one)
    assert scheduler.plan(StepBudget(100)) == []


def test_a_prompt_that_is_removed_while_it_waits_never_starts() -> None:
    scheduler = PrefillScheduler(BlockManager(8, 4))
    one = sequence("a", 8)
    scheduler.add(one)
    scheduler.remove(one)
    assert scheduler.num_waiting == 0 and scheduler.admit() == []


def test_outputs_that_were_begun_elsewhere_come_first_in_their_order() -> None:
    scheduler = PrefillScheduler(BlockManager(64, 4))
    for name, salt, known in (("a", b"1", ()), ("b", b"2", (7, 8)), ("c", b"3", ()), ("d", b"4", (9,))):
        prompt, told = tuple(range(1, 11)), {0: known} if known else {}
        request = Request(RequestKey(name, 1), prompt, SamplingParams(), salt, known_tokens=told)
        scheduler.add(Sequence.root(request, 0))
        if name == "a":
            scheduler.admit()
    assert [s.request.key.request_id for s in scheduler.admit()] == ["b", "d", "c"]
    scheduled = scheduler.plan(StepBudget(28))
    assert [(p.sequence.request.key.request_id, p.num_tokens) for p in scheduled] == [("b", 12), ("d", 11), ("a", 5)]
