"""Harmony, the format of gpt-oss: an output is messages, each with a channel.

    <|channel|>analysis<|message|>…<|end|>                                          thinking
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                      text before calls
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>                        text

The prompt ends with `<|start|>assistant`. Most models end their output with `<|call|>` or `<|return|>`, so that neither
is in it: a call is whole when its arguments are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.json_call import read_arguments
from router.tool_calls.lark import Lark
from router.tool_calls.reader import CallBegin, Garbled, OutputReader, Reading, Reasoning, Text
from router.tool_calls.thinking import Thinking

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_MARKS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_NEXT = f"{_START}assistant"
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class Harmony(ToolFormat):
    """gpt-oss. Calls begin a message; `HarmonyThinking` has the messages before and beside them."""

    name = "harmony"
    marks = _MARKS

    def is_of(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def read(self, reader: OutputReader, tools: Mapping[str, Tool]) -> Reading[None]:
        told: set[type] = set()
        header = ""
        if reader.is_thinking:
            told.add(Reasoning)
            yield from reader.read_reasoning(*_ENDS)
            reader.is_thinking = False
        if (yield from reader.starts_with(" to=")):
            header, _ = yield from reader.take_until(_MESSAGE)
        while True:
            if not header:
                mark = yield from reader.read_text(*_MARKS)
                if mark not in (_START, _CHANNEL):
                    continue
                rest, _ = yield from reader.take_until(_MESSAGE)
                header = mark + rest
            if "to=" in header:
                yield from self._read_call(reader, tools, header + _MESSAGE)
            else:
                kind = Reasoning if f"{_CHANNEL}analysis" in header else Text
                if kind in told:
                    reader.tell(kind("\n\n"))
                told.add(kind)
                reader.is_thinking = kind is Reasoning
                yield from (reader.read_reasoning if reader.is_thinking else reader.read_text)(*_ENDS)
                reader.is_thinking = False
            header = ""

    def _read_call(self, reader: OutputReader, tools: Mapping[str, Tool], header: str) -> Reading[None]:
        reader.begin_call(header)
        found = _RECIPIENT.search(header)
        if found is None or found[1] not in tools:
            raise Garbled
        yield from reader.take_blanks()
        yield from read_arguments(reader, CallBegin(found[1]))
        reader.end_call()

    def calls(self, lark: Lark, tools: Sequence[Tool], *, is_single: bool) -> Mapping[str, str]:
        call = lark.rule("call", " | ".join(f"{lark.literal(_header(t))} {lark.json(t.schema())}" for t in tools))
        more = "" if is_single else f"({lark.literal(_CALL + _NEXT)} {call})*"
        return {_header(tool): f"{lark.json(tool.schema())} {more}" for tool in tools}


def _header(tool: Tool) -> str:
    return f"{_CHANNEL}commentary to=functions.{tool.name} {_CONSTRAIN}json{_MESSAGE}"


class HarmonyThinking(Thinking):
    """The channels of gpt-oss."""

    def __init__(self) -> None:
        super().__init__("harmony", f"{_CHANNEL}analysis{_MESSAGE}", _END, Harmony())

    def is_of(self, template: str) -> bool:
        return Harmony().is_of(template)

    def text(self, lark: Lark, text: str | None) -> str:
        return f"{lark.literal(f'{_CHANNEL}final{_MESSAGE}')} {text or lark.text_without(*_ENDS)}"

    def grammar(
        self, lark: Lark, answer: str, *, is_thinking: bool, most_tokens: int | None, may_say: bool = False
    ) -> str:
        thought = f"{lark.text_up_to(_END, most_tokens=most_tokens)} {lark.literal(_NEXT)}"
        first = thought if is_thinking else f"({lark.literal(self.begin)} {thought})?"
        said = f"{lark.literal(f'{_CHANNEL}commentary{_MESSAGE}')} {lark.text_up_to(_END)} {lark.literal(_NEXT)}"
        return f"{first} ({said})? {answer}" if may_say else f"{first} {answer}"
