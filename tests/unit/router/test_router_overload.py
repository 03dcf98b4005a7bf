"""The rate at which room is made, and who is turned away while more arrives than leaves."""

from __future__ import annotations

import pytest
from served_cluster import SERVICE_S, SLOTS, TOKENS, Cluster, limits
from wired_router import ManualClock, run

from cluster.errors import Overloaded
from router.queue.admission import AdmissionRequest
from router.queue.waiting_queue import _SWEEP_S
from router.routing.load_tracker import RequestLoad


def test_the_rate_at_which_room_is_made_is_measured_while_requests_wait_and_not_otherwise() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        drain = cluster.router.dispatcher.admission._in_flight._drain
        await cluster.pass_time(1.0)
        assert drain.num_seconds == 0
        for _ in range(20):
            cluster.submit()
        await cluster.pass_time(1.0)
        assert 0.7 < drain.num_seconds < 1.0
        await cluster.pass_time(5.0)
        assert 1.3 < drain.num_seconds < 1.6, "nobody waits for the last four"

    run(scenario)


def test_those_far_back_that_will_be_late_are_shed_when_another_is_refused() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        await cluster.learn()
        for _ in range(SLOTS + 40):
            cluster.submit()
        admission = cluster.router.dispatcher.admission
        admission.overload.add_refusal(clock())
        assert isinstance(cluster.error_of(cluster.submit()), Overloaded)
        in_time = admission.max_wait_s * SLOTS / SERVICE_S
        assert cluster.refused["overload"] == 1 and cluster.refused["shed"] == pytest.approx(40 - in_time, abs=2)
        assert not any(client.live.is_over for client in cluster.clients[20 : 20 + SLOTS + int(in_time) - 1])

    run(scenario)


def test_the_queue_is_looked_through_for_those_that_will_be_late_once_in_a_while() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        await cluster.learn()
        for _ in range(SLOTS + 40):
            cluster.submit()
        cluster.router.dispatcher.admission.overload.add_refusal(clock())
        num_shed = []
        for seconds in (0.0, 0.9 * _SWEEP_S, 0.2 * _SWEEP_S):
            await clock.advance(seconds)  # nothing ends, so what waits is later
            assert isinstance(cluster.error_of(cluster.submit()), Overloaded)
            num_shed.append(cluster.refused["shed"])
        assert 0 < num_shed[0] == num_shed[1] < num_shed[2]

    run(scenario)


def test_those_that_are_refused_early_have_arrived_and_come_back_later_the_more_do() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, limits(max_queued_requests=1), service_s=60.0)
        for _ in range(SLOTS + 1):
            cluster.submit()
        await cluster.pass_time(1.0)
        admission = cluster.router.dispatcher.admission
        assert admission.overload.excess == 1 and 1.0 <= admission.retry_after_s(1.0) <= 1.5
        for num_refused in range(1, 201):
            with pytest.raises(Overloaded):
                cluster.router.dispatcher.waiting.refuse_early(AdmissionRequest(RequestLoad(5, 1, TOKENS)))
            assert admission.overload.excess == pytest.approx(min(num_refused, 100))
        assert 10 <= admission.retry_after_s(0.1) <= 15

    run(scenario)


def test_an_overload_without_a_worker_is_refused_as_ever() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, limits(max_queued_requests=2))
        cluster.router.dispatcher.admission.overload.add_refusal(clock())
        cluster.router.workers["d0"].lose()
        for _ in range(2):
            assert not cluster.submit().live.is_over
        assert isinstance(cluster.error_of(cluster.submit()), Overloaded)
        assert cluster.refused == {"queue_requests": 1}

    run(scenario)
