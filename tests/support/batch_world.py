"""A batch store and what its runners were asked, for tests of batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import openai
import pytest
from router_harness import Router
from waiting import Changes

from cluster.sqlite_file import SqliteFile
from router.batches.idle import IdleCapacity
from router.batches.lines import Line, LineResult
from router.batches.runner import BatchRunner
from router.batches.sqlite_store import SqliteStore, _prepare
from router.batches.store import CANCELLING, Batch, StoredFile, StoredRecord
from router.queue.admission import Admission

T = TypeVar("T")

ENDPOINT = "/v1/completions"
OK = LineResult(
    200, {"usage": {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}}
)
LEASE_S = 0.3


class WatchedFile(SqliteFile):
    """Tells of whatever is written. Made in the event loop of the test."""

    def __init__(self, path: str | None) -> None:
        super().__init__(path, _prepare, name="the file of batches")
        self.changes = Changes()
        self._loop = asyncio.get_running_loop()
        self._num_written = 0

    def _in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        result = super()._in_transaction(work)
        num_written = 0 if self._connection is None else self._connection.total_changes
        if num_written != self._num_written:
            self._num_written = num_written
            self._loop.call_soon_threadsafe(self.changes.tell)
        return result


class WatchedStore(SqliteStore):
    """Made in the event loop of the test."""

    def __init__(self, path: str | None) -> None:
        super().__init__(path, monotonic=lambda: time.monotonic() + self.ahead_s)
        self._file = file = WatchedFile(path)
        self.changes = file.changes
        self.ahead_s = 0.0
        """Its clock is ahead of the real one by so much: claims end the sooner."""


class World:
    """A store, and what was asked of its runners."""

    def __init__(self, store: WatchedStore) -> None:
        self.store = store
        self.changes = store.changes
        """Told, too, when a line begins."""
        self.most = 4
        self.runs: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.holds: set[str] = set()
        """Prompts that get no answer until they are freed."""
        self._freed = asyncio.Event()
        self.replies: dict[str, list[LineResult]] = {}
        self.began = asyncio.Event()
        self.num_running = 0
        self.most_at_once = 0

    def runner(self, **given: Any) -> BatchRunner:
        idle = IdleCapacity(lambda num_running: num_running < self.most)
        limits = {"most_line_bytes": 1000, "lease_s": LEASE_S} | given
        return BatchRunner(self.store, idle, self.answer, self.counts, **limits)

    @contextlib.asynccontextmanager
    async def running(self, **given: Any) -> AsyncIterator[BatchRunner]:
        runner = self.runner(**given)
        runner.start()
        try:
            yield runner
        finally:
            await runner.stop()

    async def answer(self, batch: Batch, line: Line, request_id: str) -> LineResult:
        prompt = line.body["prompt"]
        self.runs[prompt] += 1
        self.began.set()
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        self.changes.tell()
        try:
            while prompt in self.holds:
                self._freed.clear()
                await self._freed.wait()
            await asyncio.sleep(0)
        finally:
            self.num_running -= 1
        return self.replies[prompt].pop(0) if self.replies.get(prompt) else OK

    def free(self, *prompts: str) -> None:
        """Without any: all."""
        self.holds -= set(prompts) or self.holds
        self._freed.set()

    async def add(
        self, *prompts: str, batch_id: str = "batch_1", tenant: str = "acme", raw: bytes | None = None, **fields: Any
    ) -> None:
        now = int(time.time())
        lines = [
            {"custom_id": f"c-{prompt}", "method": "POST", "url": ENDPOINT, "body": {"prompt": prompt}}
            for prompt in prompts
        ]
        data = "\n".join(map(json.dumps, lines)).encode() if raw is None else raw
        half, file_id = len(data) // 2, f"file-{batch_id}"
        for number, piece in enumerate((data[:half], data[half:])):
            await self.store.put_piece(file_id, number, piece)
        file = StoredFile(file_id, tenant, "in.jsonl", "batch", len(data), 2, now, now + 999)
        await self.store.add(StoredRecord("file", file_id, tenant, file.to_json(), now + 999))
        given = {"created_at": now, "expires_at": now + 999} | fields
        batch = Batch(batch_id, tenant, "key", file_id, ENDPOINT, "24h", **given)
        await self.store.add(StoredRecord("batch", batch_id, tenant, batch.to_json(), now + 9999))

    async def batch(self, batch_id: str = "batch_1", tenant: str = "acme") -> Batch:
        record = await self.store.find("batch", tenant, batch_id)
        assert record is not None
        return Batch.from_json(record.data)

    async def until(self, condition: Callable[[Batch], bool], *where: str) -> Batch:
        async def look() -> Batch | None:
            batch = await self.batch(*where)
            return batch if condition(batch) else None

        found = await self.changes.until(look)
        assert found is not None
        return found

    async def until_answered(self, is_enough: Callable[[frozenset[int]], bool]) -> None:
        """`is_enough` gets the numbers of the lines of batch_1 that have an answer."""

        async def look() -> bool:
            return is_enough(await self.store.answered("batch_1"))

        await self.changes.until(look)

    async def until_let_go(self, runner: BatchRunner) -> None:
        """Until the runner works no more on what it holds."""
        work = [task for task in runner._tasks if task.get_name().startswith("batch ")]
        await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 20)
        assert not runner._held

    async def over(self, *where: str) -> Batch:
        """`where`: id and tenant."""
        return await self.until(lambda batch: batch.is_over, *where)

    async def cancel(self) -> None:
        record = await self.store.find("batch", "acme", "batch_1")
        assert record is not None
        cancelling = Batch.from_json(record.data).to(CANCELLING, time.time())
        assert await self.store.replace(replace(record, data=cancelling.to_json()))

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Of a result."""
        assert file_id is not None
        record = await self.store.find("file", "acme", file_id)
        assert record is not None
        file = StoredFile.from_json(record.data)
        pieces = [await self.store.piece(file_id, number) for number in range(file.num_pieces)]
        data = b"".join(piece for piece in pieces if piece is not None)
        assert len(data) == file.size_bytes and data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]


async def until_refused(admission: Admission, times: int) -> None:
    """So often a line has asked whether there is capacity to spare, and there was none."""
    has_spare, refused = admission.has_spare, asyncio.Semaphore(0)

    def ask(num_running: int, now: float) -> bool:
        is_spare = has_spare(num_running, now)
        if not is_spare:
            refused.release()
        return is_spare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "has_spare", ask)
        async with asyncio.timeout(20):
            for _ in range(times):
                await refused.acquire()


async def until_status(router: Router, client: openai.AsyncOpenAI, batch_id: str, *wanted: str) -> Any:
    """The batch in one of these statuses, of a router whose store is a `WatchedStore`."""

    async def look() -> Any:
        batch = await client.batches.retrieve(batch_id)
        return batch if batch.status in wanted else None

    store = router.server._http._batch_store
    assert isinstance(store, WatchedStore)
    return await store.changes.until(look)
