"""Files of requests: what a good one is, what is reported of a bad one, and in which line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.batches.lines import MOST_PROBLEMS, Checker, Line, Splitter, read_line

CHAT = "/v1/chat/completions"
MOST_BYTES = 1000


def line(number: int = 1, **fields: Any) -> bytes:
    given_fields = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": {"model": "m"}} | fields
    return json.dumps({name: value for name, value in given_fields.items() if value is not ...}).encode()


def checked(data: bytes, step: int = 7, most_lines: int = 100) -> Checker:
    checker = Checker(CHAT, MOST_BYTES, most_lines)
    if all(checker.feed(data[start : start + step]) for start in range(0, len(data), step)):
        checker.end()
    return checker


def problems_of(data: bytes, **how: Any) -> list[tuple[str, int | None, str | None]]:
    return [(problem.code, problem.line, problem.param) for problem in checked(data, **how).problems]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n \n"])
def test_a_good_file_is_counted_with_or_without_a_last_line_end(end: bytes) -> None:
    checker = checked(b"\n".join([line(1), b"", line(2)]) + end)
    assert (checker.problems, checker.total) == ([], 2)


BAD: list[tuple[bytes, str, str | None]] = [
    (b"{", "invalid_json_line", None),
    (b"[]", "invalid_json_line", None),
    (b"\xff\xfe", "invalid_json_line", None),
    (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
    (b"[" * 900, "invalid_json_line", None),
    (line(custom_id=...), "missing_required_parameter", "custom_id"),
    (line(body=...), "missing_required_parameter", "body"),
    (line(extra=1), "unknown_parameter", "extra"),
    (line(custom_id=5), "invalid_custom_id", "custom_id"),
    (line(custom_id=""), "invalid_custom_id", "custom_id"),
    (line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
    (line(method="GET"), "invalid_method", "method"),
    (line(url="/v1/completions"), "invalid_url", "url"),
    (line(body=[]), "invalid_body", "body"),
    (line(custom_id="r1"), "duplicate_custom_id", "custom_id"),
    (line(9, body={"a": "x" * MOST_BYTES}), "line_too_long", None),
]


@pytest.mark.parametrize(("bad", "code", "param"), BAD, ids=[f"{code}-{n}" for n, (_, code, _) in enumerate(BAD)])
def test_what_is_wrong_is_told_with_its_line(bad: bytes, code: str, param: str | None) -> None:
    assert problems_of(b"\n".join([line(1), b"", bad, line(4)])) == [(code, 3, param)]
    assert problems_of(b"\n".join([line(1), bad])) == [(code, 2, param)]


def test_every_bad_line_is_told_up_to_a_bound() -> None:
    assert [found[1] for found in problems_of(b"\n".join([b"{", line(2), b"}", line(2)]))] == [1, 3, 4]
    assert len(problems_of(b"{\n" * 500, most_lines=1000)) == MOST_PROBLEMS


def test_an_empty_file_and_one_with_too_many_lines_are_refused() -> None:
    assert problems_of(b"") == problems_of(b"\n \n") == [("empty_file", None, None)]
    many = b"\n".join(line(number) for number in range(6))
    assert problems_of(many, most_lines=6) == [] and problems_of(many, most_lines=5) == [("too_many_lines", 6, None)]


def test_a_line_is_what_it_asks_for() -> None:
    data = line(4, body={"model": "é"})
    assert read_line(4, data, CHAT) == Line(4, "r4", {"model": "é"}, len(data))


@given(st.lists(st.binary(max_size=12)), st.integers(1, 9))
def test_lines_do_not_depend_on_how_a_file_is_cut(parts: list[bytes], step: int) -> None:
    data = b"\n".join(parts)
    expected = [(number, text) for number, text in enumerate(data.split(b"\n"), 1) if text.strip()]
    splitter, found = Splitter(MOST_BYTES), list[tuple[int, bytes]]()
    for start in range(0, len(data), step):
        found += splitter.feed(data[start : start + step])
    assert [*found, *splitter.end()] == expected
