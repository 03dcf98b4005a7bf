"""Hermes' and Qwen's calls: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`, for each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import json_call, read_json_call
from router.tool_calls.lark import Lark
from router.tool_calls.reader import OutputReader, Reading

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """Nous Hermes 2 and 3, Qwen2.5 and Qwen3, and many that were trained on their outputs."""

    name = "hermes"
    marks = (_BEGIN, _END)

    def is_of(self, template: str) -> bool:
        return _BEGIN in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        while True:
            reader.begin_call((yield from reader.read_text(_BEGIN)))
            yield from reader.take_blanks()
            yield from read_json_call(reader, tools)
            yield from reader.take_blanks()
            yield from reader.take(_END)
            reader.end_call()
            yield from reader.take_blanks()

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        rest = f'"\\n" {json_call(lark, tools)} "\\n" {lark.literal(_END)}'
        return {_BEGIN: rest if is_single else lark.several(_BEGIN, rest, "\n")}
