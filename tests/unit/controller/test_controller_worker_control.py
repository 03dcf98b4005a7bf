"""Calls that the controller passes on to one worker, and `baton flush`, which makes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from admin_desk import FakeBackend
from scripted_router import baton

from cli import change
from cluster import protocol, rpc
from cluster.config.schema import AdminSection
from cluster.errors import IncompatibleProtocol, NotFound, NotServed, Unavailable
from cluster.pb import admin_pb2, admin_pb2_grpc
from controller import admin_service
from controller.admin_service import start_admin
from controller.plan import plan_cluster
from tools import client as client_module
from tools.client import AdminClient

WAIT_S = 10.0


class FakeWorker(admin_pb2_grpc.WorkerControlServiceServicer):
    """Has `num_blocks` in its prefix cache until they are flushed; None: it refuses."""

    def __init__(self, num_blocks: int | None) -> None:
        self._num_blocks = num_blocks
        self.is_silent = False

    async def FlushPrefixCache(
        self, request: admin_pb2.FlushPrefixCacheRequest, context: Any
    ) -> admin_pb2.FlushPrefixCacheResponse:
        if self.is_silent:
            await asyncio.Event().wait()
        if self._num_blocks is None:
            await rpc.abort(context, NotServed(f"{request.worker_id} does not do that"))
        num_blocks, self._num_blocks = self._num_blocks, 0
        return admin_pb2.FlushPrefixCacheResponse(num_blocks=num_blocks)


class Desk:
    """A controller with the workers prefill-0 (7 blocks), decode-0 (refuses), decode-1 (gone) and decode-2, which is
    not ready."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self._loop = loop
        self._servers: list[grpc.aio.Server] = []
        self.backend, self.prefill = FakeBackend(folder), FakeWorker(7)
        self.run(self._start())

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _start(self) -> None:
        backend = self.backend
        for worker_id, worker in (("prefill-0", self.prefill), ("decode-0", FakeWorker(None))):
            server, port = rpc.create_server()
            admin_pb2_grpc.add_WorkerControlServiceServicer_to_server(worker, server)
            await server.start()
            self._servers.append(server)
            backend.worker_addresses[worker_id] = f"127.0.0.1:{port}"
        backend.worker_addresses["decode-1"] = "127.0.0.1:1"
        backend.pool.add(plan_cluster(backend.reconfigurer.config, num_gpus=0, num_cores=4).workers)
        backend.pool.run()
        while not all(backend.pool[worker_id].is_ready for worker_id in backend.worker_addresses):
            await asyncio.sleep(0)
        server, backend.address = await start_admin(AdminSection(port=0), backend)
        self._servers.append(server)

    async def _stop(self) -> None:
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        await self.backend.pool.stop(0.0)

    def close(self) -> None:
        self.run(self._stop())


@pytest.fixture
def desk(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(loop, tmp_path)
    yield desk
    desk.close()


def flush(desk: Desk, worker_id: str) -> int:
    with AdminClient(desk.backend.address) as client:
        return int(client.flush_cache(worker_id).num_blocks)


def test_a_call_reaches_the_worker_that_it_names_and_its_answer_comes_back(desk: Desk) -> None:
    assert [flush(desk, "prefill-0"), flush(desk, "prefill-0")] == [7, 0]


def test_a_program_and_a_controller_of_two_protocols_refuse_each_other_by_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(protocol, "VERSION", 3)
        later.setattr(protocol, "OLDEST", 2)
        client = AdminClient(desk.backend.address)
    with client, pytest.raises(IncompatibleProtocol) as refused:
        client.set_roles(1, 1, dry_run=True)
    assert (
        refused.value.message
        == "the controller speaks protocol 1; its caller speaks 2 to 3: upgrade the controller first"
    )
    with AdminClient(desk.backend.address) as client:
        assert client.cluster().protocol == protocol.spoken()
        monkeypatch.setattr(admin_service, "spoken", lambda: "2-3")
        with pytest.raises(IncompatibleProtocol) as refused:
            client.cluster()
    where = f"the controller at {desk.backend.address}"
    assert refused.value.message == f"{where} speaks protocol 2 to 3; this program speaks 1: upgrade this program first"


def test_the_error_of_a_worker_is_the_callers(desk: Desk) -> None:
    with pytest.raises(NotServed, match="decode-0 does not do that"):
        flush(desk, "decode-0")


def test_a_worker_that_is_unknown_or_not_there_is_named_in_the_error(desk: Desk) -> None:
    with pytest.raises(NotFound, match="no worker 'decode-9'; there are decode-0, decode-1, decode-2, prefill-0"):
        flush(desk, "decode-9")
    with pytest.raises(Unavailable, match="worker decode-1 does not answer"):
        flush(desk, "decode-1")
    with pytest.raises(Unavailable, match="worker decode-2 is starting; try again when it is ready"):
        flush(desk, "decode-2")


def test_every_method_of_the_service_is_passed_on() -> None:
    names = {method.name for method in admin_pb2.DESCRIPTOR.services_by_name["WorkerControlService"].methods}
    requests = admin_pb2.DESCRIPTOR.services_by_name["WorkerControlService"].methods
    assert "FlushPrefixCache" in names
    assert all("worker_id" in method.input_type.fields_by_name for method in requests)


def test_flush_prints_what_each_worker_forgot(desk: Desk) -> None:
    def run(*arguments: str) -> Any:
        return baton("flush", *arguments, "--admin-address", desk.backend.address)

    assert run("prefill-0").stdout == "prefill-0: 7 blocks\n"
    again = run("prefill-0", "--json")
    assert json.loads(again.stdout) == {"num_blocks": {"prefill-0": 0}, "num_stored_blocks": {"prefill-0": 0}}
    everywhere = run("decode-0", "prefill-0", "decode-1")
    assert (everywhere.exit_code, everywhere.stdout) == (1, "prefill-0: 0 blocks\n"), "one that fails ends no other"
    assert "decode-0: decode-0 does not do that; decode-1: worker decode-1 does not answer" in everywhere.stderr
    assert run().exit_code == 1


def test_a_worker_that_takes_long_to_flush_is_waited_for_aloud_and_named_when_it_does_not_answer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LOOK_TIMEOUT_S", -29.0)  # beside the 30 s of each call
    monkeypatch.setattr(change, "SAID_AFTER_S", 0.0)
    desk.prefill.is_silent = True
    silent = baton("flush", "prefill-0", "--admin-address", desk.backend.address)
    assert silent.exit_code == 1
    assert "prefill-0: is waited for; to flush a store takes 60 s at most\n" in silent.stderr
    assert "not all is flushed: prefill-0: worker prefill-0 does not answer within 0." in silent.stderr
