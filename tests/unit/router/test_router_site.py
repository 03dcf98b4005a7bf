"""Another site in a browser, at each path of a router: DNS that it points here, and posts from its pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_worker import pair
from http_door import chat, serving
from router_harness import ids

from cluster.api_keys import ApiKey, digest_of, render_keys

pytestmark = pytest.mark.asyncio

GET = ("/", "/healthz", "/readyz", "/metrics", "/v1/models", "/api/cluster", "/openapi.json", "/v1/files", "/nowhere")
POST = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/tokenize",
    "/v1/files",
    "/v1/batches",
    "/api/roles",
)
EVIL: tuple[dict[str, str], ...] = (
    {"host": "evil.example:8000"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"host": "evil.example", "origin": "http://evil.example"},
)


async def test_no_path_answers_another_site(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("ok")])) as (router, http):
        for headers in EVIL:
            for method, path in [*(("GET", path) for path in GET), *(("POST", path) for path in POST)]:
                answer = await http.request(method, path, headers=headers)
                assert answer.status_code == 403, (method, path, headers)
                assert answer.json()["error"]["type"] == "permission_error" and answer.headers["x-request-id"]
                assert "router.allowed_hosts" in answer.text
        port = router.server.http_address.rpartition(":")[2]
        for host in (f"localhost:{port}", "127.0.0.1", "[::1]:1", "10.0.0.7:8000"):
            assert (await http.get("/healthz", headers={"host": host})).status_code == 200
        own: dict[str, Any] = {"origin": f"http://127.0.0.1:{port}"}
        assert (await http.post("/v1/chat/completions", json=chat(), headers=own)).status_code == 200


async def test_a_configured_name_is_answered_and_where_keys_are_needed_any(tmp_path: Path) -> None:
    async with serving(tmp_path, (), allowed_hosts=("baton.example",)) as (_, http):
        assert (await http.get("/healthz", headers={"host": "baton.example"})).status_code == 200
        assert (await http.get("/healthz", headers={"host": "other.example"})).status_code == 403
    file = tmp_path / "keys.yaml"
    file.write_text(render_keys([ApiKey("a", digest_of("baton-a"), "acme", ("generate",))]))
    async with serving(tmp_path, (), keys_file=str(file)) as (_, http):
        assert (await http.get("/healthz", headers={"host": "baton.svc"})).status_code == 200
        assert (await http.get("/v1/models", headers={"host": "baton.svc"})).status_code == 401
        assert (await http.get("/healthz", headers={"origin": "http://evil.example"})).status_code == 403
