"""Connections of clients: how many there may be, and how long one may owe the rest of what it has begun to send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_worker import pair
from http_door import serving
from router_harness import Router, ids, refusal, running_router, text_spec

from cluster import rpc
from cluster.address import network_of
from cluster.errors import Overloaded
from cluster.pb import generation_pb2 as pb
from cluster.pb import generation_pb2_grpc
from cluster.program import raise_file_limit
from router import http_listener

pytestmark = pytest.mark.asyncio

STALLED_S = 0.3
WAIT_S = 20.0
HEAD = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"
GET = HEAD + b"\r\n"


class Client:
    """A connection on which bytes are written as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> int:
        """The status of the next answer, whose body is read as well."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            await self.reader.readexactly(int(fields[b"content-length"]))
        return int(head.split()[1])

    async def rest(self) -> bytes:
        """What still comes before the other side closes."""
        with contextlib.suppress(ConnectionResetError):
            return await asyncio.wait_for(self.reader.read(), WAIT_S)
        return b""

    async def trickle(self) -> bytes:
        """Sends a byte at a time until the other side has closed; what it said."""
        rest = asyncio.create_task(self.rest())
        with contextlib.suppress(ConnectionError):
            while not rest.done():
                self.writer.write(b"x")
                await self.writer.drain()
                await asyncio.wait([rest], timeout=STALLED_S / 4)
        return await rest


@contextlib.asynccontextmanager
async def connected(router: Router, source: str = "127.0.0.1", address: str = "") -> AsyncIterator[Client]:
    host, _, port = (address or router.server.http_address).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_head_that_is_not_sent_to_its_end_is_given_up(tmp_path: Path) -> None:
    async with serving(tmp_path, (), stalled_client_timeout_s=STALLED_S) as (router, _):
        async with connected(router) as silent:
            assert await silent.rest() == b""
        async with connected(router) as halfway:
            halfway.writer.write(HEAD)
            assert (await halfway.rest()).startswith(b"HTTP/1.1 408 ")
        async with connected(router) as slow:
            slow.writer.write(HEAD + b"x-slow: ")
            assert (await slow.trickle()).startswith(b"HTTP/1.1 408 ")


async def test_the_head_of_a_second_request_has_the_same_time(tmp_path: Path) -> None:
    async with serving(tmp_path, (), stalled_client_timeout_s=STALLED_S) as (router, _), connected(router) as client:
        for _ in range(2):
            client.writer.write(GET)
            assert await client.answer() == 200
        await asyncio.sleep(2 * STALLED_S)  # the silence: between requests a connection may be silent for longer
        client.writer.write(GET + HEAD)
        assert await client.answer() == 200
        assert b"HTTP/1.1 408 " in await client.trickle()


async def test_a_body_that_trickles_in_is_given_up(tmp_path: Path) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000\r\n\r\n"
    async with serving(tmp_path, (), stalled_client_timeout_s=STALLED_S) as (router, _), connected(router) as client:
        client.writer.write(head)
        assert (await client.trickle()).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_nobody_reads_any_more_does_not_keep_its_connection(tmp_path: Path) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000\r\n\r\n"
    async with serving(tmp_path, (), stalled_client_timeout_s=STALLED_S) as (router, _), connected(router) as client:
        client.writer.write(head)
        assert await client.answer() == 404
        assert await client.trickle() == b""


async def test_a_body_that_comes_at_a_fair_rate_may_take_longer(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "a" * 30_000}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving(tmp_path, (), stalled_client_timeout_s=STALLED_S) as (router, _), connected(router) as client:
        client.writer.write(head)
        begun = asyncio.get_running_loop().time()
        for at in range(0, len(body), 3000):
            client.writer.write(body[at : at + 3000])
            await asyncio.sleep(STALLED_S / 6)  # the rate is what is looked at
        assert asyncio.get_running_loop().time() - begun > STALLED_S
        assert await client.answer() == 200


async def test_one_address_cannot_take_every_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, (), max_connections_per_address=2) as (router, _):
        async with connected(router) as first, connected(router) as second, connected(router) as third:
            for client in (first, second):
                client.writer.write(GET)
                assert await client.answer() == 200
            refused = await third.rest()
            assert refused.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in refused
            assert b"retry-after: 1\r\n" in refused
            async with connected(router, "127.0.0.2") as other:
                other.writer.write(GET)
                assert await other.answer() == 200
        async with asyncio.timeout(WAIT_S):  # the router has to see that they are closed
            while True:
                async with connected(router) as again:
                    again.writer.write(GET)
                    if await again.answer() == 200:
                        break


async def test_there_is_a_bound_on_all_connections_and_those_in_it_are_served(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        workers = pair(lambda _: [ids("ok")])
        router, _ = await stack.enter_async_context(serving(tmp_path, workers, max_connections=3))
        clients = [await stack.enter_async_context(connected(router, f"127.0.0.{n}")) for n in range(2, 7)]
        assert all([(await client.rest()).startswith(b"HTTP/1.1 503 ") for client in clients[3:]])
        body = json.dumps({"model": "", "prompt": "a"}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
        for client in clients[:3]:
            client.writer.write(head + body)
            assert await client.answer() == 200


async def test_files_that_the_process_may_not_open_lower_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "raise_file_limit", lambda: 516)
    async with contextlib.AsyncExitStack() as stack:
        router, _ = await stack.enter_async_context(serving(tmp_path, ()))
        *_, third = [await stack.enter_async_context(connected(router)) for _ in range(3)]
        assert (await third.rest()).startswith(b"HTTP/1.1 503 ")


async def test_the_limit_of_files_is_raised_to_what_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        assert raise_file_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.asynccontextmanager
async def own_channel(router: Router) -> AsyncIterator[Any]:
    """A stub on a connection of its own."""
    async with rpc.create_channel(router.address, is_alone=True) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def test_grpc_closes_a_connection_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_HANDSHAKE_MS", 300)
    async with running_router(tmp_path / "model") as router:
        async with connected(router, address=router.address) as silent:
            await silent.rest()
        async with connected(router, address=router.address) as halfway:
            halfway.writer.write(b"PRI * HTTP/2.0\r\n")
            await halfway.rest()


async def test_grpc_takes_so_many_connections_and_no_more(tmp_path: Path) -> None:
    """The harness has one."""
    async with (
        running_router(tmp_path / "model", pair(), max_connections=2) as router,
        own_channel(router) as good,
        own_channel(router) as one_more,
    ):
        assert (await good.ListModels(pb.ListModelsRequest())).models
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await one_more.ListModels(pb.ListModelsRequest(), timeout=2)
        assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert (await good.ListModels(pb.ListModelsRequest())).models


async def until_taken(stub: Any) -> None:
    """Until one more call is taken: the router has seen that the one before is over."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert (await stub.ListModels(pb.ListModelsRequest())).models
                return


async def test_one_address_has_so_many_calls_over_grpc_on_all_its_connections(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with (
        running_router(tmp_path / "model", (prefill, decode), max_connections_per_address=1) as router,
        own_channel(router) as other,
    ):
        await until_taken(other)
        call = router.generation.GenerateStream(pb.GenerateStreamRequest(spec=text_spec()))
        await prefill.next_admit()
        error = await refusal(other.ListModels(pb.ListModelsRequest()))
        assert isinstance(error, Overloaded) and "router.max_connections_per_address" in error.message
        assert error.retry_after_s == 1.0
        call.cancel()
        await until_taken(other)


async def test_an_address_stands_for_whoever_its_network_gave_it_to() -> None:
    assert network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("2001:db8::1") == network_of("[2001:db8::2]") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2") and network_of("unix") == b"unix"


@contextlib.contextmanager
def no_file_left() -> Iterator[None]:
    """This process can open nothing meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_connection_for_which_no_file_is_left_waits_and_is_looked_at_once_a_second(tmp_path: Path) -> None:
    """asyncio tries as often as there may be connections in the backlog, and logs each time: a stall of the loop."""
    loop = asyncio.get_running_loop()
    refused: list[dict[str, Any]] = []
    seen = asyncio.Event()

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        refused.append(context)
        seen.set()

    async with serving(tmp_path, ()) as (router, _):
        host, _, port = router.server.http_address.rpartition(":")
        client = socket.socket()
        client.setblocking(False)
        loop.set_exception_handler(on_error)
        with client:
            with no_file_left():
                await loop.sock_connect(client, (host, int(port)))
                async with asyncio.timeout(WAIT_S):
                    await seen.wait()
                await asyncio.sleep(0)
                assert [str(context["message"]) for context in refused] == ["socket.accept() out of system resource"]
            await loop.sock_sendall(client, GET)
            async with asyncio.timeout(WAIT_S):
                answer = await loop.sock_recv(client, 1024)
            assert answer.startswith(b"HTTP/1.1 200 ")


async def test_what_is_written_to_a_client_is_sent_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, an answer's body, and every event of a stream, waits up to 40 ms until the client says that it has read
    what came before."""
    options: list[int] = []
    made = http_listener._Connection.connection_made

    def noted(connection: http_listener._Connection, transport: asyncio.Transport) -> None:
        made(connection, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(http_listener._Connection, "connection_made", noted)
    async with serving(tmp_path, pair(lambda _: [ids("yes!")])) as (_, http):
        assert (await http.get("/healthz")).status_code == 200
    assert options and all(options)
