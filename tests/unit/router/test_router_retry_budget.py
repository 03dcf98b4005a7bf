"""Retries are delayed by their budget, and never fail by it; others are served meanwhile."""

from __future__ import annotations

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, failed, phase
from wired_router import QUEUE_TIMEOUT_S, Client, ManualClock, WiredRouter, WiredWorker, logged, run

from cluster.lifecycle import RequestState
from cluster.pb import worker_pb2
from router.routing.load_tracker import NOTHING

LARGE = {"num_blocks": 4096, "max_num_seqs": 256}
AT_ONCE = 4


def submit(router: WiredRouter, num_requests: int) -> list[Client]:
    """One after the other."""
    clients = []
    for _ in range(num_requests):
        router.clock.now += 0.001
        clients.append(router.submit())
    return clients


def begin(router: WiredRouter, num_requests: int) -> list[Client]:
    """Requests that decode."""
    clients = submit(router, num_requests)
    for client in clients:
        key = client.live.key.to_proto()
        prefill, decode = client.live.attempt.prefill, client.live.attempt.workers[-1]
        assert isinstance(prefill, WiredWorker) and isinstance(decode, WiredWorker)
        prefill.emit(phase(key, PREFILL), logged(key, 0, "a"), phase(key, TRANSFER))
        decode.emit(phase(key, DECODE))
    for worker in router.workers.values():
        worker.take()
    return clients


def many(clock: ManualClock, worker_ids: list[str], num_requests: int) -> tuple[WiredRouter, list[Client]]:
    router = WiredRouter(clock, [], max_running_requests=1000, max_queued_requests=1000)
    router.name(worker_ids)
    for worker in router.workers.values():
        worker.open(**LARGE)
    return router, begin(router, num_requests)


def on(clients: list[Client], worker_id: str) -> list[Client]:
    return [client for client in clients if client.live.attempt.placement.decode_id == worker_id]


def placed(clients: list[Client]) -> list[Client]:
    """Those whose present attempt is on workers."""
    return [client for client in clients if client.live.attempt.key == client.live.key]


def compute(client: Client) -> None:
    """The first token of an attempt."""
    prefill = client.live.attempt.prefill
    assert isinstance(prefill, WiredWorker)
    key = client.live.key.to_proto()
    prefill.emit(phase(key, PREFILL), logged(key, client.live.num_tokens, "b"), phase(key, TRANSFER))


def finish(client: Client) -> None:
    decode = client.live.attempt.workers[-1]
    assert isinstance(decode, WiredWorker)
    key, num_tokens = client.live.key.to_proto(), client.live.num_tokens
    decode.emit(phase(key, PREFILL), phase(key, DECODE), logged(key, num_tokens, "z", finish_reason=LENGTH))
    client.take()
    assert client.live.lifecycle.state is RequestState.FINISHED


@pytest.mark.parametrize(("num_requests", "num_at_once"), [(6, 3), (16, AT_ONCE), (100, 20)])
def test_a_lost_workers_requests_are_computed_again_a_few_or_a_fifth_of_all_at_a_time(
    num_requests: int, num_at_once: int
) -> None:
    async def scenario(clock: ManualClock) -> None:
        router, clients = many(clock, ["p0", "d0", "d1"], num_requests)
        lost = on(clients, "d0")
        router.workers["d0"].lose()
        assert len(router.workers["p0"].take_admits()) == num_at_once
        assert placed(lost) == lost[:num_at_once], "who came first goes on first"
        assert router.dispatcher.num_queued == len(lost) - num_at_once
        for number, client in enumerate(lost, start=1):
            compute(client)
            assert placed(lost) == lost[: number + num_at_once], "each one that is computed makes way for the next"
        assert router.dispatcher.counters.retried == {"WORKER_LOST": len(lost)}
        for client in clients:
            finish(client)
        router.check_idle()

    run(scenario)


def test_others_are_served_while_retries_wait() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, clients = many(clock, ["p0", "d0", "d1"], 16)
        router.workers["d0"].lose()
        router.workers["p0"].take()
        innocent = router.submit()
        assert [admit.key.request_id for admit in router.workers["p0"].take_admits()] == [innocent.request_id]
        for client in [*on(clients, "d0"), innocent]:
            router.dispatcher.cancel(client.request_id, "by the test")
        for client in on(clients, "d1"):
            router.dispatcher.cancel(client.request_id, "by the test")
        router.check_idle()

    run(scenario)


def test_retries_wait_while_prompts_take_half_of_the_time_to_a_first_token() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, clients = many(clock, ["p0", "d0", "d1"], 100)
        cost = worker_pb2.StepCost(fixed_s=0.001, prompt_token_s=0.01)
        router.workers["p0"].emit(worker_pb2.Event(stats=worker_pb2.WorkerStats(step_cost=cost)))
        router.workers["d0"].lose()
        # Six tokens each, 60 ms: a fifth one is placed behind 240 ms, a sixth one would be behind 300 of 500.
        assert len(router.workers["p0"].take_admits()) == AT_ONCE + 1
        for client in clients:
            router.dispatcher.cancel(client.request_id, "by the test")
        router.check_idle()

    run(scenario)


def test_waiting_for_the_budget_is_no_reason_to_fail() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, clients = many(clock, ["p0", "d0", "d1"], 16)
        lost = on(clients, "d0")
        router.workers["d0"].lose()
        for _ in range(3):
            await clock.advance(QUEUE_TIMEOUT_S - 0.1)
        assert router.dispatcher.num_queued == len(lost) - AT_ONCE
        for client in lost:
            compute(client)
        for client in clients:
            finish(client)
        assert router.dispatcher.counters.failed == 0
        router.check_idle()

    run(scenario)


def test_those_that_wait_for_the_budget_go_on_without_a_prefill_worker() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, _ = many(clock, ["p0", "d0"], 0)
        clients = submit(router, 8)
        router.workers["d0"].take()
        router.workers["p0"].lose()
        assert len(router.workers["d0"].take_admits()) == AT_ONCE and not router.dispatcher.fleet.can_serve
        for client in clients:
            finish(client)
        router.check_idle()

    run(scenario)


def test_a_stalled_worker_keeps_those_that_would_wait_elsewhere() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, clients = many(clock, ["p0", "d0", "d1"], 16)
        residents = on(clients, "d0")
        recovery = router.dispatcher._recovery
        recovery.on_worker_stalled(router.workers["d0"])
        recovery.on_worker_stalled(router.workers["d0"])
        assert len(on(clients, "d0")) == len(residents) - AT_ONCE and router.dispatcher.num_queued == 0
        for client in residents:
            if client not in on(clients, "d0"):
                compute(client)
        recovery.on_worker_stalled(router.workers["d0"])
        assert not on(clients, "d0")
        for client in clients:
            router.dispatcher.cancel(client.request_id, "by the test")
        router.check_idle()

    run(scenario)


def test_a_failed_hand_off_is_tried_again_at_once_in_a_quiet_cluster_and_knows_what_was_tried_in_a_busy_one() -> None:
    async def scenario(clock: ManualClock) -> None:
        router, _ = many(clock, ["p0", "p1", "d0"], 0)
        clients = submit(router, 16)
        for worker in router.workers.values():
            worker.take()
        through_p0 = [client for client in clients if client.live.attempt.placement.prefill_id == "p0"]
        for client in through_p0:
            router.workers["p0"].emit(failed(client.live.key.to_proto(), worker_pb2.Failed.REASON_TRANSFER_FAILED))
        assert len(router.workers["p1"].take_admits()) == AT_ONCE
        for number, client in enumerate(through_p0):
            assert client.live.attempt.placement.prefill_id == "p1", number
            compute(client)
        for client in clients:
            router.dispatcher.cancel(client.request_id, "by the test")
        assert router.dispatcher.context.loads["p1"] == NOTHING
        router.check_idle()

    run(scenario)
