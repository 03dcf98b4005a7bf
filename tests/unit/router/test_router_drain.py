"""A drain that runs out of time: whoever is still here is told so, and nobody begins any more."""

from __future__ import annotations

import asyncio

from wired_router import ManualClock, WiredRouter, run

from cluster.errors import Unavailable
from cluster.lifecycle import RequestState


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
