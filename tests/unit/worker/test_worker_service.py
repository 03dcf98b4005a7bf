"""The speaking side towards routers: who speaks first, what silence looks like, and how a session ends."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from connection_harness import SOON_S, handshake
from waiting import until

from cluster import rpc
from cluster.failure_detector import FailureTimeouts
from cluster.pb import admin_pb2, admin_pb2_grpc, handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from cluster.protocol import HEADER
from engine.kv.errors import BlockAccountingError
from worker.handoff_streams import HandoffStreams
from worker.service import SpeakingLoop, WorkerService

TIMING = FailureTimeouts(heartbeat_s=0.1, suspect_after_s=20.0, dead_after_s=60.0)
INFO = worker_pb2.WorkerInfo(worker_id="d")


class FakeCore:
    """Notes what is posted; it has every handler."""

    def __init__(self) -> None:
        self.posted: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.inbox = self.handoffs = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return name

    def post(self, handler: Any, *arguments: Any) -> None:
        self.posted.put((handler, arguments))

    def expect(self, name: str) -> tuple[Any, ...]:
        """The next thing posted, but for ticks, which must be this."""
        while True:
            handler, arguments = self.posted.get(timeout=SOON_S)
            if handler == name:
                return arguments
            assert handler == "tick", f"{handler} was posted instead of {name}"

    def next_callable(self) -> tuple[Any, tuple[Any, ...]]:
        """The next posted call that is no handler of the core's own."""
        while True:
            handler, arguments = self.posted.get(timeout=SOON_S)
            if callable(handler):
                return handler, arguments


class Router:
    """One session of a router."""

    def __init__(self, address: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.address = address
        self.channel = rpc.create_blocking_channel(address)
        self.commands: queue.SimpleQueue[worker_pb2.Command | None] = queue.SimpleQueue()
        stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.batches = stub.Session(iter(self.commands.get, None), timeout=SOON_S, metadata=metadata)

    def close(self) -> None:
        self.batches.cancel()
        self.commands.put(None)
        self.channel.close()


@pytest.fixture
def served() -> Iterator[tuple[FakeCore, WorkerService, Router]]:
    core = FakeCore()
    streams = HandoffStreams(handshake("d"), TIMING)
    service = WorkerService(SpeakingLoop(), core, streams, INFO, TIMING)  # type: ignore[arg-type]
    port = service.start("127.0.0.1", 0, insecure=False)
    router = Router(f"127.0.0.1:{port}")
    yield core, service, router
    router.close()
    service.stop()


def stats(number: int) -> worker_pb2.Event:
    return worker_pb2.Event(stats=worker_pb2.WorkerStats(num_steps=number))


def test_the_first_batch_is_the_engines_however_long_it_takes(served: tuple[FakeCore, WorkerService, Router]) -> None:
    core, _, router = served
    session, info = core.expect("session_opened")
    assert info == INFO
    for _ in range(3):  # heartbeats pass
        core.expect("tick")
    session([worker_pb2.Event(info=INFO)])
    assert next(router.batches).events[0].info == INFO


def test_a_session_with_nothing_to_tell_says_so(served: tuple[FakeCore, WorkerService, Router]) -> None:
    core, _, router = served
    (session, _) = core.expect("session_opened")
    session([stats(1)])
    assert len(next(router.batches).events) == 1
    asked_at = time.monotonic()
    assert [len(next(router.batches).events) for _ in range(5)] == [0] * 5
    assert time.monotonic() - asked_at > 2.5 * TIMING.heartbeat_s, "it said so without a pause"
    session([stats(2)])
    told = next(batch for batch in router.batches if batch.events)
    assert told.events == [stats(2)]


def test_a_router_of_another_protocol_is_refused_by_name_and_the_others_go_on(
    served: tuple[FakeCore, WorkerService, Router],
) -> None:
    core, _, router = served
    (session, _) = core.expect("session_opened")
    foreign = Router(router.address, ((HEADER, "2-3"),))
    with pytest.raises(grpc.RpcError) as refused:
        next(foreign.batches)
    why = "worker d speaks protocol 1; its caller speaks 2 to 3: upgrade worker d first"
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, why)
    session([stats(1)])
    assert next(router.batches).events == [stats(1)]
    next_one = Router(router.address, ((HEADER, "1-2"),))
    core.expect("session_opened")
    for closed in (foreign, next_one):
        closed.close()


def test_a_hand_off_of_another_protocol_is_refused_by_its_hello(served: tuple[FakeCore, WorkerService, Router]) -> None:
    """A sender that writes at once may not be told why, where the call is refused before its hello is read."""
    _, _, router = served
    stub = handoff_pb2_grpc.HandoffServiceStub(router.channel)
    hello = handshake("p", protocol="2-3").hello("e")
    first = handoff_pb2.SenderMessage(number=1, hello=hello)
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.Connect(iter([first]), timeout=SOON_S, metadata=((HEADER, "2-3"),)))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == "worker p speaks protocol 2 to 3; worker d speaks 1: upgrade worker d first"


def test_the_engine_thread_is_told_of_every_heartbeat(served: tuple[FakeCore, WorkerService, Router]) -> None:
    core, _, _ = served
    core.expect("session_opened")
    for _ in range(3):
        core.expect("tick")


def test_commands_and_the_end_of_a_session_reach_the_engine_thread(
    served: tuple[FakeCore, WorkerService, Router],
) -> None:
    core, _, router = served
    (session, _) = core.expect("session_opened")
    command = worker_pb2.Command(cancel=worker_pb2.Cancel(sequence_index=3))
    router.commands.put(command)
    assert core.expect("command") == (session, command)
    router.close()
    assert core.expect("session_closed") == (session,)


def test_a_session_ends_with_its_reader(
    served: tuple[FakeCore, WorkerService, Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of life from a worker that hears nothing any more would keep its router waiting for ever."""
    core, service, router = served
    (session, _) = core.expect("session_opened")

    def fail(handler: Any, *arguments: Any) -> None:
        if handler == "command":
            raise ValueError("a fault in the reader")
        core.post(handler, *arguments)

    monkeypatch.setattr(service, "_post", fail)
    session([stats(1)])
    router.commands.put(worker_pb2.Command(resync_cache=worker_pb2.ResyncCache()))
    told = [event for batch in router.batches for event in batch.events]
    assert told == [stats(1)], "what was told before is sent"
    assert core.expect("session_closed") == (session,)


def test_a_worker_that_stops_ends_its_sessions_with_all_that_was_told(
    served: tuple[FakeCore, WorkerService, Router],
) -> None:
    core, service, router = served
    (session, _) = core.expect("session_opened")
    for number in range(100):
        session([stats(number)])
    service.stop()
    try:
        told = [event.stats.num_steps for batch in router.batches for event in batch.events]
    except grpc.RpcError as error:
        pytest.fail(f"the session broke: {error.details()}")
    assert told == list(range(100))


def test_the_engine_thread_flushes_the_prefix_cache_and_its_answer_is_the_calls(
    served: tuple[FakeCore, WorkerService, Router],
) -> None:
    core, _, router = served
    core.flush_cache = lambda done: done(3, 2, "")
    control = admin_pb2_grpc.WorkerControlServiceStub(router.channel)
    call = control.FlushPrefixCache.future(admin_pb2.FlushPrefixCacheRequest(worker_id="d"), timeout=SOON_S)
    handler, arguments = core.next_callable()
    assert not call.done()
    handler(*arguments)
    assert (call.result().num_blocks, call.result().num_stored_blocks) == (3, 2)
    later: list[Any] = []
    core.flush_cache = later.append
    call = control.FlushPrefixCache.future(admin_pb2.FlushPrefixCacheRequest(worker_id="d"), timeout=SOON_S)
    handler, arguments = core.next_callable()
    handler(*arguments)
    [done] = later
    assert not call.done(), "the store is not flushed yet"
    done(3, 0, "the store is away")
    assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "the store is away")


def test_what_is_asked_of_another_worker_is_refused(served: tuple[FakeCore, WorkerService, Router]) -> None:
    core, _, router = served
    core.flush_cache = lambda done: done(3, 0, "")
    control = admin_pb2_grpc.WorkerControlServiceStub(router.channel)
    with pytest.raises(grpc.RpcError) as raised:
        control.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(worker_id="p"), timeout=SOON_S)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, "this is worker d, not 'p'")


def test_a_call_that_was_given_up_does_nothing_and_a_failure_is_the_callers(
    served: tuple[FakeCore, WorkerService, Router],
) -> None:
    core, _, router = served
    done: list[int] = []

    def fail(_: Any) -> None:
        done.append(1)
        raise BlockAccountingError("the books are wrong")

    core.flush_cache = fail
    control = admin_pb2_grpc.WorkerControlServiceStub(router.channel)
    request = admin_pb2.FlushPrefixCacheRequest(worker_id="d")
    call = control.FlushPrefixCache.future(request, timeout=SOON_S)
    handler, arguments = core.next_callable()
    call.cancel()
    cancelled = arguments[0]
    until(cancelled.cancelled, "the end of the call", SOON_S, every_s=0.01)
    handler(*arguments)
    assert done == []
    call = control.FlushPrefixCache.future(request, timeout=SOON_S)
    handler, arguments = core.next_callable()
    handler(*arguments)
    assert (call.code(), call.details()) == (grpc.StatusCode.INTERNAL, "the books are wrong")
