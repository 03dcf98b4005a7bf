"""Chats: a client's messages checked, and made the plain values that a chat template reads.

Owns the path from google.protobuf.Struct, or JSON, to those. Knows no template (`router.api.chat_template`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from google.protobuf import struct_pb2

from cluster.pb import generation_pb2
from router.api.call import MOST_MESSAGES, MOST_TOOLS, Effort, read_arguments
from router.api.infill import Infill
from router.api.violations import Violations, shortened

_RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token"})
"""Names that a client's template_kwargs cannot set."""
EFFORTS: tuple[str, ...] = get_args(Effort)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class Chat:
    """Plain values, as a template takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    choice: generation_pb2.ToolChoice = field(default_factory=generation_pb2.ToolChoice)
    reasoning: generation_pb2.ReasoningOptions = field(default_factory=generation_pb2.ReasoningOptions)


Prompt = str | Chat | Infill


def read_chat(
    chat: generation_pb2.ChatInput,
    violations: Violations,
    field: str,
    reasoning: generation_pb2.ReasoningOptions | None = None,
) -> Chat:
    """Adds what is wrong with the chat to `violations`, below `field`."""
    given = _json_chat(chat, violations, field) if chat.json else chat
    if given is None:
        return Chat([], [], {})
    is_short = violations.at_most(f"{field}.messages", given.messages, MOST_MESSAGES, "messages")
    if not (violations.at_most(f"{field}.tools", given.tools, MOST_TOOLS, "tools") and is_short):
        return Chat([], [], {})
    plain = given if isinstance(given, Chat) else _plain_chat(given)
    messages, tools, kwargs = plain.messages, plain.tools, plain.template_kwargs
    if not messages:
        violations.add(f"{field}.messages", "must hold at least one message")
    called: set[str] = set()
    for index, message in enumerate(messages):
        _check_message(message, violations, f"{field}.messages[{index}]", called)
    for name in sorted(_RESERVED & kwargs.keys()):
        violations.add(f"{field}.template_kwargs.{name}", "is set by the server and cannot be given")
    _check_tools(tools, chat.tool_choice, violations, field)
    return Chat(messages, tools, kwargs, chat.tool_choice, reasoning or generation_pb2.ReasoningOptions())


def _plain_chat(chat: generation_pb2.ChatInput) -> Chat:
    return Chat(list(map(_to_dict, chat.messages)), list(map(_to_dict, chat.tools)), _to_dict(chat.template_kwargs))


def _json_chat(chat: generation_pb2.ChatInput, violations: Violations, field: str) -> Chat | None:
    if chat.messages or chat.tools or chat.HasField("template_kwargs"):
        violations.add(f"{field}.json", "excludes messages, tools and template_kwargs: set it or them")
        return None
    try:
        found = json.loads(chat.json)
        parts = Chat(found["messages"], found.get("tools") or [], found.get("template_kwargs") or {})
        lists = parts.messages, parts.tools
        is_good = isinstance(parts.template_kwargs, dict) and all(isinstance(each, list) for each in lists)
        is_good = is_good and all(isinstance(entry, dict) for each in lists for entry in each)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_good = False
    if not is_good:
        violations.add(
            f"{field}.json", 'must be {"messages": […], "tools": […], "template_kwargs": {…}}, the last two if any'
        )
        return None
    return parts


def _to_dict(struct: struct_pb2.Struct) -> dict[str, Any]:
    return {key: _plain(value) for key, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    """A number without a fraction becomes an int, as it was in the client's JSON."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return _to_dict(value.struct_value)
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
    return None


def _check_tools(
    tools: Sequence[Mapping[str, Any]], choice: generation_pb2.ToolChoice, violations: Violations, field: str
) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"{field}.tools[{index}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            violations.add(path, 'must be {"type": "function", "function": {…}}')
            continue
        name, parameters = function.get("name"), function.get("parameters")
        if not (isinstance(name, str) and _TOOL_NAME.fullmatch(name)):
            violations.add(f"{path}.function.name", "must be 1 to 128 letters, digits, `_`, `-`, `.`, `:` or `/`")
        elif name in names:
            violations.add(f"{path}.function.name", f"names a tool twice: {name!r}")
        else:
            names.add(name)
        if parameters is not None and not isinstance(parameters, Mapping):
            violations.add(f"{path}.function.parameters", "must be a JSON schema of an object")
        elif parameters and not _is_of_objects(parameters.get("type", "object")):
            what = f"must be a JSON schema of an object (its type is {shortened(json.dumps(parameters['type']))})"
            violations.add(f"{path}.function.parameters", what)
    for name in choice.names:
        if name not in names:
            violations.add(f"{field}.tool_choice", f"names {shortened(name)!r}, which is not among the tools")
    if choice.mode == generation_pb2.ToolChoice.MODE_REQUIRED and not tools:
        violations.add(f"{field}.tool_choice", "asks for a call, and there are no tools")


def _is_of_objects(kind: object) -> bool:
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _check_message(message: dict[str, Any], violations: Violations, field: str, called: set[str]) -> None:
    """`called`: the ids of the calls before it, which it adds its own to."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        violations.add(f"{field}.role", "must be a string such as `user`")
    elif role not in _ROLES:
        violations.add(f"{field}.role", f"must be one of {', '.join(_ROLES)} (got {shortened(role)!r})")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _join_text_parts(content, violations, f"{field}.content")
    elif content is None:
        message["content"] = ""  # which a template would write as the word None
    elif not isinstance(content, str):
        violations.add(f"{field}.content", "must be a string or a list of text parts")
    if message.get("tool_calls") is None:
        message.pop("tool_calls", None)
    elif role != "assistant" or not isinstance(message["tool_calls"], list):
        violations.add(f"{field}.tool_calls", "must be a list, in a message of the assistant")
    else:
        for index, call in enumerate(message["tool_calls"]):
            _check_call(call, violations, f"{field}.tool_calls[{index}]", called)
    if role == "tool" and message.get("tool_call_id") not in called:
        what = "must be the id of a call in a message of the assistant before it"
        violations.add(f"{field}.tool_call_id", f"{what} (got {shortened(str(message.get('tool_call_id')))!r})")


def _check_call(call: Any, violations: Violations, field: str, called: set[str]) -> None:
    """Makes the arguments an object, as templates read them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        violations.add(field, 'must be {"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
        return
    if isinstance(call.get("id"), str):
        called.add(call["id"])
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    if not isinstance(arguments, dict):
        violations.add(f"{field}.function.arguments", "must be the text of a JSON object")
    function["arguments"] = arguments


def _join_text_parts(parts: list[Any], violations: Violations, field: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if isinstance(text, str):
            texts.append(text)
        else:
            violations.add(f"{field}[{index}]", 'must be {"type": "text", "text": ...}: this model reads text only')
    return "".join(texts)
