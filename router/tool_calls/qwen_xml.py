"""Qwen3-Coder's calls: `<tool_call>`, `<function=NAME>`, and `<parameter=NAME>` with a value for each argument."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from router.tool_calls.arguments import argument, begin_named_call, properties_of, read_argument, tell_end, tell_key
from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.lark import Lark
from router.tool_calls.reader import OutputReader, Reading

_FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER = "<function=", "</function>", "<parameter=", "</parameter>"


class QwenXml(ToolFormat):
    """Qwen3-Coder, Qwen3.5, Nemotron 3, and Seed-OSS with marks of its own."""

    def __init__(self, name: str, begin: str, end: str) -> None:
        self.name = name
        self._begin, self._end = self.marks = begin, end

    def is_of(self, template: str) -> bool:
        return self._begin in template and _FUNCTION in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        while True:
            reader.begin_call((yield from reader.read_text(self._begin)))
            yield from reader.take_blanks()
            yield from reader.take(_FUNCTION)
            name = (yield from reader.take_while(lambda sign: sign not in ">\n")).strip("\"' ")
            yield from reader.take(">")
            yield from self._read_arguments(reader, begin_named_call(reader, tools, name))
            yield from reader.take_blanks()
            yield from reader.take(self._end)
            reader.end_call()
            yield from reader.take_blanks()

    def _read_arguments(self, reader: OutputReader, tool: Tool) -> Reading[None]:
        seen: dict[str, None] = {}
        while True:
            yield from reader.take_blanks()
            if (yield from reader.take(_PARAMETER, _END_FUNCTION)) == _END_FUNCTION:
                tell_end(reader, seen)
                return
            name = yield from reader.take_while(lambda sign: sign not in ">\n")
            yield from reader.take(">")
            tell_key(reader, name, seen)
            yield from read_argument(reader, tool, name, _END_PARAMETER, around="\n")

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        functions = []
        for tool in tools:
            given = []
            for name, (schema, is_required) in properties_of(tool, without="<>\n").items():
                value = argument(lark, tool, schema, _END_PARAMETER, around="\n")
                one = f'{json.dumps(f"{_PARAMETER}{name}>")} {value} "\\n"'
                given.append(one if is_required else f"({one})?")
            begin, end = json.dumps(f"\n{_FUNCTION}{tool.name}>\n"), json.dumps(f"{_END_FUNCTION}\n")
            functions.append(" ".join([begin, *given, end]))
        rest = f"{lark.rule('call', ' | '.join(functions))} {lark.literal(self._end)}"
        return {self._begin: rest if is_single else lark.several(self._begin, rest, "\n")}
