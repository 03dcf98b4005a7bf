"""A router that drains: what fails is not tried again; once time is over, whoever is still here is told so."""

from __future__ import annotations

import asyncio

from fake_worker import failed
from wired_router import ManualClock, WiredRouter, reach, run

from cluster.errors import Unavailable
from cluster.lifecycle import RequestState
from cluster.pb import worker_pb2


def test_a_drain_that_runs_out_of_time_ends_all_that_wait_and_starts_none() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["d0"], needs_prefill=False, max_running_requests=4, max_running_tokens=50)
        runs, large, small = router.submit(), router.submit(n=2), router.submit()
        assert (router.dispatcher.num_running, router.dispatcher.num_queued) == (1, 2)
        router.workers["d0"].take()
        draining = asyncio.create_task(router.dispatcher.drain(1.0))
        await clock.advance(0.5)
        await clock.advance(1.0)  # without the large one, there is room for the small one
        await draining
        assert runs.live.lifecycle.state is RequestState.FAILED
        assert {c.live.lifecycle.state for c in (large, small)} == {RequestState.REJECTED}
        assert isinstance(small.live.error, Unavailable)
        assert router.workers["d0"].take_admits() == []
        router.check_idle()

    run(scenario)


def test_an_attempt_that_fails_while_the_router_drains_is_the_last() -> None:
    async def scenario(clock: ManualClock) -> None:
        for is_draining in (False, True):
            router = WiredRouter(clock, ["p0", "p1", "d0"])
            client, key = reach(router, "prefilling")
            draining = asyncio.create_task(router.dispatcher.drain(10.0)) if is_draining else None
            await clock.advance(0.0)
            router.workers["d0"].emit(failed(key, worker_pb2.Failed.REASON_TRANSFER_FAILED))
            if draining is None:
                assert client.live.lifecycle.state is RequestState.QUEUED and len(client.live.attempts) == 2
                continue
            assert client.live.lifecycle.state is RequestState.FAILED
            await draining
            router.check_idle()

    run(scenario)
