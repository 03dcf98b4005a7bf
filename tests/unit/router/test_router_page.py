"""The page over real sockets: its policy, who may see the data, and how the split is planned, applied and refused."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from admin_desk import FakeBackend
from certificates import Authority
from fake_worker import pair
from router_harness import Router, ids, running_router, text_spec

from cluster import rpc
from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.auth import KeyRing
from cluster.config.schema import AdminSection
from cluster.pb import admin_pb2, admin_pb2_grpc
from cluster.pb import generation_pb2 as pb
from cluster.tls import InternalTls
from controller.admin_service import start_admin

pytestmark = pytest.mark.asyncio
KEYS = (
    ApiKey("alice", digest_of("baton-a"), "acme", ("generate",)),
    ApiKey("op", digest_of("baton-o"), "ops", ("admin",)),
)
ADMIN = {"authorization": "Bearer baton-o"}
TWO_TWO = {"prefill": 2, "decode": 2, "dry_run": True}


@contextlib.asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    workers = pair(lambda _: [ids("yes")])
    async with running_router(folder / "model", workers, http_port=0, **settings) as router:
        address = f"http://{router.server.http_address}"
        async with httpx.AsyncClient(base_url=address, timeout=20) as http:
            yield router, http


@contextlib.asynccontextmanager
async def controlled(
    router: Router, folder: Path, keys: KeyRing | None = None, inside: InternalTls | None = None
) -> AsyncIterator[FakeBackend]:
    """A controller that has named itself to the router; its one prefill and three decode workers are words."""
    folder.mkdir()
    backend = FakeBackend(folder)
    tls, client = (None, None) if inside is None else (inside.server, inside.client)
    server, backend.address = await start_admin(AdminSection(port=0), backend, keys, tls)
    async with rpc.create_channel(router.control_address, tls=client) as channel:
        control: Any = admin_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
        fleet = router.server.dispatcher.fleet
        workers = [admin_pb2.WorkerAddress(worker_id=w.worker_id, address=w.address, role=w.role) for w in fleet]
        await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=workers, admin_address=backend.address))
    try:
        yield backend
    finally:
        backend.stage.steps.gate.set()
        await backend.reconfigurer.close()
        await server.stop(None)


async def until(http: httpx.AsyncClient, holds: Callable[[Any], bool]) -> Any:
    """What the page is document once this holds: what a controller says is document again for half a second."""
    async with asyncio.timeout(20):
        while not holds(document := (await http.get("/api/cluster")).json()):
            pass
    return document


async def refusal(http: httpx.AsyncClient, body: Any = TWO_TWO, **headers: str) -> tuple[int, str]:
    answer = await http.post("/api/roles", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    return answer.status_code, answer.json()["error"]["message"] if "error" in answer.json() else ""


async def test_the_page_is_one_file_and_its_policy_allows_that_file_and_nothing_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, http):
        answer = await http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert policy["require-trusted-types-for"] == "'script'" and policy["frame-ancestors"] == "'none'"
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|\bon[a-z]+=["']|innerHTML|style=["']""", answer.text)


async def test_what_it_is_told_is_what_was_served_and_only_what_is_new(tmp_path: Path) -> None:
    async with serving(tmp_path) as (router, http):
        spec = text_spec(request_id="mine")
        await router.generation.Generate(pb.GenerateRequest(spec=spec))
        document = (await http.get("/api/cluster")).json()
        assert (document["status"]["router"]["num_finished"], document["status"]["model"]) == (1, "model")
        assert [(w["worker_id"], w["role"], w["state"]) for w in document["status"]["workers"]] == [
            ("decode-0", "decode", "ready"),
            ("prefill-0", "prefill", "ready"),
        ]
        (life,) = document["activity"]["requests"]
        assert (life["request_id"], life["outcome"], life["num_prompt_tokens"]) == ("mine", "finished", 5)
        assert "hello" not in json.dumps(document) and "yes" not in json.dumps(document), "neither prompts nor outputs"
        assert document["controller"] is None and document["change"]["may"] is False
        assert "without a controller" in document["change"]["why"]
        again = {"life": document["activity"]["life"], "request": life["number"], "second": 10**9}
        later = (await http.get("/api/cluster", params=again)).json()
        assert later["activity"]["requests"] == later["activity"]["seconds"] == []
        assert (await http.get("/api/cluster", params=again | {"life": "x"})).json()["activity"]["requests"] == [life]
        for wrong in ("-1", "x", "9" * 30, "１"):
            answer = await http.get("/api/cluster", params={"second": wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "second")


async def test_data_and_changes_need_the_scope_admin_and_the_page_itself_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(render_keys(KEYS))
    async with serving(tmp_path, keys_file=str(tmp_path / "keys.yaml")) as (router, http):
        assert (await http.get("/")).status_code == 200
        for headers, status in (({}, 401), ({"authorization": "Bearer baton-a"}, 403), (ADMIN, 200)):
            assert (await http.get("/api/cluster", headers=headers)).status_code == status
        assert [(await refusal(http))[0], (await refusal(http, authorization="Bearer baton-a"))[0]] == [401, 403]
        async with controlled(router, tmp_path / "controller", KeyRing(KEYS)) as backend:
            document = (await http.get("/api/cluster", headers=ADMIN)).json()
            assert document["change"] == {"may": True, "why": ""} and document["controller"]["version"] == 1
            planned = await http.post("/api/roles", json=TWO_TWO, headers=ADMIN)
            assert planned.status_code == 200 and planned.json()["is_change"] is False
            (step,) = planned.json()["plan"]["steps"]
            assert re.fullmatch(r"flip decode-\d to prefill", step) and backend.stage.split() == (1, 3)
        # The router passes keys on, and it is the controller that lets them change something.
        async with controlled(router, tmp_path / "strict", KeyRing(KEYS[:1])):
            assert (await refusal(http, **ADMIN))[0] == 401
            document = (await http.get("/api/cluster", headers=ADMIN)).json()
            assert document["controller"] is None and document["change"]["why"].startswith(
                "the controller does not answer: "
            )


async def test_a_plan_changes_nothing_and_is_applied_once_by_whoever_comes_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as (router, http), controlled(router, tmp_path / "controller") as backend:
        plan = (await http.post("/api/roles", json=TWO_TWO)).json()
        assert plan["plan"]["changes"] == ["roles.prefill.devices: 2", "roles.decode.devices: 2"]
        assert (plan["version"], backend.reconfigurer.version, backend.file.load().roles.prefill.devices) == (1, 1, 1)
        wanted = [{"prefill": p, "decode": 4 - p, "dry_run": False, "expected_version": 1} for p in (2, 3)]
        backend.stage.steps.gate.clear()
        answers = await asyncio.gather(*(http.post("/api/roles", json=each) for each in wanted))
        changing = (await http.get("/api/cluster")).json()["controller"]["changing"]
        assert changing["num_done"] == 0 and changing["steps"]
        backend.stage.steps.gate.set()
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        won = wanted[[answer.status_code for answer in answers].index(200)]["prefill"]
        async for event in backend.events.after(0):
            if event.kind.name == "CHANGED":
                break
        assert backend.stage.split() == (won, 4 - won) and backend.file.load().roles.prefill.devices == won
        document = await until(http, lambda document: document["controller"]["changing"] is None)
        assert [event["kind"] for event in document["controller"]["events"]][-2:] == ["step_done", "changed"]
        status, why = await refusal(http, {"prefill": 9, "decode": 0, "dry_run": True})
        assert status == 400 and "decode" in why


async def test_another_site_or_a_name_that_points_here_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (router, http), controlled(router, tmp_path / "controller") as backend:
        host = router.server.http_address
        for headers in (
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"sec_fetch_site": "cross-site"},
            {"sec_fetch_site": "same-site"},
            {"host": f"evil.example:{host.rpartition(':')[2]}"},
            {"host": "127.0.0.1.evil.example"},
        ):
            status, why = await refusal(http, {**TWO_TWO, "dry_run": False}, **headers)
            assert status == 403, (headers, why)
        form = await http.post("/api/roles", content=json.dumps(TWO_TWO), headers={"content-type": "text/plain"})
        assert form.status_code == 400 and "application/json" in form.text
        fine = {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert (await http.post("/api/roles", json=TWO_TWO, headers=fine)).status_code == 200
        named = {"host": f"localhost:{host.rpartition(':')[2]}"}
        assert (await http.post("/api/roles", json=TWO_TWO, headers=named)).status_code == 200
        assert backend.stage.split() == (1, 3)


async def test_where_everybody_can_come_nobody_changes_anything(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, host="0.0.0.0", insecure=True) as (router, http),
        controlled(router, tmp_path / "controller"),
    ):
        change = (await http.get("/api/cluster")).json()["change"]
        assert change["may"] is False and "set auth.keys_file or tls.client_ca" in change["why"]
        assert await refusal(http) == (403, change["why"])


async def test_a_certificate_is_as_good_as_a_key_and_routers_show_the_controller_the_clusters_own(
    tmp_path: Path,
) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path)
    outer, inside = ours.server(clients=theirs), ours.internal()
    settings = {
        "tls_cert": outer.cert,
        "tls_key": outer.key,
        "tls_client_ca": outer.client_ca,
        "internal_tls_cert": inside.cert,
        "internal_tls_key": inside.key,
        "internal_tls_ca": inside.ca,
    }
    client = ours.client(showing=theirs)
    async with running_router(tmp_path / "model", host="0.0.0.0", http_port=0, tls=client, **settings) as router:
        port = router.server.http_address.rpartition(":")[2]
        async with (
            controlled(router, tmp_path / "controller", inside=inside) as backend,
            httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=client.context(), timeout=20) as http,
        ):
            assert (await http.get("/api/cluster")).json()["change"] == {"may": True, "why": ""}
            assert (await http.post("/api/roles", json=TWO_TWO)).json()["plan"]["steps"]
            assert (await refusal(http, origin="https://evil.example"))[0] == 403
            backend.stage.steps.gate.set()
            async with rpc.create_channel(backend.address) as stranger:
                admin: Any = admin_pb2_grpc.AdminServiceStub(stranger)  # type: ignore[no-untyped-call]
                with pytest.raises(grpc.aio.AioRpcError):
                    await admin.GetCluster(admin_pb2.GetClusterRequest(), timeout=20)


WRONG_BODIES = [
    ("{", "body"),
    ("[]", "body"),
    ("{}", "prefill"),
    ('{"prefill": -1, "decode": 1, "dry_run": true}', "prefill"),
    ('{"prefill": 1, "decode": 1e9, "dry_run": true}', "decode"),
    ('{"prefill": "1", "decode": 1, "dry_run": true}', "prefill"),
    ('{"prefill": true, "decode": 1, "dry_run": true}', "prefill"),
    ('{"prefill": 1, "decode": 1, "dry_run": 1}', "dry_run"),
    ('{"prefill": 1, "decode": 1, "dry_run": true, "force": true}', "force"),
    ('{"prefill": 1, "decode": 1, "dry_run": true, "expected_version": 18446744073709551616}', "expected_version"),
    ("\xff", "body"),
    (" " * 5000, "larger"),
]


async def test_a_body_with_a_mistake_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as (router, http), controlled(router, tmp_path / "controller") as backend:
        headers = {"content-type": "application/json; charset=utf-8"}
        for body, where in WRONG_BODIES:
            answer = await http.post("/api/roles", content=body.encode("latin-1"), headers=headers)
            assert answer.status_code == 400 and where in answer.json()["error"]["message"], answer.text
        assert backend.stage.split() == (1, 3)


async def test_a_controller_that_is_gone_is_said_and_found_again_elsewhere(tmp_path: Path) -> None:
    async with serving(tmp_path) as (router, http):
        async with controlled(router, tmp_path / "first"):
            assert (await http.get("/api/cluster")).json()["change"]["may"] is True
        document = await until(http, lambda document: not document["change"]["may"])
        assert "does not answer" in document["change"]["why"]
        assert len(document["status"]["workers"]) == 2 and (await refusal(http))[0] == 503
        # One that is silent is waited for once, by however many look.
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = rpc.format_address(*silent.getsockname())
            async with rpc.create_channel(router.control_address) as channel:
                control: Any = admin_pb2_grpc.ControlServiceStub(channel)  # type: ignore[no-untyped-call]
                await control.SetWorkers(admin_pb2.SetWorkersRequest(admin_address=address))
            begun = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*(http.get("/api/cluster") for _ in range(8)))
            assert asyncio.get_running_loop().time() - begun < 5
            assert all("does not answer" in answer.json()["change"]["why"] for answer in answers)
        async with controlled(router, tmp_path / "second"):
            assert (await http.get("/api/cluster")).json()["change"]["may"] is True
