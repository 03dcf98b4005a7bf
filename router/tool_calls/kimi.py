"""Kimi K2's calls: one section of them, each with an id that has the name and a number, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import read_arguments, read_section
from router.tool_calls.lark import Lark
from router.tool_calls.reader import CallBegin, Garbled, OutputReader, Reading

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAMESPACE = "functions."


class Kimi(ToolFormat):
    """Kimi K2 and K2.5."""

    name = "kimi"
    marks = (_BEGIN, _END, _CALL, _ARGUMENTS, _END_CALL)

    def is_of(self, template: str) -> bool:
        return _CALL in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from read_section(reader, _BEGIN, _CALL, _END, lambda: self._read_call(reader, tools))

    def _read_call(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        yield from reader.take_blanks()
        call_id = (yield from reader.take_until(_ARGUMENTS, _END_CALL))[0].strip()
        name = call_id.removeprefix(_NAMESPACE).partition(":")[0]
        if name not in tools:
            raise Garbled
        yield from reader.take_blanks()
        yield from read_arguments(reader, CallBegin(name, call_id))
        yield from reader.take_blanks()
        yield from reader.take(_END_CALL)

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        number, before = lark.rule("NUMBER", "/0|[1-9][0-9]{0,2}/"), lark.literal(_ARGUMENTS)
        names = [lark.literal(f"{_NAMESPACE}{tool.name}:") for tool in tools]
        each = [f"{name} {number} {before} {lark.json(tool.schema())}" for name, tool in zip(names, tools, strict=True)]
        call = f"{lark.literal(_CALL)} {lark.rule('call', ' | '.join(each))} {lark.literal(_END_CALL)}"
        return {_BEGIN: f"{call if is_single else f'({call})+'} {lark.literal(_END)}"}
