"""The lines of a batch's files: what an input line asks for, what is wrong with a file, and the files of results.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}
    {"id": ..., "custom_id": "1", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

The body of a line is checked when the line is answered, and the answer says what is wrong with it. Lines that were not
run any more are in the error file with `"response": null` and a code that says why. Results are the same however often
they are written, so that a router which takes over from another one writes nothing twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from router.batches.store import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    PIECE_BYTES,
    Batch,
    BatchClaim,
    BatchProblem,
    BatchStatus,
    BatchStore,
    LineAnswer,
    StoredFile,
    StoredRecord,
    pieces_of,
)
from router.openai.bodies import read_json

MOST_LINES = 50_000
MOST_PROBLEMS = 100
"""Most problems of one file that are reported."""
LONGEST_CUSTOM_ID = 512
_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_AT_ONCE = 50
"""Lines whose answers are read at a time."""
_UNANSWERED = {
    CANCELLED: ("batch_cancelled", "This request was not executed before the batch was cancelled."),
    EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
}


@dataclass(frozen=True)
class Line:
    """One request."""

    number: int
    """Counted from 1, blank lines included."""
    custom_id: str
    body: dict[str, Any]
    size_bytes: int
    """Size of the whole line."""


@dataclass(frozen=True)
class LineResult:
    """The outcome of one attempt to answer a line."""

    status: int
    body: Mapping[str, Any]
    retry_after_s: float | None = None
    """Not None: there is no answer yet, and the line may be tried again after this time."""
    is_refusal: bool = False
    """It has not run."""


class Splitter:
    """Cuts the pieces of a file into lines. Raises ValueError with the number of a line longer than `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rest = b""
        self._number = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """The lines that are complete now, without blank ones."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        yield from self._numbered(lines)
        if len(self._rest) > self._most_bytes:
            raise ValueError(self._number + 1)

    def end(self) -> Iterator[tuple[int, bytes]]:
        """The last line, if no line end follows it."""
        rest, self._rest = self._rest, b""
        yield from self._numbered([rest])

    def _numbered(self, lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
        for line in lines:
            self._number += 1
            if len(line) > self._most_bytes:
                raise ValueError(self._number)
            if line.strip():
                yield self._number, line


def read_line(number: int, data: bytes, endpoint: str) -> Line | BatchProblem:
    """One line of a batch for `endpoint`."""
    try:
        found = read_json(data)
    except ValueError:
        return BatchProblem("invalid_json_line", "this line is not JSON in UTF-8; write one object in one line", number)
    if not isinstance(found, dict):
        return BatchProblem("invalid_json_line", "this line is no JSON object", number)
    for name in sorted(_FIELDS - found.keys()):
        return BatchProblem("missing_required_parameter", f"{name} must be set", number, name)
    for name in sorted(found.keys() - _FIELDS):
        known = ", ".join(sorted(_FIELDS))
        return BatchProblem(
            "unknown_parameter", f"has a field that is not known here; known: {known}", number, name[:64]
        )
    custom_id, method, url, body = (found[name] for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= LONGEST_CUSTOM_ID:
        return BatchProblem(
            "invalid_custom_id", f"must be a text of 1 to {LONGEST_CUSTOM_ID} characters", number, "custom_id"
        )
    if method != "POST":
        return BatchProblem("invalid_method", "must be POST", number, "method")
    if url != endpoint:
        return BatchProblem("invalid_url", f"must be the endpoint of the batch, {endpoint}", number, "url")
    if not isinstance(body, dict):
        return BatchProblem("invalid_body", "must be a JSON object", number, "body")
    return Line(number, custom_id, body, len(data))


class Checker:
    """Checks every line of a file; `problems` and `total` say what it found."""

    def __init__(self, endpoint: str, most_line_bytes: int, most_lines: int = MOST_LINES) -> None:
        self.problems: list[BatchProblem] = []
        self.total = 0
        self._endpoint = endpoint
        self._most_line_bytes = most_line_bytes
        self._most_lines = most_lines
        self._splitter = Splitter(most_line_bytes)
        self._seen: dict[str, int] = {}

    def feed(self, piece: bytes) -> bool:
        """False: there is no need to check the rest."""
        return self._check_all(self._splitter.feed(piece))

    def end(self) -> None:
        """After the last piece."""
        if self._check_all(self._splitter.end()) and not self.total and not self.problems:
            self.problems.append(BatchProblem("empty_file", "the file holds no line; write one request in each"))

    def _check_all(self, lines: Iterator[tuple[int, bytes]]) -> bool:
        try:
            for number, data in lines:
                self.total += 1
                if self.total > self._most_lines:
                    message = f"the file has more than {self._most_lines} lines; split it into several batches"
                    self.problems = [BatchProblem("too_many_lines", message, number)]
                    return False
                self._check(number, data)
                if len(self.problems) >= MOST_PROBLEMS:
                    return False
        except ValueError as error:
            message = f"this line is longer than {self._most_line_bytes} bytes, which is the most taken here"
            self.problems.append(BatchProblem("line_too_long", message, error.args[0]))
            return False
        return True

    def _check(self, number: int, data: bytes) -> None:
        line = read_line(number, data, self._endpoint)
        if isinstance(line, BatchProblem):
            self.problems.append(line)
            return
        first = self._seen.setdefault(line.custom_id, number)
        if first != number:
            message = f"is that of line {first}, too; each must have its own"
            self.problems.append(BatchProblem("duplicate_custom_id", message, number, "custom_id"))


class ClaimLost(Exception):
    """Another router has the batch, or the store has lost it."""


async def lines_of(store: BatchStore, batch: Batch, most_line_bytes: int) -> AsyncIterator[Line]:
    """The lines of a file without problems. Raises InputGone."""
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
    return LineAnswer(line.number, status == 200, _result(request_id, line, response, None))


def answer_lost_line(line: Line, request_id: str, num_routers: int) -> LineAnswer:
    """The answer to a line with which so many routers were lost."""
    message = (
        f"{num_routers} routers were lost while they computed this line, the last time beside no other line; it may be "
        "the cause. Change it, or send it once more in a batch of its own."
    )
    return LineAnswer(line.number, False, _result(request_id, line, None, {"code": "router_lost", "message": message}))


async def write_results(store: BatchStore, claim: BatchClaim, batch: Batch, most_line_bytes: int, now: float) -> Batch:
    """Writes both files and returns the finished batch. One that was cancelled before its file was checked has no
    lines. Raises ClaimLost: a router that has ended the batch meanwhile may have dropped what was read here."""
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
                await bad.write(_result(request_id, line, None, {"code": code, "message": message}))
            elif answer.is_good:
                await good.write(answer.data)
            else:
                num_failed += 1
                await bad.write(answer.data)
    if batch.status != CANCELLING and not num_left:
        over = COMPLETED
    changes = {"completed": good.num_lines, "failed": num_failed, "usage": totals.as_json()}
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


def _result(request_id: str, line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    result = {"id": request_id, "custom_id": line.custom_id, "response": response, "error": error}
    return json.dumps(result, ensure_ascii=False, separators=(",", ":")).encode()


class _Usage:
    """Tokens of all answers."""

    def __init__(self) -> None:
        self._input = self._output = self._cached = self._reasoning = 0

    def add(self, answers: list[bytes]) -> None:
        for data in answers:
            usage = json.loads(data)["response"]["body"]["usage"]
            of_input, of_output = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
            self._input += usage[f"{of_input}_tokens"]
            self._output += usage[f"{of_output}_tokens"]
            self._cached += usage[f"{of_input}_tokens_details"]["cached_tokens"]
            self._reasoning += usage.get(f"{of_output}_tokens_details", {}).get("reasoning_tokens", 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self._input,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._input + self._output,
        }


class _Writer:
    """Writes one file of results, in pieces."""

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
        """Returns the file's id; None where no line was written and there is no file."""
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
