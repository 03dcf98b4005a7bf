"""Calls as `<invoke name="…">` with `<parameter name="…">` for each argument, in one section: MiniMax's, and DeepSeek's
since V3.2.

DeepSeek writes its own sign into each mark (DSML), and says of each value whether it is text as it is or JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from router.tool_calls.arguments import (
    argument,
    begin_named_call,
    is_bare,
    properties_of,
    read_argument,
    tell_end,
    tell_key,
)
from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import read_section
from router.tool_calls.lark import Lark
from router.tool_calls.reader import OutputReader, Reading

_SIGN = "｜DSML｜"
_KIND = ' string="'


class InvokeXml(ToolFormat):
    """MiniMax M2; with DeepSeek's sign V3.2, whose section is of `function_calls`, and V4, whose is of `tool_calls`."""

    def __init__(self, name: str, section: str, *, is_dsml: bool) -> None:
        sign = _SIGN if is_dsml else ""
        self.name = name
        self._section = section
        self._is_dsml = is_dsml
        self._begin, self._end = f"<{sign}{section}>", f"</{sign}{section}>"
        self._invoke, self._end_invoke = f'<{sign}invoke name="', f"</{sign}invoke>"
        self._parameter, self._end_parameter = f'<{sign}parameter name="', f"</{sign}parameter>"
        self.marks = (_SIGN,) if is_dsml else (self._begin, self._end)

    def is_of(self, template: str) -> bool:
        return self._section in template and (_SIGN in template) == self._is_dsml

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from read_section(reader, self._begin, self._invoke, self._end, lambda: self._read_call(reader, tools))

    def _read_call(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        name, _ = yield from reader.take_until('"')
        yield from reader.take(">")
        tool = begin_named_call(reader, tools, name)
        seen: dict[str, None] = {}
        while True:
            yield from reader.take_blanks()
            if (yield from reader.take(self._parameter, self._end_invoke)) == self._end_invoke:
                tell_end(reader, seen)
                return
            key, _ = yield from reader.take_until('"')
            is_text = False
            if (yield from reader.starts_with(_KIND)):
                yield from reader.take(_KIND)
                is_text = (yield from reader.take('true"', 'false"')) == 'true"'
            yield from reader.take(">")
            tell_key(reader, key, seen)
            yield from read_argument(reader, tool, key, self._end_parameter, is_text=is_text)

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        calls = []
        for tool in tools:
            given = []
            for name, (schema, is_required) in properties_of(tool, without='"<>\n').items():
                is_text = is_bare(tool, schema, self._end_parameter)
                kind = f'{_KIND}{json.dumps(is_text)}"' if self._is_dsml else ""
                before = lark.literal(f'{self._parameter}{name}"{kind}>')
                one = f'{before} {argument(lark, tool, schema, self._end_parameter)} "\\n"'
                given.append(one if is_required else f"({one})?")
            begin = lark.literal(f'\n{self._invoke}{tool.name}">\n')
            calls.append(" ".join([begin, *given, lark.literal(self._end_invoke)]))
        call = lark.rule("call", " | ".join(calls))
        more, end = "" if is_single else f"({call})*", lark.literal("\n" + self._end)
        return {self._begin: f"{call} {more} {end}"}
