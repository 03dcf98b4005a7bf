"""Sessions and hand-off streams of the fast fidelity: messages that arrive after the latency, and nothing else.

The router's client of a worker, the worker's core and both hand-off connections are the real ones; gRPC calls, their
tasks and signs of life are not simulated, as no message is ever lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, worker_pb2
from cluster.pb.handoff_pb2 import ReceiverMessage, SenderMessage
from engine.kv.cache_events import CacheEvents
from engine.sampling.params import SampledToken, check_finish
from engine.sequence import Sequence as Output
from kv_transfer.actions import Chunk
from router.routing.worker_client import READY, Event, PromptTokens, WorkerClient
from simulate.network import CONNECT_AGAIN_S, Network
from simulate.ranks import Pages
from worker.core import Core
from worker.handoff_connection import HandoffConnection, HandoffMessage
from worker.handoff_metrics import HandoffMetrics
from worker.handoff_streams import HandoffStreams
from worker.reporter import CacheReporter, Reporter, RouterSession, finish_to_proto

BEAT_S = 0.5
"""A router hears of each worker as often."""


@dataclass(frozen=True)
class DirectService:
    """The part of a worker that others reach at its address."""

    core: Core
    streams: DirectStreams
    info: worker_pb2.WorkerInfo


class Tokens:
    """`worker_pb2.Tokens` that are never put into a message; other events that are many have their fields, too."""

    __slots__ = ("finish_reason", "first_token_index", "key", "sequence_index", "stop_token_id", "token_ids")

    def __init__(self, key: RequestKey, sequence_index: int, first_token_index: int, token_ids: list[int]) -> None:
        self.key = key
        self.sequence_index = sequence_index
        self.first_token_index = first_token_index
        self.token_ids = token_ids
        self.finish_reason = generation_pb2.FINISH_REASON_UNSPECIFIED
        self.stop_token_id: int | None = None

    def HasField(self, name: str) -> bool:
        return getattr(self, name) is not None


class _PhaseChanged(NamedTuple):
    """`worker_pb2.PhaseChanged`."""

    key: RequestKey
    phase: generation_pb2.Heartbeat.Phase
    num_cached_tokens: int


class _CacheEvents(NamedTuple):
    """`worker_pb2.CacheEvents`."""

    sequence_number: int
    snapshot: bool
    evicted: list[bytes]
    stored: list[bytes]


class DirectReporter(Reporter):
    """Events that are many are not messages, but what a router's client makes of them."""

    def tell(self, key: RequestKey, kind: str, message: object, *, can_wait: bool = False) -> None:
        """Gathers an event for the session of a request."""
        self.emit(key, (kind, message), can_wait=can_wait)  # type: ignore[arg-type]  # `DirectClient` takes both

    def emit_phase(self, key: RequestKey, phase: generation_pb2.Heartbeat.Phase, num_cached_tokens: int = 0) -> None:
        self.tell(key, "phase", _PhaseChanged(key, phase, num_cached_tokens))

    def emit_tokens(self, sequence: Output, sampled: SampledToken, index: int) -> None:
        """Reports a first token, or one behind those that an earlier attempt reported."""
        request = sequence.request
        tokens = Tokens(request.key, sequence.index, index, [sampled.token_id])
        finish = check_finish(request.params, sequence.output_token_ids or [sampled.token_id])
        if finish is not None:
            finish_to_proto(finish, tokens)  # type: ignore[arg-type]
        self.tell(request.key, "tokens", tokens)


class DirectCacheReporter(CacheReporter):
    """The same for changes of the prefix cache, each in one event."""

    def _send(self, session: RouterSession, events: CacheEvents) -> None:
        message = _CacheEvents(self._next_number(session), events.is_snapshot, events.evicted, events.stored)
        self._reporter.send(session, ("cache", message), can_wait=True)  # type: ignore[arg-type]


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

    def admit(self, command: worker_pb2.Command, prompt: PromptTokens) -> None:
        self._post(command, prompt.token_ids)

    def send(self, command: worker_pb2.Command) -> None:
        self._post(command)

    def _post(self, command: worker_pb2.Command, *prompt: tuple[int, ...]) -> None:
        if self.is_ready and self._service is not None:
            core, loop = self._service.core, self._network.loop
            loop.call_later(self._network.latency_s, core.inbox.post, core.command, self._hear, command, *prompt)

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

    def _take(self, events: list[Any]) -> None:
        if not self._is_closed:
            self._take_in([event if type(event) is tuple else _event_of(event) for event in events])


def _event_of(message: worker_pb2.Event) -> Event:
    kind = str(message.WhichOneof("event"))
    return kind, getattr(message, kind)


def beat(network: Network, clients: Iterable[WorkerClient]) -> None:
    """Signs of life of all workers, again and again."""
    for client in clients:
        assert isinstance(client, DirectClient)
        client.beat()
    network.loop.call_later(BEAT_S, beat, network, clients)


REPORTERS = DirectReporter, DirectCacheReporter
"""Of a worker whose events are no messages."""


class UncountedHandoffs(HandoffMetrics):
    """Nobody reads what is counted of hand-offs here."""

    def moved(self, direction: str, transport: str, num_bytes: int) -> None:
        """Counts nothing."""


class DirectConnection(HandoffConnection):
    """A connection whose messages all arrive: none is numbered or counted, and no answer is overdue."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        """A `_Link` takes its messages as soon as it has been dialled or answered."""
        super().__init__(*arguments, **more)
        self.enqueue = _refuse
        del self._queue  # a large cluster has tens of thousands of connections

    def stamp(self, message: HandoffMessage) -> HandoffMessage:
        return message

    def accept(self, number: int) -> bool:
        return True

    def receive(self, message: HandoffMessage) -> None:
        if not self.ended:
            self._context.post(self.on_message, message)

    def on_message(self, message: HandoffMessage) -> None:
        if not self.is_retired:
            self._role.on_message(self, message)

    def send(self, message: HandoffMessage) -> None:
        if not self.is_retired:
            self.enqueue(message)

    def _command(self, kind: str, chunk: Chunk, table: Sequence[int] = (), after_step: int = 0) -> Any:
        return kind, (self.epoch, chunk.slot) if kind == "send" else Pages(chunk, table, after_step)


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


def _refuse(_: HandoffMessage | None) -> None:
    raise AssertionError("a message is sent on a connection that no link carries")


def _deliver(connection: HandoffConnection, message: HandoffMessage | None) -> None:
    if message is None:
        connection.end("the other worker closed the stream")
    else:
        connection.receive(message)
