"""When a prefix that many prompts begin with is copied ahead of them, and where to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from cluster.config.schema import RouterSection
from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes
from cluster.step_cost import StepCost
from router.routing.hot_prefixes import HOT_REQUESTS, MEMORY_S, Copy, HotPrefixes
from router.routing.load_tracker import Charge, Placement, RequestLoad
from router.routing.policies.interface import RoutingContext, RoutingRequest
from router.routing.prefix_index import Holders, PrefixIndex, PromptHashes

COST = StepCost(fixed_s=0.005, prompt_token_s=1e-4, attended_s=0.0, sequence_s=0.0, kv_token_s=0.0)
SHARED = tuple(range(600))
NUM_TOKENS = 512
"""Two groups of 16 blocks."""


@dataclass(eq=False)
class Worker:
    """A prefill worker that holds the first `num_cached` tokens of what prompts share."""

    worker_id: str
    prefix_index: PrefixIndex
    prefix_format: str = "float32"
    weights_revision: str = "w"
    step_cost: StepCost | None = COST
    kv_tokens: int = 10_000
    max_num_seqs: int = 8

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        return self.prefix_index.num_cached_tokens(prompt)

    def gets(self, num_tokens: int) -> None:
        hashes = list(prefix_hashes((*SHARED, 0), 16, b""))[: num_tokens // 16]
        self.prefix_index.apply(worker_pb2.CacheEvents(sequence_number=1, snapshot=True, stored=hashes))


class World:
    """Three prefill workers, of which the first has what prompts share."""

    def __init__(self) -> None:
        self.now, self.context, holders = 100.0, RoutingContext(), Holders()
        self.context.clock = lambda: self.now
        self.hot = HotPrefixes(self.context)
        self.workers = [Worker(name, PrefixIndex(16, 1000, holders, name)) for name in ("p0", "p1", "p2")]
        self.workers[0].gets(592)
        self.num = 0

    def place(self, to: str = "p0", *, stays: bool = False, uses_cache: bool = True) -> Copy | None:
        """A prompt of 800 tokens, 20 ms of which are its own; with `stays` it is not computed yet."""
        self.num += 1
        prompt = PromptHashes((*SHARED, *range(1000 * self.num, 1000 * self.num + 200)), b"")
        request = RoutingRequest(RequestLoad(800, 1, 900), prompt, uses_cache)
        placement = Placement(to, "d0", "", 592)
        charge = Charge(self.context.loads, placement, request.work)
        copy = self.hot.placed(request, placement, self.workers)
        if not stays:
            charge.all_done()
        return copy


def test_a_prefix_that_is_asked_for_now_and_then_is_not_copied() -> None:
    world = World()
    for _ in range(100):
        assert world.place() is None
        world.now += 1.0


def test_a_hot_one_is_copied_once_its_holder_has_a_queue_to_the_worker_with_none() -> None:
    world = World()
    for _ in range(int(HOT_REQUESTS)):
        assert world.place("p0") is None
    world.place("p1", stays=True)
    copy = world.place(stays=True) or world.place(stays=True)
    assert copy is not None and (copy.why, copy.target_id) == ("queue", "p2")
    assert (copy.fetch.holder_id, copy.fetch.num_tokens) == ("p0", NUM_TOKENS), "whole groups of blocks"
    assert "1 of 3 workers have it" in copy.explanation
    more = world.place(stays=True)
    assert more is not None and more.target_id == "p1", "one at a time to each worker"
    assert world.place(stays=True) is None, "all others are to have it"
    for each in (copy, more):
        world.hot.over(each)
    assert world.place(stays=True) is None, "they were to have it a moment ago"
    world.now += MEMORY_S
    again = next(copy for _ in range(10) if (copy := world.place()) is not None)
    world.workers[1].gets(512)
    world.workers[2].gets(592)
    world.hot.over(again)
    world.now += MEMORY_S
    assert not any(world.place() for _ in range(20)), "everyone has it"


def test_one_whose_prompts_take_half_of_the_holders_time_is_copied_before_there_is_a_queue() -> None:
    world = World()
    while (copy := world.place()) is None and world.num < 600:
        world.now += 0.03
    assert copy is not None and copy.why == "share" and world.num > 100


@pytest.mark.parametrize("why", ["off", "bypassed", "full", "weights", "alone", "slow"])
def test_nothing_is_copied_where_that_cannot_or_may_not_be(why: str) -> None:
    world = World()
    match why:
        case "off":
            world.context.limits = replace(RouterSection(), prefix_fetch="off")
        case "full":
            world.workers[1:] = [replace(worker, kv_tokens=1000) for worker in world.workers[1:]]
        case "weights":
            world.workers[1:] = [replace(worker, weights_revision="v") for worker in world.workers[1:]]
        case "alone":
            del world.workers[1:]
        case "slow":
            for holder, target in (("p0", "p1"), ("p0", "p2")):
                for _ in range(3):
                    world.context.fetch_times.took(holder, target, NUM_TOKENS, 0.05, world.now)
    assert not any(world.place(stays=True, uses_cache=why != "bypassed") for _ in range(20))
