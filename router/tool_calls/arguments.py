"""Arguments that a model writes one by one: text as it is, and other values as JSON, by the schema of each.

XML-like formats have a mark before and behind each value; `read_argument` and `argument` are the two sides of one
agreement about what is between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from router.tool_calls.format import Tool
from router.tool_calls.lark import Lark
from router.tool_calls.reader import Arguments, CallBegin, Garbled, OutputReader, Reading

_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_DEEPEST = 16
"""References that are followed in one schema."""
_OF_TEXT = ("pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType")
"""Keywords of a string that text without quotes is not held to."""
_OF_OBJECT = (
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords of a tool's parameters that arguments written one by one are not held to."""
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def properties_of(tool: Tool, *, without: str) -> dict[str, tuple[Any, bool]]:
    """The schema of each argument, and whether it must be there. Raises ValueError where a strict tool's parameters say
    more than that, and for a name that has a character of `without`, or white space around it."""
    parameters = tool.parameters
    wrong = [keyword for keyword in _OF_OBJECT if keyword in parameters] if tool.is_strict else []
    if wrong:
        raise ValueError(
            f"{wrong[0]} of the parameters of {tool.name} cannot be followed in this model's format of calls, "
            "which has one argument after the other; use properties and required alone, or leave out strict"
        )
    required = [each for each in _list(parameters.get("required")) if isinstance(each, str)]
    properties, others = _mapping(parameters.get("properties")), parameters.get("additionalProperties", True)
    for name in (*properties, *required):
        if name != name.strip() or any(sign in name for sign in without):
            raise ValueError(f"{tool.name} has an argument {name!r}, which this model's format of calls cannot write")
    return {name: (properties.get(name, others), name in required) for name in [*properties, *required]}


def schema_of(tool: Tool, schema: Any) -> dict[str, Any]:
    """The schema of one argument by itself, as grammars take it."""
    whole = {key: tool.parameters[key] for key in ("$defs", "definitions", "$schema") if key in tool.parameters}
    if schema is False:
        raise ValueError(f"the parameters of {tool.name} require an argument that they do not allow")
    if schema is not True and not isinstance(schema, Mapping):
        raise ValueError(f"the parameters of {tool.name} have {schema!r} where a schema must be")
    return {**whole, **({} if schema is True else schema), "x-guidance": tool.options}


def types_of(tool: Tool, schema: Any, depth: int = 0) -> frozenset[str]:
    """The types of JSON that a schema may allow."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _TYPES
    found = _TYPES
    if "type" in schema:
        given = schema["type"]
        found &= {given} if isinstance(given, str) else {each for each in _list(given) if isinstance(each, str)}
        found |= {"integer"} if "number" in found else frozenset()
    if "const" in schema or "enum" in schema:
        found &= {type_of(value) for value in ([schema["const"]] if "const" in schema else _list(schema["enum"]))}
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            found &= frozenset().union(*(types_of(tool, each, depth + 1) for each in _list(schema[keyword])))
    for each in _list(schema.get("allOf")):
        found &= types_of(tool, each, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found &= types_of(tool, _target(tool, reference), depth + 1)
    return found


def type_of(value: Any) -> str:
    """The type of a value of JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _target(tool: Tool, reference: str) -> Any:
    """What a reference within the parameters names; anything, where that is not known."""
    found: Any = tool.parameters
    for step in reference.split("/")[1:] if reference.startswith("#") else ("",):
        if not isinstance(found, Mapping):
            return True
        found = found.get(step.replace("~1", "/").replace("~0", "~"), True)
    return found


def is_bare(tool: Tool, schema: Any, end: str) -> bool:
    """Whether a value is text without quotes, up to `end`."""
    if types_of(tool, schema) != {"string"} or any(keyword in schema for keyword in _OF_TEXT):
        return False
    simple = {"type", "enum", "const", "description", "title", "default", "examples", "deprecated"}
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return simple.issuperset(schema) and not any(end in value for value in values)


def argument(lark: Lark, tool: Tool, schema: Any, end: str, *, around: str = "") -> str:
    """The grammar of a value and its end mark. `around`: white space between text and its marks."""
    before = f"{json.dumps(around)} " if around else ""
    if not is_bare(tool, schema, end):
        return f"{before}{lark.json(schema_of(tool, schema))} {lark.literal(around + end)}"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return before + f"({' | '.join(json.dumps(value + around) for value in values)}) {lark.literal(end)}"
    if lark.is_special(end):
        return f"{before}{lark.text_without(end)} {lark.literal(end)}"
    head, rest = lark.split(around + end)
    value = lark.rule("VALUE", f"({lark.text_without(end)}) {json.dumps(head)}")
    return f"{before}{value} {lark.literal(rest)}".rstrip()


def begin_named_call(reader: OutputReader, tools: Mapping[str, Tool], name: str) -> Tool:
    """Tells the name of a call whose arguments follow one by one, and returns what it calls. Raises Garbled where no
    tool has that name."""
    if name not in tools:
        raise Garbled
    reader.tell(CallBegin(name))
    return tools[name]


def read_argument(
    reader: OutputReader, tool: Tool, name: str, end: str, *, around: str = "", is_text: bool = False
) -> Reading[None]:
    """Reads a value and its end mark, and tells it as JSON. `is_text`: the model says that it is text. Raises
    Garbled."""
    tell = partial(tell_argument, reader)
    properties = _mapping(tool.parameters.get("properties"))
    schema = properties.get(name, tool.parameters.get("additionalProperties", True))
    types, position, pieces = types_of(tool, schema), reader.position, list[str]()
    if is_bare(tool, schema, end) or (is_text and "string" in types):
        yield from _read_text(reader, tell, end, around)
        return
    is_streamed = False
    try:
        yield from reader.take_blanks()
        for sign in '{["':
            is_streamed = is_streamed or (reader.streams_calls and (yield from reader.starts_with(sign)))
        value = yield from reader.take_json(tell if is_streamed else pieces.append)
        yield from reader.take_blanks()
        yield from reader.take(end)
        if type_of(value) not in types and "string" in types:
            raise Garbled
    except Garbled:
        if is_streamed:
            raise
        reader.go_back(position)
        text, _ = yield from reader.take_until(end)
        text = text.removeprefix(around).removesuffix(around)
        literal = _LITERALS.get(text.strip())
        if literal is not None and {"boolean", "null"} & types:
            pieces = [literal]
        elif "string" in types:
            pieces = [_quoted(text)]
        else:
            raise
    for piece in pieces:
        tell(piece)


def _read_text(reader: OutputReader, tell: Callable[[str], None], end: str, around: str) -> Reading[None]:
    """Reads text piece by piece; what may be the white space before its mark is held back."""
    if around and (yield from reader.starts_with(around)):
        yield from reader.take(around)
    tell('"')
    mark = held = ""
    while not mark:
        piece, mark = yield from reader.take_some(end)
        text = held + piece
        if mark:
            text, held = text.removesuffix(around), ""
        else:
            held = around if around and text.endswith(around) else ""
            text = text.removesuffix(held)
        tell(_quoted(text)[1:-1])
    tell('"')


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def separated(lark: Lark, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """The grammar of items in this order with a separator between them; those that need not be there may be left
    out."""
    tail, heads = "", ""
    for item, is_required in reversed(items):
        rest = f"{item} {tail}".strip()
        optional = f"{rest} | {heads}" if heads else f"({rest})?"
        heads = lark.rule("items", rest if is_required else optional)
        more = f"{json.dumps(separator)} {item}"
        tail = lark.rule("more", f"{more if is_required else f'({more})?'} {tail}")
    return heads


def tell_key(reader: OutputReader, name: str, seen: dict[str, None]) -> None:
    """Tells the begin of an argument, as JSON. Raises Garbled for one that was there."""
    if name in seen:
        raise Garbled
    reader.tell(Arguments(("{" if not seen else ", ") + json.dumps(name, ensure_ascii=False) + ": "))
    seen[name] = None


def tell_argument(reader: OutputReader, piece: str) -> None:
    """Tells a piece of a value."""
    reader.tell(Arguments(piece))


def tell_end(reader: OutputReader, seen: dict[str, None]) -> None:
    """Tells the end of the arguments."""
    reader.tell(Arguments("}" if seen else "{}"))
