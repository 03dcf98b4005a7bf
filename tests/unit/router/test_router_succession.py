"""A router that takes over the ports of another one, which leaves: streams end where they are, and nobody waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2 as httpx
import pytest
from fake_worker import DECODE, LENGTH, FakeWorker, phase, tokens
from router_harness import Router, begin, ids, kinds, rest, running_router, text_of

from cluster import rpc
from cluster.errors import ConfigError, Unavailable
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from cluster.settings import RouterSettings
from router import program

GIVEN = {"http_port": 0, "drain_timeout_s": 30.0, "policy": "least_loaded"}


def ports_of(router: Router) -> dict[str, int]:
    addresses = {"port": router.address, "http_port": router.server.http_address}
    return {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}


async def num_running(address: str) -> int:
    """Asked over a connection of its own."""
    async with rpc.create_channel(address, is_alone=True) as channel:
        stub = admin_pb2_grpc.StatusServiceStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
    return int(status.router.num_running)


async def test_a_router_leaves_to_its_successor_and_its_streams_end_where_they_are(tmp_path: Path) -> None:
    prefill, decode = FakeWorker("p0", worker_pb2.ROLE_PREFILL), FakeWorker("d0", worker_pb2.ROLE_DECODE)
    async with running_router(tmp_path, (prefill, decode), **GIVEN) as old:
        stream, events, key = await begin(old, prefill)
        host, _, port = old.server.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        given = GIVEN | ports_of(old) | {"is_successor": True}
        async with running_router(tmp_path, (prefill, decode), **given) as new:
            assert (new.address, new.server.http_address) == (old.address, old.server.http_address)
            leaving = asyncio.create_task(old.server.stop())
            assert await reader.read() == b"", "the old one closes connections without a request"
            writer.close()
            assert [await num_running(new.address) for _ in range(8)] == [0] * 8, "the old one runs a request"
            async with httpx.AsyncClient(base_url=f"http://{new.server.http_address}") as client:
                assert (await client.get("/readyz")).status_code == 200
            assert old.server.dispatcher.num_running == 1 and not leaving.done()
            decode.emit(phase(key, DECODE), tokens(key, 1, ids("bc"), finish_reason=LENGTH))
            events += await rest(stream)
            assert text_of(events) == "abc" and kinds(events)[-1] == "completed"
            await leaving


async def test_a_successor_that_reaches_no_worker_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_CONNECT_S", 0.2)
    gone = FakeWorker("d0", worker_pb2.ROLE_DECODE)
    await gone.start()
    await gone.stop()
    async with running_router(tmp_path, **GIVEN) as old:
        given = GIVEN | ports_of(old) | {"is_successor": True}
        with pytest.raises(Unavailable, match=r"connected to too few workers after 0\.2 s"):
            async with running_router(tmp_path, (gone,), **given):
                pass
        assert await num_running(old.address) == 0


async def test_a_router_that_is_no_successor_takes_nobodys_port(tmp_path: Path) -> None:
    async with running_router(tmp_path, **GIVEN) as old:
        for name, port in ports_of(old).items():
            with pytest.raises(ConfigError, match="is in use or not an address of this machine"):
                async with running_router(tmp_path, **GIVEN | {name: port}):
                    pass


async def test_a_router_beside_others_listens_once_it_is_connected_or_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_BESIDE_OTHERS_S", 0.2)
    decode, gone = FakeWorker("d0", worker_pb2.ROLE_DECODE), FakeWorker("d1", worker_pb2.ROLE_DECODE)
    await gone.start()
    await gone.stop()
    given = GIVEN | {"shares_ports": True, "needs_prefill": False}
    async with running_router(tmp_path, (decode,), **given) as first:
        settings = given | ports_of(first) | {"model_path": str(tmp_path)}
        for worker in (decode, gone):
            server = program.RouterServer(
                RouterSettings.from_values(**settings, workers=(worker.flag,)), lambda line: None
            )
            address, _ = await server.start()
            assert (address, server.http_address) == (first.address, first.server.http_address)
            assert server.dispatcher.fleet.can_serve is (worker is decode)
            await server.stop()
