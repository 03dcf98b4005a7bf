"""Hand-off links, both those that this worker opens and those that it is called on. Lives on the speaking loop.

A link is one gRPC stream, and its name is the pair's epoch, made by the sender for this stream alone. Every link that
was opened here or announced as called ends with exactly one `link_down`; what is told to it after that is dropped.

    sender:    open -> greeted -> heard ... -> down
    receiver:  called -> heard ... -> down

A link ends when either side ends it, when its connection closes, when a message is missing or makes no sense, and when
the peer has been silent for too long. It decides nothing else: what was heard is posted to the engine thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in the stubs

from cluster import rpc
from cluster.errors import BatonError, FailedPrecondition, InvalidRequest, Unavailable
from cluster.failure_detector import FailureTimeouts, Liveness
from cluster.pb import handoff_pb2, handoff_pb2_grpc
from cluster.pb.handoff_pb2 import ReceiverMessage, SenderMessage
from cluster.tls import ClientTls
from worker.handshake import Handshake
from worker.streams import Stream

logger = logging.getLogger(__name__)

AnyMessage = SenderMessage | ReceiverMessage
Post = Callable[..., None]
"""Has a handler called with its arguments on the engine thread."""


class LinkListener(Protocol):
    """Who is posted what happens to links; `worker.handoff_connection.Carrier` for a real worker."""

    def link_greeted(self, epoch: str, hello: handoff_pb2.ReceiverHello) -> None: ...

    def link_called(self, epoch: str, hello: handoff_pb2.SenderHello, agreed: handoff_pb2.ReceiverHello) -> None: ...

    def link_heard(self, epoch: str, message: AnyMessage) -> None: ...

    def link_suspected(self, epoch: str, is_suspect: bool) -> None: ...

    def link_down(self, epoch: str, why: str, is_final: bool = False) -> None: ...


class LinkServer:
    """All links of one worker."""

    def __init__(
        self,
        terms: Handshake,
        timing: FailureTimeouts,
        listener: LinkListener,
        post: Post,
        tls: ClientTls | None = None,
    ) -> None:
        """`tls`: towards other workers."""
        self._tls = tls
        self._terms = terms
        self._timing = timing
        self._listener = listener
        self._post = post
        self._streams: dict[str, Stream[Any]] = {}
        self._dials: set[asyncio.Task[None]] = set()

    # Both sides

    def tell(self, epoch: str, message: AnyMessage) -> None:
        """Queues a message; dropped when the link is gone, whose end was reported."""
        stream = self._streams.get(epoch)
        if stream is not None:
            stream.tell(message)

    def close(self, epoch: str, why: str = "it is not needed any more") -> None:
        stream = self._streams.get(epoch)
        if stream is not None:
            self._end(stream, why, level=logging.INFO)

    def tick(self, elapsed_s: float) -> None:
        """Every `timing.tick_s`: says that this side is alive, and looks who is silent."""
        for stream in list(self._streams.values()):
            verdict = stream.tick(elapsed_s)
            if verdict is Liveness.DEAD:
                self._end(stream, f"the peer has been silent for {stream.silence_s:.1f} s")
            elif stream.is_greeted and verdict is Liveness.SUSPECT and not stream.is_suspect:
                self._suspect(stream, True)

    def end_all(self, why: str) -> None:
        for stream in list(self._streams.values()):
            self._end(stream, why)

    async def close_all(self) -> None:
        """Ends every link; returns when those that were opened here have let go of their connections."""
        for epoch in list(self._streams):
            self.close(epoch, "the worker is stopping")
        await asyncio.gather(*self._dials, return_exceptions=True)

    def _hear(self, stream: Stream[Any], message: AnyMessage) -> None:
        """Raises BatonError for what ends a stream."""
        if stream.why:
            return
        is_new = stream.accept(message.number)
        if stream.is_suspect:
            self._suspect(stream, False)
        kind = message.WhichOneof("message")
        if kind is None or (kind == "hello" and is_new):
            raise BatonError(f"the peer sent a message that makes no sense here: {kind or 'an empty one'}")
        if is_new and kind != "alive":
            self._post(self._listener.link_heard, stream.epoch, message)

    def _suspect(self, stream: Stream[Any], is_suspect: bool) -> None:
        stream.is_suspect = is_suspect
        self._post(self._listener.link_suspected, stream.epoch, is_suspect)

    def _end(self, stream: Stream[Any], why: str, *, is_final: bool = False, level: int = logging.WARNING) -> None:
        """The one way out of the table; the first reason counts."""
        if not stream.why:
            stream.end(why)
            del self._streams[stream.epoch]
            logger.log(level, "link %s is down: %s", stream.epoch, why)
            self._post(self._listener.link_down, stream.epoch, why, is_final)

    # The sender's side

    def open(self, epoch: str, address: str, incarnation: str) -> None:
        """Calls a decode worker; what is told before it has answered waits."""
        assert epoch not in self._streams, f"link {epoch} is open already"
        stream = self._streams[epoch] = Stream(epoch, SenderMessage, self._timing)
        stream.tell(SenderMessage(hello=self._terms.hello(epoch)))
        stream.task = asyncio.create_task(self._dial(stream, address, incarnation), name=f"link {epoch}")
        self._dials.add(stream.task)
        stream.task.add_done_callback(lambda task: self._dialed(stream, task))

    async def _dial(self, stream: Stream[SenderMessage], address: str, incarnation: str) -> None:
        try:
            async with rpc.create_channel(address, tls=self._tls, is_alone=True) as channel:
                await self._converse(stream, handoff_pb2_grpc.HandoffServiceStub(channel), incarnation)
        except grpc.aio.AioRpcError as error:
            is_final = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            said = error.details() or error.code().name
            self._end(stream, said, is_final=is_final)
        except BatonError as error:
            self._end(stream, error.message, is_final=error.grpc_code == FailedPrecondition.grpc_code)

    async def _converse(
        self, stream: Stream[SenderMessage], stub: handoff_pb2_grpc.HandoffServiceStub, incarnation: str
    ) -> None:
        call = stub.Connect(stream.outbound())
        first = await call.read()
        if first is EOF or first.WhichOneof("message") != "hello":
            raise BatonError("the decode worker did not greet")
        stream.accept(first.number)
        if first.hello.incarnation != incarnation:
            raise BatonError("the decode worker was restarted since the router chose it")
        self._terms.check(first.hello)
        stream.is_greeted = True
        self._post(self._listener.link_greeted, stream.epoch, first.hello)
        while (message := await call.read()) is not EOF:
            self._hear(stream, message)
        self._end(stream, await call.details() or "the decode worker closed the stream")

    def _dialed(self, stream: Stream[SenderMessage], task: asyncio.Task[None]) -> None:
        self._dials.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("link %s failed", stream.epoch, exc_info=error)
        self._end(stream, f"an error of this worker: {type(error).__name__}" if error else "the connection closed")

    # The receiver's side

    async def serve(
        self, messages: AsyncIterator[SenderMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[ReceiverMessage]:
        """A prefill worker calls: the whole stream, until either side ends it."""
        try:
            hello = await self._greeting(messages)
            agreed = self._terms.answer(hello)
        except BatonError as error:
            logger.warning("a hand-off link was refused: %s", error.message)
            await rpc.abort(context, error)
        stream = self._streams[hello.pair_epoch] = Stream(hello.pair_epoch, ReceiverMessage, self._timing)
        stream.accept(1)
        stream.is_greeted = True
        stream.tell(ReceiverMessage(hello=agreed))
        self._post(self._listener.link_called, stream.epoch, hello, agreed)
        stream.task = asyncio.create_task(self._read(stream, messages), name=f"link {stream.epoch}")
        context.add_done_callback(lambda _: self._end(stream, "the prefill worker is gone"))  # type: ignore[arg-type]
        async for message in stream.outbound():
            yield message
        await rpc.abort(context, Unavailable(f"the decode worker ended the link: {stream.why}"))

    async def _greeting(self, messages: AsyncIterator[SenderMessage]) -> handoff_pb2.SenderHello:
        try:
            async with asyncio.timeout(self._timing.dead_after_s):
                first = await anext(aiter(messages), None)
        except TimeoutError:
            raise InvalidRequest("a hand-off stream begins with hello, and none came") from None
        if first is None or first.WhichOneof("message") != "hello" or first.number != 1:
            raise InvalidRequest("the first message of a hand-off stream must be hello, with number 1")
        epoch = first.hello.pair_epoch
        if not epoch or epoch in self._streams:
            raise InvalidRequest(f"pair epoch {epoch!r} is in use already; every link needs one of its own")
        return first.hello

    async def _read(self, stream: Stream[ReceiverMessage], messages: AsyncIterator[SenderMessage]) -> None:
        try:
            async for message in messages:
                self._hear(stream, message)
            self._end(stream, "the prefill worker closed the stream")
        except BatonError as error:
            self._end(stream, error.message)
        except Exception as error:  # whatever gRPC makes of a connection that broke, or of bytes that are no message
            self._end(stream, f"the stream broke: {type(error).__name__}: {error}")
