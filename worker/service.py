"""The speaking side of a worker: its gRPC server on an asyncio loop of its own, between routers, peers and the core.

Decides nothing: every message heard is posted to the engine thread, everything told is queued to its stream. Streams
end when their client goes; the core then cancels what they brought.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster import rpc
from cluster.errors import BatonError, FailedPrecondition
from cluster.pb import handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from kv_transfer.layout import KvLayout, check_compatible
from worker.core import Core
from worker.links import Links

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5

EventQueue = asyncio.Queue[list[worker_pb2.Event] | None]
ReceiverQueue = asyncio.Queue[handoff_pb2.ReceiverMessage | None]


class Service(worker_pb2_grpc.WorkerServiceServicer, handoff_pb2_grpc.HandoffServiceServicer):
    """Implements both services and the core's `Speaker`."""

    def __init__(
        self, core: Core, info: worker_pb2.WorkerInfo, layout: KvLayout, store_address: str, chunk_tokens: int
    ):
        self._core = core
        self._info = info
        self._layout = layout
        self._receiver_hello = handoff_pb2.ReceiverHello(
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            layout=layout.to_proto(),
            store_address=store_address,
            chunk_tokens=chunk_tokens,
        )
        sender_hello = handoff_pb2.SenderHello(
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            layout=layout.to_proto(),
            transport=info.transport,
            chunk_tokens=chunk_tokens,
        )
        self._links = Links(
            sender_hello,
            up=lambda peer, hello: core.post(core.carrier.link_up, peer, hello),
            heard=lambda peer, message: core.post(core.carrier.link_heard, message),
            down=lambda peer: core.post(core.carrier.link_down, peer),
        )
        self._sessions: dict[str, EventQueue] = {}
        self._session_names = itertools.count(1)
        self._senders: dict[str, ReceiverQueue] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="speak", daemon=True)

    # Life

    def start(self, host: str, port: int, insecure: bool) -> int:
        """Listens; returns the port. Raises ConfigError when the address cannot be had."""
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(host, port, insecure), self._loop).result()

    def stop(self) -> None:
        """Closes every stream and the server; returns when its thread has ended."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _start(self, host: str, port: int, insecure: bool) -> int:
        limit = rpc.INTERNAL_MESSAGE_BYTES
        self._server, bound = rpc.create_server(host, port, max_message_bytes=limit, insecure=insecure)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self, self._server)
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return bound

    async def _stop(self) -> None:
        for events in self._sessions.values():
            events.put_nowait(None)
        for messages in self._senders.values():
            messages.put_nowait(None)
        await self._links.close_all()
        await self._server.stop(STOP_GRACE_S)

    # Speaker: called on the engine thread

    def events(self, session: str, events: list[worker_pb2.Event]) -> None:
        self._on_loop(self._put, self._sessions, session, events)

    def tell_sender(self, epoch: str, message: handoff_pb2.ReceiverMessage) -> None:
        self._on_loop(self._put, self._senders, epoch, message)

    def tell_receiver(self, peer: str, message: handoff_pb2.SenderMessage) -> None:
        self._on_loop(self._links.tell, peer, message)

    def open_link(self, peer: str, address: str, incarnation: str) -> None:
        self._on_loop(self._links.open, peer, address, incarnation)

    def close_link(self, peer: str) -> None:
        """Closes a link either way: to a decode worker, or from a prefill worker (then `peer` is the pair's epoch)."""
        self._on_loop(self._links.close, peer)
        self._on_loop(self._put, self._senders, peer, None)

    def _on_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker is stopping
            self._loop.call_soon_threadsafe(function, *arguments)

    @staticmethod
    def _put(queues: dict[str, asyncio.Queue[Any]], name: str, item: object) -> None:
        queue = queues.get(name)
        if queue is not None:
            queue.put_nowait(item)

    # Services: called on the loop

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.Command], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.EventBatch]:
        name = f"session-{next(self._session_names)}"
        queue = self._sessions[name] = asyncio.Queue()
        self._core.post(self._core.session_opened, name, self._info)
        reader = asyncio.create_task(self._read_commands(name, request_iterator))
        try:
            while (events := await queue.get()) is not None:
                while not queue.empty() and (more := queue.get_nowait()) is not None:
                    events = events + more
                yield worker_pb2.EventBatch(events=events)
        finally:
            reader.cancel()
            del self._sessions[name]
            self._core.post(self._core.session_closed, name)

    async def _read_commands(self, name: str, commands: AsyncIterator[worker_pb2.Command]) -> None:
        async for command in commands:
            self._core.post(self._core.command, name, command)

    async def Connect(
        self, request_iterator: AsyncIterator[handoff_pb2.SenderMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[handoff_pb2.ReceiverMessage]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello":
            await rpc.abort(context, BatonError("the first message of a hand-off stream must be hello"))
        try:
            self._check(first.hello)
        except BatonError as error:
            await rpc.abort(context, error)
        epoch = f"{first.hello.worker_id}-{self._info.worker_id}-{uuid.uuid4().hex[:12]}"
        queue = self._senders[epoch] = asyncio.Queue()
        hello = handoff_pb2.ReceiverHello()
        hello.CopyFrom(self._receiver_hello)
        hello.pair_epoch = epoch
        self._core.post(self._core.carrier.peer_up, epoch, hello.store_address, first.hello)
        reader = asyncio.create_task(self._read_sender(epoch, request_iterator, queue))
        try:
            yield handoff_pb2.ReceiverMessage(hello=hello)
            while (message := await queue.get()) is not None:
                yield message
        finally:
            reader.cancel()
            del self._senders[epoch]
            self._core.post(self._core.carrier.peer_down, epoch)

    def _check(self, hello: handoff_pb2.SenderHello) -> None:
        check_compatible(KvLayout.from_proto(hello.layout), self._layout)
        if hello.transport != self._info.transport:
            both = f"{hello.worker_id} uses {hello.transport}, {self._info.worker_id} uses {self._info.transport}"
            raise FailedPrecondition(f"the transports differ: {both}; set the same transfer.transport on both")

    async def _read_sender(
        self, epoch: str, messages: AsyncIterator[handoff_pb2.SenderMessage], queue: ReceiverQueue
    ) -> None:
        async for message in messages:
            self._core.post(self._core.carrier.peer_heard, epoch, message)
        queue.put_nowait(None)
