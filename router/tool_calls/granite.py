"""Granite's calls: `<|tool_call|>` and one list of JSON objects with name and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import json_call, read_json_list
from router.tool_calls.lark import Lark
from router.tool_calls.reader import OutputReader, Reading

_BEGIN = "<|tool_call|>"


class Granite(ToolFormat):
    """Granite 3; Granite 4 writes as Hermes does, and has this mark for a role."""

    name = "granite"
    marks = (_BEGIN,)

    def is_of(self, template: str) -> bool:
        return _BEGIN in template and "<tool_call>" not in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        while True:
            reader.begin_call((yield from reader.read_text(_BEGIN)))
            yield from reader.take_blanks()
            yield from read_json_list(reader, tools)
            yield from reader.take_blanks()

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        call = json_call(lark, tools)
        more = "" if is_single else f'(", " {call})*'
        return {_BEGIN: f'"[" {call} {more} "]"'}
