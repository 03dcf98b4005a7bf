"""A call as one JSON object with the name and the arguments of the tool, as several formats write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from router.tool_calls.format import Tool
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
                early = json.dumps((yield from reader.take_json()), ensure_ascii=False)
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


def json_call(lark: Lark, tools: Sequence[Tool], *, arguments: str = "arguments") -> str:
    """The grammar of the object: its name first, with one space behind each colon and comma."""
    objects = []
    for tool in tools:
        begin = '{"name": ' + json.dumps(tool.name) + f', "{arguments}": '
        objects.append(f'{json.dumps(begin)} {lark.json(tool.schema())} "}}"')
    return lark.rule("call", " | ".join(objects))
