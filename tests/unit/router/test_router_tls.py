"""TLS on the router's ports and towards its workers: who gets through, and who does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from certificates import Authority
from fake_worker import FakeWorker, decode_script, pair, prefill_script
from router_harness import Router, ids, running_router, text_of, text_spec
from scripted_router import baton

from cluster import rpc
from cluster.errors import ConfigError
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from cluster.pb import generation_pb2 as pb
from cluster.tls import ClientTls, InternalTls, ServerTls
from router.http_listener import ConnectionLimits, HttpListener
from router.routing.worker_client import WorkerCallbacks, WorkerClient

pytestmark = pytest.mark.asyncio

LIMITS = ConnectionLimits(100)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def public(tls: ServerTls) -> dict[str, Any]:
    """Settings of a router."""
    return {"tls_cert": tls.cert, "tls_key": tls.key, "tls_client_ca": tls.client_ca}


def internal(tls: InternalTls) -> dict[str, Any]:
    return {"internal_tls_cert": tls.cert, "internal_tls_key": tls.key, "internal_tls_ca": tls.ca}


def answering(tls: ServerTls | None) -> tuple[FakeWorker, FakeWorker]:
    """A pair that writes `fine`."""

    def outputs(_: worker_pb2.Admit) -> list[list[int]]:
        return [ids("fine")]

    return (
        FakeWorker("prefill-0", worker_pb2.ROLE_PREFILL, prefill_script(outputs), tls),
        FakeWorker("decode-0", worker_pb2.ROLE_DECODE, decode_script(outputs), tls),
    )


async def refused(router: Router, tls: ClientTls | None) -> None:
    """A client with this does not get through."""
    async with rpc.create_channel(router.address, tls=tls, is_alone=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/baton.v1.GenerationService/ListModels")(b"", timeout=20)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE, error.value


async def test_the_right_certificates_work_from_end_to_end(tmp_path: Path, ours: Authority) -> None:
    cluster = ours.internal()
    settings = public(ours.server(clients=ours)) | internal(cluster)
    client = ours.client(showing=ours)
    async with running_router(tmp_path / "m", answering(cluster.server), tls=client, **settings) as router:
        assert text_of(await router.stream(text_spec())) == "fine"


async def test_a_client_that_does_not_ask_for_a_certificate_needs_none(tmp_path: Path, ours: Authority) -> None:
    async with running_router(tmp_path / "m", tls=ours.client(), **public(ours.server())) as router:
        assert (await router.generation.ListModels(pb.ListModelsRequest())).models


async def test_who_has_not_the_right_certificate_does_not_get_through(
    tmp_path: Path, ours: Authority, theirs: Authority
) -> None:
    clients: dict[str, ClientTls | None] = {
        "without TLS": None,
        "without a certificate": ours.client(),
        "of another authority": ours.client(showing=theirs),
        "expired": ours.client(showing=ours, is_expired=True),
        "that believes another authority": theirs.client(showing=ours),
    }
    good = ours.client(showing=ours)
    async with running_router(tmp_path / "m", tls=good, **public(ours.server(clients=ours))) as router:
        for client in clients.values():
            await refused(router, client)
        assert (await router.generation.ListModels(pb.ListModelsRequest())).models


@pytest.mark.parametrize(
    "make",
    [
        lambda authority: authority.server(is_expired=True),
        lambda authority: authority.server("baton.example.org"),
        lambda authority: authority.server("baton"),
    ],
    ids=["expired", "of another host", "of the cluster's inside"],
)
async def test_a_router_with_a_wrong_certificate_is_not_believed(
    tmp_path: Path, ours: Authority, make: Callable[[Authority], ServerTls]
) -> None:
    async with running_router(tmp_path / "m", tls=ours.client(), **public(make(ours))) as router:
        await refused(router, ours.client())


async def test_a_router_listens_beyond_loopback_with_tls_and_not_without(tmp_path: Path, ours: Authority) -> None:
    with pytest.raises(ConfigError, match=r"refusing to listen on '0\.0\.0\.0' without TLS: set up TLS"):
        async with running_router(tmp_path / "m", host="0.0.0.0"):
            pass
    async with running_router(tmp_path / "m", host="0.0.0.0", **public(ours.server())) as router:
        address = router.address.replace("0.0.0.0", "127.0.0.1")
        async with rpc.create_channel(address, tls=ours.client()) as channel:
            assert await channel.unary_unary("/baton.v1.GenerationService/ListModels")(b"", timeout=20)


async def test_files_that_cannot_be_used_are_a_mistake_of_the_configuration(tmp_path: Path, ours: Authority) -> None:
    good, other = ours.server(), ours.server()
    wrong = {
        "are not a pair": {"tls_cert": good.cert, "tls_key": other.key},
        "are not both PEM": {"tls_cert": good.key, "tls_key": good.key},
        "no-such": {"tls_cert": str(tmp_path / "no-such"), "tls_key": good.key},
        "name both files": {"tls_cert": good.cert},
        "name all three": {"internal_tls_cert": good.cert, "internal_tls_key": good.key},
        "no certificate of an authority": public(good) | {"tls_client_ca": good.key},
    }
    for what, settings in wrong.items():
        with pytest.raises(ConfigError, match=what):
            async with running_router(tmp_path / "m", **settings):
                pass


async def test_the_control_port_lets_in_only_who_is_of_the_cluster(
    tmp_path: Path, ours: Authority, theirs: Authority
) -> None:
    cluster = ours.internal()
    strangers = [None, ours.client(), ClientTls(ours.file, *theirs.issue("baton"), name="baton")]
    async with running_router(tmp_path / "m", **internal(cluster)) as router:
        for stranger in strangers:
            async with rpc.create_channel(router.control_address, tls=stranger, is_alone=True) as channel:
                control = admin_pb2_grpc.ControlServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await control.SetWorkers(admin_pb2.SetWorkersRequest(), timeout=20)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        async with rpc.create_channel(router.control_address, tls=cluster.client) as channel:
            await admin_pb2_grpc.ControlServiceStub(channel).SetWorkers(admin_pb2.SetWorkersRequest(), timeout=20)


async def test_a_worker_that_is_not_of_the_cluster_never_becomes_ready(
    tmp_path: Path, ours: Authority, theirs: Authority
) -> None:
    """The one that is becomes ready although it was named last."""
    strangers = [
        FakeWorker("plain", worker_pb2.ROLE_DECODE),
        FakeWorker("theirs", worker_pb2.ROLE_DECODE, tls=theirs.internal().server),
        FakeWorker("expired", worker_pb2.ROLE_DECODE, tls=ours.internal(is_expired=True).server),
        FakeWorker("host", worker_pb2.ROLE_DECODE, tls=ours.internal("127.0.0.1").server),
    ]
    friends = [FakeWorker(name, worker_pb2.ROLE_DECODE, tls=ours.internal().server) for name in ("one", "two")]
    seen = Seen({"one", "two"})
    clients = []
    try:
        for worker in (*strangers, *friends):
            await worker.start()
            client = WorkerClient(
                worker.worker_id, worker.address, worker.role, seen.callbacks, tls=ours.internal().client
            )
            clients.append(client)
            client.start()
        await asyncio.wait_for(seen.everybody.wait(), 20)
        assert {client.worker_id for client in clients if client.is_ready} == {"one", "two"}
    finally:
        for client in clients:
            await client.close()
        for worker in (*strangers, *friends):
            await worker.stop()


class Seen:
    """Which workers became ready."""

    def __init__(self, expected: set[str]) -> None:
        self._missing = expected
        self.everybody = asyncio.Event()

        self.callbacks = WorkerCallbacks(self._on_ready, lambda worker: None, lambda worker, events: None)

    def _on_ready(self, worker: WorkerClient) -> None:
        self._missing.remove(worker.worker_id)
        if not self._missing:
            self.everybody.set()


async def test_a_worker_believes_no_router_without_a_certificate(tmp_path: Path, ours: Authority) -> None:
    cluster = ours.internal()
    workers = answering(cluster.server)
    async with running_router(tmp_path / "m", workers, **internal(cluster)):
        for tls in (None, ClientTls(ours.file, name="baton")):
            async with rpc.create_channel(workers[0].address, tls=tls, is_alone=True) as channel:
                call = channel.stream_stream("/baton.v1.WorkerService/Session")()
                assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.UNAVAILABLE


async def test_the_program_speaks_tls(tmp_path: Path, ours: Authority) -> None:
    settings = public(ours.server(clients=ours))
    client = ours.client(showing=ours)
    async with running_router(tmp_path / "m", pair(lambda _: [ids("fine")]), tls=client, **settings) as router:
        at = ("generate", "x", "--max-tokens", "9", "--address", router.address)
        shown = ("--tls-cert", str(client.cert), "--tls-key", str(client.key))
        told = await asyncio.to_thread(baton, *at, "--tls-ca", client.ca, *shown)
        assert told.stdout == "fine\n", told.stderr
        plain = await asyncio.to_thread(baton, *at)
        assert plain.exit_code == 4 and "--tls-ca" in plain.stderr
        without = await asyncio.to_thread(baton, *at, *shown)
        assert without.exit_code == 2 and "--tls-ca" in without.stderr
        half = await asyncio.to_thread(baton, *at, "--tls-ca", client.ca, *shown[:2])
        assert half.exit_code == 3 and "key" in half.stderr


async def test_http_is_under_the_same_tls_and_wants_the_same_certificates(tmp_path: Path, ours: Authority) -> None:
    good = ours.client(showing=ours)
    async with running_router(tmp_path / "m", tls=good, http_port=0, **public(ours.server(clients=ours))) as router:
        address = f"https://{router.server.http_address}"
        async with httpx2.AsyncClient(base_url=address, verify=good.context()) as http:
            assert (await http.get("/healthz")).json() == {"status": "ok"}
        for url, client in ((address, ours.client()), (address.replace("https", "http"), good)):
            async with httpx2.AsyncClient(base_url=url, verify=client.context()) as http:
                with pytest.raises(httpx2.TransportError):
                    await http.get("/healthz")


async def test_http_is_not_opened_beyond_loopback_without_tls() -> None:
    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody calls")

    with pytest.raises(ConfigError, match=r"refusing to serve HTTP on '0\.0\.0\.0' without TLS"):
        HttpListener(nothing, "0.0.0.0", 0, insecure=False, tls=None, stalled_client_s=1.0, limits=LIMITS)
    allowed = HttpListener(nothing, "0.0.0.0", 0, insecure=True, tls=None, stalled_client_s=1.0, limits=LIMITS)
    allowed.start()
    with pytest.raises(ConfigError, match="is in use or not an address of this machine"):
        port = int(allowed.address.rpartition(":")[2])
        HttpListener(nothing, "127.0.0.1", port, insecure=False, tls=None, stalled_client_s=1.0, limits=LIMITS)
    await allowed.stop()
