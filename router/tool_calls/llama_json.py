"""Llama 3's calls: an answer that is a JSON object with name and parameters, or several with semicolons between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import json_begin, json_call, json_rest, read_json_calls
from router.tool_calls.lark import Lark
from router.tool_calls.reader import Garbled, OutputReader, Reading

_TAG = "<|python_tag|>"


class LlamaJson(ToolFormat):
    """Llama 3.1, 3.2 and 3.3. `<|python_tag|>` may be before a call, also behind text."""

    name = "llama3_json"
    marks = (_TAG,)
    is_at_start = True
    key = "parameters"

    def is_of(self, template: str) -> bool:
        return _TAG in template or '"parameters": dictionary of argument name' in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        try:
            reader.begin_call()
            yield from reader.take_blanks()
            if (yield from reader.starts_with(_TAG)):
                yield from reader.take(_TAG)
            yield from read_json_calls(reader, tools, ";")
        except Garbled:
            reader.drop_call()
        while True:
            try:
                reader.begin_call((yield from reader.read_text(_TAG)))
                yield from read_json_calls(reader, tools, ";")
            except Garbled:
                reader.drop_call()

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        call = json_call(lark, tools, key=self.key)
        more = "" if is_single else f'("; " {call})*'
        found = {json_begin(tool, self.key)[0]: f"{json_rest(lark, tool, self.key)} {more}" for tool in tools}
        return {**found, _TAG: f"{call} {more}"} if lark.is_special(_TAG) else found
