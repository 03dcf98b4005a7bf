"""The routes of batches: created, listed, read, cancelled. `router.batches` works on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.errors import FieldViolation, NotFound
from router.api.call import Principal
from router.api.violations import Violations, invalid
from router.batches.store import CANCELLING, DAY_S, KEPT_S, Batch, BatchStore, StoredFile, StoredRecord, new_batch_id
from router.openai.answers import Page
from router.openai.bodies import BatchBody, BatchesQuery
from router.openai.errors import HttpFailure
from router.openai.file_answers import BatchAnswer, ProblemAnswer
from router.openai.files import (
    MOST_KEPT_BATCHES,
    MOST_OPEN_BATCHES,
    find_file,
    limits_of_tenant,
    no_such_file,
    page_answer,
    page_of,
)
from router.openai.http import CALLS, HAS_BODY, Operation, checked_texts, parse, read_body

LONGEST_KEY, LONGEST_VALUE = 64, 512
_BODY_BYTES = 64 * 1024
_WINDOW_S = DAY_S
_RESULT_S = DAY_S
"""Time after the window for writing the results."""


class BatchRoutes:
    """`operations`: for the HTTP API. `wake` is called with the id of a batch that is new or was changed."""

    def __init__(
        self,
        store: BatchStore,
        principal_of: Callable[[Request], Principal],
        wake: Callable[[str], None],
        *,
        stalled_client_s: float,
    ) -> None:
        self._store = store
        self._principal_of = principal_of
        self._wake = wake
        self._stalled_client_s = stalled_client_s
        all_batches, one = "/v1/batches", "/v1/batches/{batch_id}"
        self.operations = [
            Operation(
                "POST",
                all_batches,
                self._create,
                "Answer the lines of a file in idle capacity",
                (*HAS_BODY, 404, 429),
                BatchAnswer,
                body=BatchBody,
            ),
            Operation(
                "GET",
                all_batches,
                self._list,
                "Batches, the newest first",
                CALLS,
                Page[BatchAnswer],
                query=BatchesQuery,
            ),
            Operation("GET", one, self._get, "One batch", (*CALLS, 404), BatchAnswer),
            Operation("POST", f"{one}/cancel", self._cancel, "Cancel a batch", (*CALLS, 404, 409), BatchAnswer),
        ]

    async def _create(self, request: Request) -> Response:
        principal = self._principal_of(request)
        body = parse(await read_body(request, _BODY_BYTES, self._stalled_client_s), BatchBody)
        _check_metadata(body.metadata or {})
        file = await find_file(self._store, principal, body.input_file_id)
        if file.purpose != "batch":
            raise invalid((FieldViolation("input_file_id", "must be a file that was uploaded with purpose batch"),))
        now = int(time.time())
        batch = Batch(
            new_batch_id(),
            principal.tenant,
            principal.key_id,
            file.file_id,
            body.endpoint,
            body.completion_window,
            now,
            now + _WINDOW_S,
            body.metadata,
            KEPT_S if body.output_expires_after is None else body.output_expires_after.seconds,
        )
        await self._keep_input(principal, file, batch.expires_at + _RESULT_S)
        ends_at = batch.expires_at + KEPT_S
        record = StoredRecord("batch", batch.batch_id, principal.tenant, batch.to_json(), ends_at)
        if not await self._store.reserve(record, limits_of_tenant(0)):
            what = f"{MOST_OPEN_BATCHES} open batches, and {MOST_KEPT_BATCHES} with those of the last 30 days"
            raise HttpFailure(429, "too_many_batches", f"there may be {what}; wait until some are over")
        self._wake(batch.batch_id)
        return JSONResponse(_batch_answer(batch, (0, 0)))

    async def _keep_input(self, principal: Principal, file: StoredFile, until: int) -> None:
        """Keeps a file that would expire before its batch ends. Raises NotFound."""
        while file.expires_at < until:
            record = await self._store.find("file", principal.tenant, file.file_id)
            if record is None or not record.is_readable:
                raise no_such_file(file.file_id)
            file = replace(StoredFile.from_json(record.data), expires_at=until)
            if await self._store.replace(replace(record, data=file.to_json(), ends_at=until)):
                return

    async def _list(self, request: Request) -> Response:
        principal, query = self._principal_of(request), checked_texts(request.query_params, BatchesQuery)
        records = await page_of(self._store, "batch", principal.tenant, query.after, query.limit, is_ascending=False)
        answers = await asyncio.gather(*(self._answer_for(Batch.from_json(record.data)) for record in records))
        return JSONResponse(page_answer(answers, query.limit))

    async def _get(self, request: Request) -> Response:
        return JSONResponse(await self._answer_for(Batch.from_json((await self._find(request)).data)))

    async def _cancel(self, request: Request) -> Response:
        """A batch that is being cancelled is answered as it is."""
        while True:
            record = await self._find(request)
            batch = Batch.from_json(record.data)
            if batch.status == CANCELLING:
                return JSONResponse(await self._answer_for(batch))
            if not batch.can_cancel:
                raise HttpFailure(409, "batch_over", f"a batch that is {batch.status} cannot be cancelled")
            cancelling = batch.to(CANCELLING, time.time())
            if await self._store.replace(replace(record, data=cancelling.to_json())):
                self._wake(batch.batch_id)
                return JSONResponse(await self._answer_for(cancelling))

    async def _find(self, request: Request) -> StoredRecord:
        """Raises NotFound."""
        batch_id: str = request.path_params["batch_id"]
        record = await self._store.find("batch", self._principal_of(request).tenant, batch_id)
        if record is None or not record.is_readable:
            raise NotFound(f"there is no batch {batch_id[:64]!r}; it ended long ago, or is another tenant's")
        return record

    async def _answer_for(self, batch: Batch) -> BatchAnswer:
        return _batch_answer(batch, (0, 0) if batch.is_over else await self._store.counts(batch.batch_id))


def _check_metadata(metadata: dict[str, str]) -> None:
    wrong = Violations()
    if any(len(key) > LONGEST_KEY or len(value) > LONGEST_VALUE for key, value in metadata.items()):
        wrong.add("metadata", f"keys may have {LONGEST_KEY} characters, and values {LONGEST_VALUE}")
    wrong.raise_if_any()


def _batch_answer(batch: Batch, counts: tuple[int, int]) -> BatchAnswer:
    """`counts`: lines answered well, and with an error, of a batch that is not over."""
    completed, failed = (batch.completed, batch.failed) if batch.is_over else counts
    problems = cast("list[ProblemAnswer]", batch.problems)
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "in_progress_at": batch.reached.get("in_progress"),
        "finalizing_at": batch.reached.get("finalizing"),
        "cancelling_at": batch.reached.get("cancelling"),
        "completed_at": batch.reached.get("completed"),
        "failed_at": batch.reached.get("failed"),
        "cancelled_at": batch.reached.get("cancelled"),
        "expired_at": batch.reached.get("expired"),
        "request_counts": {"total": batch.total, "completed": completed, "failed": failed},
        "usage": batch.usage,
        "metadata": batch.metadata,
    }
