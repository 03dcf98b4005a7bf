"""A file of requests, line by line: what each asks for, and what is wrong with the file. Pure.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}

What a body may hold is not looked at here: that is for whoever answers the line, who says so in its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from router.batches.store import BatchProblem
from router.openai.bodies import read_json

MOST_LINES = 50_000
MOST_PROBLEMS = 100
"""That are told of one file."""
LONGEST_CUSTOM_ID = 512
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True)
class Line:
    """One request."""

    number: int
    """From 1 on, blank lines counted."""
    custom_id: str
    body: dict[str, Any]
    size_bytes: int
    """Of all of it."""


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
    """Pieces of a file as its lines. Raises ValueError for a line longer than `most_bytes`: its number."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rest = b""
        self._number = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Lines that are whole by now, blank ones left out."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        yield from self._told(lines)
        if len(self._rest) > self._most_bytes:
            raise ValueError(self._number + 1)

    def end(self) -> Iterator[tuple[int, bytes]]:
        """The last one, if no line end follows it."""
        rest, self._rest = self._rest, b""
        yield from self._told([rest])

    def _told(self, lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
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
    """Looks at every line of a file; `problems` and `total` say what it found."""

    def __init__(self, endpoint: str, most_line_bytes: int, most_lines: int = MOST_LINES) -> None:
        self.problems: list[BatchProblem] = []
        self.total = 0
        self._endpoint = endpoint
        self._most_line_bytes = most_line_bytes
        self._most_lines = most_lines
        self._splitter = Splitter(most_line_bytes)
        self._seen: dict[str, int] = {}

    def feed(self, piece: bytes) -> bool:
        """False: there is no need to look at the rest."""
        return self._look(self._splitter.feed(piece))

    def end(self) -> None:
        """After the last piece."""
        if self._look(self._splitter.end()) and not self.total and not self.problems:
            self.problems.append(BatchProblem("empty_file", "the file holds no line; write one request in each"))

    def _look(self, lines: Iterator[tuple[int, bytes]]) -> bool:
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
