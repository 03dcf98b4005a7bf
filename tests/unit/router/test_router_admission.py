"""Who runs, who waits and who is turned away: the router's own code, simulated workers, a clock that is moved."""

from __future__ import annotations

import pytest
from fake_worker import DECODE, PREFILL, phase
from served_cluster import SLOTS, TOKENS, Cluster, limits
from wired_router import Client, ManualClock, logged, run

from cluster.api_keys import KeyQuota
from cluster.errors import DeadlineExceeded, OutOfRange, Overloaded, QuotaExceeded
from cluster.lifecycle import RequestState
from router.api.call import Principal


def test_while_nothing_is_known_nothing_is_refused_for_its_wait() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        clients = [cluster.submit(queue_timeout_s=1, time_left_s=2.0) for _ in range(100)]
        assert not cluster.refused and not any(client.live.is_over for client in clients)

    run(scenario)


def test_at_ten_times_capacity_those_that_run_are_in_time_and_the_machine_is_never_idle() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        ended: list[Client] = []
        for _ in range(1000):
            cluster.submit()
            ended += await cluster.pass_time(0.01)
        in_time = [client for client in ended if cluster.wait_of(client) <= 0.5]
        assert len(in_time) >= 0.9 * 10 * 10, "goodput of ten seconds"
        slow = [c for c in cluster.clients if c.live.error and c.live.lifecycle.history[-1].at > c.live.arrived_at]
        assert len(slow) == cluster.refused["shed"] < 0.11 * len(cluster.clients), "most are refused at once"
        retries = [c.live.error.retry_after_s for c in cluster.clients if c.live.error]
        assert all(retry is not None and 0.25 <= retry <= 60 for retry in retries) and len(set(retries)) > 100

        await cluster.pass_time(3.0)
        assert cluster.router.dispatcher.num_queued == 0
        after = [cluster.submit() for _ in range(10)]
        await cluster.pass_time(2.0)
        assert all(client.live.lifecycle.state is RequestState.FINISHED for client in after), "normal again"

    run(scenario)


def test_a_burst_that_drains_waits_and_so_do_clients_that_ask_again_when_they_are_answered() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, service_s=1.0)
        for _ in range(64):
            cluster.submit()
        for _ in range(60):
            for _ in await cluster.pass_time(1.0):
                cluster.submit()
        assert not cluster.refused
        assert cluster.router.dispatcher.counters.finished >= 4 * 59

    run(scenario)


def test_a_little_more_than_can_be_served_is_shed_too() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        ended: list[Client] = []
        for number in range(6000):
            if number % 8 == 0:  # 12.5 in a second
                cluster.submit()
            ended += await cluster.pass_time(0.01)
        last = [client for client in ended if client.live.arrived_at > clock() - 30]
        assert len([client for client in last if cluster.wait_of(client) <= 0.55]) >= 0.9 * len(last) >= 0.9 * 280

    run(scenario)


def test_who_says_how_long_it_may_wait_is_held_to_that_and_not_to_the_objective() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        patient: list[Client] = []
        for number in range(400):
            if number % 20 == 0:
                patient.append(cluster.submit(queue_timeout_s=60))
            cluster.submit()
            await cluster.pass_time(0.01)
        await cluster.pass_time(10.0)
        assert cluster.refused["overload"] > 100
        assert all(client.live.lifecycle.state is RequestState.FINISHED for client in patient)
        assert max(map(cluster.wait_of, patient)) > 0.5

    run(scenario)


def test_what_cannot_begin_before_its_deadline_or_its_timeout_is_refused_at_once() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        await cluster.learn()
        for _ in range(SLOTS + 20):
            cluster.submit()
        late = cluster.submit(time_left_s=1.0)
        error = cluster.error_of(late)
        assert isinstance(error, DeadlineExceeded) and error.retry_after_s is not None
        assert "1.0 s" in error.message
        impatient = cluster.error_of(cluster.submit(queue_timeout_s=1))
        assert isinstance(impatient, Overloaded) and "may wait 1 s" in impatient.message
        assert cluster.refused == {"deadline": 1, "queue_timeout": 1}
        for client in (cluster.submit(time_left_s=5.0), cluster.submit(queue_timeout_s=5)):
            await cluster.pass_time(2.0)
            assert not client.live.error

    run(scenario)


def test_tokens_in_flight_are_bounded_and_a_request_beyond_the_bound_is_told_which() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, limits(max_running_tokens=2 * TOKENS + 1))
        clients = [cluster.submit() for _ in range(3)]
        assert cluster.router.dispatcher.num_running == 2
        error = cluster.error_of(cluster.submit(max_output_tokens=100))
        assert isinstance(error, OutOfRange) and "router.max_running_tokens" in error.message and "105" in error.message
        await cluster.pass_time(1.0)
        assert all(client.live.lifecycle.state is RequestState.FINISHED for client in clients)

    run(scenario)


def test_without_a_bound_of_its_own_what_runs_is_what_the_decode_workers_pools_should_hold() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, limits(max_running_requests=100))
        d0 = cluster.router.workers["d0"]
        d0.lose()
        d0.open(num_blocks=20, block_size=16, max_num_seqs=100)
        for _ in range(3):
            cluster.submit(max_output_tokens=200)
        assert cluster.router.dispatcher.num_running == 2, "each should write 128 tokens, as nothing is known"
        await cluster.pass_time(2.0)
        for _ in range(40):  # all write two tokens
            cluster.submit(max_output_tokens=200)
            await cluster.pass_time(0.5)
        for _ in range(10):
            cluster.submit(max_output_tokens=200)
        assert cluster.router.dispatcher.num_running == 10

    run(scenario)


def test_no_more_sequences_run_than_decode_workers_step_and_a_few_on_their_way() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, limits(max_running_requests=100))
        d0 = cluster.router.workers["d0"]
        d0.lose()
        d0.open(max_num_seqs=8)
        for _ in range(10):
            cluster.submit(n=2)
        assert cluster.router.dispatcher.num_running == 5

    run(scenario)


def test_as_many_requests_run_as_the_workers_have_places_for_unless_a_number_is_given() -> None:
    async def scenario(clock: ManualClock) -> None:
        for most, places, running in ((None, 300, 302), (None, 100, 102), (280, 300, 280)):
            cluster = Cluster(clock, limits(max_running_requests=most))
            d0 = cluster.router.workers["d0"]
            d0.lose()
            d0.open(max_num_seqs=places, num_blocks=10_000)
            for _ in range(310):
                cluster.submit()
            assert cluster.router.dispatcher.num_running == running

    run(scenario)


def test_a_request_runs_alone_however_large_it_is() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        d0 = cluster.router.workers["d0"]
        d0.lose()
        d0.open(num_blocks=1, block_size=16, max_num_seqs=1)
        cluster.submit(n=4, max_output_tokens=200)
        assert cluster.router.dispatcher.num_running == 1

    run(scenario)


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, limits(max_queued_requests=3, max_queued_tokens=3 * TOKENS))
        for _ in range(SLOTS + 2):
            cluster.submit()
        of_tokens = cluster.error_of(cluster.submit(max_output_tokens=50))
        assert isinstance(of_tokens, Overloaded) and str(3 * TOKENS) in of_tokens.message
        cluster.submit()
        of_requests = cluster.error_of(cluster.submit())
        assert isinstance(of_requests, Overloaded) and "3 requests" in of_requests.message
        assert cluster.refused == {"queue_tokens": 1, "queue_requests": 1}

    run(scenario)


def test_one_tenant_leaves_room_in_the_queue_for_others() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock, limits(max_queued_requests=20))
        heavy, light = (Principal(key_id=name, tenant=name) for name in ("heavy", "light"))
        for _ in range(100):
            cluster.submit(principal=heavy)
        assert cluster.router.dispatcher.num_queued == 10
        first, second = cluster.submit(principal=light), cluster.submit(principal=light)
        assert not first.live.is_over and not second.live.is_over
        assert cluster.refused == {"tenant_share": 100 - SLOTS - 10}

    run(scenario)


def test_a_higher_priority_runs_first() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        low = [cluster.submit(priority=-1) for _ in range(SLOTS + 2)]
        high = cluster.submit(priority=3)
        assert low[-1].heartbeat() and high.heartbeat()
        await cluster.pass_time(0.85)
        assert cluster.wait_of(high) == min(cluster.wait_of(client) for client in (high, *low[SLOTS:]))

    run(scenario)


def test_a_quota_is_refused_by_its_name_and_with_its_delay() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        who = Principal(key_id="k7", tenant="t", quota=KeyQuota(requests_per_min=2, max_concurrent=5))
        for _ in range(2):
            assert not cluster.submit(principal=who).live.is_over
        error = cluster.error_of(cluster.submit(principal=who))
        assert isinstance(error, QuotaExceeded) and error.retry_after_s == pytest.approx(30.0)
        assert [violation.field for violation in error.violations] == ["key:k7/requests_per_min"]
        assert cluster.refused == {"quota_requests_per_min": 1}
        await clock.advance(30.01)
        assert not cluster.submit(principal=who).live.is_over

    run(scenario)


def test_live_requests_of_a_key_are_counted_until_they_end_in_any_way() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        who = Principal(key_id="k", tenant="t", quota=KeyQuota(max_concurrent=1))
        finished = cluster.submit(principal=who)
        assert isinstance(cluster.error_of(cluster.submit(principal=who)), QuotaExceeded)
        await cluster.pass_time(0.5)
        assert finished.live.lifecycle.state is RequestState.FINISHED
        cancelled = cluster.submit(principal=who)
        assert cluster.router.dispatcher.cancel(cancelled.request_id, "by the test")
        assert not cluster.submit(principal=who).live.is_over

    run(scenario)


def test_output_tokens_are_charged_while_a_request_runs() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        who = Principal(key_id="k", tenant="t", quota=KeyQuota(output_tokens_per_min=3))
        client = cluster.submit(principal=who)
        key, d0 = client.live.key.to_proto(), cluster.router.workers["d0"]
        d0.emit(phase(key, PREFILL), phase(key, DECODE), logged(key, 0, "abc"))
        error = cluster.error_of(cluster.submit(principal=who))
        assert isinstance(error, QuotaExceeded) and error.retry_after_s == pytest.approx(20.0)
        assert not client.live.is_over, "what runs is let run"

    run(scenario)


def test_a_call_that_needs_no_worker_is_charged_and_is_no_live_request() -> None:
    async def scenario(clock: ManualClock) -> None:
        cluster = Cluster(clock)
        who = Principal(key_id="k", tenant="t", quota=KeyQuota(max_concurrent=1, prompt_tokens_per_min=20))
        waiting = cluster.router.dispatcher.waiting
        for _ in range(2):
            waiting.refuse_over_quota(who)
            waiting.charge(who, 5)
        assert not cluster.submit(principal=who).live.is_over
        with pytest.raises(QuotaExceeded, match="1 requests of this API key are live"):
            waiting.refuse_over_quota(who)
        await cluster.pass_time(0.5)
        waiting.charge(who, 5)
        with pytest.raises(QuotaExceeded, match="has used the 20 prompt tokens"):
            waiting.refuse_over_quota(who)

    run(scenario)
