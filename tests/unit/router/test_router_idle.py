"""Work that can wait: when a cluster has capacity to spare for it, and who is next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_worker import DECODE, PREFILL, phase
from wired_router import Client, ManualClock, WiredRouter, admit_of, logged, run

from cluster.pb import worker_pb2
from router.batches.idle import IdleCapacity

PLACES = 16


class Cluster:
    """A decode worker with PLACES, and what a step costs on it."""

    def __init__(self, clock: ManualClock, **cost: float) -> None:
        self.router = WiredRouter(clock, ["d0"], queue_timeout_s=60.0, needs_prefill=False)
        self.clock, self.d0 = clock, self.router.workers["d0"]
        self.open()
        if cost:
            stats = worker_pb2.WorkerStats(step_cost=worker_pb2.StepCost(**cost))
            self.d0.emit(worker_pb2.Event(stats=stats))

    def open(self, **info: Any) -> None:
        self.d0.lose()
        self.d0.open(**{"max_num_seqs": PLACES, "num_blocks": 1000} | info)

    def begin(self, **given: Any) -> Client:
        """One that decodes."""
        client = self.router.submit(**given)
        key = admit_of(self.d0).key
        self.d0.emit(phase(key, PREFILL), phase(key, DECODE), logged(key, 0, "a"))
        return client

    def has_spare(self, num_running: int) -> bool:
        return self.router.dispatcher.admission.has_spare(num_running, self.clock())


def test_an_idle_cluster_has_half_of_its_places_to_spare() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        num_running = 0
        while cluster.has_spare(num_running):
            cluster.begin()
            num_running += 1
        assert num_running == PLACES // 2

    run(scenario)


def test_beside_others_it_fills_up_to_what_the_next_ones_need() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        for _ in range(10):
            cluster.begin()
        num_running = 0
        while cluster.has_spare(num_running):
            cluster.begin()
            num_running += 1
        assert num_running == PLACES * 7 // 8 - 10

    run(scenario)


def test_a_slow_cluster_is_used_while_nobody_else_is_there_and_not_beside_them() -> None:
    """Steps of a second keep no objective, and there is none to keep."""

    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, fixed_s=1.0, sequence_s=0.01, prompt_token_s=0.01)
        cluster.begin()
        assert cluster.has_spare(1) and not cluster.has_spare(0)

    run(scenario)


def test_prompts_that_are_not_computed_yet_leave_time_for_the_next_one() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, fixed_s=0.001, prompt_token_s=0.02)
        cluster.router.submit()
        assert cluster.has_spare(1)
        for _ in range(3):
            cluster.router.submit()
        assert not cluster.has_spare(4)

    run(scenario)


@pytest.mark.parametrize("why", ["somebody waits", "no worker", "a full pool", "an overload"])
def test_there_is_nothing_to_spare_when(why: str) -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        if why == "a full pool":
            cluster.open(num_blocks=9)
            cluster.begin(max_output_tokens=200)
            assert not cluster.has_spare(1)
            return
        cluster.begin()
        assert cluster.has_spare(1)
        if why == "somebody waits":
            for _ in range(2 * PLACES):
                cluster.router.submit()
            assert cluster.router.dispatcher.num_queued
        elif why == "no worker":
            cluster.d0.lose()
        else:
            cluster.router.dispatcher.admission.overload.add_refusal(clock())
        assert not cluster.has_spare(1)

    run(scenario)


async def test_lines_are_counted_until_they_end_however_they_do() -> None:
    idle, ends = IdleCapacity(lambda num_running: num_running < 2), asyncio.Event()

    async def line(tenant: str, *, fails: bool = False) -> None:
        async with idle.place(tenant):
            await ends.wait()
            assert not fails

    tasks = [asyncio.create_task(line("a", fails=True)), *(asyncio.create_task(line("a")) for _ in range(3))]
    async with asyncio.timeout(20):
        while idle.num_running < 2:
            await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()  # before its turn
    async with asyncio.timeout(20):
        await asyncio.wait(tasks[1:3])
        while idle.num_running < 2:
            await asyncio.sleep(0)
    ends.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    ended = [AssertionError, asyncio.CancelledError, asyncio.CancelledError, type(None)]
    assert [type(result) for result in results] == ended and idle.num_running == 0


async def test_tenants_take_turns_however_many_lines_each_has() -> None:
    spare = [False]
    idle, begun = IdleCapacity(lambda _: spare[0]), list[str]()

    async def line(tenant: str) -> None:
        async with idle.place(tenant):
            begun.append(tenant)

    tasks = [asyncio.create_task(line(tenant)) for tenant in "aaaaaabbc"]
    await asyncio.sleep(0)
    tasks[3].cancel()
    spare[0] = True
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert "".join(begun) == "abcabaaa"
