"""A worker's gRPC server on an asyncio loop of its own (the speaking loop), between routers, peers and engine.

Decides nothing: every message received is posted to the engine thread, everything sent is queued to its stream. Streams
end when their client goes or can no longer be read; the core then cancels what they brought. The loop sends heartbeats
whatever the engine does, finds silent peers, and has the engine thread look at its deadlines. A worker is as alive as
its ranks: while one of them is silent, every stream is closed and none is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster import rpc
from cluster.errors import BatonError, NotFound, Unavailable
from cluster.failure_detector import TICKS_PER_HEARTBEAT, FailureTimeouts
from cluster.pb import admin_pb2, admin_pb2_grpc, handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from cluster.protocol import inside_gates
from cluster.tls import InternalTls
from worker.core import Core
from worker.handoff_streams import HandoffStreams

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_GRACE_S = 0.5
MOST_EVENTS = 512
"""Events that one message to a router carries at most; an event is 70 KB at most, and gRPC takes far more."""


class SpeakingLoop:
    """An asyncio loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="speak", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """From any thread: calls `function(*arguments)` on the loop; nothing is called once it is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker is stopping
            self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """From another thread: the result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `last`, ends the loop and its thread."""
        if self._thread.is_alive():
            self.run(last())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()


class _Session:
    """Events that wait to be sent to one router, and for how long nothing was sent."""

    def __init__(self, loop: SpeakingLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[list[worker_pb2.Event] | None] = asyncio.Queue()
        self._quiet_s = 0.0
        self._has_spoken = False
        self._left: list[worker_pb2.Event] = []
        """Events taken from the queue that did not fit in the last message."""

    def send(self, events: list[worker_pb2.Event]) -> None:
        """From any thread (`worker.reporter.RouterSession`)."""
        self._loop.post(self.put, events)

    def put(self, events: list[worker_pb2.Event] | None) -> None:
        """None: the session ends."""
        self._queue.put_nowait(events)

    def tick(self, elapsed_s: float, timing: FailureTimeouts) -> None:
        """Sends a sign of life where nothing else was sent, but not before the worker's own description."""
        self._quiet_s += elapsed_s
        if self._has_spoken and self._quiet_s + timing.tick_s > timing.heartbeat_s:
            self.put([])

    async def next(self) -> worker_pb2.EventBatch | None:
        """All that waits, or as much of it as one message carries; None at the end."""
        events = self._left or await self._queue.get()
        while events is not None and len(events) < MOST_EVENTS and not self._queue.empty():
            more = self._queue.get_nowait()
            if more is None:
                self.put(None)
                break
            events = events + more
        self._has_spoken, self._quiet_s = True, 0.0
        if events is None:
            return None
        self._left = events[MOST_EVENTS:]
        return worker_pb2.EventBatch(events=events[:MOST_EVENTS])


class WorkerService(
    worker_pb2_grpc.WorkerServiceServicer,
    handoff_pb2_grpc.HandoffServiceServicer,
    admin_pb2_grpc.WorkerControlServiceServicer,
):
    """Implements the services of a worker."""

    def __init__(
        self,
        loop: SpeakingLoop,
        core: Core,
        streams: HandoffStreams,
        info: worker_pb2.WorkerInfo,
        timing: FailureTimeouts,
        tick_ranks: Callable[[float], str] = lambda elapsed_s: "",
        tls: InternalTls | None = None,
        token: str = "",
    ) -> None:
        """`tick_ranks` gets the time that has passed, and returns why the ranks cannot go on now, or nothing.
        `tls`: with the router and with other workers; `token`: what they must show, if anything."""
        self._loop = loop
        self._tls = tls
        self._token = token
        self._core = core
        self._post = core.inbox.post
        self._streams = streams
        self._tick_ranks = tick_ranks
        self._frozen = ""
        """Why the ranks cannot go on; empty while they can."""
        self._info = info
        self._timing = timing
        self._sessions: dict[str, _Session] = {}
        self._session_names = itertools.count(1)

    # Life

    def start(self, host: str, port: int, insecure: bool) -> int:
        """Listens; returns the port. Raises ConfigError when the address cannot be had."""
        self._loop.start()
        return self._loop.run(self._start(host, port, insecure))

    def stop(self) -> None:
        """Closes every stream and the server; returns when its thread has ended."""
        self._loop.stop(self._stop)

    async def _start(self, host: str, port: int, insecure: bool) -> int:
        limit = rpc.INTERNAL_MESSAGE_BYTES
        tls = None if self._tls is None else self._tls.server
        open_service = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        greeting = handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"].full_name
        gates = inside_gates(self._token, f"worker {self._info.worker_id}", (open_service,), (greeting,))
        self._server, bound = rpc.create_server(
            host, port, max_message_bytes=limit, insecure=insecure, tls=tls, interceptors=gates
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_WorkerControlServiceServicer_to_server(self, self._server)
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        self._heartbeats = asyncio.create_task(self.heartbeat(), name="heartbeat")
        return bound

    async def _stop(self) -> None:
        if hasattr(self, "_heartbeats"):
            self._heartbeats.cancel()
        for session in self._sessions.values():
            session.put(None)
        await self._streams.close()
        await self._server.stop(STOP_GRACE_S)

    async def heartbeat(self) -> None:
        """Until it is cancelled: signs of life, a look at who is silent, deadlines. `start` runs it."""
        clock = self._loop.loop.time
        before = clock()
        for number in itertools.count(1):
            await asyncio.sleep(self._timing.tick_s)
            now = clock()
            elapsed_s, before = now - before, now
            self._look_at_ranks(elapsed_s)
            self._streams.tick(elapsed_s)
            for session in self._sessions.values():
                session.tick(elapsed_s, self._timing)
            if number % TICKS_PER_HEARTBEAT == 0:
                self._post(self._core.handoffs.tick)

    def _look_at_ranks(self, elapsed_s: float) -> None:
        why = self._tick_ranks(elapsed_s)
        if why and not self._frozen:
            logger.error("%s: nobody is served until it answers again", why)
            for session in self._sessions.values():
                session.put(None)
            self._streams.end_all(why)
        elif self._frozen and not why:
            logger.warning("every tensor-parallel rank answers again")
        self._frozen = why

    async def _refuse_if_frozen(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._frozen:
            await rpc.abort(context, Unavailable(self._frozen))

    # Services: called on the loop

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.Command], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.EventBatch]:
        await self._refuse_if_frozen(context)
        name = f"session-{next(self._session_names)}"
        session = self._sessions[name] = _Session(self._loop)
        send = session.send
        self._post(self._core.session_opened, send, self._info)
        reader = asyncio.create_task(self._read_commands(session, request_iterator))
        try:
            while (batch := await session.next()) is not None:
                yield batch
        finally:
            reader.cancel()
            del self._sessions[name]
            self._post(self._core.session_closed, send)

    async def _read_commands(self, session: _Session, commands: AsyncIterator[worker_pb2.Command]) -> None:
        """Ends the session when no more can be read of it: signs of life would keep its router waiting."""
        send = session.send
        try:
            async for command in commands:
                self._post(self._core.command, send, command)
        except Exception:  # whatever gRPC makes of bytes that are no command
            logger.exception("the commands of a router cannot be read any more: its session ends")
            session.put(None)

    async def Connect(
        self,
        request_iterator: AsyncIterator[handoff_pb2.SenderMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[handoff_pb2.ReceiverMessage]:
        await self._refuse_if_frozen(context)
        async for message in self._streams.serve(request_iterator, context, self._core.handoffs.accept):
            yield message

    async def FlushPrefixCache(
        self, request: admin_pb2.FlushPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.FlushPrefixCacheResponse:
        flushed: Future[tuple[int, int, str]] = Future()

        def work() -> None:
            self._core.flush_cache(lambda *found: _complete(flushed, lambda: found))

        await self._on_engine_thread(request.worker_id, context, work)
        num_blocks, num_stored, problem = await asyncio.wrap_future(flushed)
        if problem:
            await rpc.abort(context, Unavailable(problem))
        return admin_pb2.FlushPrefixCacheResponse(num_blocks=num_blocks, num_stored_blocks=num_stored)

    async def ListSessions(
        self, request: admin_pb2.ListSessionsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ListSessionsResponse:
        return await self._on_engine_thread(request.worker_id, context, partial(self._core.kept_sessions, request))

    async def EndSession(
        self, request: admin_pb2.EndSessionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.EndSessionResponse:
        work = partial(self._core.end_session, request)
        return admin_pb2.EndSessionResponse(num_ended=await self._on_engine_thread(request.worker_id, context, work))

    async def _on_engine_thread(
        self, worker_id: str, context: grpc.aio.ServicerContext[Any, Any], work: Callable[[], T]
    ) -> T:
        """The result of `work`, done by the engine thread between two turns, for a method of WorkerControlService."""
        await self._refuse_if_frozen(context)
        if worker_id != self._info.worker_id:
            await rpc.abort(context, NotFound(f"this is worker {self._info.worker_id}, not {worker_id!r}"))
        result: Future[T] = Future()
        self._post(_complete, result, work)
        try:
            return await asyncio.wrap_future(result)
        except BatonError as error:
            failure = error
        await rpc.abort(context, failure)


def _complete(result: Future[T], work: Callable[[], T]) -> None:
    """Sets the result of `work`, which is not done if nobody waits for it any more. Never raises."""
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)
