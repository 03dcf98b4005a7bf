"""The routes of batches: created, listed, looked at, cancelled. Who works on them is `router.batches`' business."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.auth import Gate
from cluster.errors import FieldViolation, NotFound
from router.api.call import Principal
from router.api.violations import Violations, invalid
from router.batches.records import CANCELLING, DAY_S, KEPT_S, Batch, StoredFile, new_batch_id, told_batch
from router.batches.runner import BatchRunner
from router.batches.store import BatchStore, StoredRecord
from router.openai import pages
from router.openai.app import Answer, parse, read_body
from router.openai.bodies import BatchBody
from router.openai.errors import HttpFailure, body_of
from router.openai.exchange import failed
from router.openai.files import caller_for, find_file, no_such_file, route
from router.openai.uploads import LEAST_KEPT_S

MOST_BATCHES = 100
"""On one page."""
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512
_BODY_BYTES = 64 * 1024
_WINDOW_S = DAY_S
_RESULT_S = DAY_S
"""After the window, to write what came of it."""


class BatchRoutes:
    """`routes`: for the HTTP door."""

    def __init__(self, store: BatchStore, runner: BatchRunner, gate: Gate, *, stalled_client_s: float) -> None:
        self._store = store
        self._runner = runner
        self._gate = gate
        self._stalled_client_s = stalled_client_s
        self.routes = [
            route("/v1/batches", POST=self._create, GET=self._list),
            route("/v1/batches/{batch_id}", GET=self._tell),
            route("/v1/batches/{batch_id}/cancel", POST=self._cancel),
        ]

    async def _create(self, request: Request, request_id: str) -> Answer:
        caller = caller_for(self._gate, request)
        body = parse(bytes(await read_body(request, _BODY_BYTES, self._stalled_client_s)), BatchBody)
        _check(body)
        file = await find_file(self._store, caller, body.input_file_id)
        if file is None:
            raise no_such_file(body.input_file_id)
        if file.purpose != "batch":
            raise invalid((FieldViolation("input_file_id", "must be a file that was uploaded with purpose batch"),))
        now = int(time.time())
        kept_s = KEPT_S if body.output_expires_after is None else body.output_expires_after.seconds
        batch = Batch(
            new_batch_id(),
            caller.tenant,
            caller.key_id,
            file.file_id,
            body.endpoint,
            body.completion_window,
            now,
            now + _WINDOW_S,
            body.metadata,
            kept_s,
        )
        await self._keep_input(caller, file, batch.expires_at + _RESULT_S)
        ends_at = batch.expires_at + KEPT_S
        await self._store.add(StoredRecord("batch", batch.batch_id, caller.tenant, batch.to_json(), ends_at))
        self._runner.wake()
        return JSONResponse(told_batch(batch, (0, 0)))

    async def _keep_input(self, caller: Principal, file: StoredFile, until: int) -> None:
        """A batch needs its input to the end: one that would expire before is kept longer. Raises NotFound."""
        while file.expires_at < until:
            record = await self._store.find("file", caller.tenant, file.file_id)
            if record is None:
                raise no_such_file(file.file_id)
            file = replace(StoredFile.from_json(record.data), expires_at=until)
            if await self._store.replace(replace(record, data=file.to_json(), ends_at=until)):
                return

    async def _list(self, request: Request, request_id: str) -> Answer:
        caller, query = caller_for(self._gate, request), request.query_params
        pages.check_names(query, "after", "limit")
        limit = pages.limit_of(query, usual=20, most=MOST_BATCHES)
        after = query.get("after")
        records = await self._store.page("batch", caller.tenant, after=after, limit=limit + 1, is_ascending=False)
        if records is None:
            raise pages.unknown_after()
        told = await asyncio.gather(*(self._told(Batch.from_json(record.data)) for record in records))
        return JSONResponse(pages.page(told, limit))

    async def _tell(self, request: Request, request_id: str) -> Answer:
        return JSONResponse(await self._told(Batch.from_json((await self._find(request)).data)))

    async def _cancel(self, request: Request, request_id: str) -> Answer:
        """One that is being cancelled is told as it is."""
        while True:
            record = await self._find(request)
            batch = Batch.from_json(record.data)
            if batch.status == CANCELLING:
                return JSONResponse(await self._told(batch))
            if not batch.can_cancel:
                message = f"a batch that is {batch.status} cannot be cancelled"
                return failed(HttpFailure(409, body_of(message, 409, "batch_over")), request_id)
            cancelling = batch.to(CANCELLING, time.time())
            if await self._store.replace(replace(record, data=cancelling.to_json())):
                self._runner.wake(batch.batch_id)
                return JSONResponse(await self._told(cancelling))

    async def _find(self, request: Request) -> StoredRecord:
        """Raises NotFound."""
        batch_id: str = request.path_params["batch_id"]
        record = await self._store.find("batch", caller_for(self._gate, request).tenant, batch_id)
        if record is None:
            raise NotFound(f"there is no batch {batch_id[:64]!r}; it ended long ago, or is another tenant's")
        return record

    async def _told(self, batch: Batch) -> dict[str, object]:
        counts = (0, 0) if batch.is_over else await self._store.counts(batch.batch_id)
        return told_batch(batch, counts)


def _check(body: BatchBody) -> None:
    wrong = Violations()
    metadata = body.metadata or {}
    wrong.at_most("metadata", metadata, MOST_METADATA, "pairs")
    if any(len(key) > LONGEST_KEY or len(value) > LONGEST_VALUE for key, value in metadata.items()):
        wrong.add("metadata", f"keys may have {LONGEST_KEY} characters, and values {LONGEST_VALUE}")
    kept = body.output_expires_after
    if kept is not None and not LEAST_KEPT_S <= kept.seconds <= KEPT_S:
        wrong.add("output_expires_after.seconds", f"must be from {LEAST_KEPT_S} to {KEPT_S} (got {kept.seconds})")
    wrong.raise_if_any()
