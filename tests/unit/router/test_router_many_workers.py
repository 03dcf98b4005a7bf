"""Among many workers a choice looks at a few, and finds what a look at all of them would."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from candidates import FakeCandidate, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes
from cluster.step_cost import StepCost, UsualCost, usual
from router.routing.candidate_pool import FEW, CandidatePool
from router.routing.load_tracker import Charge, LoadTracker, Placement, PlacementKind, RequestLoad
from router.routing.policies import policy_class
from router.routing.policies.interface import RoutingContext, RoutingRequest, SessionKey
from router.routing.policies.predicted import Predicted
from router.routing.prefix_index import Holders, PrefixIndex, PromptHashes

COST = StepCost(fixed_s=0.004, prompt_token_s=0.0002, attended_s=1e-9, sequence_s=0.0002, kv_token_s=1e-7)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Caching(FakeCandidate):
    """A worker with a prefix cache."""

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        assert self.prefix_index is not None
        return self.prefix_index.num_cached_tokens(prompt)


class Cluster:
    """Half of the workers of each role, with random caches and loads; `spread`: by how much costs differ."""

    def __init__(self, num_workers: int, *, spread: float = 0.0, num_holding: int = 4) -> None:
        self._draw = draw = random.Random(num_workers)
        self.loads = LoadTracker()
        self.policy = Predicted(RoutingContext(self.loads))
        self.holders = Holders()
        self._told = Counter[str]()
        self._system = self._tokens(160)
        self._sessions = [self._system + self._tokens(draw.randrange(64, 1600)) for _ in range(num_workers // 2)]
        workers = [self._worker(i, draw.uniform(1 - spread, 1 + spread)) for i in range(num_workers)]
        self.pools = CandidatePool(workers[::2]), CandidatePool(workers[1::2])
        self.lists = workers[::2], workers[1::2]
        self.loads.on_change = self._touch
        for session in self._sessions:
            for worker in draw.sample(workers, num_holding):
                self._cache(worker, session)
        for worker in draw.sample(workers, num_workers // 2):
            self._cache(worker, self._system)

    def request(self) -> RoutingRequest:
        tokens = self._draw.choice(self._sessions) + self._tokens(self._draw.randrange(1, 600))
        return RoutingRequest(RequestLoad(len(tokens), 1, len(tokens) + 200), PromptHashes(tokens, b""))

    def run(self, num_requests: int) -> list[float]:
        """Completions of what is chosen over those of the best of all, while requests come and go."""
        ratios, charges = list[float](), list[Charge]()
        for _ in range(num_requests):
            request = self.request()
            (few, _), (every, _) = (self.policy._best(request, *some) for some in (self.pools, self.lists))
            assert few.num_missed == every.num_missed
            ratios.append(few.completion_s / every.completion_s)
            charges.append(Charge(self.loads, self.policy.choose(request, *self.pools), request.work))
            charge = self._draw.choice(charges)
            charge.prefill_done()
            if self._draw.random() < 0.5:
                charges.remove(charge)
                charge.all_done()
        return ratios

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(range(1000), k=count))

    def _worker(self, number: int, speed: float) -> Caching:
        cost = StepCost(*(speed * part for part in vars(COST).values()))
        worker_id = f"{'pd'[number % 2]}{number}"
        return Caching(worker_id, cost, prefix_index=PrefixIndex(BLOCK_SIZE, 10_000, self.holders, worker_id))

    def _cache(self, worker: FakeCandidate, tokens: tuple[int, ...]) -> None:
        index = worker.prefix_index
        assert index is not None
        self._told[worker.worker_id] += 1
        number = self._told[worker.worker_id]
        stored = prefix_hashes(tokens, BLOCK_SIZE, b"")
        index.apply(worker_pb2.CacheEvents(sequence_number=number, snapshot=number == 1, stored=stored))

    def _touch(self, worker_id: str) -> None:
        for pool in self.pools:
            pool.touch(worker_id)


def test_where_steps_cost_the_same_the_best_of_all_is_found() -> None:
    assert max(Cluster(120).run(150)) == pytest.approx(1.0)


def test_where_workers_differ_what_is_chosen_ends_within_a_few_percent_of_the_best() -> None:
    ratios = Cluster(120, spread=0.2).run(150)
    assert statistics.mean(ratios) < 1.03 and max(ratios) < 1.2


def test_of_many_workers_that_hold_a_prompt_one_is_found_though_all_are_busier_than_the_others() -> None:
    cluster = Cluster(300, num_holding=80)
    request = cluster.request()
    for worker in cluster.lists[0]:
        if worker.num_cached_tokens(request.prompt) > 160:
            Charge(cluster.loads, Placement(worker.worker_id, "elsewhere", ""), RequestLoad(60, 1, 100))
    found = cluster.policy.choose(request, *cluster.pools)
    assert found.num_cached_tokens == cluster.policy.choose(request, *cluster.lists).num_cached_tokens > 160


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=90))
def test_of_those_that_hold_a_prompt_the_one_found_first_comes_before_all_others(drawn: list[tuple[int, int]]) -> None:
    tokens = tuple(range(40 * BLOCK_SIZE + 1))
    hashes, holders = list(prefix_hashes(tokens, BLOCK_SIZE, b"")), Holders()
    workers, keys = list[Caching](), dict[str, int]()
    for number, (num_blocks, key) in enumerate(drawn):
        index = PrefixIndex(BLOCK_SIZE, 99, holders, f"w{number:02}")
        index.apply(worker_pb2.CacheEvents(sequence_number=1, snapshot=True, stored=hashes[:num_blocks]))
        workers.append(Caching(f"w{number:02}", prefix_index=index))
        keys[f"w{number:02}"] = key
    pool, others = CandidatePool(workers[::2]), CandidatePool(workers[1::2])
    prompt = PromptHashes(tokens, b"")

    def value(worker: Caching) -> tuple[float, str]:
        return keys[worker.worker_id] - worker.num_cached_tokens(prompt) / BLOCK_SIZE, worker.worker_id

    for some in (pool, others):
        found = some.holders(prompt, lambda worker: keys[worker.worker_id], 1 / BLOCK_SIZE, each=1, most=99)
        held = [worker for worker in some if worker.num_cached_tokens(prompt)]
        assert found == sorted(found, key=value)
        assert [value(worker)[0] for worker in found[:1]] == sorted(value(worker)[0] for worker in held)[:1]


def test_holders_that_cannot_be_the_first_are_not_looked_for() -> None:
    cluster = Cluster(120)
    prompt, pool = cluster.request().prompt, cluster.pools[0]
    longest = max(worker.num_cached_tokens(prompt) for worker in pool)
    found = pool.holders(prompt, lambda worker: 0.0, 1.0, each=2, most=6)
    assert 0 < len(found) <= 2 and all(worker.num_cached_tokens(prompt) == longest for worker in found)
    waits = {worker.worker_id: 2000.0 for worker in found}
    found = pool.holders(prompt, lambda worker: waits.get(worker.worker_id, 0.0), 1.0, each=2, most=6)
    assert len(found) > 2 and found[0].worker_id not in waits


def test_among_few_workers_a_pool_changes_nothing() -> None:
    cluster = Cluster(2 * FEW, spread=0.3)
    for _ in range(50):
        request = cluster.request()
        placement = cluster.policy.choose(request, *cluster.pools)
        assert placement == cluster.policy.choose(request, *cluster.lists)
        Charge(cluster.loads, placement, request.work)


def test_a_session_finds_its_workers_among_many() -> None:
    cluster = Cluster(120, num_holding=0)
    request = replace(cluster.request(), uses_cache=False, session=SessionKey("", "s"))
    last = cluster.lists[0][-1].worker_id, cluster.lists[1][-1].worker_id
    cluster.policy.on_placed(request, Placement(*last, ""))
    placement = cluster.policy.choose(request, *cluster.pools)
    assert placement.decode_id == last[1] and placement.kind is PlacementKind.SESSION


def test_few_workers_are_weighed_and_those_left_out_of_a_retry_leave_others() -> None:
    cluster = Cluster(400)
    few = cluster.policy.few(cluster.request(), *cluster.pools)
    assert all(4 <= len(some) <= 20 for some in few)


@pytest.mark.parametrize("name", ["least_loaded", "round_robin"])
def test_other_policies_choose_the_same_from_a_pool_as_from_a_list(name: str) -> None:
    cluster, loads = Cluster(60), LoadTracker()
    of_pools, of_lists = (policy_class(name)(RoutingContext(loads)) for _ in range(2))  # type: ignore[arg-type]
    loads.on_change = cluster._touch
    for _ in range(100):
        request = request_of(100)
        placement = of_pools.choose(request, *cluster.pools)
        assert placement == of_lists.choose(request, *cluster.lists)
        Charge(loads, placement, request.work)


def test_the_usual_cost_follows_costs_that_come_and_go() -> None:
    draw, sums, here = random.Random(3), UsualCost(), list[StepCost]()
    for _ in range(200):
        if here and draw.random() < 0.4:
            sums.remove(here.pop(draw.randrange(len(here))))
        else:
            kind, speed = draw.randrange(3), draw.random()
            parts = [
                speed * part * (kind != skipped)
                for part, skipped in zip(vars(COST).values(), (9, 0, 0, 1, 1), strict=True)
            ]
            here.append(StepCost(*parts))
            sums.add(here[-1])
        found = sums.value
        if not here:
            assert found is None
        else:
            assert found is not None
            assert list(vars(found).values()) == pytest.approx(list(vars(usual(here)).values()), abs=1e-12)


def test_many_blocks_that_the_same_workers_hold_share_one_set() -> None:
    holders = Holders()
    indices = [PrefixIndex(BLOCK_SIZE, 1000, holders, f"w{i}") for i in range(100)]
    hashes = [i.to_bytes(16, "big") for i in range(500)]
    for index in indices:
        index.apply(worker_pb2.CacheEvents(sequence_number=1, snapshot=True, stored=hashes))
    assert len({id(holders.mask_of(block_hash)) for block_hash in hashes}) == 1
    assert list(holders.worker_ids(holders.mask_of(hashes[0]))) == [f"w{i}" for i in reversed(range(100))]
