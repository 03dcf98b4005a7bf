"""A call as one JSON object with the name and the arguments of the tool, as several formats write it.

`PlainJson` is the format of calls that are nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.lark import Lark
from router.tool_calls.reader import Arguments, CallBegin, Garbled, OutputReader, Reading


def read_json_call(
    reader: OutputReader, tools: Mapping[str, Tool], *, arguments: Sequence[str] = ("arguments", "parameters")
) -> Reading[None]:
    """Reads the object and tells the call, whose keys may come in any order. `arguments`: names of that key.

    Raises Garbled."""
    name, early, call_id, has_arguments = "", "", "", False
    yield from reader.take("{")
    yield from reader.take_blanks()
    while True:
        key = yield from reader.take_json()
        yield from reader.take_blanks()
        yield from reader.take(":")
        yield from reader.take_blanks()
        if key == "name" and not name:
            name = yield from reader.take_json()
            if not isinstance(name, str) or name not in tools:
                raise Garbled
            if has_arguments:
                reader.tell(CallBegin(name, call_id), Arguments(early))
        elif key in arguments and not has_arguments:
            has_arguments = True
            if not (yield from reader.starts_with("{")):
                raise Garbled
            if name:
                reader.tell(CallBegin(name, call_id))
                yield from reader.take_json(lambda piece: reader.tell(Arguments(piece)))
            else:
                pieces: list[str] = []
                yield from reader.take_json(pieces.append)
                early = "".join(pieces)
        else:
            value = yield from reader.take_json()
            call_id = value if key == "id" and isinstance(value, str) else call_id
        yield from reader.take_blanks()
        if (yield from reader.take(",", "}")) == "}":
            break
        yield from reader.take_blanks()
    if not name:
        raise Garbled
    if not has_arguments:
        reader.tell(CallBegin(name, call_id), Arguments("{}"))


def read_arguments(reader: OutputReader, begin: CallBegin) -> Reading[None]:
    """Reads a JSON object, the arguments of a call, and tells both. Raises Garbled."""
    if not (yield from reader.starts_with("{")):
        raise Garbled
    reader.tell(begin)
    yield from reader.take_json(lambda piece: reader.tell(Arguments(piece)))


def read_json_calls(reader: OutputReader, tools: Mapping[str, Tool], separator: str) -> Reading[None]:
    """Reads calls with a separator between them, of which the first has begun, up to what follows the last one. Raises
    Garbled."""
    while True:
        yield from reader.take_blanks()
        yield from read_json_call(reader, tools)
        reader.end_call()
        yield from reader.take_blanks()
        if not (yield from reader.starts_with(separator)):
            return
        reader.begin_call((yield from reader.take(separator)))


def read_json_list(reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
    """Reads a list of calls, of which the first has begun. Raises Garbled."""
    yield from reader.take("[")
    yield from read_json_calls(reader, tools, ",")
    yield from reader.take("]")


def read_section(
    reader: OutputReader, begin: str, call: str, end: str, read_call: Callable[[], Reading[None]]
) -> Reading[None]:
    """Reads text and sections of calls without an end: a mark begins a section and another one ends it, if it is there;
    a third one is before each call, which `read_call` reads up to its end. Raises Garbled."""
    while True:
        reader.begin_call((yield from reader.read_text(begin)))
        yield from reader.take_blanks()
        yield from reader.take(call)
        is_call = True
        while is_call:
            yield from read_call()
            reader.end_call()
            yield from reader.take_blanks()
            is_call = yield from reader.starts_with(call)
            if is_call:
                reader.begin_call((yield from reader.take(call)))
        if (yield from reader.starts_with(end)):
            yield from reader.take(end)
            yield from reader.take_blanks()


def json_begin(tool: Tool, key: str) -> tuple[str, str]:
    """What is before a tool's arguments, in two parts."""
    return '{"name": ' + json.dumps(tool.name), f', "{key}": '


def json_rest(lark: Lark, tool: Tool, key: str) -> str:
    """The grammar of what follows the first part of `json_begin`."""
    return f'{json.dumps(json_begin(tool, key)[1])} {lark.json(tool.schema())} "}}"'


def json_call(lark: Lark, tools: Sequence[Tool], *, key: str = "arguments") -> str:
    """The grammar of the object: its name first, with one space behind each colon and comma."""
    objects = [f'{json.dumps("".join(json_begin(tool, key)))} {lark.json(tool.schema())} "}}"' for tool in tools]
    return lark.rule("call", " | ".join(objects))


class PlainJson(ToolFormat):
    """An answer that is such an object, or a list of them."""

    name = "json"
    is_at_start = True
    key = "arguments"

    def is_of(self, template: str) -> bool:
        return re.search(r"\btools\b", template) is not None

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        try:
            reader.begin_call()
            yield from reader.take_blanks()
            if (yield from reader.starts_with("[")):
                yield from read_json_list(reader, tools)
            else:
                yield from read_json_call(reader, tools)
                reader.end_call()
            yield from reader.take_blanks()
        except Garbled:
            reader.drop_call()
        yield from reader.read_rest()

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        call = json_call(lark, tools, key=self.key)
        more = "" if is_single else f'(", " {call})*'
        found: dict[str, str] = {}
        for tool in tools:
            start, rest = json_begin(tool, self.key)[0], json_rest(lark, tool, self.key)
            found |= {start: rest, f"[{start}": f'{rest} {more} "]"'}
        return found
