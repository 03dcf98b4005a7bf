"""What one tenant may keep and have open of files and batches, over HTTP."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import http_door
import openai
import pytest
from batch_world import WatchedStore, until_status
from http_door import chat, sdk

from router import http_server
from router.openai import files

ENDPOINT = "/v1/chat/completions"
FILE_BYTES = 20_000
GIVEN: dict[str, Any] = {"endpoint": ENDPOINT, "completion_window": "24h"}
LINE = json.dumps({"custom_id": "1", "method": "POST", "url": ENDPOINT, "body": chat()}).encode()

serving = functools.partial(http_door.serving, max_file_bytes=FILE_BYTES)


async def test_a_tenant_may_have_so_many_open_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_OPEN_BATCHES", 2)
    monkeypatch.setattr(http_server, "SqliteStore", WatchedStore)
    async with serving(tmp_path, ()) as (router, _), sdk(router) as client:
        file = await client.files.create(file=("a.jsonl", LINE), purpose="batch")
        made = [await client.batches.create(input_file_id=file.id, **GIVEN) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.batches.create(input_file_id=file.id, **GIVEN)
        assert refused.value.code == "too_many_batches"
        await client.batches.cancel(made[0].id)
        await until_status(router, client, made[0].id, "cancelled")
        assert (await client.batches.create(input_file_id=file.id, **GIVEN)).id


async def test_uploads_at_once_keep_to_the_space_of_their_tenant(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (router, _), sdk(router) as client:
        calls = [client.files.create(file=(f"{n}", b"x" * FILE_BYTES), purpose="batch") for n in range(30)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, openai.types.FileObject) for result in results) == 20
        assert {result.status_code for result in results if isinstance(result, openai.APIStatusError)} == {413}
