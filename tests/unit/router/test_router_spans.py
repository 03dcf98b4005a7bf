"""A request's spans: its attempts and phases in their order, at the instants that happened, whatever happened."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fake_worker import DECODE, LENGTH, PREFILL, TRANSFER, failed, phase
from wired_router import Client, ManualClock, WiredRouter, admit_of, logged, run

from cluster.errors import InvalidRequest
from cluster.pb import worker_pb2
from router.observe.tracing import Origin, Span, span_of_refusal, spans_of

BEGUN_S = 1e9
"""The wall clock at ManualClock's 1000."""
ORIGIN = Origin("text_completion", True, 1000.0, BEGUN_S)


def seconds(span: Span) -> tuple[str, float, float]:
    """Its name, and from when to when after the call."""
    return span.name, *(round(ns / 1e9 - BEGUN_S, 6) for ns in (span.begin_ns, span.end_ns))


def phases(span: Span) -> list[tuple[str, float, float]]:
    return [seconds(child) for child in span.children]


def walk(span: Span) -> Iterator[Span]:
    yield span
    for child in span.children:
        yield from walk(child)


def check_order(root: Span) -> None:
    """Children lie in their parent, one after the other."""
    for span in walk(root):
        assert span.begin_ns <= span.end_ns
        at = span.begin_ns
        for child in span.children:
            assert at <= child.begin_ns and child.end_ns <= span.end_ns, (span, child)
            at = child.end_ns


def spans(client: Client) -> Span:
    root = spans_of(client.live, ORIGIN)
    check_order(root)
    return root


def test_a_request_that_is_handed_off_is_one_attempt_of_four_phases() -> None:
    async def scenario(clock: ManualClock) -> Client:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit(max_output_tokens=3)
        p0, d0 = router.workers["p0"], router.workers["d0"]
        key = admit_of(p0).key
        await clock.advance(0.1)
        p0.emit(phase(key, PREFILL, num_cached_tokens=2))
        await clock.advance(0.2)
        p0.emit(logged(key, 0, "a"), phase(key, TRANSFER))
        await clock.advance(0.3)
        d0.emit(phase(key, DECODE))
        await clock.advance(0.4)
        d0.emit(logged(key, 1, "b"), logged(key, 2, "c", finish_reason=LENGTH))
        return client

    root = spans(run(scenario))
    assert seconds(root) == ("text_completion m", 0.0, 1.0)
    assert not root.error
    (attempt,) = root.children
    assert seconds(attempt) == ("attempt", 0.0, 1.0)
    assert phases(attempt) == [
        ("queue", 0.0, 0.1),
        ("prefill", 0.1, 0.3),
        ("hand-off", 0.3, 0.6),
        ("decode", 0.6, 1.0),
    ]
    assert [(event.name, event.time_ns / 1e9 - BEGUN_S) for event in root.events] == [
        ("first_token", pytest.approx(0.3, abs=1e-6))
    ]
    assert [event.name for event in attempt.events] == ["placed"]
    told = root.attributes
    assert told["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.3)
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    usage = [told[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens", "cache_read.input_tokens")]
    assert usage == [5, 3, 2]
    assert (told["gen_ai.request.model"], told["gen_ai.request.max_tokens"]) == ("m", 3)
    assert (told["baton.outcome"], told["baton.attempts"]) == ("finished", 1)
    placed = attempt.attributes
    assert (placed["baton.prefill_worker"], placed["baton.decode_worker"]) == ("p0", "d0")
    assert placed["baton.placement.kind"] == "disaggregated" and placed["baton.placement.reason"]


def test_a_local_prefill_hands_nothing_over() -> None:
    async def scenario(clock: ManualClock) -> Client:
        router = WiredRouter(clock, ["d0"], needs_prefill=False)
        client = router.submit(max_output_tokens=2)
        d0 = router.workers["d0"]
        key = admit_of(d0).key
        await clock.advance(0.1)
        d0.emit(phase(key, PREFILL))
        await clock.advance(0.1)
        d0.emit(logged(key, 0, "a"), phase(key, DECODE))
        await clock.advance(0.1)
        d0.emit(logged(key, 1, "b", finish_reason=LENGTH))
        return client

    (attempt,) = spans(run(scenario)).children
    assert [name for name, _, _ in phases(attempt)] == ["queue", "prefill", "decode"]
    assert "baton.prefill_worker" not in attempt.attributes


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_replay_is_a_second_attempt_after_one_that_failed(has_begun: bool) -> None:
    async def scenario(clock: ManualClock) -> Client:
        router = WiredRouter(clock, ["p0", "p1", "d0"])
        client = router.submit(max_output_tokens=2)
        p0, p1, d0 = (router.workers[name] for name in ("p0", "p1", "d0"))
        key = admit_of(p0).key
        await clock.advance(0.1)
        if has_begun:
            p0.emit(phase(key, PREFILL))
        await clock.advance(0.1)
        p0.lose()
        again = admit_of(p1).key
        await clock.advance(0.1)
        p1.emit(phase(again, PREFILL))
        await clock.advance(0.1)
        p1.emit(logged(again, 0, "a"), phase(again, TRANSFER))
        await clock.advance(0.1)
        d0.emit(phase(again, DECODE), logged(again, 1, "b", finish_reason=LENGTH))
        return client

    root = spans(run(scenario))
    first, second = root.children
    assert not root.error, "the client saw no more than a pause"
    assert (first.error, first.attributes["error.type"]) == ("WORKER_LOST", "WORKER_LOST")
    begun = [("queue", 0.0, 0.1), ("prefill", 0.1, 0.2)] if has_begun else [("queue", 0.0, 0.2)]
    assert phases(first) == begun
    assert phases(second) == [
        ("queue", 0.2, 0.3),
        ("prefill", 0.3, 0.4),
        ("hand-off", 0.4, 0.5),
        ("decode", 0.5, 0.5),
    ]
    assert (first.attributes["baton.attempt"], second.attributes["baton.attempt"]) == (1, 2)
    assert (first.attributes["baton.prefill_worker"], second.attributes["baton.prefill_worker"]) == ("p0", "p1")
    assert second.attributes["baton.placement.kind"] == "retried"
    assert root.attributes["baton.attempts"] == 2


def test_a_move_is_a_second_attempt_and_no_failure() -> None:
    async def scenario(clock: ManualClock) -> Client:
        router = WiredRouter(clock, ["p0", "d0", "d1"])
        client = router.submit(max_output_tokens=100)
        p0 = router.workers["p0"]
        key = admit_of(p0).key
        p0.emit(phase(key, PREFILL), logged(key, 0, "a"), phase(key, TRANSFER))
        assert client.live.placement is not None
        old = router.workers[client.live.placement.decode_id]
        await clock.advance(0.1)
        old.emit(phase(key, DECODE), logged(key, 1, "b"))
        await clock.advance(0.1)
        router.name(["p0", "d0", "d1"], draining=[old.worker_id])
        assert client.live.key.attempt == 2
        new = router.workers[client.live.placement.decode_id]
        again = client.live.key.to_proto()
        await clock.advance(0.1)
        old.emit(logged(again, 2, "c"), phase(again, TRANSFER))
        new.emit(phase(again, DECODE), logged(again, 3, "d", finish_reason=LENGTH))
        return client

    root = spans(run(scenario))
    first, second = root.children
    assert not root.error and not first.error and not second.error
    assert first.attributes["baton.moved"] == "the worker drains"
    assert second.attributes["baton.placement.kind"] == "moved"
    assert [name for name, _, _ in phases(first)] == ["queue", "prefill", "hand-off", "decode"]
    assert phases(second) == [("hand-off", 0.2, 0.3), ("decode", 0.3, 0.3)]


def test_a_request_that_is_turned_away_in_the_queue_has_waited_and_nothing_else() -> None:
    async def scenario(clock: ManualClock) -> Client:
        router = WiredRouter(clock, ["p0", "d0"])
        router.workers["d0"].lose()
        router.workers["p0"].lose()
        client = router.submit(queue_timeout_s=2)
        await clock.advance(2.0)
        return client

    client = run(scenario)
    root = spans(client)
    assert phases(root) == [("queue", 0.0, 2.0)]
    assert client.live.error is not None and root.error == client.live.error.message
    assert root.attributes["error.type"] == client.live.error.reason
    assert (root.attributes["baton.outcome"], root.attributes["baton.attempts"]) == ("rejected", 0)


def test_a_request_that_fails_blames_its_last_attempt() -> None:
    async def scenario(clock: ManualClock) -> Client:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit()
        key = admit_of(router.workers["p0"]).key
        await clock.advance(0.5)
        router.workers["p0"].emit(failed(key, worker_pb2.Failed.REASON_INVALID))
        return client

    root = spans(run(scenario))
    (attempt,) = root.children
    assert root.attributes["error.type"] == attempt.attributes["error.type"] == "INVALID_REQUEST"
    assert root.error == attempt.error and "p0" in root.error
    assert root.attributes["baton.outcome"] == "failed"


def test_a_client_that_leaves_is_no_error() -> None:
    async def scenario(clock: ManualClock) -> Client:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit()
        key = admit_of(router.workers["p0"]).key
        router.workers["p0"].emit(phase(key, PREFILL))
        await clock.advance(0.5)
        router.dispatcher.cancel(client.request_id, "the client left")
        return client

    root = spans(run(scenario))
    (attempt,) = root.children
    assert not root.error and not attempt.error
    assert "error.type" not in root.attributes
    assert root.attributes["baton.outcome"] == "cancelled"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]


def test_a_trace_of_a_resumed_generation_begins_with_the_call_that_resumed_it() -> None:
    async def scenario(clock: ManualClock) -> Client:
        router = WiredRouter(clock, ["p0", "d0"])
        client = router.submit()
        await clock.advance(5.0)
        router.dispatcher.cancel(client.request_id, "the client left")
        return client

    root = spans_of(run(scenario).live, Origin("chat", True, 1004.0, BEGUN_S + 4))
    check_order(root)
    assert seconds(root)[1:] == (4.0, 5.0)
    assert root.name == "chat m"


def test_a_call_that_led_to_no_request_is_one_span() -> None:
    root = span_of_refusal(InvalidRequest("spec.top_p is 3; use at most 1"), ORIGIN, 1000.25)
    assert seconds(root) == ("text_completion", 0.0, 0.25)
    assert (root.error, root.attributes["error.type"]) == ("spec.top_p is 3; use at most 1", "INVALID_REQUEST")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_children_lie_in_their_parents_one_after_the_other(seed: int) -> None:
    draw = random.Random(seed)

    async def scenario(clock: ManualClock) -> list[Client]:
        router = WiredRouter(clock, ["p0", "p1", "d0", "d1"], max_running_requests=3)
        clients = [router.submit(max_output_tokens=4) for _ in range(6)]
        for _ in range(60):
            await clock.advance(draw.choice([0.0, 0.01, 0.2]))
            live = draw.choice(clients).live
            worker = draw.choice([w for w in router.workers.values() if w.is_ready] or [*router.workers.values()])
            key = live.key.to_proto()
            match draw.choice(["phase"] * 4 + ["token"] * 4 + ["fail", "lose", "open", "cancel"]):
                case "phase":
                    worker.emit(phase(key, draw.choice([PREFILL, TRANSFER, DECODE])))
                case "token" if worker.is_ready:
                    index = live.sequences[0].num_tokens
                    worker.emit(logged(key, index, "a", finish_reason=LENGTH if index == 3 else 0))
                case "fail" if worker.is_ready:
                    worker.emit(failed(key, draw.choice([1, 2, 3, 7])))
                case "lose" if draw.random() < 0.3:
                    worker.lose()
                case "open" if not worker.is_ready:
                    worker.open()
                case "cancel" if draw.random() < 0.2:
                    router.dispatcher.cancel(live.key.request_id, "the client left")
        for client in clients:
            router.dispatcher.cancel(client.request_id, "the test is over")
        return clients

    for client in run(scenario):
        root = spans(client)
        assert len([s for s in root.children if s.name == "attempt"]) == len(client.live.attempts)
        covered = sum(child.end_ns - child.begin_ns for child in root.children)
        assert covered == root.end_ns - root.begin_ns, "some time is in no span"
        for attempt in root.children:
            if attempt.name == "attempt" and attempt.begin_ns < attempt.end_ns:
                assert sum(c.end_ns - c.begin_ns for c in attempt.children) == attempt.end_ns - attempt.begin_ns
