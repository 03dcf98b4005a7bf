"""Batches whose lines are bodies of /v1/responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batch_world import WatchedStore
from fake_worker import pair
from http_door import sdk, serving
from router_harness import ids
from test_router_batches import jsonl, over, results

from router import http_server


@pytest.fixture(autouse=True)
def watch_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SqliteStore", WatchedStore)


@pytest.mark.asyncio
async def test_a_batch_of_responses_of_which_those_are_kept_that_say_so(tmp_path: Path) -> None:
    async with serving(tmp_path, pair(lambda _: [ids("yes")])) as (router, http), sdk(router) as client:
        bodies: list[dict[str, Any]] = [{}, {"store": True}, {"stream": True}, {"background": True}, {"input": 5}]
        lines = [
            {"custom_id": f"{number}", "method": "POST", "url": "/v1/responses"}
            | {"body": {"model": "model", "input": "hi", "max_output_tokens": 3, **body}}
            for number, body in enumerate(bodies)
        ]
        file = await client.files.create(file=jsonl(*lines), purpose="batch")
        reply = await client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
        batch = await over(router, client, reply.id)
        good = [line["response"]["body"] for line in await results(client, batch.output_file_id)]
        bad = [line["response"]["body"]["error"]["param"] for line in await results(client, batch.error_file_id)]
        kept = [(await http.get(f"/v1/responses/{answer['id']}")).status_code for answer in good]
    assert [answer["output"][0]["content"][0]["text"] for answer in good] == ["yes", "yes"]
    assert (kept, [answer["store"] for answer in good]) == ([404, 200], [False, True])
    assert bad[:2] == ["stream", "background"] and bad[2].startswith("input")
    assert batch.usage is not None and batch.usage.total_tokens == sum(a["usage"]["total_tokens"] for a in good)


@pytest.mark.asyncio
async def test_a_line_whose_tool_is_wrong_is_told_the_place_in_its_own_body(tmp_path: Path) -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "array"}}
    tools = [[function], [{"type": "namespace", "name": "n", "description": "d", "tools": [function]}], [{"type": "x"}]]
    async with serving(tmp_path, pair(lambda _: [ids("yes")])) as (router, _), sdk(router) as client:
        lines = [
            {"custom_id": f"{number}", "method": "POST", "url": "/v1/responses"}
            | {"body": {"model": "model", "input": "hi", "tools": each}}
            for number, each in enumerate(tools)
        ]
        file = await client.files.create(file=jsonl(*lines), purpose="batch")
        reply = await client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
        batch = await over(router, client, reply.id)
        errors = [line["response"]["body"]["error"] for line in await results(client, batch.error_file_id)]
    places = ["tools[0].parameters", "tools[0].tools[0].parameters", "tools[0].type"]
    assert [error["param"] for error in errors] == places
    assert all(place in error["message"] for error, place in zip(errors, places, strict=True)), errors
