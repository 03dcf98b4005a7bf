"""`baton sessions` against a controller whose workers keep what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_router import baton

from cluster import rpc
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from cluster.protocol import spoken


class Desk(admin_pb2_grpc.AdminServiceServicer, admin_pb2_grpc.WorkerControlServiceServicer):
    """Two ready workers, and one that starts."""

    address = ""

    def __init__(self) -> None:
        self.kept: dict[str, list[tuple[str, str]]] = {"p0": [], "d0": []}
        self.has_share = True

    async def GetCluster(self, request: admin_pb2.GetClusterRequest, context: Any) -> admin_pb2.GetClusterResponse:
        states = {"p0": "ready", "d0": "ready", "d1": "starting"}
        processes = [
            admin_pb2.ProcessStatus(name=name, state=state, role=worker_pb2.ROLE_DECODE)
            for name, state in states.items()
        ]
        return admin_pb2.GetClusterResponse(processes=processes, protocol=spoken())

    async def ListSessions(
        self, request: admin_pb2.ListSessionsRequest, context: Any
    ) -> admin_pb2.ListSessionsResponse:
        found = [
            admin_pb2.KeptSession(
                tenant=tenant,
                session_id=name,
                remaining_s=41.26,
                tiers=[admin_pb2.SessionBlocks(tier="device", num_blocks=3), admin_pb2.SessionBlocks(tier="host")],
            )
            for tenant, name in self.kept[request.worker_id]
            if not request.HasField("tenant") or tenant == request.tenant
        ]
        shown = found[: request.num_sessions]
        return admin_pb2.ListSessionsResponse(sessions=shown, num_total=len(found), has_share=self.has_share)

    async def EndSession(self, request: admin_pb2.EndSessionRequest, context: Any) -> admin_pb2.EndSessionResponse:
        kept = self.kept[request.worker_id]
        ended = [
            each
            for each in kept
            if each[1] == request.session_id and (not request.HasField("tenant") or each[0] == request.tenant)
        ]
        self.kept[request.worker_id] = [each for each in kept if each not in ended]
        return admin_pb2.EndSessionResponse(num_ended=len(ended))


@pytest.fixture
def desk(loop: asyncio.AbstractEventLoop) -> Iterator[Desk]:
    async def start() -> tuple[Desk, Any]:
        made = Desk()
        server, port = rpc.create_server("127.0.0.1", 0)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(made, server)
        admin_pb2_grpc.add_WorkerControlServiceServicer_to_server(made, server)
        await server.start()
        made.address = f"127.0.0.1:{port}"
        return made, server

    made, server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield made
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)


def run(desk: Desk, *arguments: str) -> Any:
    return baton("sessions", *arguments, "--admin-address", desk.address)


def test_sessions_are_listed_by_worker_with_their_blocks(desk: Desk) -> None:
    desk.kept = {"p0": [("acme", "chat-1")], "d0": [("acme", "chat-1"), ("", "chat-2")]}
    done = run(desk, "list")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.exit_code == 0, done.stderr
    assert ["p0", "acme", "chat-1", "3", "0", "-", "41"] in lines and [
        "d0",
        "-",
        "chat-2",
        "3",
        "0",
        "-",
        "41",
    ] in lines
    told = json.loads(run(desk, "list", "--tenant", "acme", "--json").stdout)["workers"]
    assert [session["session_id"] for session in told["d0"]["sessions"]] == ["chat-1"]
    assert told["p0"]["sessions"][0] == {
        "tenant": "acme",
        "session_id": "chat-1",
        "remaining_s": 41.3,
        "blocks": {"device": 3, "host": 0},
    }
    few = run(desk, "list", "--limit", "1").stdout
    assert "d0: 1 of 2 sessions; --limit shows more" in few and "chat-2" not in few


def test_without_sessions_it_says_what_makes_them(desk: Desk) -> None:
    assert "router.session_ttl_s must be above 0" in run(desk, "list").stdout
    assert run(desk, "list", "--tenant", "acme").stdout.startswith("no session of tenant 'acme' is kept")
    desk.has_share = False
    assert "engine.kv_session_share is 0" in run(desk, "list").stdout


def test_a_session_is_ended_on_all_workers_and_one_that_is_not_there_is_refused(desk: Desk) -> None:
    desk.kept = {"p0": [("acme", "chat")], "d0": [("acme", "chat"), ("other", "chat")]}
    done = run(desk, "end", "chat", "--tenant", "acme")
    assert (done.exit_code, done.stdout) == (0, "ended on p0, d0\n")
    assert desk.kept == {"p0": [], "d0": [("other", "chat")]}
    gone = run(desk, "end", "chat", "--tenant", "acme")
    assert gone.exit_code == 1
    assert "no worker keeps a session 'chat' of tenant 'acme'; `baton sessions list` shows" in gone.stderr
    assert json.loads(run(desk, "end", "chat", "--json").stdout) == {"ended": {"p0": 0, "d0": 1}}
