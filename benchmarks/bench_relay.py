"""Stands between a server and two clients that offer the same load, so that both measure one run of the server.

Each client has a port of its own. A request waits until the other client has sent it, too (the same prompt, and as many
tokens); then it goes to the server once, as the first client wrote it, and every piece of the answer goes to both,
unchanged, in the moment it comes. When pieces went by is kept: `Seen`, a third measurement of the same run.

HTTP/1.1 is read by h11; gRPC messages pass as bytes. Lives in the event loop of whoever starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import h11

from cluster import rpc
from cluster.pb import generation_pb2 as pb

FIRST, SECOND = 0, 1
MEET_S = 90.0
"""A client that has not asked what the other one did within it will not."""
_STREAM, _MODEL = "GenerateStream", "GetModel"
_READ_BYTES = 2**16
_Sink = Callable[[bytes], Awaitable[None]]


@dataclass
class Seen:
    """One request as it went by; instants of this process's clock, in seconds."""

    sent_at: float
    """When the first client's request was here whole."""
    told: list[float] = field(default_factory=list)
    """When each message with output came from the server."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Both as the server says."""
    ended_at: float = 0.0
    apart_s: float = 0.0
    """How much later the second client asked than the first; it is in what the first one measures."""


_Answer = Callable[[_Sink, Seen], Awaitable[None]]
"""Asks the server, passes on what comes, and keeps when it came."""


class NoRun(Exception):
    """A request was not answered for both: one client did not ask it, or the server broke off."""


class _Pair:
    def __init__(self) -> None:
        self.sinks: dict[int, _Sink] = {}
        self.asked_at: dict[int, float] = {}
        self.is_whole = asyncio.Event()
        self.answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def to_both(self, piece: bytes) -> None:
        for client in (FIRST, SECOND):
            await self.sinks[client](piece)


class Meeting:
    """Of two clients' requests. `seen`: of every pair, in the order of asking."""

    def __init__(self, num_warm: int) -> None:
        self.seen: list[Seen] = []
        self.problems: list[str] = []
        self.begun = asyncio.Event()
        """The first client has sent its first request after `num_warm`."""
        self._num_warm = num_warm
        self._waiting: dict[str, _Pair] = {}

    @property
    def counted(self) -> list[Seen]:
        """Without the warm-up."""
        return self.seen[self._num_warm :]

    async def join(self, client: int, key: str, sink: _Sink, answer: _Answer) -> None:
        """Returns when both have the answer. `answer` gets it, for the first client's request. Raises NoRun."""
        pair = self._waiting.setdefault(key, _Pair())
        pair.sinks[client], pair.asked_at[client] = sink, time.perf_counter()
        if len(pair.sinks) == 2:
            del self._waiting[key]
            pair.is_whole.set()
        if client == SECOND:
            await self._await_whole(pair)
            if not await asyncio.shield(pair.answered):
                raise NoRun
            return
        seen = Seen(pair.asked_at[FIRST])
        self.seen.append(seen)
        if len(self.seen) > self._num_warm:
            self.begun.set()
        try:
            await self._await_whole(pair)
            seen.apart_s = pair.asked_at[SECOND] - pair.asked_at[FIRST]
            await answer(pair.to_both, seen)
            seen.ended_at = time.perf_counter()
            pair.answered.set_result(True)
        finally:
            if not pair.answered.done():
                pair.answered.set_result(False)

    async def _await_whole(self, pair: _Pair) -> None:
        try:
            await asyncio.wait_for(pair.is_whole.wait(), MEET_S)
        except TimeoutError:
            self.problems.append(f"within {MEET_S:g} s only one of the clients asked this")
            raise NoRun from None


class HttpRelay:
    """In front of the HTTP server at `host`:`port`. What is not a completion passes through for each client alone."""

    def __init__(self, host: str, port: int, meeting: Meeting) -> None:
        self._host = host
        self._port = port
        self._meeting = meeting

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[str, str]]:
        """The addresses of both clients."""
        connections = set[asyncio.Task[None]]()
        async with contextlib.AsyncExitStack() as stack:
            addresses = []
            for client in (FIRST, SECOND):

                def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: int = client) -> None:
                    connections.add(asyncio.create_task(self._serve(client, reader, writer)))

                server = await asyncio.start_server(connected, "127.0.0.1", 0)
                addresses.append("{}:{}".format(*server.sockets[0].getsockname()))
                stack.callback(server.close)
            try:
                yield addresses[0], addresses[1]
            finally:
                for connection in connections:
                    connection.cancel()
                await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, client: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _read_request(reader):
                await self._pass(client, request, writer)
        except NoRun:
            pass  # which the meeting has noted
        except (OSError, h11.ProtocolError) as error:
            self._meeting.problems.append(f"{type(error).__name__}: {error}")
        finally:
            writer.close()

    async def _pass(self, client: int, request: list[Any], writer: asyncio.StreamWriter) -> None:
        async def sink(piece: bytes) -> None:
            writer.write(piece)
            with contextlib.suppress(ConnectionError):  # who leaves says itself whether it had all
                await writer.drain()

        if request[0].method == b"POST" and request[0].target.endswith(b"/completions"):
            body = json.loads(b"".join(bytes(event.data) for event in request if isinstance(event, h11.Data)))
            key = json.dumps([body["prompt"], body["max_tokens"]])
            await self._meeting.join(client, key, sink, lambda both, seen: self._ask(request, both, seen))
        else:
            await self._ask(request, sink, Seen(0.0))

    async def _ask(self, request: list[Any], sink: _Sink, seen: Seen) -> None:
        """The server, and passes on what it answers. Raises h11.ProtocolError where that breaks off."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            connection = h11.Connection(h11.CLIENT)
            writer.write(b"".join(connection.send(event) or b"" for event in request))
            events = _Events(seen)
            while connection.their_state is not h11.DONE:
                piece = await reader.read(_READ_BYTES)
                at = time.perf_counter()
                await sink(piece)
                connection.receive_data(piece)
                for event in _events_of(connection):
                    if isinstance(event, h11.Data):
                        events.take(bytes(event.data), at)
        finally:
            writer.close()


class _Events:
    """Server-sent events of OpenAI's completions, as far as a figure needs them."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._unfinished = b""

    def take(self, data: bytes, at: float) -> None:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._read(json.loads(line.removeprefix(b"data: ")), at)

    def _read(self, chunk: dict[str, Any], at: float) -> None:
        if any(choice.get("text") for choice in chunk.get("choices", ())):
            self._seen.told.append(at)
        if usage := chunk.get("usage"):
            self._seen.num_prompt_tokens = usage["prompt_tokens"]
            self._seen.num_output_tokens = usage["completion_tokens"]


async def _read_request(reader: asyncio.StreamReader) -> list[Any]:
    """Its events, whole; none when the client has gone."""
    connection, events = h11.Connection(h11.SERVER), list[Any]()
    while not (events and isinstance(events[-1], h11.EndOfMessage)):
        piece = await reader.read(_READ_BYTES)
        if not piece:
            return []
        connection.receive_data(piece)
        events += _events_of(connection)
    return events


def _events_of(connection: h11.Connection) -> Iterator[Any]:
    while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        yield event
        if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            break


class GrpcRelay:
    """In front of Baton at `address`."""

    def __init__(self, address: str, meeting: Meeting) -> None:
        self._address = address
        self._meeting = meeting

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[str, str]]:
        """The addresses of both clients."""
        async with rpc.create_channel(self._address) as channel, contextlib.AsyncExitStack() as stack:
            addresses = []
            for client in (FIRST, SECOND):
                server, port = rpc.create_server(max_message_bytes=rpc.INTERNAL_MESSAGE_BYTES)
                server.add_generic_rpc_handlers((_Methods(client, channel, self._meeting),))
                await server.start()
                stack.push_async_callback(server.stop, None)
                addresses.append(f"127.0.0.1:{port}")
            yield addresses[0], addresses[1]


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Of one client's server."""

    def __init__(self, client: int, channel: grpc.aio.Channel, meeting: Meeting) -> None:
        self._client = client
        self._channel: Any = channel
        self._meeting = meeting

    def service(self, details: Any) -> Any:
        method = details.method

        async def stream(request: bytes, context: Any) -> None:
            async def answer(both: _Sink, seen: Seen) -> None:
                await self._ask(method, request, both, seen)

            spec = pb.GenerateStreamRequest.FromString(request).spec
            key = json.dumps([list(spec.token_ids.ids), spec.text, spec.stopping.max_output_tokens])
            await self._meeting.join(self._client, key, context.write, answer)

        async def once(request: bytes, _: Any) -> bytes:
            answer: bytes = await self._channel.unary_unary(method)(request)
            return answer

        if method.endswith(f"/{_STREAM}"):
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(once) if method.endswith(f"/{_MODEL}") else None

    async def _ask(self, method: str, request: bytes, both: _Sink, seen: Seen) -> None:
        async for piece in self._channel.unary_stream(method)(request):
            at = time.perf_counter()
            await both(piece)
            event = pb.GenerateStreamResponse.FromString(piece)
            if event.HasField("delta"):
                seen.told.append(at)
            elif event.HasField("completed"):
                seen.num_prompt_tokens = event.completed.usage.prompt_tokens
                seen.num_output_tokens = event.completed.usage.completion_tokens
