"""Mistral's calls, older and newer ones.

Older models write `[TOOL_CALLS]` and one list of JSON objects; newer ones `[TOOL_CALLS]name[ARGS]{…}` for each call,
some with `[CALL_ID]` and nine letters or digits before `[ARGS]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import json_call, read_arguments, read_json_list
from router.tool_calls.lark import Lark
from router.tool_calls.reader import CallBegin, Garbled, OutputReader, Reading

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(ToolFormat):
    """Mistral, Ministral, Codestral, Devstral and Magistral since 7B v0.3."""

    name = "mistral"
    marks = (_BEGIN, _ID, _ARGUMENTS)

    def is_of(self, template: str) -> bool:
        return _BEGIN in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        while True:
            reader.begin_call((yield from reader.read_text(_BEGIN)))
            yield from reader.take_blanks()
            if (yield from reader.starts_with("[")):
                yield from read_json_list(reader, tools)
            else:
                yield from self._read_call(reader, tools)
                reader.end_call()
            yield from reader.take_blanks()

    def _read_call(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        name = (yield from reader.take_while(lambda sign: sign not in "[{")).strip()
        if name not in tools:
            raise Garbled
        call_id = ""
        if (yield from reader.starts_with(_ID)):
            yield from reader.take(_ID)
            call_id = (yield from reader.take_while(lambda sign: sign != "[")).strip()
        if (yield from reader.starts_with(_ARGUMENTS)):
            yield from reader.take(_ARGUMENTS)
        yield from read_arguments(reader, CallBegin(name, call_id))

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        if not lark.is_special(_ARGUMENTS):
            call = json_call(lark, tools)
            more = "" if is_single else f'(", " {call})*'
            return {_BEGIN: f'" "? "[" {call} {more} "]"'}
        has_id = f"({lark.literal(_ID)} /[a-zA-Z0-9]{{9}}/)? " if lark.is_special(_ID) else ""
        before = lark.literal(_ARGUMENTS)
        each = [f"{json.dumps(tool.name)} {has_id}{before} {lark.json(tool.schema())}" for tool in tools]
        rest = lark.rule("call", " | ".join(each))
        return {_BEGIN: rest if is_single else lark.several(_BEGIN, rest)}
