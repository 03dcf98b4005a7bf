"""Connections of two workers over real gRPC in one loop, and what each side reported."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from cluster import rpc
from cluster.config.schema import TransferSection
from cluster.failure_detector import FailureTimeouts
from cluster.pb import handoff_pb2, handoff_pb2_grpc
from kv_transfer.layout import KvLayout
from worker.handoff_connection import HandoffConnection, HandoffContext, HandoffMessage
from worker.handoff_metrics import HandoffMetrics
from worker.handoff_streams import HandoffStreams, Handshake

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", tp_size=1, block_size=16, model="m@1")
TIMING = FailureTimeouts(heartbeat_s=0.04, suspect_after_s=0.25, dead_after_s=0.6)
SOON_S = 10.0
REPORTS = {"open_pair": "greeted", "on_message": "received", "_on_suspected": "suspected", "_on_ended": "ended"}
"""What a connection has called on the engine thread, and what the tests call it."""


def handshake(name: str, **changes: Any) -> Handshake:
    base = Handshake(
        worker_id=name,
        incarnation=f"{name}-life",
        layout=LAYOUT,
        store_address="127.0.0.1:1",
        transports=("shm", "gloo"),
        host_id="here",
        transfer=TransferSection(wire_format="native", chunk_tokens=256, num_slots=4),
    )
    own = {name: value for name, value in changes.items() if hasattr(base, name)}
    transfer = {name: value for name, value in changes.items() if name not in own}
    return dataclasses.replace(base, transfer=dataclasses.replace(base.transfer, **transfer), **own)


def abort(reason: str) -> handoff_pb2.Abort:
    return handoff_pb2.Abort(reason=reason)


class End(handoff_pb2_grpc.HandoffServiceServicer):
    """One worker's streams, and what its connections reported."""

    def __init__(self, own: Handshake, timing: FailureTimeouts = TIMING) -> None:
        self.handshake = own
        self.timing = timing
        self.streams = HandoffStreams(own, timing)
        self.connections: dict[str, HandoffConnection] = {}
        nobody: Any = None
        self._context = HandoffContext(self._post, self._call, nobody, timing, HandoffMetrics())
        self.events: list[tuple[str, tuple[Any, ...], float]] = []
        self._changed = asyncio.Event()
        self.is_beating = True
        self.num_ticks = 0

    def open(self, epoch: str, address: str, incarnation: str) -> None:
        """As a sender."""
        connection = self._connection(epoch, peer="d")
        self.streams.dial(connection, address, incarnation)

    def send(self, epoch: str, message: HandoffMessage) -> None:
        self.connections[epoch].send(message)

    def close_connection(self, epoch: str) -> None:
        self.connections[epoch].end("it is not needed any more")

    def _accept(self, hello: handoff_pb2.SenderHello, agreed: handoff_pb2.ReceiverHello) -> HandoffConnection:
        self._note("called", hello.pair_epoch, hello, agreed)
        return self._connection(hello.pair_epoch)

    def _connection(self, epoch: str, peer: str = "") -> HandoffConnection:
        nobody: Any = None
        connection = self.connections[epoch] = HandoffConnection(epoch, nobody, self._context, peer=peer)
        return connection

    def _call(self, function: Any, *arguments: Any) -> None:
        function(*arguments)

    def _post(self, handler: Any, *arguments: Any) -> None:
        if handler.__name__ == "open_pair":
            arguments = arguments[:1]
        self._note(REPORTS[handler.__name__], handler.__self__.epoch, *arguments)

    def _note(self, name: str, *arguments: Any) -> None:
        self.events.append((name, arguments, time.monotonic()))
        self._changed.set()

    def said(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for handler, arguments, _ in self.events if handler == name]

    def heard(self) -> list[str]:
        return [message.abort.reason for _, message in self.said("received")]

    def time_of(self, name: str) -> float:
        return next(when for handler, _, when in self.events if handler == name)

    async def wait_for(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_until_said(self, name: str) -> tuple[Any, ...]:
        await self.wait_for(lambda: self.said(name))
        return self.said(name)[0]

    async def wait_for_tick(self) -> None:
        last = self.num_ticks
        await self.wait_for(lambda: self.num_ticks > last)

    async def serve(self, port: int = 0) -> str:
        self.server, bound = rpc.create_server("127.0.0.1", port)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(self, self.server)
        await self.server.start()
        self.start_beating()
        return f"127.0.0.1:{bound}"

    def start_beating(self) -> None:
        self.heart = asyncio.create_task(self._beat())

    async def close(self) -> None:
        self.heart.cancel()
        await self.streams.close()
        if hasattr(self, "server"):
            await self.server.stop(None)

    async def _beat(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self.timing.tick_s)  # heartbeats and silence are measured in real time
            now = time.monotonic()
            if self.is_beating:
                self.streams.tick(now - before)
                self.num_ticks += 1
                self._changed.set()
            before = now

    async def Connect(
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[handoff_pb2.ReceiverMessage]:
        async for message in self.streams.serve(request_iterator, context, self._accept):
            yield message


@asynccontextmanager
async def two_ends(
    sender: Handshake | None = None, receiver: Handshake | None = None, timing: FailureTimeouts = TIMING
) -> AsyncIterator[tuple[End, End, str]]:
    """A sender, a receiver that serves, and its address."""
    async with AsyncExitStack() as stack:
        p, d = End(sender or handshake("p"), timing), End(receiver or handshake("d"), timing)
        address = await d.serve()
        p.start_beating()
        stack.push_async_callback(d.close)
        stack.push_async_callback(p.close)
        yield p, d, address
