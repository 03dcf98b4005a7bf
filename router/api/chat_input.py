"""Chat messages of a request as plain values for the template, checked.

Owns the path from google.protobuf.Struct to dicts and what a message must have. Knows no template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import struct_pb2

from cluster.pb import generation_pb2
from router.api.chat_template import RESERVED
from router.api.violations import Violations


@dataclass(frozen=True)
class Chat:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]


def read_chat(chat: generation_pb2.ChatInput, violations: Violations, field: str) -> Chat:
    """Plain values; what is wrong with them is added to `violations` below `field`."""
    messages = [to_dict(message) for message in chat.messages]
    if not messages:
        violations.add(f"{field}.messages", "must hold at least one message")
    for index, message in enumerate(messages):
        _check_message(message, violations, f"{field}.messages[{index}]")
    kwargs = to_dict(chat.template_kwargs)
    for name in sorted(RESERVED & kwargs.keys()):
        violations.add(f"{field}.template_kwargs.{name}", "is set by the server and cannot be given")
    return Chat(messages, [to_dict(tool) for tool in chat.tools], kwargs)


def to_dict(struct: struct_pb2.Struct) -> dict[str, Any]:
    return {key: _plain(value) for key, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    """A number without a fraction becomes an int, as it was in the client's JSON."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return to_dict(value.struct_value)
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


def _check_message(message: dict[str, Any], violations: Violations, field: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        violations.add(f"{field}.role", "must be a string such as `user`")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _join_text_parts(content, violations, f"{field}.content")
    elif content is None:
        message["content"] = ""  # which a template would write as the word None
    elif not isinstance(content, str):
        violations.add(f"{field}.content", "must be a string or a list of text parts")


def _join_text_parts(parts: list[Any], violations: Violations, field: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if isinstance(text, str):
            texts.append(text)
        else:
            violations.add(f"{field}[{index}]", 'must be {"type": "text", "text": ...}: this model reads text only')
    return "".join(texts)
