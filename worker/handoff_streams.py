"""The gRPC streams of hand-off connections, both those that this worker opens and those that peers open.

Lives on the speaking loop. It agrees with the peer on what both use (`Handshake`), moves the messages of each
connection (`worker.handoff_connection`), and ends the stream when its gRPC call ends or a message is missing or makes
no sense. It decides nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in the stubs

from cluster import rpc
from cluster.config.schema import TransferSection
from cluster.errors import BatonError, FailedPrecondition, InvalidRequest, Unavailable
from cluster.failure_detector import FailureTimeouts
from cluster.pb import handoff_pb2, handoff_pb2_grpc
from cluster.pb.handoff_pb2 import ReceiverMessage, SenderMessage
from cluster.protocol import check_protocol, inside_metadata, spoken
from cluster.tls import ClientTls
from cluster.transports import pick
from kv_transfer.layout import KvLayout, check_compatible, check_wire_format, page_obstacle
from worker.handoff_connection import HandoffConnection

logger = logging.getLogger(__name__)

Accept = Callable[[handoff_pb2.SenderHello, handoff_pb2.ReceiverHello], HandoffConnection]
"""Makes the connection of a call with this hello, which is answered with the other."""


@dataclass(frozen=True)
class Handshake:
    """Agrees with a peer on what both use: hellos in, hellos out. The same towards every peer.

    A refusal is a FAILED_PRECONDITION: asking again would not help.
    """

    worker_id: str
    incarnation: str
    layout: KvLayout
    store_address: str
    """host:port of the store at which those that send to this worker meet its ranks."""
    transports: tuple[str, ...]
    """Best first."""
    host_id: str
    transfer: TransferSection
    """`wire_format`, `chunk_tokens` and `num_slots` of this worker."""
    protocol: str = field(default_factory=spoken)
    """The versions that this worker speaks."""

    def hello(self, epoch: str, last: Collection[str] = ()) -> handoff_pb2.SenderHello:
        """The first message of this worker as a sender; `last`: transports to name after all others."""
        return handoff_pb2.SenderHello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            layout=self.layout.to_proto(),
            pair_epoch=epoch,
            transports=sorted(self.transports, key=lambda name: name in last),
            host_id=self.host_id,
            wire_format=self.transfer.wire_format,
            chunk_tokens=self.transfer.chunk_tokens,
            num_slots=self.transfer.num_slots,
            protocol=self.protocol,
        )

    def answer(self, hello: handoff_pb2.SenderHello) -> handoff_pb2.ReceiverHello:
        """The first message of this worker as a receiver: what both sides will use.

        Raises IncompatibleProtocol, LayoutMismatch and FailedPrecondition, naming both sides.
        """
        self._check_protocol(hello.worker_id, hello.protocol)
        theirs = KvLayout.from_proto(hello.layout)
        check_compatible(theirs, self.layout)
        check_wire_format(hello.wire_format, self.transfer.wire_format)
        transport, reason = pick(
            tuple(hello.transports),
            self.transports,
            is_same_host=hello.host_id == self.host_id,
            page_obstacle=page_obstacle(theirs, self.layout, self.transfer.wire_format),
        )
        chunk_tokens = min(hello.chunk_tokens, self.transfer.chunk_tokens)
        num_slots = min(hello.num_slots, self.transfer.num_slots)
        if not chunk_tokens or not num_slots:
            given = f"{hello.num_slots} slots of {hello.chunk_tokens} tokens"
            raise FailedPrecondition(f"{hello.worker_id} offers {given}; both must be at least 1")
        return handoff_pb2.ReceiverHello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            layout=self.layout.to_proto(),
            store_address=self.store_address,
            transport=transport,
            transport_reason=reason,
            chunk_tokens=chunk_tokens,
            num_slots=num_slots,
            wire_format=self.transfer.wire_format,
            protocol=self.protocol,
        )

    def check(self, answer: handoff_pb2.ReceiverHello) -> None:
        """Checks, as the sender, what was answered. Raises as `answer` does."""
        self._check_protocol(answer.worker_id, answer.protocol)
        check_compatible(self.layout, KvLayout.from_proto(answer.layout))
        check_wire_format(self.transfer.wire_format, answer.wire_format)
        own = self.transfer
        sizes_fit = 0 < answer.chunk_tokens <= own.chunk_tokens and 0 < answer.num_slots <= own.num_slots
        if answer.transport not in self.transports or not sizes_fit:
            given = f"{answer.transport!r} with {answer.num_slots} slots of {answer.chunk_tokens} tokens"
            asked = f"{', '.join(self.transports)} with {own.num_slots} slots of {own.chunk_tokens} tokens"
            raise FailedPrecondition(f"{answer.worker_id} answered {given}, where {self.worker_id} offered {asked}")

    def _check_protocol(self, peer_id: str, speaks: str) -> None:
        check_protocol(f"worker {peer_id}", speaks, f"worker {self.worker_id}", self.protocol)


class HandoffStreams:
    """All streams of one worker."""

    def __init__(
        self,
        handshake: Handshake,
        timing: FailureTimeouts,
        tls: ClientTls | None = None,
        token: str = "",
        *,
        open_channel: rpc.OpenChannel = rpc.create_channel,
    ) -> None:
        """`tls`, `token`, `open_channel`: towards other workers."""
        self._open_channel = open_channel
        self._token = token
        self._handshake = handshake
        self._timing = timing
        self._tls = tls
        self._connections: dict[str, HandoffConnection] = {}
        self._dials: set[asyncio.Task[None]] = set()

    # Both sides

    def tick(self, elapsed_s: float) -> None:
        """Every `timing.tick_s`: heartbeats, and a look at who is silent."""
        self._connections = {epoch: c for epoch, c in self._connections.items() if not c.ended}
        for connection in list(self._connections.values()):
            connection.tick(elapsed_s)

    def end_all(self, why: str, level: int = logging.WARNING) -> None:
        for connection in list(self._connections.values()):
            connection.end(why, level=level)

    async def close(self) -> None:
        """Ends every stream; returns when those that were opened here have closed their gRPC connections."""
        self.end_all("the worker is stopping", logging.INFO)
        await asyncio.gather(*self._dials, return_exceptions=True)

    # The sender's side

    def dial(self, connection: HandoffConnection, address: str, incarnation: str) -> None:
        """Calls a decode worker; messages wait until it has answered."""
        self._connections[connection.epoch] = connection
        connection.enqueue(SenderMessage(hello=self._handshake.hello(connection.epoch, connection.last)))
        connection.task = asyncio.create_task(
            self._dial(connection, address, incarnation), name=f"hand-off {connection.epoch}"
        )
        self._dials.add(connection.task)
        connection.task.add_done_callback(lambda task: self._dialed(connection, task))

    async def _dial(self, connection: HandoffConnection, address: str, incarnation: str) -> None:
        try:
            async with self._open_channel(address, tls=self._tls, is_alone=True) as channel:
                await self._converse(connection, handoff_pb2_grpc.HandoffServiceStub(channel), incarnation)
        except grpc.aio.AioRpcError as error:
            is_final = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            connection.end(error.details() or error.code().name, is_final=is_final)
        except BatonError as error:
            connection.end(error.message, is_final=error.grpc_code == FailedPrecondition.grpc_code)

    async def _converse(
        self, connection: HandoffConnection, stub: handoff_pb2_grpc.HandoffServiceStub, incarnation: str
    ) -> None:
        call = stub.Connect(connection.outbound(), metadata=inside_metadata(self._token))
        first = await call.read()
        if first is EOF or first.WhichOneof("message") != "hello":
            raise BatonError("the decode worker did not answer with hello")
        connection.accept(first.number)
        if first.hello.incarnation != incarnation:
            raise BatonError("the decode worker was restarted since the router chose it")
        self._handshake.check(first.hello)
        connection.greeted(first.hello)
        while (message := await call.read()) is not EOF:
            connection.receive(message)
        connection.end(await call.details() or "the decode worker closed the stream")

    def _dialed(self, connection: HandoffConnection, task: asyncio.Task[None]) -> None:
        self._dials.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("hand-off connection %s failed", connection.epoch, exc_info=error)
        connection.end(f"an error of this worker: {type(error).__name__}" if error else "the connection closed")

    # The receiver's side

    async def serve(
        self, messages: AsyncIterator[SenderMessage], context: grpc.aio.ServicerContext[Any, Any], accept: Accept
    ) -> AsyncIterator[ReceiverMessage]:
        """The whole stream of a prefill worker that calls, until either side ends it."""
        try:
            hello = await self._read_hello(messages)
            agreed = self._handshake.answer(hello)
        except BatonError as error:
            logger.warning("a hand-off connection was refused: %s", error.message)
            await rpc.abort(context, error)
        connection = self._connections[hello.pair_epoch] = accept(hello, agreed)
        connection.accept(1)
        connection.greeted()
        connection.enqueue(ReceiverMessage(hello=agreed))
        connection.task = asyncio.create_task(self._read(connection, messages), name=f"hand-off {connection.epoch}")
        context.add_done_callback(lambda _: connection.end("the prefill worker is gone"))  # type: ignore[arg-type]
        async for message in connection.outbound():
            yield message  # type: ignore[misc]  # a receiver's are ReceiverMessages
        await rpc.abort(context, Unavailable(f"the decode worker ended the connection: {connection.ended}"))

    async def _read_hello(self, messages: AsyncIterator[SenderMessage]) -> handoff_pb2.SenderHello:
        try:
            async with asyncio.timeout(self._timing.dead_after_s):
                first = await anext(aiter(messages), None)
        except TimeoutError:
            raise InvalidRequest("a hand-off stream begins with hello, and none came") from None
        if first is None or first.WhichOneof("message") != "hello" or first.number != 1:
            raise InvalidRequest("the first message of a hand-off stream must be hello, with number 1")
        epoch = first.hello.pair_epoch
        known = self._connections.get(epoch)
        if not epoch or (known is not None and not known.ended):
            raise InvalidRequest(f"pair epoch {epoch!r} is in use already; every connection needs one of its own")
        return first.hello

    async def _read(self, connection: HandoffConnection, messages: AsyncIterator[SenderMessage]) -> None:
        try:
            async for message in messages:
                connection.receive(message)
            connection.end("the prefill worker closed the stream")
        except BatonError as error:
            connection.end(error.message)
        except Exception as error:  # whatever gRPC makes of a connection that broke, or of bytes that are no message
            connection.end(f"the stream broke: {type(error).__name__}: {error}")
