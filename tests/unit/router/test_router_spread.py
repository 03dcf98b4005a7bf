"""A router on a machine of its own: where it listens for the others, what it tells them, and what it does not keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fake_worker import pair
from router_harness import ids, running_router, text_of, text_spec

from cluster.pb import admin_pb2

HERE = "127.0.0.2"
SPREAD: dict[str, Any] = {"host": "0.0.0.0", "node_host": HERE, "insecure": True, "http_port": 0, "batch_store": ""}


async def test_it_tells_the_address_of_its_machine_where_it_listens_on_all(tmp_path: Path) -> None:
    async with running_router(tmp_path, pair(lambda _: [ids("ok")]), metrics_port=0, **SPREAD) as router:
        status = await router.admin.GetStatus(admin_pb2.GetStatusRequest())
        told = [router.address, router.control_address, router.server.http_address, status.router_address]
        assert [address.rpartition(":")[0] for address in (*told, status.router.metrics_address)] == [HERE] * 5
        assert text_of(await router.stream(text_spec())) == "ok"
        async with httpx.AsyncClient() as client:
            page = await client.get(f"http://{status.router.metrics_address}/metrics")
            assert "baton_running_requests" in page.text


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "files"), ("POST", "files"), ("DELETE", "files/file-1"), ("GET", "batches"), ("POST", "batches/b/cancel")],
)
async def test_batches_that_the_other_routers_would_not_know_are_refused(
    tmp_path: Path, method: str, path: str
) -> None:
    async with running_router(tmp_path, **SPREAD) as router, httpx.AsyncClient() as client:
        answer = await client.request(method, f"http://{router.server.http_address}/v1/{path}")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "not_served" and "name a Redis in `state`" in error["message"]
        wrong = await client.put(f"http://{router.server.http_address}/v1/files")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, POST")
