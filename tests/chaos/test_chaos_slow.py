"""A worker that is slow, not dead: it gets no new requests while it is, and is used again when it has recovered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from chaos_fleet import ChaosWorker, Fleet, Measured, await_true
from chaos_states import WORKERS
from cluster_fixture import token_spec

pytestmark = [pytest.mark.battery, pytest.mark.timeout(300)]

STOPPED_S, RUNS_S = 0.4, 0.1
"""Shorter than what a worker may be silent for."""
EVERY_S = 0.25
NUM_TOKENS = 48


@contextmanager
def slowed(worker: ChaosWorker) -> Iterator[None]:
    """The worker's process runs a fifth of the time."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        while not is_over.is_set():
            worker.stop()
            is_over.wait(STOPPED_S)
            worker.cont()
            is_over.wait(RUNS_S)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Load:
    """Requests at a steady rate, and how long each took."""

    def __init__(self, fleet: Fleet, pool: ThreadPoolExecutor) -> None:
        self._fleet = fleet
        self._pool = pool
        self._draw = random.Random(1)

    def _ask(self, prompt: list[int]) -> float:
        begun = time.monotonic()
        for _ in self._fleet.client.stream(token_spec(prompt, NUM_TOKENS), timeout_s=60.0):
            pass
        return time.monotonic() - begun

    def run(self, num_requests: int) -> list[float]:
        """Seconds that each of so many requests took, sorted; fails if one does."""
        asked: list[Future[float]] = []
        never = threading.Event()
        for _ in range(num_requests):
            prompt = self._draw.choices(range(4, 1000), k=self._draw.randrange(40, 300))
            asked.append(self._pool.submit(self._ask, prompt))
            never.wait(EVERY_S)
        return sorted(future.result() for future in asked)

    def until(self, condition: Callable[[], bool]) -> None:
        """Asks until the condition holds."""
        is_over = threading.Event()

        def ask_on() -> None:
            while not is_over.is_set():
                self.run(4)

        asking = self._pool.submit(ask_on)
        try:
            await_true(condition, self._fleet.client.status, 90.0)
        finally:
            is_over.set()
            asking.result()


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_slow_worker_is_passed_over_until_it_has_recovered(victim: str, measured: Measured) -> None:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with Fleet({name: {} for name in names}, {**WORKERS, "max_num_batched_tokens": 512}, measured) as fleet:

        def is_slow() -> bool:
            return next(worker.is_slow for worker in fleet.client.status().workers if worker.worker_id == victim)

        with ThreadPoolExecutor(64) as pool:
            load = Load(fleet, pool)
            load.run(40)
            before = load.run(40)
            with slowed(fleet[victim]):
                load.until(is_slow)
                during = load.run(60)
            load.until(lambda: not is_slow())
            after = load.run(40)
        for name, times in (("before", before), ("while slow", during), ("after", after)):
            p50, p95 = (1000 * times[int(share * len(times))] for share in (0.5, 0.95))
            print(f"{victim} {name}: p50 {p50:.0f} ms, p95 {p95:.0f} ms")
        assert during[len(during) // 2] < 3 * before[len(before) // 2], "most requests do not see it"
        fleet.settle()
