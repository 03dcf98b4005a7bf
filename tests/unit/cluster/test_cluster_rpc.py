"""Errors over a real gRPC connection, and where a server may listen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from relay import relayed

from cluster import errors, rpc
from cluster.address import PortSharing, hold_port, listen_error
from cluster.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    FieldViolation,
    InvalidRequest,
    NotReachable,
    Overloaded,
    QuotaExceeded,
)

METHOD = "/test.Echo/Call"
Handler = Callable[[bytes, Any], Awaitable[bytes]]


async def start_server(handler: Handler, **kwargs: Any) -> tuple[grpc.aio.Server, str]:
    server, port = rpc.create_server(**kwargs)
    call = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Call": call}),))
    await server.start()
    return server, f"127.0.0.1:{port}"


async def call_error(address: str, request: bytes = b"x") -> grpc.aio.AioRpcError:
    async with rpc.create_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(METHOD, bytes, bytes)(request, timeout=10)
        return caught.value


def crossed_the_wire(error: BatonError) -> grpc.aio.AioRpcError:
    """The client's view of a server that aborts with `error`."""

    async def handler(_: bytes, context: Any) -> bytes:
        await rpc.abort(context, error)

    async def run() -> grpc.aio.AioRpcError:
        server, address = await start_server(handler)
        try:
            return await call_error(address)
        finally:
            await server.stop(None)

    return asyncio.run(run())


@pytest.mark.parametrize("is_batons", [False, True])
async def test_a_call_that_a_closing_server_has_not_begun_is_made_again_and_one_that_baton_cancelled_is_not(
    is_batons: bool,
) -> None:
    num_calls = 0

    async def handler(_: bytes, context: Any) -> bytes:
        nonlocal num_calls
        num_calls += 1
        if is_batons:
            await rpc.abort(context, Cancelled("by CancelGeneration"))
        if num_calls < 3:
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        return b"done"

    def call(address: str) -> bytes:
        with rpc.create_blocking_channel(address) as channel:
            answer: bytes = channel.unary_unary(METHOD, bytes, bytes)(b"x", timeout=10)
        return answer

    server, address = await start_server(handler)
    try:
        if is_batons:
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(call, address)
            assert isinstance(rpc.from_rpc_error(caught.value), Cancelled)
        else:
            assert await asyncio.to_thread(call, address) == b"done"
    finally:
        await server.stop(None)
    assert num_calls == (1 if is_batons else 3)


async def test_a_port_is_shared_with_a_successor_and_nobody_else() -> None:
    async def answer(request: bytes, _: Any) -> bytes:
        return request

    first, address = await start_server(answer, sharing=PortSharing.FIRST)
    port = int(address.rpartition(":")[2])
    for sharing in (PortSharing.NONE, PortSharing.FIRST):
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: it is in use"):
            rpc.create_server(port=port, sharing=sharing)
    second, _ = await start_server(answer, port=port, sharing=PortSharing.JOINED)
    await first.stop(None)
    async with rpc.create_channel(address, is_alone=True) as channel:
        assert await channel.unary_unary(METHOD, bytes, bytes)(b"x", timeout=10) == b"x"
    await second.stop(None)


async def test_processes_that_share_a_held_port_each_take_connections_and_nobody_else_gets_it() -> None:
    asked: list[int] = []

    async def call(address: str) -> None:
        async with rpc.create_channel(address, is_alone=True) as channel:
            await channel.unary_unary(METHOD, bytes, bytes)(b"x", timeout=10)

    def answers(number: int) -> Any:
        async def answer(request: bytes, _: Any) -> bytes:
            asked.append(number)
            return request

        return answer

    held = hold_port("127.0.0.1", 0)
    port = held.getsockname()[1]
    with pytest.raises(ConfigError, match="it is in use"):
        rpc.create_server(port=port, sharing=PortSharing.FIRST)
    with pytest.raises(OSError):
        hold_port("127.0.0.1", port)
    servers = [(await start_server(answers(n), port=port, sharing=PortSharing.JOINED))[0] for n in range(2)]
    with hold_port("127.0.0.1", port, is_joined=True):
        for _ in range(200):  # which of the two gets a connection is drawn by Linux
            await call(f"127.0.0.1:{port}")
            if len(set(asked)) == 2:
                break
    assert set(asked) == {0, 1}
    await servers[0].stop(None)
    asked.clear()
    for _ in range(8):
        await call(f"127.0.0.1:{port}")
    assert set(asked) == {1}, "the one that is left takes them all"
    await servers[1].stop(None)
    assert listen_error("127.0.0.1", port) is not None, "it is held, although nobody listens"
    held.close()
    assert listen_error("127.0.0.1", port) is None


def kinds() -> list[type[BatonError]]:
    every = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, BatonError)]
    return [k for k in every if k not in (BatonError, NotReachable)]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_kind_of_error_arrives_as_itself(kind: type[BatonError]) -> None:
    caught = crossed_the_wire(kind("what and why"))
    assert caught.code().name == kind.grpc_code
    back = rpc.from_rpc_error(caught)
    assert type(back) is kind
    assert back.message == "what and why"
    assert back.violations == ()
    assert back.retry_after_s is None


def test_field_violations_and_the_retry_delay_survive_the_round_trip() -> None:
    violations = (FieldViolation("spec.sampling.top_p", "must be in (0, 1] (got 1.5)"), FieldViolation("spec.n", "é"))
    back = rpc.from_rpc_error(crossed_the_wire(InvalidRequest("2 fields are wrong", violations=violations)))
    assert back.violations == violations
    busy = rpc.from_rpc_error(crossed_the_wire(Overloaded("queue full", retry_after_s=1.25)))
    assert isinstance(busy, Overloaded)
    assert busy.retry_after_s == 1.25


def test_a_quota_arrives_with_its_limit_and_its_delay() -> None:
    violation = FieldViolation("key:k7/requests_per_min", "this API key has used its 6 requests")
    caught = crossed_the_wire(QuotaExceeded("wait", violations=(violation,), retry_after_s=6.5))
    trailers: Any = caught.trailing_metadata()
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert "google.rpc.QuotaFailure" in {detail.TypeName() for detail in status.details}
    back = rpc.from_rpc_error(caught)
    assert isinstance(back, QuotaExceeded) and back.violations == (violation,) and back.retry_after_s == 6.5


def test_details_are_the_standard_google_rpc_messages() -> None:
    caught = crossed_the_wire(Overloaded("full", retry_after_s=2.0, violations=(FieldViolation("a", "b"),)))
    trailers: Any = caught.trailing_metadata()
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert {detail.TypeName() for detail in status.details} == {
        "google.rpc.ErrorInfo",
        "google.rpc.RetryInfo",
        "google.rpc.BadRequest",
    }
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("OVERLOADED", "baton")


def test_an_error_too_large_for_the_trailers_is_cut_and_still_arrives() -> None:
    violations = tuple(FieldViolation(f"spec.stopping.stop[{i}]", "語" * 300) for i in range(200))
    back = rpc.from_rpc_error(crossed_the_wire(InvalidRequest("🙂" * 5000, violations=violations)))
    assert isinstance(back, InvalidRequest)
    assert back.message.endswith("…")
    assert 0 < len(back.violations) < 200
    assert back.violations[0].field == "spec.stopping.stop[0]"


def test_a_lone_surrogate_in_a_message_does_not_break_the_answer() -> None:
    assert rpc.from_rpc_error(crossed_the_wire(InvalidRequest("bad \ud800 text"))).message == "bad ? text"


def test_an_address_where_nobody_listens_is_not_reachable() -> None:
    async def run() -> BatonError:
        server, address = await start_server(lambda *_: asyncio.sleep(0))  # type: ignore[arg-type]
        await server.stop(None)
        return rpc.from_rpc_error(await call_error(address))

    assert isinstance(asyncio.run(run()), NotReachable)


def test_a_message_over_the_limit_is_refused_without_reaching_the_handler() -> None:
    seen: list[int] = []

    async def handler(request: bytes, _: Any) -> bytes:
        seen.append(len(request))
        return b""

    async def run() -> grpc.aio.AioRpcError:
        server, address = await start_server(handler, max_message_bytes=1000)
        try:
            return await call_error(address, b"x" * 2000)
        finally:
            await server.stop(None)

    caught = asyncio.run(run())
    assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(rpc.from_rpc_error(caught), Overloaded)
    assert seen == []


def test_a_blocking_call_gives_the_same_exception() -> None:
    async def handler(_: bytes, context: Any) -> bytes:
        await rpc.abort(context, InvalidRequest("no", violations=(FieldViolation("f", "d"),)))

    def call(address: str) -> BatonError:
        with rpc.create_blocking_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(METHOD, bytes, bytes)(b"", timeout=10)
            return rpc.from_rpc_error(caught.value)

    async def run() -> BatonError:
        server, address = await start_server(handler)
        try:
            return await asyncio.to_thread(call, address)
        finally:
            await server.stop(None)

    back = asyncio.run(run())
    assert isinstance(back, InvalidRequest)
    assert back.violations == (FieldViolation("f", "d"),)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.7", False),
        ("localhost.example.org", False),
    ],
)
def test_only_addresses_that_cannot_leave_the_machine_are_loopback(host: str, expected: bool) -> None:
    assert rpc.is_loopback(host) is expected


def test_another_address_is_refused_unless_insecure_is_said() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=r"refusing to listen on '0\.0\.0\.0' without TLS"):
            rpc.create_server("0.0.0.0")
        server, port = rpc.create_server("0.0.0.0", insecure=True)
        assert port > 0
        await server.stop(None)

    asyncio.run(run())


def test_a_port_in_use_is_refused_and_never_shared() -> None:
    async def run() -> None:
        server, port = rpc.create_server()
        await server.start()
        try:
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                rpc.create_server(port=port)
        finally:
            await server.stop(None)

    asyncio.run(run())


def test_an_ipv6_address_gets_its_brackets_once() -> None:
    assert rpc.format_address("::1", 5) == "[::1]:5"
    assert rpc.format_address("[::1]", 5) == "[::1]:5"
    assert rpc.format_address("localhost", 5) == "localhost:5"


def test_a_peer_that_fell_silent_after_a_ping_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was heard after the ping, which it never answered: gRPC waited a minute for that, and sent no other ping. A
    router took so long to see that a worker had given up their connection during a blackout."""
    monkeypatch.setattr(rpc, "_PING_EVERY_MS", 200)
    monkeypatch.setattr(rpc, "_PING_TIMEOUT_MS", 2_000)

    async def talk(_: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.05)

    async def scenario() -> float:
        server, port = rpc.create_server()
        call = grpc.unary_stream_rpc_method_handler(talk)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Talk": call}),))
        await server.start()
        try:
            async with relayed(f"127.0.0.1:{port}") as (relay, address), rpc.create_channel(address) as channel:
                stream = channel.unary_stream("/test.Echo/Talk", bytes, bytes)(b"x", timeout=30)
                await stream.read()
                relay.hold(only_there=True)
                while relay.num_bytes_held == 0:  # which is a ping
                    await stream.read()
                await stream.read()
                relay.hold()
                begun = time.monotonic()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    while True:
                        await stream.read()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                return time.monotonic() - begun
        finally:
            await server.stop(None)

    assert asyncio.run(scenario()) < 10
