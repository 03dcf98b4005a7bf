"""The lines of a batch's input file, and of the two files that come of it: what was answered well, and what was not.

    {"id": ..., "custom_id": "1", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

Lines that were not run any more are in the error file with `"response": null` and a code that says why. Both files are
the same however often they are written, so that a router which goes on after another one writes nothing twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from router.batches.input_lines import Line, Splitter, read_line
from router.batches.store import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    PIECE_BYTES,
    Batch,
    BatchClaim,
    BatchStatus,
    BatchStore,
    LineAnswer,
    StoredFile,
    StoredRecord,
    pieces_of,
)

_AT_ONCE = 50
"""Lines whose answers are read at a time."""
_UNANSWERED = {
    CANCELLED: ("batch_cancelled", "This request was not executed before the batch was cancelled."),
    EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
}


class ClaimLost(Exception):
    """Another router has the batch, or the store has lost it."""


async def lines_of(store: BatchStore, batch: Batch, most_line_bytes: int) -> AsyncIterator[Line]:
    """Of a file that was found to be good. Raises InputGone."""
    splitter = Splitter(most_line_bytes)

    async def read(found: list[tuple[int, bytes]]) -> list[Line]:
        lines = await asyncio.to_thread(lambda: [read_line(*each, batch.endpoint) for each in found])
        return [line for line in lines if isinstance(line, Line)]

    async for piece in pieces_of(store, batch.tenant, batch.input_file_id):
        for line in await read(list(splitter.feed(piece))):
            yield line
    for line in await read(list(splitter.end())):
        yield line


def answer_line(line: Line, request_id: str, status: int, body: Mapping[str, Any]) -> LineAnswer:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return LineAnswer(line.number, status == 200, _told(request_id, line, response, None))


async def write_results(store: BatchStore, claim: BatchClaim, batch: Batch, most_line_bytes: int, now: float) -> Batch:
    """Writes both files and returns the batch as it is then. One that was cancelled before its file was looked at has
    no lines. Raises ClaimLost: what was read meanwhile may have been dropped by another one who has ended it."""
    if not batch.total:
        return batch.to(CANCELLED, now)
    good = _Writer(store, claim, batch, "output", now)
    bad = _Writer(store, claim, batch, "error", now)
    totals, num_failed, num_left = _Usage(), 0, 0
    over: BatchStatus = CANCELLED if batch.status == CANCELLING else EXPIRED
    code, message = _UNANSWERED[over]
    async for lines in _in_parts(lines_of(store, batch, most_line_bytes)):
        answers = {a.number: a for a in await store.answers(batch.batch_id, [line.number for line in lines])}
        await asyncio.to_thread(totals.add, [a.data for a in answers.values() if a.is_good])
        for line in lines:
            answer = answers.get(line.number)
            if answer is None:
                num_left += 1
                request_id = batch.request_id(line.number)
                await bad.write(_told(request_id, line, None, {"code": code, "message": message}))
            elif answer.is_good:
                await good.write(answer.data)
            else:
                num_failed += 1
                await bad.write(answer.data)
    if batch.status != CANCELLING and not num_left:
        over = COMPLETED
    changes = {"completed": good.num_lines, "failed": num_failed, "usage": totals.told()}
    files = {"output_file_id": await good.close(), "error_file_id": await bad.close()}
    return batch.to(over, now, **changes, **files)


async def _in_parts(lines: AsyncIterator[Line]) -> AsyncIterator[list[Line]]:
    part: list[Line] = []
    async for line in lines:
        part.append(line)
        if len(part) == _AT_ONCE:
            yield part
            part = []
    if part:
        yield part


def _told(request_id: str, line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    told = {"id": request_id, "custom_id": line.custom_id, "response": response, "error": error}
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


class _Usage:
    """Tokens of all answers together."""

    def __init__(self) -> None:
        self._input = self._output = self._cached = 0

    def add(self, answers: list[bytes]) -> None:
        for data in answers:
            usage = json.loads(data)["response"]["body"]["usage"]
            self._input += usage["prompt_tokens"]
            self._output += usage["completion_tokens"]
            self._cached += usage["prompt_tokens_details"]["cached_tokens"]

    def told(self) -> dict[str, Any]:
        return {
            "input_tokens": self._input,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._input + self._output,
        }


class _Writer:
    """One result, in pieces."""

    def __init__(self, store: BatchStore, claim: BatchClaim, batch: Batch, kind: str, now: float) -> None:
        self.num_lines = 0
        self._store = store
        self._claim = claim
        self._batch = batch
        self._kind = kind
        self._file_id = batch.result_file_id(kind)
        self._now = int(now)
        self._part = bytearray()
        self._size = self._num_pieces = 0

    async def write(self, line: bytes) -> None:
        self.num_lines += 1
        self._part += line + b"\n"
        if len(self._part) >= PIECE_BYTES:
            await self._flush()

    async def close(self) -> str | None:
        """Its file's id; None: it has no line, and there is none."""
        if not self.num_lines:
            return None
        await self._flush()
        batch = self._batch
        name, expires_at = f"{batch.batch_id}_{self._kind}.jsonl", self._now + batch.output_kept_s
        file = StoredFile(
            self._file_id, batch.tenant, name, "batch_output", self._size, self._num_pieces, self._now, expires_at
        )
        if not await self._store.add(
            StoredRecord("file", self._file_id, batch.tenant, file.to_json(), expires_at), self._claim
        ):
            raise ClaimLost
        return self._file_id

    async def _flush(self) -> None:
        if self._part:
            part = bytes(self._part)
            if not await self._store.put_piece(self._file_id, self._num_pieces, part, self._claim):
                raise ClaimLost
            self._size += len(self._part)
            self._num_pieces += 1
            self._part.clear()
