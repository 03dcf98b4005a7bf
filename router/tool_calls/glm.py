"""GLM's calls: `<tool_call>` and a name, `<arg_key>` and `<arg_value>` for each argument, `</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from router.tool_calls.arguments import argument, begin_named_call, properties_of, read_argument, tell_end, tell_key
from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.lark import Lark
from router.tool_calls.reader import OutputReader, Reading

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm(ToolFormat):
    """GLM 4.5 and 4.6, and 4.7, which writes no line breaks between marks."""

    name = "glm"
    marks = (_BEGIN, _END, _KEY, _END_KEY, _VALUE, _END_VALUE)

    def is_of(self, template: str) -> bool:
        return _KEY in template and _BEGIN in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        while True:
            reader.begin_call((yield from reader.read_text(_BEGIN)))
            yield from reader.take_blanks()
            name = (yield from reader.take_while(lambda sign: sign not in "\n<")).strip()
            tool = begin_named_call(reader, tools, name)
            seen: dict[str, None] = {}
            while True:
                yield from reader.take_blanks()
                if (yield from reader.take(_KEY, _END)) == _END:
                    break
                key, _ = yield from reader.take_until(_END_KEY)
                yield from reader.take_blanks()
                yield from reader.take(_VALUE)
                tell_key(reader, key.strip(), seen)
                yield from read_argument(reader, tool, key.strip(), _END_VALUE)
            tell_end(reader, seen)
            reader.end_call()
            yield from reader.take_blanks()

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        calls = []
        for tool in tools:
            given = []
            for name, (schema, is_required) in properties_of(tool, without="<>\n").items():
                before = lark.literal(f"{_KEY}{name}{_END_KEY}\n{_VALUE}")
                one = f'{before} {argument(lark, tool, schema, _END_VALUE)} "\\n"'
                given.append(one if is_required else f"({one})?")
            calls.append(" ".join([json.dumps(f"{tool.name}\n"), *given]))
        rest = f"{lark.rule('call', ' | '.join(calls))} {lark.literal(_END)}"
        return {_BEGIN: rest if is_single else lark.several(_BEGIN, rest, "\n")}
