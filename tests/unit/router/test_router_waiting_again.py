"""A request whose decode worker is lost and for which no other is there: it waits again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_worker import DECODE, LENGTH, phase
from router_harness import ids
from wired_router import (
    QUEUE_TIMEOUT_S,
    Client,
    ManualClock,
    WiredRouter,
    admit_of,
    cancelled,
    known,
    logged,
    reach,
    run,
)

from cluster.errors import Unavailable
from cluster.lifecycle import RequestKey, RequestState
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2

S = RequestState


def wait_again(router: WiredRouter, state: str = "first token", **request: Any) -> tuple[Client, worker_pb2.RequestKey]:
    client, key = reach(router, state, **request)
    router.workers["p0"].is_draining = True  # or it would stand in for d0
    router.workers["d0"].lose()
    assert client.live.lifecycle.state is S.QUEUED
    assert (router.dispatcher.num_queued, router.dispatcher.num_running) == (1, 0)
    return client, key


def test_who_has_waited_before_is_first_when_a_worker_is_back() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"], max_running_requests=1)
        client, key = reach(router, "first token")
        behind = router.submit()
        router.workers["p0"].is_draining = True
        router.workers["d0"].lose()
        p0, d0 = router.workers["p0"], router.workers["d0"]
        assert router.dispatcher.num_queued == 2
        p0.take()
        assert cancelled(p0, key) == [None]
        p0.is_draining = False
        d0.open()
        again = admit_of(d0)
        assert RequestKey.of(again.key) == (client.request_id, 2) and known(again) == {0: ids("a")}
        p0.take()
        d0.emit(phase(again.key, DECODE), logged(again.key, 1, "b", finish_reason=LENGTH))
        (admit,) = p0.take_admits()
        assert RequestKey.of(admit.key) == (behind.request_id, 1)

    run(scenario)


def test_what_a_request_held_on_a_lost_worker_is_free_for_another() -> None:
    async def scenario(clock: ManualClock) -> None:
        num_tokens = len(ids("hello")) + 16
        router = WiredRouter(clock, ["p0", "d0"], max_running_tokens=2 * num_tokens)
        wait_again(router)
        router.workers["p0"].is_draining = False
        router.workers["d0"].open()
        assert router.dispatcher.num_running == 1
        router.submit()
        assert (router.dispatcher.num_queued, router.dispatcher.num_running) == (0, 2)

    run(scenario)


def test_who_waits_again_in_vain_has_failed_and_not_been_rejected() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, _ = wait_again(router)
        await clock.advance(QUEUE_TIMEOUT_S - 0.1)
        assert not client.live.is_over
        await clock.advance(0.2)
        client.take()
        assert client.live.lifecycle.state is S.FAILED and client.texts == ["a"]
        assert isinstance(client.live.error, Unavailable) and client.live.error.retry_after_s == 1.0
        counters = router.dispatcher.counters
        assert (counters.failed, counters.rejected) == (1, 0)
        router.check_idle()

    run(scenario)


@pytest.mark.parametrize("own_s", [1, 2 * int(QUEUE_TIMEOUT_S)])
def test_who_waits_again_may_wait_for_as_long_as_others_and_as_it_wants(own_s: int) -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, _ = wait_again(router, queue_timeout_s=own_s)
        await clock.advance(max(own_s, QUEUE_TIMEOUT_S) - 0.1)
        assert not client.live.is_over
        await clock.advance(0.2)
        assert client.live.lifecycle.state is S.FAILED

    run(scenario)


def test_who_waits_again_for_room_in_vain_is_unavailable_and_may_be_resumed() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"], max_running_requests=1)
        lost, _ = wait_again(router)
        router.workers["p0"].is_draining = False
        router.dispatcher.admission.has_room = lambda work, now: False  # type: ignore[method-assign]
        router.workers["d0"].open()
        await clock.advance(QUEUE_TIMEOUT_S + 0.1)
        assert lost.live.lifecycle.state is S.FAILED
        assert isinstance(lost.live.error, Unavailable) and "free again" in lost.live.error.message
        router.check_idle()

    run(scenario)


def test_who_waits_again_can_be_cancelled() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, _ = wait_again(router)
        assert router.dispatcher.cancel(client.request_id, "by the test")
        assert not router.dispatcher.cancel(client.request_id, "once more")
        client.take()
        assert client.live.lifecycle.state is S.CANCELLED
        assert client.ends[0].finish_reason == pb.FINISH_REASON_CANCELLED and client.texts == ["a"]
        router.check_idle()
        router.workers["d0"].open()
        assert router.workers["d0"].take_admits() == []
        await clock.advance(2 * QUEUE_TIMEOUT_S)
        router.check_idle()

    run(scenario)


def test_a_drain_lets_who_waits_again_run_and_fails_it_when_its_time_is_over() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        lucky, _ = wait_again(router)
        draining = asyncio.create_task(router.dispatcher.drain(10.0))
        await clock.advance(1.0)
        refused = router.submit()
        assert refused.live.lifecycle.state is S.REJECTED
        router.workers["p0"].is_draining = False
        router.workers["d0"].open()
        assert RequestKey.of(admit_of(router.workers["p0"]).key) == (lucky.request_id, 2)
        router.workers["p0"].is_draining = True
        router.workers["d0"].lose()  # the second attempt waits for a third
        await clock.advance(10.0)
        assert draining.done() and lucky.live.lifecycle.state is S.FAILED
        assert isinstance(lucky.live.error, Unavailable)
        router.check_idle()

    run(scenario)
