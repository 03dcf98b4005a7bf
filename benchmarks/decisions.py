"""How long the router takes to choose the workers of a request, hashing of its prompt included.

Loads are simulated: candidates hold real prefix indices and measured step costs, and a load tracker holds work, as in
the router of a large cluster; no worker, no socket. Every decision is charged, and given back some decisions later.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes
from cluster.step_cost import StepCost
from router.routing.load_tracker import Charge, RequestLoad
from router.routing.policies.interface import RoutingContext, RoutingRequest
from router.routing.policies.predicted import Predicted
from router.routing.prefix_index import Holders, PrefixIndex, PromptHashes

BLOCK_SIZE = 16
MOST_PROMPT_TOKENS = 8192
_SHARED_TOKENS = 1024
_NUM_SYSTEM_PROMPTS = 8
_VOCABULARY = 32_000
_SALT = b"tenant"
_OWN_SHARE = 0.1
"""Of the sessions that a worker has cached: those that nobody had before."""
_RUNNING = 256
"""Requests that are on the workers while one is placed."""


@dataclass
class _Worker:
    worker_id: str
    step_cost: StepCost
    kv_tokens: int
    index: PrefixIndex
    max_num_seqs: int = 0
    weights_revision: str = ""

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        return self.index.num_cached_tokens(prompt)


class Simulation:
    """`num_workers`, half of each role, whose caches hold `num_blocks` blocks together; all from one seed."""

    def __init__(self, num_workers: int, num_blocks: int, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        holders = Holders()
        each = num_blocks // num_workers
        cost = StepCost(0.004, 0.0002, 1e-9, 0.0002, 1e-7)
        self._workers = [
            _Worker(f"{'pd'[i % 2]}{i}", cost, each * BLOCK_SIZE, PrefixIndex(BLOCK_SIZE, each, holders))
            for i in range(num_workers)
        ]
        self._system_prompts = [self._tokens(_SHARED_TOKENS) for _ in range(_NUM_SYSTEM_PROMPTS)]
        self._sessions = [self._new_session() for _ in range(num_workers * 4)]
        self.num_cached_blocks = sum(self._fill(worker, each) for worker in self._workers)
        self._context = RoutingContext()
        self._policy = Predicted(self._context)
        self._charges: deque[Charge] = deque()

    def decide(self) -> tuple[float, float]:
        """One decision on a prompt of some session, or of a new one; seconds, and seconds of processor."""
        draw = self._draw
        tokens = draw.choice(self._sessions) if draw.random() < 0.8 else self._new_session()
        most = MOST_PROMPT_TOKENS - 64
        prompt = (tokens + self._tokens(64))[-most:] if len(tokens) > most else tokens + self._tokens(64)
        work = RequestLoad(len(prompt), 1, len(prompt) + 512)
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        request = RoutingRequest(work, PromptHashes(prompt, _SALT))
        placement = self._policy.choose(request, self._workers[::2], self._workers[1::2])
        took_s, took_cpu_s = time.perf_counter() - begun, time.thread_time() - begun_cpu
        self._charges.append(Charge(self._context.loads, placement, work))
        if len(self._charges) > _RUNNING:
            self._charges.popleft().all_done()
        return took_s, took_cpu_s

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(range(_VOCABULARY), k=count))

    def _new_session(self) -> tuple[int, ...]:
        own = self._tokens(self._draw.randrange(256, MOST_PROMPT_TOKENS - _SHARED_TOKENS))
        return self._draw.choice(self._system_prompts) + own

    def _fill(self, worker: _Worker, num_blocks: int) -> int:
        """Whole sessions, until the worker's cache is full; how many blocks it then holds."""
        hashes: dict[bytes, None] = {}
        while len(hashes) < num_blocks:
            if self._draw.random() < _OWN_SHARE:
                self._sessions.append(self._new_session())
            hashes.update(dict.fromkeys(prefix_hashes(self._draw.choice(self._sessions), BLOCK_SIZE, _SALT)))
        kept = list(hashes)[:num_blocks]
        worker.index.apply(worker_pb2.CacheEvents(sequence_number=1, snapshot=True, stored=kept))
        return len(kept)


def measure_decisions(num_workers: int = 64, num_blocks: int = 100_000, num_decisions: int = 5000) -> dict[str, Any]:
    """Milliseconds of a decision; `cpu_`: of processor, which a busy machine changes less. A tenth of them warms up and
    does not count."""
    simulation = Simulation(num_workers, num_blocks)
    for _ in range(num_decisions // 10):
        simulation.decide()
    taken = [simulation.decide() for _ in range(num_decisions)]
    percentiles, of_cpu = (statistics.quantiles(column, n=1000) for column in zip(*taken, strict=True))
    return {
        "workers": num_workers,
        "cached_blocks": simulation.num_cached_blocks,
        "decisions": num_decisions,
        "p50_ms": round(1000 * percentiles[499], 3),
        "p99_ms": round(1000 * percentiles[989], 3),
        "cpu_p99_ms": round(1000 * of_cpu[989], 3),
        "max_ms": round(1000 * max(taken)[0], 3),
    }
