"""Files and batches over HTTP: what OpenAI's own client sees, who sees what, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import http_door
import openai
import pytest
from batch_world import WatchedStore, until_refused, until_status
from fake_worker import pair
from http_door import sdk
from router_harness import Router, ids

from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.errors import Overloaded
from cluster.pb import generation_pb2 as pb
from router import http_server
from router.api.call import ANYONE, Call
from router.batches.lines import Line
from router.batches.store import Batch
from router.openai.bodies import BatchBody
from router.openai.generating import LineAnswerer

ENDPOINT = "/v1/chat/completions"
FILE_BYTES = 20_000
GIVEN: dict[str, Any] = {"endpoint": ENDPOINT, "completion_window": "24h"}


serving = functools.partial(http_door.serving, max_file_bytes=FILE_BYTES)


@pytest.fixture(autouse=True)
def watch_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SqliteStore", WatchedStore)


def request(custom_id: str, url: str = ENDPOINT, **body: Any) -> dict[str, Any]:
    given = {"model": "model", "messages": [{"role": "user", "content": custom_id}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def jsonl(*lines: object) -> tuple[str, bytes]:
    return "input.jsonl", "\n".join(map(json.dumps, lines)).encode()


async def over(router: Router, client: openai.AsyncOpenAI, batch_id: str) -> Any:
    return await until_status(router, client, batch_id, "completed", "failed", "expired", "cancelled")


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def test_lines_are_answered_as_calls_would_be_and_run_behind_them(tmp_path: Path) -> None:
    prefill, decode = pair(lambda _: [ids("yes")])
    async with serving(tmp_path, (prefill, decode)) as (router, http), sdk(router) as client:
        lines = [request("1", priority=10), request("2", temperature=9), request("3", stream=True)]
        lines += [request("4", model="gpt"), request("5", priority=11), request("6", tempreature=1)]
        file = await client.files.create(file=jsonl(*lines), purpose="batch")
        assert (file.purpose, file.filename, file.status) == ("batch", "input.jsonl", "processed")
        reply = await client.batches.create(input_file_id=file.id, metadata={"a": "b"}, **GIVEN)
        assert reply.status == "validating" and reply.expires_at == reply.created_at + 24 * 3600
        batch = await over(router, client, reply.id)
        assert (batch.status, batch.metadata, batch.endpoint) == ("completed", {"a": "b"}, ENDPOINT)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (6, 1, 5)
        answer = (await results(client, batch.output_file_id))[0]
        body = answer["response"]["body"]
        assert (answer["custom_id"], answer["error"]) == ("1", None) and body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == "yes"
        bad = {line["custom_id"]: line["response"] for line in await results(client, batch.error_file_id)}
        for line in lines[1:]:
            custom_id = str(line["custom_id"])
            if custom_id != "3":
                direct = await http.post(ENDPOINT, json=line["body"])
                assert (bad[custom_id]["status_code"], bad[custom_id]["body"]) == (direct.status_code, direct.json())
        assert "stream: must be false in a batch" in bad["3"]["body"]["error"]["message"]
    assert len(decode.admits) == 1


async def test_a_batch_of_text_completions(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("x")])) as (router, _), sdk(router) as client:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        lines = [line | {"body": {"model": "model", "prompt": ["a", "b"]}}]
        file = await client.files.create(file=jsonl(*lines), purpose="batch")
        reply = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = await over(router, client, reply.id)
        answer = (await results(client, batch.output_file_id))[0]["response"]["body"]
        assert [choice["text"] for choice in answer["choices"]] == ["x", "x"]
        assert batch.usage is not None and batch.usage.total_tokens == answer["usage"]["total_tokens"] == 4


async def test_a_bad_file_is_told_line_by_line(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (router, _), sdk(router) as client:
        lines = [request("a"), request("a"), request("b", url="/v1/completions"), []]
        file = await client.files.create(file=jsonl(*lines), purpose="batch")
        batch = await over(router, client, (await client.batches.create(input_file_id=file.id, **GIVEN)).id)
        assert batch.status == "failed" and batch.failed_at is not None
        found = [(error.line, error.code, error.param) for error in batch.errors.data]
        assert found == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "invalid_url", "url"),
            (4, "invalid_json_line", None),
        ]


async def test_interactive_traffic_goes_first_and_refusals_for_load_are_tried_again(tmp_path: Path) -> None:
    """Nothing runs beside what fills the cluster, and then all of it does."""
    prefill, decode = pair()
    async with serving(tmp_path, (prefill, decode), max_running_requests=1) as (router, http), sdk(router) as client:
        first = asyncio.create_task(http.post(ENDPOINT, json=request("live")["body"]))
        await prefill.next_admit()
        file = await client.files.create(file=jsonl(request("1"), request("2")), purpose="batch")
        reply = await client.batches.create(input_file_id=file.id, **GIVEN)
        await until_status(router, client, reply.id, "in_progress")
        await until_refused(router.server.dispatcher.admission, 4)
        assert router.server.dispatcher.num_queued == 0 and router.server.dispatcher.num_running == 1
        first.cancel()
        await prefill.next_admit()
        assert router.server.dispatcher.num_running == 1
        cancelled = await client.batches.cancel(reply.id)
        assert cancelled.status == "cancelling" and cancelled.cancelling_at is not None
        batch = await over(router, client, reply.id)
        assert batch.status == "cancelled" and batch.cancelled_at is not None and batch.output_file_id is None
        left = await results(client, batch.error_file_id)
        assert {line["error"]["code"] for line in left} == {"batch_cancelled"} and len(left) == 2
        with pytest.raises(openai.ConflictError, match="a batch that is cancelled cannot be cancelled"):
            await client.batches.cancel(reply.id)


async def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (router, http), sdk(router) as client:
        data = bytes(range(256)) * 50
        names = [f"{number}.jsonl" for number in range(5)]
        made = [await client.files.create(file=(name, data), purpose="batch") for name in names]
        assert [file.filename async for file in client.files.list(limit=2)] == names[::-1]
        assert [file.filename async for file in client.files.list(order="asc", limit=3)] == names
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        reply = await client.files.retrieve(made[0].id)
        assert reply == made[0] and reply.bytes == len(data) and reply.expires_at == reply.created_at + 30 * 24 * 3600
        answer = await http.get(f"/v1/files/{made[0].id}/content")
        assert answer.content == data and answer.headers["content-length"] == str(len(data))
        assert (await client.files.delete(made[0].id)).deleted
        for call in (client.files.retrieve, client.files.delete, client.files.content):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                await call(made[0].id)
        kept: Any = {"anchor": "created_at", "seconds": 3600}
        file = await client.files.create(file=("a", b"x"), purpose="batch", expires_after=kept)
        assert file.expires_at == file.created_at + 3600


async def test_a_file_that_a_batch_needs_is_not_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (router, _), sdk(router) as client:
        file = await client.files.create(file=jsonl(request("1")), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, **GIVEN)
        with pytest.raises(openai.ConflictError, match=f"is the input of {batch.id}"):
            await client.files.delete(file.id)
        await client.batches.cancel(batch.id)
        await over(router, client, batch.id)
        assert (await client.files.delete(file.id)).deleted


async def test_a_file_that_a_batch_needs_does_not_expire_before_it(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("ok")])) as (router, _), sdk(router) as client:
        short: Any = {"anchor": "created_at", "seconds": 3600}
        file, other = [
            await client.files.create(file=jsonl(request("1")), purpose="batch", expires_after=short) for _ in range(2)
        ]
        batch = await client.batches.create(input_file_id=file.id, **GIVEN)
        file, other = [await client.files.retrieve(each.id) for each in (file, other)]
    assert batch.expires_at and file.expires_at and file.expires_at > batch.expires_at
    assert other.expires_at == other.created_at + 3600, "that of others stays as it was"


async def test_batches_are_paged_the_newest_first(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (router, http), sdk(router) as client:
        file = await client.files.create(file=jsonl(request("1")), purpose="batch")
        made = [(await client.batches.create(input_file_id=file.id, **GIVEN)).id for _ in range(5)]
        page = (await http.get("/v1/batches", params={"limit": 2})).json()
        assert [page["first_id"], page["last_id"], page["has_more"]] == [made[4], made[3], True]
        assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]
        rest = (await http.get("/v1/batches", params={"after": made[1]})).json()
        assert [each["id"] for each in rest["data"]] == [made[0]] and not rest["has_more"]


async def test_a_file_that_is_too_large_is_413_however_it_is_sent(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (router, http), sdk(router) as client:
        for size in (FILE_BYTES + 1, FILE_BYTES + 100_000, 40 * FILE_BYTES):
            with pytest.raises(openai.APIStatusError) as error:
                await client.files.create(file=("a", b"x" * size), purpose="batch")
            assert error.value.status_code == 413 and f"larger than {FILE_BYTES} bytes" in str(error.value)

        async def parts() -> AsyncIterator[bytes]:
            yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(10):
                yield b"x" * 10_000
            yield b'\r\n--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'

        reply = await http.post(
            "/v1/files", content=parts(), headers={"content-type": "multipart/form-data; boundary=x"}
        )
        assert reply.status_code == 413 and reply.json()["error"]["code"] == "file_too_large"
        for number in range(20):
            await client.files.create(file=(f"{number}", b"x" * FILE_BYTES), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="delete some"):
            await client.files.create(file=("one more", b"x"), purpose="batch")


BAD_UPLOADS: list[tuple[dict[str, Any], str]] = [
    ({"files": {"file": ("a", b"x")}}, "purpose: must be set"),
    ({"files": {"file": ("a", b"x")}, "data": {"purpose": "vision"}}, "purpose: should be 'batch'"),
    ({"files": {"file": ("a", b"")}, "data": {"purpose": "batch"}}, "file: must hold at least one byte"),
    ({"files": {"document": ("a", b"x")}, "data": {"purpose": "batch"}}, "document: is not a field that is known"),
    ({"data": {"purpose": "batch", "file": "text"}, "files": {}}, "must be multipart/form-data"),
    ({"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "expires_after[seconds]": "9"}}, "expires_after"),
    ({"json": {"purpose": "batch"}}, "must be multipart/form-data"),
    ({"content": b"nothing", "headers": {"content-type": "multipart/form-data"}}, "the body is no upload"),
    ({"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "file: must be set"),
    (
        {"content": b"\xff" * 99, "headers": {"content-type": "multipart/form-data; boundary=x"}},
        "the body is no upload",
    ),
]
BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"completion_window": "1h"}, "completion_window: should be '24h'"),
    (
        {"endpoint": "/v1/embeddings"},
        "endpoint: should be '/v1/chat/completions', '/v1/completions' or '/v1/resp",
    ),
    ({"input_file_id": None}, "input_file_id: should be a valid string"),
    ({"colour": 1}, "colour: is not a field that is known here"),
    ({"metadata": {"a" * 65: ""}}, "metadata: keys may have 64 characters"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata: at most 16 pairs"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
        "output_expires_after.seconds: must be at least 3600 (got 5)",
    ),
]
BAD_QUERIES = [
    ("/v1/files?limit=0", "limit: must be at least 1 (got 0)"),
    ("/v1/batches?limit=101", "limit: must be at most 100 (got 101)"),
    ("/v1/batches?limit=2x", "limit"),
    ("/v1/batches?after=batch_none", "after: is no id of this list"),
    ("/v1/files?order=up", "order: should be 'asc' or 'desc'"),
    ("/v1/files?page=2", "page: is not a field that is known here"),
]


async def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (router, http), sdk(router) as client:
        file = await client.files.create(file=jsonl(request("1")), purpose="batch")
        good = {"input_file_id": file.id, **GIVEN}
        reply = [(await http.post("/v1/files", **given), why) for given, why in BAD_UPLOADS]
        reply += [(await http.post("/v1/batches", json=good | given), why) for given, why in BAD_BATCHES]
        reply += [(await http.get(path), why) for path, why in BAD_QUERIES]
        for answer, why in reply:
            error = answer.json()["error"]
            assert answer.status_code == 400 and why in error["message"], (error, why)
        for path in ("/v1/batches/batch_x", "/v1/files/file-x", "/v1/files/file-x/content"):
            assert (await http.get(path)).status_code == 404
        assert (await http.post("/v1/batches/batch_x/cancel")).status_code == 404
        assert (await http.post("/v1/batches", json=good | {"input_file_id": "file-x"})).status_code == 404
        refused = await http.delete("/v1/files")
        assert refused.status_code == 405 and set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
        assert (await http.head("/v1/files")).status_code == 200


async def test_an_upload_that_stops_in_the_middle_is_given_up(tmp_path: Path) -> None:
    async with serving(tmp_path, (), stalled_client_timeout_s=0.3) as (router, _):
        host, _, port = router.server.http_address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: multipart/form-data; boundary=x"
        part = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
        writer.write(head + b"\r\ncontent-length: 999\r\n\r\n" + part)
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        await writer.wait_closed()


KEYS = tuple(
    ApiKey(name, digest_of(f"baton-{name}"), tenant, (scope,))
    for name, tenant, scope in (
        ("a", "acme", "generate"),
        ("b", "acme", "generate"),
        ("c", "other", "generate"),
        ("op", "acme", "admin"),
    )
)


async def test_each_tenant_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(render_keys(KEYS))
    workers = pair(lambda _: [ids("ok")])
    async with serving(tmp_path, workers, keys_file=str(tmp_path / "keys.yaml")) as (router, http):
        async with sdk(router, "baton-a") as mine, sdk(router, "baton-b") as ours, sdk(router, "baton-c") as theirs:
            file = await mine.files.create(file=jsonl(request("1")), purpose="batch")
            batch = await over(router, mine, (await mine.batches.create(input_file_id=file.id, **GIVEN)).id)
            assert batch.status == "completed" and (await ours.batches.retrieve(batch.id)).id == batch.id
            assert [each.id async for each in ours.files.list()] == [batch.output_file_id, file.id]
            assert [each.id async for each in theirs.files.list()] == []
            assert [each.id async for each in theirs.batches.list()] == []
            for call in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(file.id)
            for call in (theirs.batches.retrieve, theirs.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await call(batch.id)
            with pytest.raises(openai.NotFoundError):
                await theirs.batches.create(input_file_id=file.id, **GIVEN)
            with pytest.raises(openai.BadRequestError, match="must be a file that was uploaded with purpose batch"):
                await mine.batches.create(input_file_id=batch.output_file_id, **GIVEN)
        assert (await http.get("/v1/files")).status_code == 401
        operator = {"authorization": "Bearer baton-op"}
        assert (await http.get("/v1/batches", headers=operator)).status_code == 403


async def test_lines_of_a_key_that_was_revoked_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(render_keys(KEYS))
    prefill, decode = pair()
    given = {"keys_file": str(tmp_path / "keys.yaml"), "max_running_requests": 1}
    async with serving(tmp_path, (prefill, decode), **given) as (router, http), sdk(router, "baton-b") as ours:
        live = http.post(ENDPOINT, json=request("live")["body"], headers={"authorization": "Bearer baton-b"})
        first = asyncio.create_task(live)
        await prefill.next_admit()
        async with sdk(router, "baton-a") as mine:
            file = await mine.files.create(file=jsonl(request("1")), purpose="batch")
            reply = await mine.batches.create(input_file_id=file.id, **GIVEN)
        assert router.server.keys is not None
        router.server.keys.replace(KEYS[1:])
        first.cancel()
        batch = await over(router, ours, reply.id)
        answer = (await results(ours, batch.error_file_id))[0]["response"]
        assert (batch.status, answer["status_code"]) == ("completed", 401)
        assert "not known here any more" in answer["body"]["error"]["message"]


class Service:
    """Takes down what it is asked for."""

    def __init__(self) -> None:
        self.specs: list[pb.GenerationSpec] = []

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        self.specs.append(request.spec)
        raise Overloaded("no", retry_after_s=2.5)


@pytest.mark.parametrize(("given", "runs_at"), [(None, -10), (10, -10), (-3, -10), (11, 11)])
async def test_a_line_runs_at_the_lowest_priority_and_a_refusal_is_no_answer(given: int | None, runs_at: int) -> None:
    service: Any = Service()
    answerer = LineAnswerer(service.Generate, lambda key_id: ANYONE, lambda token_id: b"", 1000)
    batch = Batch("batch_1", "acme", "a", "file-1", "/v1/completions", "24h", 1, 2)
    line = Line(1, "a", {"model": "m", "prompt": "a", "priority": given}, 100)
    tried = await answerer.answer(batch, line, "id")
    assert [spec.scheduling.priority for spec in service.specs] == [runs_at]
    assert (tried.status, tried.retry_after_s, tried.is_refusal) == (429, 2.5, True)
    long = await answerer.answer(batch, Line(1, "a", {"model": "m", "prompt": "a" * 1000}, 1050), "id")
    assert long.status == 400 and long.retry_after_s is None and len(service.specs) == 1


async def test_a_store_that_is_away_is_503_and_costs_no_completion(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    where = str(tmp_path / "file" / "b.db")
    async with serving(tmp_path, pair(lambda _: [ids("ok")]), batch_store=where) as (router, http):
        for path in ("/v1/files", "/v1/batches", "/v1/files/file-x"):
            answer = await http.get(path)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "store_away"
            assert answer.headers["retry-after"] == "1"
        async with sdk(router) as client:
            assert (await client.completions.create(model="model", prompt="a")).choices[0].text == "ok"


def test_the_docs_name_every_field_that_is_taken() -> None:
    text = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
    section = text.partition("## Batches")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) >= set(BatchBody.model_fields) | {
        "file",
        "purpose",
        "expires_after",
    }
