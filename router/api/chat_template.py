"""Chat templates: found in a model folder, or in the file that `model.chat_template` names, and rendered in a sandbox.

    model.chat_template  |  chat_template.jinja, additional_chat_templates/NAME.jinja  |  chat_template.json
    |  tokenizer_config.json

The first of these that is there holds all of a model's templates. Of several, a request with tools is rendered by
`tool_use`, any other by `default`, unless its template_kwargs name another one. Owns the few names that templates of
Hugging Face models expect. Templates come with the model, messages from clients: neither can reach Python from in here.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import CheckpointError, FailedPrecondition, FieldViolation, InvalidRequest
from cluster.model_folder import has_model_file, read_model_file, read_model_json
from cluster.pb import generation_pb2
from router.api.chat import Chat
from router.api.violations import invalid, shortened

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the templates that are used: that for any request, and that for one with tools."""
_CHOICE = "chat_template"
"""Among a chat's template_kwargs, the name of another template."""
_DEFAULT_FILE, _JSON_FILE, _NAMED = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
_LONGEST_LINE = 120
_LONGEST_REASON = 200
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that templates do not know, as the next one that they do."""
_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that turn thinking on."""


class _TemplateRefusal(jinja2.TemplateError):
    """The template has refused the messages with raise_exception(reason)."""


class ChatTemplate:
    """Compiled templates; `render` is safe to call from several threads."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origins: Mapping[str, str] | None = None
    ) -> None:
        """`sources` maps template names to their text; `default` is used unless tools ask for `tool_use`. `origins`:
        where each was found, for errors.

        Raises CheckpointError for a template that does not compile.
        """
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, set[str]] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._variables[name] = meta.find_undeclared_variables(environment.parse(source))
            except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
                raise _does_not_compile((origins or {}).get(name, ""), source, error) from error
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any], file: Path | None = None) -> ChatTemplate:
        """The templates of a model folder, or that of `file` in place of them all. A model without one gets one that
        refuses every chat. Raises CheckpointError that names the file, and the line where one is wrong."""
        special = {key: _token_text(tokenizer_config[key]) for key in _token_keys(tokenizer_config)}
        found = _of_folder(folder, tokenizer_config) if file is None else {DEFAULT: (_text_of(file), str(file))}
        sources, origins = ({name: each[part] for name, each in found.items()} for part in (0, 1))
        return cls(sources, special, origins)

    @property
    def source(self) -> str:
        """The text of the templates that are used where a chat names no other."""
        return "\n".join(self._sources[name] for name in (DEFAULT, TOOL_USE) if name in self._sources)

    @property
    def is_present(self) -> bool:
        return bool(self.source)

    def render(self, chat: Chat) -> str:
        """Returns the prompt, with the beginning of the assistant's answer unless the chat says otherwise.

        Raises FailedPrecondition without a template, InvalidRequest when it cannot render these messages.
        """
        if not self.is_present:
            raise FailedPrecondition("this model has no chat template; send spec.text or spec.token_ids instead")
        tools = [] if chat.choice.mode == generation_pb2.ToolChoice.MODE_NONE else chat.tools
        name = self._name_of(chat, has_tools=bool(tools))
        switches = self._switches(chat.reasoning, self._variables[name])
        given = {key: value for key, value in chat.template_kwargs.items() if key != _CHOICE}
        values = {"add_generation_prompt": True, **switches, **given, **self._special_tokens}
        messages = chat.messages
        if "developer" not in self._sources[name]:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        try:
            try:
                return self._templates[name].render(messages=messages, tools=tools or None, **values)
            except TypeError:  # a template that joins arguments to text takes them as such
                if not any("tool_calls" in each for each in messages):
                    raise
                messages = list(map(_with_argument_texts, messages))
                return self._templates[name].render(messages=messages, tools=tools or None, **values)
        except _TemplateRefusal as error:
            raise _refused(f"the model's chat template refuses these messages: {error}"[:_LONGEST_REASON]) from error
        except Exception as error:  # a template is a program that runs on a client's data: any failure is that data's
            kind = type(error).__name__
            raise _refused(f"the model's chat template cannot render these messages ({kind})") from error

    def _name_of(self, chat: Chat, *, has_tools: bool) -> str:
        """The template that the chat names, or else the one for chats as it is."""
        wanted = chat.template_kwargs.get(_CHOICE)
        if wanted is not None:
            if not isinstance(wanted, str) or wanted not in self._templates:
                what = f"must name a chat template of this model: {', '.join(sorted(self._templates))}"
                raise invalid(
                    (
                        FieldViolation(
                            f"spec.chat.template_kwargs.{_CHOICE}", f"{what} (got {shortened(str(wanted))!r})"
                        ),
                    )
                )
            return wanted
        name = TOOL_USE if has_tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise _refused(f"this model's only chat template is {TOOL_USE}: give tools")
        return name

    @staticmethod
    def _switches(reasoning: generation_pb2.ReasoningOptions, variables: Container[str]) -> dict[str, Any]:
        """What the template is told of thinking, of what it asks for."""
        effort = reasoning.effort
        if not effort and not reasoning.HasField("max_tokens"):
            return {}
        does_think = effort != "none"
        switches: dict[str, Any] = {name: does_think for name in _THINKING_SWITCHES if name in variables}
        if effort and does_think and "reasoning_effort" in variables:
            switches["reasoning_effort"] = _EFFORTS.get(effort, effort)
        return switches


def _of_folder(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Each template of a model by its name, with its text and where that is. Files of templates stand in place of
    chat_template.json, and that in place of tokenizer_config.json, as transformers reads them."""
    files = {path.stem: path for path in sorted((folder / _NAMED).glob("*.jinja"))}
    if has_model_file(folder / _DEFAULT_FILE):
        files[DEFAULT] = folder / _DEFAULT_FILE
    if files:
        return {name: (_text_of(path), str(path)) for name, path in files.items()}
    if has_model_file(folder / _JSON_FILE):
        return _named(read_model_json(folder / _JSON_FILE).get("chat_template"), folder / _JSON_FILE)
    return _named(tokenizer_config.get("chat_template"), folder / "tokenizer_config.json")


def _named(given: object, path: Path) -> dict[str, tuple[str, str]]:
    """`chat_template` of a JSON file: one template, a list of {name, template}, or an object with them by name."""
    if not given:
        return {}
    if isinstance(given, str):
        return {DEFAULT: (given, str(path))}
    pairs: list[tuple[object, object]] = list(given.items()) if isinstance(given, Mapping) else []
    if isinstance(given, list):
        entries = [each if isinstance(each, Mapping) else {} for each in given]
        pairs = [(each.get("name"), each.get("template")) for each in entries]
    if not pairs or not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        raise CheckpointError(f"{path}: chat_template must be a text, or a list of objects with name and template")
    return {str(name): (str(text), f"{path}, template {name}") for name, text in pairs}


def _text_of(path: Path) -> str:
    try:
        return read_model_file(path).decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _does_not_compile(origin: str, source: str, error: Exception) -> CheckpointError:
    """Names the file and the line, which it shows."""
    number = error.lineno if isinstance(error, jinja2.TemplateSyntaxError | SyntaxError) else None
    lines = source.splitlines()
    line = lines[number - 1].strip() if number is not None and 1 <= number <= len(lines) else ""
    if isinstance(error, SyntaxError):
        number, line = None, ""  # of the Python that jinja2 has made
    what = "it nests too deep" if isinstance(error, RecursionError) else str(error)
    at = f", line {number}" if number is not None else ""
    shown = f": {line[:_LONGEST_LINE]}" if line else ""
    return CheckpointError(f"{origin and f'{origin}: '}the chat template does not compile{at}: {what}{shown}")


def _with_argument_texts(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]
    return {**message, "tool_calls": texts}


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
