"""How long the router takes to choose the workers of a request, from listing those that may get it to charging them.

The fleet, the prefix caches, the load tracker and the policy are the router's own; workers are simulated: they have no
connection, report step costs, and cache what they are given. Between decisions workers report, and requests end, as
beside a load of some thousand requests a second; that is not part of a decision, and is timed apart.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes
from cluster.step_cost import StepCost
from router.routing.fleet import DECODE, PREFILL, Fleet, WorkerAddress
from router.routing.load_tracker import Charge, Placement, RequestLoad
from router.routing.policies.interface import RoutingContext, RoutingRequest
from router.routing.policies.predicted import Predicted
from router.routing.prefix_index import PromptHashes
from router.routing.worker_client import WorkerCallbacks, WorkerClient

BLOCK_SIZE = 16
MOST_PROMPT_TOKENS = 8192
_SHARED_TOKENS = 1024
_NUM_SYSTEM_PROMPTS = 8
_NUM_SESSIONS = 2000
_VOCABULARY = list(range(32_000))
_SALT = b"tenant"
_RUNNING = 4
"""Requests on each worker while one is placed, of 1,024 at most; the prompts of one in eight are not computed yet."""
_REPORTS = 512
"""One worker in so many reports between two decisions."""
_COST = StepCost(0.004, 0.0002, 1e-9, 0.0002, 1e-7)


class SimulatedWorker(WorkerClient):
    """A worker's connection with nothing behind it. It caches the prompts that it is given, and forgets the oldest."""

    def start(self) -> None:
        self._stored: dict[bytes, None] = {}
        self._num_events = 0

    def open(self, num_blocks: int, hashes: Sequence[bytes]) -> None:
        """The session begins, with what its cache holds."""
        self._num_blocks = num_blocks
        info = worker_pb2.WorkerInfo(
            worker_id=self.worker_id, role=self.role, block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_seqs=256
        )
        self._read(worker_pb2.EventBatch(events=[worker_pb2.Event(info=info)]))
        self._stored.update(dict.fromkeys(reversed(hashes)))
        self._tell(worker_pb2.CacheEvents(snapshot=True, stored=hashes))

    def report(self, speed: float) -> None:
        cost = StepCost(*(speed * part for part in vars(_COST).values()))
        stats = worker_pb2.WorkerStats(step_cost=cost.to_proto())
        self._read(worker_pb2.EventBatch(events=[worker_pb2.Event(stats=stats)]))

    def compute(self, hashes: Sequence[bytes]) -> None:
        """A prompt's blocks are cached, and those forgotten that were used longest ago, the ends of prompts first."""
        stored = [block_hash for block_hash in hashes if block_hash not in self._stored]
        for block_hash in reversed(hashes):
            self._stored.pop(block_hash, None)
            self._stored[block_hash] = None
        evicted = list(islice(self._stored, max(0, len(self._stored) - self._num_blocks)))
        for block_hash in evicted:
            del self._stored[block_hash]
        self._tell(worker_pb2.CacheEvents(stored=stored, evicted=evicted))

    def _tell(self, events: worker_pb2.CacheEvents) -> None:
        self._num_events += 1
        events.sequence_number = self._num_events
        self._read(worker_pb2.EventBatch(events=[worker_pb2.Event(cache=events)]))


class Simulation:
    """`num_workers`, half of each role, whose caches hold `num_blocks` blocks together; all from one seed."""

    def __init__(self, num_workers: int, num_blocks: int, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self.context = RoutingContext()
        self.policy = Predicted(self.context)
        self._num_workers = num_workers
        self.num_running = min(_RUNNING * num_workers, 4096)
        callbacks = WorkerCallbacks(lambda worker: None, lambda worker: None, lambda worker, events: None)
        self.fleet = Fleet(callbacks, lambda worker: 0, 3.0, make_client=SimulatedWorker)
        self.fleet.has_served = True
        self.context.loads.on_change = self.fleet.on_load
        self.fleet.set_workers(
            WorkerAddress(f"{'pd'[i % 2]}{i}", f"w{i}:1", (PREFILL, DECODE)[i % 2]) for i in range(num_workers)
        )
        self._workers: list[SimulatedWorker] = list(self.fleet)  # type: ignore[arg-type]
        self._system_prompts = [self._tokens(_SHARED_TOKENS) for _ in range(_NUM_SYSTEM_PROMPTS)]
        self._sessions = [self._new_session() for _ in range(_NUM_SESSIONS)]
        self.num_cached_blocks = self._fill(num_blocks // num_workers)
        self._charges: deque[Charge] = deque()
        self._next_report = 0
        gc.collect()
        gc.freeze()  # as `router.collector` does

    def next_request(self) -> RoutingRequest:
        """The next turn of some session, or the first of a new one."""
        tokens = self._draw.choice(self._sessions) if self._draw.random() < 0.8 else self._new_session()
        prompt = (tokens + self._tokens(64))[-MOST_PROMPT_TOKENS:]
        return RoutingRequest(RequestLoad(len(prompt), 1, len(prompt) + 512), PromptHashes(prompt, _SALT))

    def decide(self, request: RoutingRequest) -> tuple[Placement, Charge]:
        """What the router does for each request."""
        placement = self.policy.choose(request, *self.fleet.candidates())
        return placement, Charge(self.context.loads, placement, request.work)

    def go_on(self, request: RoutingRequest, placement: Placement, charge: Charge) -> None:
        """What happens between two decisions."""
        charges = self._charges
        charges.append(charge)
        num_running = self.num_running
        if len(charges) > num_running // 8:
            charges[-num_running // 8].prefill_done()
        if len(charges) > num_running:
            charges.popleft().all_done()
        for _ in range(max(1, self._num_workers // _REPORTS)):
            self._workers[self._next_report].report(self._draw.uniform(0.9, 1.1))
            self._next_report = (self._next_report + 1) % self._num_workers
        hashes = request.prompt.of(BLOCK_SIZE)
        blocks = [hashes.of_first(num_blocks + 1) for num_blocks in range(hashes.num_blocks)]
        for worker_id in {placement.computing_id: None, placement.decode_id: None}:
            self.fleet[worker_id].compute(blocks)  # type: ignore[attr-defined]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(_VOCABULARY, k=count))

    def _new_session(self) -> tuple[int, ...]:
        own = self._tokens(self._draw.randrange(256, MOST_PROMPT_TOKENS - _SHARED_TOKENS))
        return self._draw.choice(self._system_prompts) + own

    def _fill(self, each: int) -> int:
        """Whole sessions, until each worker's cache is full; how many blocks all then hold."""
        hashes = [list(prefix_hashes(session, BLOCK_SIZE, _SALT)) for session in self._sessions]
        total = 0
        for worker in self._workers:
            worker.report(self._draw.uniform(0.9, 1.1))
            held: dict[bytes, None] = {}
            while len(held) < each:
                held.update(dict.fromkeys(self._draw.choice(hashes)))
            kept = list(held)[:each]
            worker.open(each, kept)
            worker.report(self._draw.uniform(0.9, 1.1))
            total += len(kept)
        return total


def lost_by_few(simulation: Simulation, num_decisions: int) -> tuple[float, float]:
    """Mean of the predicted completions of what is chosen over those of the best of all workers, and of the cached
    tokens found, likewise."""
    ratios, cached = list[float](), [0, 0]
    policy, pools = simulation.policy, simulation.fleet.candidates()
    for _ in range(num_decisions):
        request = simulation.next_request()
        simulation.go_on(request, *simulation.decide(request))
        request = simulation.next_request()
        (_, few), (_, every) = (policy._best(request, *some) for some in (pools, [list(pool) for pool in pools]))
        ratios.append(few.completion_s / every.completion_s if few.num_missed == every.num_missed else 2.0)
        for index, option in enumerate((few, every)):
            cached[index] += option.prefill.num_cached_tokens
    return statistics.mean(ratios), cached[0] / max(1, cached[1])


@contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    begun = time.thread_time()
    yield
    into.append(1000 * (time.thread_time() - begun))


def measure_decisions(num_workers: int = 64, num_blocks: int = 1_000_000, num_decisions: int = 5000) -> dict[str, Any]:
    """Milliseconds of processor: those of the wall say on a busy machine what else runs there. Decisions of a warm-up,
    until the workers have as much to do as later, do not count."""
    simulation = Simulation(num_workers, num_blocks)
    decisions, others = list[float](), list[float]()
    for _ in range(simulation.num_running + num_decisions):
        request = simulation.next_request()
        with _timed(decisions):
            placement, charge = simulation.decide(request)
        with _timed(others):
            simulation.go_on(request, placement, charge)
    completion, cached = lost_by_few(simulation, 200)
    percentiles = statistics.quantiles(decisions[-num_decisions:], n=1000)
    return {
        "workers": num_workers,
        "cached_blocks": simulation.num_cached_blocks,
        "decisions": num_decisions,
        "p50_ms": round(percentiles[499], 3),
        "p99_ms": round(percentiles[989], 3),
        "p999_ms": round(percentiles[998], 3),
        "max_ms": round(max(decisions[-num_decisions:]), 3),
        "between_p50_ms": round(statistics.median(others[-num_decisions:]), 3),
        "between_max_ms": round(max(others[-num_decisions:]), 3),
        "completion_ratio": round(completion, 4),
        "cached_ratio": round(cached, 4),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
