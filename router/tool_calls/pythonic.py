"""Pythonic calls: a list of Python's calls with keyword arguments.

With Llama 3.2 and 4 it is the whole answer; LFM2 writes it between marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from router.tool_calls.arguments import (
    begin_named_call,
    properties_of,
    schema_of,
    separated,
    tell_argument,
    tell_end,
    tell_key,
    types_of,
)
from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import read_json_list
from router.tool_calls.lark import Lark
from router.tool_calls.reader import Garbled, OutputReader, Reading

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_CALLS, _END_CALLS = "<|tool_call_start|>", "<|tool_call_end|>"
_DEEPEST = 64
_NOT_IN_NAMES = "=(){}[],:;'\"\\ \t\r\n"
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", "'": "'", '"': '\\"', "/": "/"}
_ESCAPES |= {"a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}


class Pythonic(ToolFormat):
    """Values are Python's or JSON's; they are told as JSON."""

    name = "pythonic"
    marks = (_BEGIN, _END)
    is_at_start = True

    def is_of(self, template: str) -> bool:
        return re.search(r"\[\s*func(tion)?_?(name)?_?1?\(|tool_call\.name \+ '\('", template) is not None

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        try:
            reader.begin_call()
            yield from reader.take_blanks()
            if (yield from reader.starts_with(_BEGIN)):
                yield from reader.take(_BEGIN)
                yield from reader.take_blanks()
            yield from _read_list(reader, tools)
            yield from reader.take_blanks()
            if (yield from reader.starts_with(_END)):
                yield from reader.take(_END)
        except Garbled:
            reader.drop_call()
        yield from reader.read_rest()

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        rests = _calls(lark, tools)
        call = lark.rule("call", " | ".join(f"{json.dumps(begin)} {rest}" for begin, rest in rests.items()))
        more = "" if is_single else f'(", " {call})*'
        return {f"[{begin}": f'{rest} {more} "]"' for begin, rest in rests.items()}


class Lfm2(ToolFormat):
    """LFM2: such a list between marks, with text around it, or one of JSON objects where its prompt asks for that."""

    name = "lfm2"
    marks = (_CALLS, _END_CALLS)

    def is_of(self, template: str) -> bool:
        return _CALLS in template or "<|tool_list_start|>" in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        while True:
            reader.begin_call((yield from reader.read_text(_CALLS)))
            yield from reader.take_blanks()
            is_json = yield from reader.starts_with("[{")
            yield from (read_json_list if is_json else _read_list)(reader, tools)
            yield from reader.take_blanks()
            if (yield from reader.starts_with(_END_CALLS)):
                yield from reader.take(_END_CALLS)
                yield from reader.take_blanks()

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        rests = _calls(lark, tools).items()
        call = lark.rule("call", " | ".join(f"{json.dumps(begin)} {rest}" for begin, rest in rests))
        more = "" if is_single else f'(", " {call})*'
        return {_CALLS: f'"[" {call} {more} "]" {lark.literal(_END_CALLS)}'}


def _read_list(reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
    """Reads a list of calls, of which the first has begun. Raises Garbled."""
    mark = yield from reader.take("[")
    while mark != "]":
        yield from reader.take_blanks()
        name = (yield from reader.take_while(lambda sign: sign not in "([{\"'")).strip()
        yield from reader.take("(")
        begin_named_call(reader, tools, name)
        yield from _read_arguments(reader)
        reader.end_call()
        yield from reader.take_blanks()
        mark = yield from reader.take(",", "]")
        if mark == ",":
            reader.begin_call(mark)


def _calls(lark: Lark, tools: Sequence[Tool]) -> dict[str, str]:
    """By the text with which a call of each tool begins, an expression of Lark for the rest of it."""
    return {f"{tool.name}(": f'{_arguments(lark, tool)} ")"'.strip() for tool in tools}


def _arguments(lark: Lark, tool: Tool) -> str:
    given = []
    for name, (schema, is_required) in properties_of(tool, without=_NOT_IN_NAMES).items():
        is_plain = types_of(tool, schema) == {"boolean"} and set(schema) <= {"type", "description", "title", "default"}
        value = '("True" | "False")' if is_plain else lark.json(schema_of(tool, schema))
        given.append((f"{json.dumps(f'{name}=')} {value}", is_required))
    return separated(lark, given, ", ")


def _read_arguments(reader: OutputReader) -> Reading[None]:
    """Reads keyword arguments and the closing bracket, and tells them."""
    seen: dict[str, None] = {}
    yield from reader.take_blanks()
    mark = "," if not (yield from reader.starts_with(")")) else (yield from reader.take(")"))
    while mark == ",":
        yield from reader.take_blanks()
        name = yield from reader.take_while(lambda sign: sign not in _NOT_IN_NAMES)
        if not name:
            raise Garbled
        yield from reader.take_blanks()
        yield from reader.take("=")
        yield from reader.take_blanks()
        tell_key(reader, name, seen)
        yield from _read_value(reader, _DEEPEST)
        yield from reader.take_blanks()
        mark = yield from reader.take(",", ")")
    tell_end(reader, seen)


def _read_value(reader: OutputReader, depth: int) -> Reading[None]:
    """Reads a literal and tells it as JSON."""
    if depth == 0:
        raise Garbled
    for sign in ('"', "'"):
        if (yield from reader.starts_with(sign)):
            yield from _read_string(reader)
            return
    for begin, end in ("[]", "{}"):
        if (yield from reader.starts_with(begin)):
            yield from _read_items(reader, begin, end, depth)
            return
    word = yield from reader.take_while(lambda sign: sign.isalnum() or sign in "+-._")
    if word not in _WORDS and not _NUMBER.fullmatch(word):
        raise Garbled
    tell_argument(reader, _WORDS.get(word, word))


def _read_items(reader: OutputReader, begin: str, end: str, depth: int) -> Reading[None]:
    yield from reader.take(begin)
    tell_argument(reader, begin)
    yield from reader.take_blanks()
    is_first = True
    while not (yield from reader.starts_with(end)):
        if not is_first:
            yield from reader.take(",")
            yield from reader.take_blanks()
            tell_argument(reader, ", ")
        if begin == "{":
            yield from _read_string(reader)
            yield from reader.take_blanks()
            yield from reader.take(":")
            yield from reader.take_blanks()
            tell_argument(reader, ": ")
        yield from _read_value(reader, depth - 1)
        yield from reader.take_blanks()
        is_first = False
    yield from reader.take(end)
    tell_argument(reader, end)


def _read_string(reader: OutputReader) -> Reading[None]:
    quote = yield from reader.take('"', "'")
    tell_argument(reader, '"')
    mark = ""
    while mark != quote:
        text, mark = yield from reader.take_some(quote, "\\")
        tell_argument(reader, json.dumps(text, ensure_ascii=False)[1:-1])
        if mark == "\\":
            sign = yield from reader.take_characters(1)
            if sign in _ESCAPES:
                tell_argument(reader, _ESCAPES[sign])
            elif sign in _HEX:
                digits = yield from reader.take_characters(_HEX[sign])
                if not re.fullmatch("[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
                    raise Garbled
                escape = f"\\u{digits}" if sign == "u" else json.dumps(chr(int(digits, 16)))[1:-1]
                tell_argument(reader, escape)  # surrogates stay in pairs, as JSON has them
            else:
                raise Garbled
    tell_argument(reader, '"')
