"""gRPC between the parts of a simulated cluster: streams that carry messages after a latency, in order, in one process.

    Host.channel(address) -> a stub's method -> SimulatedCall -> the servicer's method at that address

A channel looks like `grpc.aio.Channel` to the generated stubs, and a `ServerContext` like gRPC's own to servicers, as
far as calls between Baton's processes use them. Messages are passed on as they are: nobody changes one that was sent.
A host that closes takes its streams with it; their other sides learn of it after the latency.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in the stubs

from simulate.virtual_loop import VirtualLoop
from simulate.wire import Cores, Lane

CONNECT_AGAIN_S = 0.1  # between two looks of a call that waits until its server is there
NUMBERED = "Connect"  # hand-off streams, whose messages have numbers

Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]
"""The end of a call: code, details, trailers."""
OK: Status = (grpc.StatusCode.OK, "", ())
GONE: Status = (grpc.StatusCode.UNAVAILABLE, "the connection is lost", ())


def _error(status: Status) -> grpc.aio.AioRpcError:
    code, details, trailers = status
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details, details)


class _Aborted(Exception):
    """A servicer ended its call with a status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class OneWay:
    """One direction of a stream: messages on their way, and those that have arrived. It has one reader, which notices
    what is missing or comes twice where messages are numbered."""

    def __init__(self, network: Network, source: str, target: str, *, is_numbered: bool) -> None:
        self._network = network
        self._loop = network.loop
        self._way = source, target
        self._is_numbered = is_numbered
        self._arrived: deque[Any] = deque()
        self._last_at = 0.0
        self._under_way: deque[Callable[[], None]] = deque()
        """In their order, where messages take time of shared cores."""
        self._reader: asyncio.Future[None] | None = None
        self.status: Status | None = None
        """Set once no message will arrive any more; those that have arrived are read first."""

    def send(self, message: Any) -> None:
        network = self._network
        if not (self._is_numbered and network.strikes("message lost")):
            self._later(self._arrive, message)
        if self._is_numbered and network.strikes("message doubled"):
            self._loop.call_later(5 * network.latency_s, self._later, self._arrive, message)

    def end(self, status: Status) -> None:
        """The last thing that is sent."""
        self._later(self.cut, status)

    def cut(self, status: Status) -> None:
        """Nothing more arrives, and what is under way is lost."""
        if self.status is None:
            self.status = status
            self._wake()

    async def read(self) -> Any:
        """The next message; EOF at the end, which `status` explains."""
        while not self._arrived:
            if self.status is not None:
                return EOF
            self._reader = self._loop.create_future()
            await self._reader
        return self._arrived.popleft()

    def _later(self, function: Callable[[Any], None], argument: Any) -> None:
        """Nothing overtakes what was sent before it."""
        network = self._network
        if network.cores is not None:
            self._under_way.append(partial(function, argument))
            own = next((network.shares[address] for address in self._way if address in network.shares), None)
            network.cores.compute(network.latency_s, [lambda: self._under_way.popleft()()], own=own)
            return
        self._last_at = max(self._last_at, self._network.arrival(*self._way))
        self._loop.call_at(self._last_at, function, argument)

    def _arrive(self, message: Any) -> None:
        if self.status is None:
            self._arrived.append(message)
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class ServerContext:
    """The context that a servicer's method gets: what it learns of its call, and how it ends it."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata
        self._callbacks: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> Any:
        return self._metadata

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _Aborted((code, details, tuple(trailing_metadata)))

    def close(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class SimulatedCall:
    """One call of a method with streams in both directions (`grpc.aio.StreamStreamCall`)."""

    def __init__(self, caller: Host, address: str, method: str, requests: Any, metadata: Any, waits: bool) -> None:
        self._caller = caller
        self.callee: Host | None = None
        self._address = address
        self._method = method
        self._waits = waits
        self._is_cancelled = False
        network = caller.network
        self._loop = network.loop
        self._is_numbered = method == NUMBERED
        self._to_server = OneWay(network, caller.address, address, is_numbered=self._is_numbered)
        self._to_client = OneWay(network, address, caller.address, is_numbered=self._is_numbered)
        self._context = ServerContext(metadata)
        self._server: asyncio.Task[None] | None = None
        self._sender = None if requests is None else self._loop.create_task(self._send_all(requests))
        caller.calls[self] = None
        self._loop.call_later(network.latency_s, self._connect)

    @property
    def way(self) -> tuple[str, str]:
        """The addresses of both sides."""
        return self._caller.address, self._address

    # The client's side

    async def write(self, message: Any) -> None:
        self._raise_if_over()
        self._to_server.send(message)

    async def read(self) -> Any:
        """The next message; EOF where the call has ended well."""
        if self._is_cancelled:
            raise asyncio.CancelledError
        message = await self._to_client.read()
        if message is EOF:
            self._raise_if_over()
        return message

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def cancel(self) -> bool:
        if self._to_client.status is not None:
            return False
        self._is_cancelled = True
        self._to_client.cut((grpc.StatusCode.CANCELLED, "cancelled here", ()))
        self._to_server.end((grpc.StatusCode.CANCELLED, "cancelled by the client", ()))
        self._loop.call_later(self._caller.network.latency_s, self._stop_server)
        self._close_client()
        return True

    async def details(self) -> str:
        return self._to_client.status[1] if self._to_client.status else ""

    async def _send_all(self, requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            self._to_server.send(message)
        self._to_server.end(OK)

    def _raise_if_over(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        status = self._to_client.status
        if status is not None and status[0] is not grpc.StatusCode.OK:
            raise _error(status)

    def _close_client(self) -> None:
        self._caller.calls.pop(self, None)
        if self._sender is not None:
            self._sender.cancel()

    # The server's side

    def _connect(self) -> None:
        if self._is_cancelled:
            return
        callee = self._caller.network.hosts.get(self._address)
        if self._is_numbered and self._caller.network.strikes("link refused"):
            self._to_client.cut((grpc.StatusCode.FAILED_PRECONDITION, "the layouts differ", ()))
        elif callee is not None and callee.servicer is not None:
            self.callee = callee
            callee.calls[self] = None
            self._server = self._loop.create_task(self._serve(callee.servicer))
        elif self._waits:
            self._loop.call_later(CONNECT_AGAIN_S, self._connect)
        else:
            self._to_client.cut((grpc.StatusCode.UNAVAILABLE, f"nothing listens at {self._address}", ()))

    async def _serve(self, servicer: Any) -> None:
        answers = getattr(servicer, self._method)(self._requests(), self._context)
        status = GONE
        try:
            async for message in answers:
                self._to_client.send(message)
            status = OK
        except _Aborted as aborted:
            status = aborted.status
        finally:
            await answers.aclose()
            self._to_client.end(status)
            self._close_server()

    async def _requests(self) -> AsyncIterator[Any]:
        """They end, too, when the client is gone: gRPC then cancels whoever serves it."""
        while (message := await self._to_server.read()) is not EOF:
            yield message

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.cancel()

    def _close_server(self) -> None:
        if self.callee is not None:
            self.callee.calls.pop(self, None)
        self._context.close()

    def sever(self) -> None:
        """The connection breaks: each side learns of it at once, and what was under way is lost."""
        if self.callee is not None:
            self._to_server.cut(GONE)
            self._to_client.cut(GONE)
            self._stop_server()
            self._close_client()

    def lose(self, host: Host) -> None:
        """The host is gone: the other side learns of it after the latency."""
        latency_s = self._caller.network.latency_s
        if host is self._caller:
            self._close_client()
            self._loop.call_later(latency_s, self._to_server.cut, GONE)
            self._loop.call_later(latency_s, self._stop_server)
        else:
            self._stop_server()
            self._loop.call_later(latency_s, self._to_client.cut, GONE)


class Channel:
    """From one host to an address (`grpc.aio.Channel`)."""

    def __init__(self, host: Host, address: str) -> None:
        self._host = host
        self._address = address

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Its calls end by themselves."""

    def stream_stream(self, path: str, *_: Any, **__: Any) -> Callable[..., SimulatedCall]:
        method = path.rpartition("/")[2]

        def call(requests: Any = None, *, wait_for_ready: bool = False, metadata: Any = ()) -> SimulatedCall:
            return SimulatedCall(self._host, self._address, method, requests, metadata, wait_for_ready)

        return call

    def unary_unary(self, path: str, *_: Any, **__: Any) -> Callable[..., Awaitable[Any]]:
        method = path.rpartition("/")[2]

        async def call(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> Any:
            try:
                async with asyncio.timeout(timeout):
                    return await self._answer(method, request, metadata)
            except TimeoutError:
                raise _error((grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout:g} s", ())) from None

        return call

    def unary_stream(self, path: str, *_: Any, **__: Any) -> None:
        """Nothing in a simulated cluster calls such a method."""

    async def close(self, grace: float | None = None) -> None:
        """Its calls end by themselves."""

    async def _answer(self, method: str, request: Any, metadata: Any) -> Any:
        network, context = self._host.network, ServerContext(metadata)
        await network.carry(self._host.address, self._address)
        servicer = network.servicer_at(self._address)
        if servicer is None:
            raise _error((grpc.StatusCode.UNAVAILABLE, f"nothing listens at {self._address}", ()))
        try:
            answer = await getattr(servicer, method)(request, context)
        except _Aborted as aborted:
            raise _error(aborted.status) from None
        finally:
            context.close()
        await network.carry(self._address, self._host.address)
        return answer


class Host:
    """A process with an address: it serves, and it opens channels."""

    def __init__(self, network: Network, address: str) -> None:
        self.network = network
        self.address = address
        self.servicer: object | None = None
        self.calls: dict[SimulatedCall, None] = {}
        """Calls that it has made or serves, and that are not over."""

    def serve(self, servicer: object) -> None:
        """`servicer` answers the calls of this address from now on."""
        self.servicer = servicer
        self.network.hosts[self.address] = self

    def channel(self, address: str, **_: Any) -> Any:
        return Channel(self, address)

    def close(self) -> None:
        """The process is gone."""
        if self.network.hosts.get(self.address) is self:
            del self.network.hosts[self.address]
        self.servicer = None
        for call in list(self.calls):
            call.lose(self)


class Network:
    """All hosts of a cluster. A message takes `latency_s`, times `spread` and `lateness`, unless its way is silent or
    its receiver has stopped: then it arrives after that. With `cores` the latency is what programs compute for it
    there, and neither lateness nor silence is known."""

    def __init__(self, loop: VirtualLoop, latency_s: float, cores: Cores | None = None) -> None:
        self.loop = loop
        self.latency_s = latency_s
        self.cores = cores
        self.shares: dict[str, Lane] = {}
        """The share of the cores that the processes at some addresses may use."""
        self.spread: Callable[[], float] = lambda: 1.0
        self.lateness = self.spread
        self.strikes: Callable[[str], bool] = lambda fault: False  # whether a fault of this name happens now
        self.hosts: dict[str, Host] = {}
        self._silent_until: dict[frozenset[str], float] = {}
        self._stopped_until: dict[str, float] = {}

    @property
    def calls(self) -> list[SimulatedCall]:
        """The calls that are served."""
        return [call for host in self.hosts.values() for call in host.calls if call.callee is host]

    def arrival(self, source: str, target: str) -> float:
        """When a message arrives that is sent now."""
        at = self.loop.time() + self.latency_s * self.spread() * self.lateness()
        if self._silent_until or self._stopped_until:
            silent = self._silent_until.get(frozenset((source, target)), 0.0)
            at = max(at, silent, self._stopped_until.get(target, 0.0), self._stopped_until.get(source, 0.0))
        return at

    async def carry(self, source: str, target: str) -> None:
        """Waits until a message that is sent now has arrived."""
        await asyncio.sleep(self.arrival(source, target) - self.loop.time())

    def servicer_at(self, address: str) -> object | None:
        host = self.hosts.get(address)
        return None if host is None else host.servicer

    def silence(self, one: str, other: str, seconds: float) -> None:
        """Nothing that is sent between two addresses arrives before so many seconds have passed."""
        self._silent_until[frozenset((one, other))] = self.loop.time() + seconds

    def stop(self, address: str, seconds: float) -> None:
        """A host neither reads nor sends for so many seconds."""
        self._stopped_until[address] = self.loop.time() + seconds
