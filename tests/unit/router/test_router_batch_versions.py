"""Files and batches that a router of another protocol has written: not found, and left as they are."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import http_door
import pytest
from batch_world import WatchedStore, World
from http_door import sdk

from router.batches import store
from router.batches.store import BatchStore, Kind

serving = functools.partial(http_door.serving, max_file_bytes=20_000)
GIVEN: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(WatchedStore(str(tmp_path / "batches.db")))
    yield world
    await world.store.close()


async def test_a_batch_of_another_protocol_is_left_to_routers_that_understand_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    store._report_unreadable.cache_clear()
    await world.add("a")
    await world.add("b", batch_id="batch_2")
    ours = await world.store.find("batch", "acme", "batch_1")
    assert ours is not None
    later = json.dumps(json.loads(ours.data) | {"protocol": "2-3", "status": "a_status_of_later"}).encode()
    assert await world.store.replace(replace(ours, data=later))
    async with world.running():
        assert (await world.over("batch_2")).completed == 1
        await world.add("c", batch_id="batch_3")
        assert (await world.over("batch_3")).completed == 1
        found = await world.store.claim("a later router", 60.0)
        assert found is not None and found[1].data == later, "it is not held here, and as it was"
    assert world.runs == {"b": 1, "c": 1}
    why = "the router that wrote it speaks protocol 2 to 3; this router speaks 1: upgrade this router first"
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [f"records of files and batches are not read, and left as they are: {why}"]


async def test_records_of_another_protocol_are_not_found_and_left_as_they_are(tmp_path: Path) -> None:
    async with serving(tmp_path, ()) as (router, http), sdk(router) as client:
        kept = router.server._http._batch_store
        files = [(await client.files.create(file=("input.jsonl", b"{}"), purpose="batch")).id for _ in range(4)]
        ours, theirs, free, foreign = files
        batches = [
            (await client.batches.create(input_file_id=file_id, **GIVEN)).id for file_id in (ours, theirs, theirs, ours)
        ]
        for kind, record_id in (("batch", batches[1]), ("batch", batches[2]), ("file", foreign)):
            await written_by_a_later_router(kept, kind, record_id)
        assert [each.id async for each in client.batches.list(limit=1)] == [batches[3], batches[0]]
        assert [each.id async for each in client.files.list(limit=1)] == [free, theirs, ours]
        for path in (f"/v1/batches/{batches[1]}", f"/v1/files/{foreign}", f"/v1/files/{foreign}/content"):
            assert (await http.get(path)).status_code == 404
        assert (await http.post(f"/v1/batches/{batches[1]}/cancel")).status_code == 404
        assert (await http.delete(f"/v1/files/{foreign}")).status_code == 404
        refused = await http.delete(f"/v1/files/{theirs}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use"), "by a batch of theirs"
        assert (await http.delete(f"/v1/files/{free}")).status_code == 200
        left = await kept.find("batch", "", batches[1])
        assert left is not None and not left.is_readable


async def written_by_a_later_router(store: BatchStore, kind: Kind, record_id: str) -> None:
    """Until it is: the runner here may write at the same moment."""
    while True:
        record = await store.find(kind, "", record_id)
        assert record is not None
        data = json.dumps(json.loads(record.data) | {"protocol": "2-3"}).encode()
        if await store.replace(replace(record, data=data)):
            return
