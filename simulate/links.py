"""Sessions and hand-off streams of the fast fidelity: messages that arrive after the latency, and nothing else.

The router's client of a worker, the worker's core and both hand-off connections are the real ones; gRPC calls, their
tasks and signs of life are not simulated, as no message is ever lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.pb import worker_pb2
from cluster.pb.handoff_pb2 import ReceiverMessage, SenderMessage
from router.routing.worker_client import READY, WorkerClient
from simulate.network import CONNECT_AGAIN_S, Network
from worker.core import Core
from worker.handoff_connection import HandoffConnection, HandoffMessage
from worker.handoff_streams import HandoffStreams

BEAT_S = 0.5
"""A router hears of each worker as often."""


@dataclass(frozen=True)
class DirectService:
    """The part of a worker that others reach at its address."""

    core: Core
    streams: DirectStreams
    info: worker_pb2.WorkerInfo


@dataclass(frozen=True)
class _Batch:
    """Events as they were gathered (`worker_pb2.EventBatch`)."""

    events: Sequence[worker_pb2.Event]


class DirectClient(WorkerClient):
    """A session without a stream."""

    def __init__(self, network: Network, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._network = network
        self._service: DirectService | None = None
        self._is_closed = False

    def start(self) -> None:
        """Calls the worker, again and again until it is there."""
        self._network.loop.call_later(self._network.latency_s, self._call)

    async def close(self) -> None:
        self._is_closed = True
        if self._service is not None:
            self._service.core.inbox.post(self._service.core.session_closed, self._hear)
        self._lose()

    def send(self, command: worker_pb2.Command) -> None:
        if self.is_ready and self._service is not None:
            core, loop = self._service.core, self._network.loop
            loop.call_later(self._network.latency_s, core.inbox.post, core.command, self._hear, command)

    def beat(self) -> None:
        """A sign of life of a worker that has nothing to say."""
        if self.state == READY:
            self._callbacks.on_events(self, ())

    def _call(self) -> None:
        host = self._network.hosts.get(self.address)
        if self._is_closed:
            return
        if host is None or not isinstance(host.servicer, DirectService):
            self._network.loop.call_later(CONNECT_AGAIN_S, self._call)
            return
        service = self._service = host.servicer
        service.core.inbox.post(service.core.session_opened, self._hear, service.info)

    def _hear(self, events: list[worker_pb2.Event]) -> None:
        """`worker.reporter.RouterSession`."""
        self._network.loop.call_later(self._network.latency_s, self._take, events)

    def _take(self, events: list[worker_pb2.Event]) -> None:
        if not self._is_closed:
            self._read(_Batch(events))  # type: ignore[arg-type]  # its events are all that is read


def beat(network: Network, clients: Iterable[WorkerClient]) -> None:
    """Signs of life of all workers, again and again."""
    for client in clients:
        assert isinstance(client, DirectClient)
        client.beat()
    network.loop.call_later(BEAT_S, beat, network, clients)


class DirectStreams(HandoffStreams):
    """Streams without calls, each a `_Link`."""

    def __init__(self, network: Network, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.network = network

    def tick(self, elapsed_s: float) -> None:
        """Nobody falls silent."""

    def dial(self, connection: HandoffConnection, address: str, incarnation: str) -> None:
        link = _Link(self, connection, address)
        connection.enqueue = link.to_receiver
        connection.enqueue(SenderMessage(hello=self._handshake.hello(connection.epoch, connection.last)))

    def answer(self, core: Core, hello: SenderMessage) -> tuple[HandoffConnection, ReceiverMessage]:
        """The connection of a prefill worker that calls, and what it is answered."""
        agreed = self._handshake.answer(hello.hello)
        connection = core.handoffs.accept(hello.hello, agreed)
        connection.accept(hello.number)
        connection.greeted()
        return connection, ReceiverMessage(hello=agreed)

    def greet(self, connection: HandoffConnection, answer: ReceiverMessage) -> None:
        """A decode worker has answered."""
        connection.accept(answer.number)
        self._handshake.check(answer.hello)
        connection.greeted(answer.hello)


class _Link:
    """The messages that are on their way between both ends of one connection."""

    def __init__(self, streams: DirectStreams, sender: HandoffConnection, address: str) -> None:
        self._streams = streams
        self._network = streams.network
        self._sender = sender
        self._address = address
        self._receiver: HandoffConnection | None = None
        self._is_greeted = False

    def to_receiver(self, message: HandoffMessage | None) -> None:
        """None: the sender has ended the stream."""
        if message is not None:
            self._sender.stamp(message)
        self._network.loop.call_later(self._network.latency_s, self._at_receiver, message)

    def to_sender(self, message: HandoffMessage | None) -> None:
        assert self._receiver is not None
        if message is not None:
            self._receiver.stamp(message)
        self._network.loop.call_later(self._network.latency_s, self._at_sender, message)

    def _at_receiver(self, message: HandoffMessage | None) -> None:
        if self._receiver is not None:
            _deliver(self._receiver, message)
            return
        host = self._network.hosts.get(self._address)
        if message is None or host is None or not isinstance(host.servicer, DirectService):
            self._sender.end(f"nothing listens at {self._address}")
            return
        service = host.servicer
        assert isinstance(message, SenderMessage)
        self._receiver, answer = service.streams.answer(service.core, message)
        self._receiver.enqueue = self.to_sender
        self._receiver.enqueue(answer)

    def _at_sender(self, message: HandoffMessage | None) -> None:
        if self._is_greeted or message is None:
            _deliver(self._sender, message)
            return
        assert isinstance(message, ReceiverMessage)
        self._is_greeted = True
        self._streams.greet(self._sender, message)


def _deliver(connection: HandoffConnection, message: HandoffMessage | None) -> None:
    if message is None:
        connection.end("the other worker closed the stream")
    else:
        connection.receive(message)
