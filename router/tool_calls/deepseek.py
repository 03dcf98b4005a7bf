"""DeepSeek's calls: one section of them, each with a name, a separator and JSON.

V3 and R1 write `function`, the separator, the name, and the arguments in a fenced block; V3.1 the name, the separator
and the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import read_arguments, read_section
from router.tool_calls.lark import Lark
from router.tool_calls.reader import CallBegin, Garbled, OutputReader, Reading

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _END_FENCE = "```json\n", "\n```"


class DeepSeek(ToolFormat):
    """DeepSeek V3 and R1, and V3.1 without fences. Either is read; calls of the own kind are what the grammar has."""

    marks = (_BEGIN, _END, _CALL, _SEPARATOR, _END_CALL)

    def __init__(self, name: str, *, is_fenced: bool) -> None:
        self.name = name
        self._is_fenced = is_fenced

    def is_of(self, template: str) -> bool:
        return _CALL in template and ("```json" in template) == self._is_fenced

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from read_section(reader, _BEGIN, _CALL, _END, lambda: self._read_call(reader, tools))

    def _read_call(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        name, _ = yield from reader.take_until(_SEPARATOR, _END_CALL)
        yield from reader.take_blanks()
        if name == "function" and not (yield from reader.starts_with("{")):
            name, _ = yield from reader.take_until("\n")
            yield from reader.take_blanks()
        if name.strip() not in tools:
            raise Garbled
        is_fenced = yield from reader.starts_with(_FENCE)
        if is_fenced:
            yield from reader.take(_FENCE)
            yield from reader.take_blanks()
        yield from read_arguments(reader, CallBegin(name.strip()))
        yield from reader.take_blanks()
        if is_fenced:
            yield from reader.take(_END_FENCE.strip())
            yield from reader.take_blanks()
        yield from reader.take(_END_CALL)

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        each = []
        for tool in tools:
            before, after = tool.name + _SEPARATOR, ""
            if self._is_fenced:
                before, after = f"function{_SEPARATOR}{tool.name}\n{_FENCE}", _END_FENCE
            each.append(f"{lark.literal(before)} {lark.json(tool.schema())} {json.dumps(after) if after else ''}")
        call = f"{lark.literal(_CALL)} {lark.rule('call', ' | '.join(each))} {lark.literal(_END_CALL)}"
        between = '"\\n"' if self._is_fenced else ""
        more = "" if is_single else f"({between} {call})*"
        return {_BEGIN: f"{call} {more} {lark.literal(_END)}"}
