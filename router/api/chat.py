"""Chats: a client's messages checked and rendered by the model's own template, in a sandbox.

Owns the path from google.protobuf.Struct to the values that a template reads, finding the template
(chat_template.jinja, or tokenizer_config.json) and the few names that templates of Hugging Face models expect.
Templates come with the model, messages from clients: neither can reach Python from in here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from google.protobuf import struct_pb2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import CheckpointError, FailedPrecondition, FieldViolation, InvalidRequest
from cluster.model_folder import has_model_file, read_model_file
from cluster.pb import generation_pb2
from router.api.call import MOST_MESSAGES, MOST_TOOLS
from router.api.violations import Violations

_RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token"})
"""Names that a client's template_kwargs cannot set."""
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Chat:
    """Plain values, as a template takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]


Prompt = str | Chat


def read_chat(chat: generation_pb2.ChatInput, violations: Violations, field: str) -> Chat:
    """Adds what is wrong with the chat to `violations`, below `field`."""
    is_short = violations.at_most(f"{field}.messages", chat.messages, MOST_MESSAGES, "messages")
    if not (violations.at_most(f"{field}.tools", chat.tools, MOST_TOOLS, "tools") and is_short):
        return Chat([], [], {})
    messages = [_to_dict(message) for message in chat.messages]
    if not messages:
        violations.add(f"{field}.messages", "must hold at least one message")
    for index, message in enumerate(messages):
        _check_message(message, violations, f"{field}.messages[{index}]")
    kwargs = _to_dict(chat.template_kwargs)
    for name in sorted(_RESERVED & kwargs.keys()):
        violations.add(f"{field}.template_kwargs.{name}", "is set by the server and cannot be given")
    return Chat(messages, [_to_dict(tool) for tool in chat.tools], kwargs)


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


class _TemplateRefusal(jinja2.TemplateError):
    """The template has refused the messages with raise_exception(reason)."""


class ChatTemplate:
    """A compiled template; `render` is safe to call from several threads."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` maps template names to their text; `default` is used unless tools ask for `tool_use`."""
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
        """A model without a template gets one that refuses every chat."""
        special = {key: _token_text(tokenizer_config[key]) for key in _token_keys(tokenizer_config)}
        path = folder / "chat_template.jinja"
        if has_model_file(path):
            return cls({"default": read_model_file(path).decode("utf-8")}, special)
        given = tokenizer_config.get("chat_template")
        if isinstance(given, list):
            return cls({entry["name"]: entry["template"] for entry in given}, special)
        return cls({"default": given} if given else {}, special)

    @property
    def is_present(self) -> bool:
        return "default" in self._templates

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> str:
        """Returns the prompt, with the beginning of the assistant's answer unless kwargs say otherwise.

        Raises FailedPrecondition without a template, InvalidRequest when it cannot render these messages.
        """
        if not self.is_present:
            raise FailedPrecondition("this model has no chat template; send spec.text or spec.token_ids instead")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        values = {"add_generation_prompt": True, **kwargs, **self._special_tokens}
        try:
            return self._templates[name].render(messages=messages, tools=list(tools) or None, **values)
        except _TemplateRefusal as error:
            raise _refused(f"the model's chat template refuses these messages: {error}"[:_LONGEST_REASON]) from error
        except Exception as error:  # a template is a program that runs on a client's data: any failure is that data's
            kind = type(error).__name__
            raise _refused(f"the model's chat template cannot render these messages ({kind})") from error


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, violations=(FieldViolation("spec.chat", reason),))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a trainer learns from; for serving it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(reason: str) -> None:
    raise _TemplateRefusal(reason)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _token_keys(tokenizer_config: Mapping[str, Any]) -> list[str]:
    return [key for key in tokenizer_config if key.endswith("_token") and _token_text(tokenizer_config[key])]


def _token_text(token: Any) -> str:
    """tokenizer_config.json writes a special token as a string or as an object with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
