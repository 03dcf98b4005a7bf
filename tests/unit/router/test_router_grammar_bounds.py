"""What a client sends as a constraint is bounded before native code sees it, and what people write is not refused."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from router.api.grammar import (
    DEEPEST,
    LONGEST_GRAMMAR,
    LONGEST_REGEX,
    MOST_REFERENCES,
    MOST_RULES,
    check_bounds,
)


def chained_rules(number: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(number)) + f'r{number}: "x"\n'


def chained_references(number: int) -> str:
    definitions: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(number)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": definitions | {f"a{number}": {"type": "null"}}})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        schema = {"type": "object", "properties": {f"level{level}": schema}, "additionalProperties": False}
    return schema


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("grammar_ebnf", chained_rules(3000), f"has 3002 rules, and may have {MOST_RULES}"),
        ("grammar_ebnf", "root ::= a\n" + "a ::= a a\n" * 2000, "has 2001 rules"),
        ("grammar_ebnf", "start: " + "(" * 5000 + '"x"' + ")" * 5000, f"nested more than {DEEPEST} levels"),
        ("grammar_ebnf", "start: " + "[" * 5000 + '"x"' + "]" * 5000, f"nested more than {DEEPEST} levels"),
        ("grammar_ebnf", "start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000, "nested more than"),
        ("grammar_ebnf", "start: %json " + chained_references(3000), "refers to 3001 definitions"),
        ("json_schema", chained_references(3000), f"refers to 3001 definitions, and may refer to {MOST_REFERENCES}"),
        ("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000, f"nested more than {DEEPEST} levels"),
        ("json_schema", "[" * 200_000, "nested more than"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, f"nested more than {DEEPEST} levels"),
        ("regex", "a?" * 30_000, f"must be 1 to {LONGEST_REGEX} characters long (got 60000)"),
        ("json_schema", " " * (LONGEST_GRAMMAR + 1), f"(got {LONGEST_GRAMMAR + 1})"),
        ("json_object", "", "(got 0)"),
    ],
    ids=lambda value: value[:24],
)
def test_what_is_too_large_is_refused_with_value_limit_and_remedy(kind: str, text: str, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        check_bounds(kind, text)
    assert said in str(refusal.value)


SQL = "\n".join(f'rule{i}: ("a" | rule{i + 1})? [A-Z]* "((((" /\\((a|b)/ -> name' for i in range(400))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(500)}})),
        ("json_schema", json.dumps(nested(30))),
        ("json_schema", json.dumps({"enum": ["{" * 500, '"' * 9, "\\" * 99]})),
        ("json_schema", chained_references(200)),
        ("json_schema", json.dumps({"items": {"$ref": "#"}, "anyOf": [{"$ref": "#"}] * 2000})),
        ("json_schema", '{"a": ['),
        ("grammar_ebnf", SQL),
        ("grammar_ebnf", "root ::= " + 'x "("\n' * 300 + "x ::= [^(\\]{[]*\n" * 200),
        ("regex", r"[(\]]" * 300 + r"\(" * 300 + "(a|b)" * 300),
        ("choice", json.dumps(["(" * 200])),
    ],
    ids=lambda value: value[:24],
)
def test_what_people_write_passes(kind: str, text: str) -> None:
    check_bounds(kind, text)


@pytest.mark.parametrize("unit", ['"', '\\"', '"\\', "[", "/", "{", "a:", "(", "\\", "[\\", "$ref", "[^"])
def test_checking_takes_time_linear_in_the_text(unit: str) -> None:
    for kind in ("json_schema", "grammar_ebnf"):
        began = time.process_time()
        with contextlib.suppress(ValueError):
            check_bounds(kind, (unit * LONGEST_GRAMMAR)[:LONGEST_GRAMMAR])
        assert time.process_time() - began < 1
