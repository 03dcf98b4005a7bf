"""Requests that may have ended a worker: they run apart, what ends two workers fails, and everybody else goes on."""

from __future__ import annotations

from collections.abc import Iterable

from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, phase
from router_harness import ids
from wired_router import QUEUE_TIMEOUT_S, Client, ManualClock, WiredRouter, WiredWorker, known, logged, run

from cluster.crash_record import Crash
from cluster.errors import FailedPrecondition, Unavailable
from cluster.lifecycle import RequestState
from cluster.pb import worker_pb2
from router.routing.retry import CLEARED_AFTER_TOKENS, MAX_CRASHES_IN_ALL, RetryState

LONG = 64


def decoding(router: WiredRouter, text: str = "ab") -> Client:
    """A request that p0 has handed to d0, which has sent `text` of its tokens."""
    client = router.submit(max_output_tokens=LONG)
    key, p0, d0 = client.live.key.to_proto(), router.workers["p0"], router.workers["d0"]
    p0.take(), d0.take()
    p0.emit(phase(key, PREFILL), logged(key, 0, text[0]), phase(key, TRANSFER))
    d0.emit(phase(key, DECODE), *[logged(key, i, letter) for i, letter in enumerate(text[1:], 1)])
    client.take()
    return client


def crash(worker: WiredWorker, clients: Iterable[Client]) -> None:
    """It ends by itself in a step with these."""
    worker.crash = Crash(frozenset(client.request_id for client in clients), "Fatal Python error: Segmentation fault")
    worker.lose()


def send(worker: WiredWorker, client: Client, text: str) -> None:
    """The next tokens of a request, from a worker that prefilled what was known."""
    key, first = client.live.key.to_proto(), client.live.num_tokens
    worker.emit(phase(key, DECODE), *[logged(key, first + i, letter) for i, letter in enumerate(text)])
    client.take()


def admitted(worker: WiredWorker) -> list[str]:
    return [admit.key.request_id for admit in worker.take_admits()]


def test_a_request_that_ends_two_workers_fails_and_takes_no_third() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client = decoding(router)
        crash(router.workers["d0"], [client])
        p0, d1 = router.workers["p0"], router.workers["d1"]
        (admit,) = d1.take_admits()
        assert not p0.take_admits(), "it may end one worker, not two"
        assert admit.role == worker_pb2.ROLE_DECODE and not admit.expect_handoff and known(admit) == {0: ids("ab")}
        crash(d1, [client])
        assert isinstance(client.live.error, FailedPrecondition)
        assert "2 workers ended by themselves while they computed this request" in client.live.error.message
        for worker_id in ("d0", "d1"):
            router.workers[worker_id].open()
        assert not any(worker.take_admits() for worker in router.workers.values())
        router.check_idle()

    run(scenario)


def test_it_has_killed_one_worker_for_each_token_and_does_not_any_more() -> None:
    """Prefill always sends a token, so that the attempts by progress never came to an end."""

    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, d0, num_lost = decoding(router), router.workers["d0"], 0
        while not client.live.is_over:
            crash(d0, [client])
            num_lost += 1
            d0.open()
            if admitted(d0):
                send(d0, client, "x")
        assert num_lost == 2 and isinstance(client.live.error, FailedPrecondition)

    run(scenario)


def test_workers_that_were_killed_from_outside_do_not_count() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, d0 = decoding(router), router.workers["d0"]
        for _ in range(10):
            d0.lose()
            d0.open()
            for worker in router.workers.values():
                if admitted(worker):
                    send(worker, client, "x")
        assert not client.live.is_over and not client.live.retry.num_crashes_in_all

    run(scenario)


def test_a_request_that_waits_on_workers_which_others_end_is_not_failed_for_that() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        cause, waiting = router.submit(max_output_tokens=LONG), router.submit(max_output_tokens=LONG)
        d0 = router.workers["d0"]
        for _ in range(8):
            crash(d0, [cause])
            d0.open()
        assert isinstance(cause.live.error, FailedPrecondition)
        assert not waiting.live.is_over and not waiting.live.retry.is_suspect

    run(scenario)


def test_suspects_run_one_after_another_and_only_the_cause_fails() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        clients = [decoding(router, "ab" * (3 - i)) for i in range(3)]
        innocent, cause, other = clients
        p0, d0 = router.workers["p0"], router.workers["d0"]
        crash(d0, clients)
        assert not admitted(p0), "a prefill worker that does both is not for suspects"
        d0.open()
        assert admitted(d0) == [innocent.request_id], "the one with the most tokens first"
        new = router.submit(max_output_tokens=LONG)
        assert not admitted(d0) and admitted(p0) == [new.request_id], "nobody unknown runs beside a suspect"
        send(d0, innocent, "x" * (CLEARED_AFTER_TOKENS - 1))
        assert not admitted(d0)
        send(d0, innocent, "x")
        assert admitted(d0) == [cause.request_id]
        crash(d0, [innocent, cause])
        assert isinstance(cause.live.error, FailedPrecondition)
        assert not innocent.live.retry.is_suspect and not innocent.live.is_over
        d0.open()
        assert admitted(d0) == [other.request_id]
        send(d0, other, "x" * CLEARED_AFTER_TOKENS)
        assert d0.can_take_work, "none is a suspect any more"
        for client in (innocent, other, new):
            router.dispatcher.cancel(client.request_id, "the end")
        router.check_idle()

    run(scenario)


def test_a_worker_with_other_requests_is_emptied_before_a_suspect_runs_there() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client, d0 = decoding(router), router.workers["d0"]
        crash(d0, [client])
        router.name(["p0", "d1"])
        d1 = router.workers["d1"]
        router.workers["p0"].lose()
        assert isinstance(d1, WiredWorker)
        client.live.retry.num_crashes = 0  # taken out of the way, so that others come first
        suspect = router.dispatcher.waiting.remove(client.request_id)
        assert suspect is not None
        d1.open()
        router.workers["p0"].open()
        resident = router.submit(max_output_tokens=1)
        assert admitted(d1) == [resident.request_id]
        suspect.retry.num_crashes = 1
        router.dispatcher.waiting.requeue(suspect)
        router.dispatcher._pump()
        assert not admitted(d1) and not d1.can_take_work, "reserved"
        key = resident.live.key.to_proto()
        d1.emit(phase(key, DECODE), logged(key, 0, "a", finish_reason=LENGTH))
        assert admitted(d1) == [client.request_id]
        router.dispatcher.cancel(client.request_id, "the end")
        assert d1.can_take_work

    run(scenario)


def test_a_suspect_for_which_no_worker_is_free_in_time_fails_by_name() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0"])
        client = decoding(router)
        crash(router.workers["d0"], [client])
        await clock.advance(QUEUE_TIMEOUT_S + 1)
        assert isinstance(client.live.error, Unavailable)
        assert "has to run apart from others" in client.live.error.message

    run(scenario)


def test_a_cancelled_suspect_leaves_nothing_reserved() -> None:
    async def scenario(clock: ManualClock) -> None:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client = decoding(router)
        crash(router.workers["d0"], [client])
        d1 = router.workers["d1"]
        assert admitted(d1) == [client.request_id] and not d1.can_take_work
        router.dispatcher.cancel(client.request_id, "the client")
        assert d1.can_take_work and client.live.lifecycle.state is RequestState.CANCELLED
        router.check_idle()

    run(scenario)


def test_a_request_that_is_cleared_again_and_again_does_not_go_on_for_ever() -> None:
    state, num_tokens = RetryState(), 0
    for _ in range(MAX_CRASHES_IN_ALL - 1):
        assert state.on_crash(num_tokens, is_only_suspect=True)
        num_tokens += CLEARED_AFTER_TOKENS
        assert state.clears(num_tokens) and not state.is_suspect
    assert not state.on_crash(num_tokens, is_only_suspect=True)
