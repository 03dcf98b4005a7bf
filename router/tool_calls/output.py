"""The form of one request's outputs: whether they begin with thinking, and how they call tools.

`OutputForm` makes the grammar that outputs are held to and a parser for each of them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.tool_calls.format import Tool, ToolFormat
from router.tool_calls.lark import Lark
from router.tool_calls.reader import EndOfOutput, Garbled, OutputReader, Part, Reading
from router.tool_calls.thinking import Thinking


@dataclass(frozen=True)
class OutputForm:
    """What a request's outputs may hold beside text."""

    tools: Mapping[str, Tool]
    """Those that may be called, by name."""
    tool_format: ToolFormat | None = None
    """None: the request has no tools to call."""
    must_call: bool = False
    is_single: bool = False
    """At most one call."""
    thinking: Thinking | None = None
    """None: the model writes none, or was told not to."""
    is_thinking: bool = False
    """The prompt ends within thinking."""
    most_thinking_tokens: int | None = None

    @property
    def format(self) -> ToolFormat | None:
        """The format that reads what follows the thinking, or all of the output where thinking is one of its channels;
        None: the rest is text."""
        channels = None if self.thinking is None else self.thinking.channels
        return channels or self.tool_format

    @property
    def marks(self) -> frozenset[str]:
        """Texts that keep their place in the output where they are special tokens."""
        of_calls = () if self.format is None else self.format.marks
        of_thinking = () if self.thinking is None else self.thinking.marks
        return frozenset((*of_calls, *of_thinking))

    def grammar(self, special_ids: Mapping[str, int], content: str | None = None) -> str | None:
        """The grammar of the outputs, as llguidance takes it; None: they are free. Raises ValueError for a
        schema of a tool that the format cannot follow.

        `content`: the grammar that the answer itself is held to, the same library's. `special_ids`: the model's
        special tokens by their text."""
        lark, others = Lark(special_ids), []
        thinking, most = self.thinking, self.most_thinking_tokens
        tools = [] if self.format is None else list(self.tools.values())
        if content is None and not tools and (thinking is None or most is None):
            return None
        if content is not None:
            found = json.loads(content)["grammars"] if content.lstrip().startswith("{") else [{"lark_grammar": content}]
            others = [{**found[0], "name": "content"}, *found[1:]]
        text = None if content is None else "@content"
        if thinking is not None:
            text = thinking.text(lark, text)
        answer = self._calls(lark, tools, text, others) if tools else text or self._free_text(lark)
        if thinking is not None:
            may_say = bool(tools) and content is None and not self.must_call
            answer = thinking.grammar(lark, answer, is_thinking=self.is_thinking, most_tokens=most, may_say=may_say)
        grammar = json.loads(lark.grammar(answer))
        return json.dumps({"grammars": [*grammar["grammars"], *others]})

    def _free_text(self, lark: Lark, *marks: str, starts: Sequence[str] = ()) -> str:
        """Text that is neither calls nor, at its begin, thinking."""
        return lark.text_not_beginning([*starts, *self._not_text], *marks)

    @property
    def _not_text(self) -> tuple[str, ...]:
        return () if self.thinking is None else (self.thinking.begin,)

    def _calls(self, lark: Lark, tools: Sequence[Tool], text: str | None, others: Sequence[Mapping[str, Any]]) -> str:
        """Text, or calls, or both. `others`: the grammar of the text, where it is held to one."""
        form = self.format
        assert form is not None
        calls = form.calls(lark, tools, is_single=self.is_single)
        starts = list(calls)
        rests = {start: lark.rule("calls", rest) for start, rest in calls.items()}
        begun = [f"{lark.literal(start)} {rest}" for start, rest in rests.items()]
        if self.must_call:
            return lark.rule("answer", " | ".join(begun))
        if text is not None:
            schema = others[0].get("json_schema") if others else None
            if form.key and schema is not None:  # both begin with a bracket: only JSON schemas are told apart behind it
                begun = [lark.json(_whole_call(tool, form.key, schema.get("x-guidance", {}))) for tool in tools]
            return lark.rule("answer", " | ".join([text, *begun]))
        if form.is_at_start:
            return lark.rule("answer", " | ".join([self._free_text(lark, starts=starts), *begun]))
        after_text = [f"{lark.text_up_to(start, starts=self._not_text)} {rest}" for start, rest in rests.items()]
        return lark.rule("answer", " | ".join([self._free_text(lark, *starts), *after_text]))

    def parser(self, *, streams_calls: bool) -> OutputParser:
        """A parser for one output. `streams_calls` as in OutputReader."""
        return OutputParser(OutputReader(streams_calls=streams_calls), self)


def _whole_call(tool: Tool, key: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call as a JSON object."""
    arguments = {**tool.schema(), "x-guidance": {**tool.options, **options}}
    definitions: dict[str, Any] = {each: arguments.pop(each) for each in ("$defs", "definitions") if each in arguments}
    properties = {"name": {"const": tool.name}, key: arguments}
    whole: dict[str, Any] = {
        **definitions,
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {**whole, "x-guidance": {**tool.options, **options}}


class OutputParser:
    """Turns the text of one output into parts, as it comes."""

    def __init__(self, reader: OutputReader, form: OutputForm) -> None:
        self._reader = reader
        self._form = form
        reader.is_thinking = form.is_thinking
        self._reading: Reading[None] | None = self._read()
        next(self._reading, None)

    @property
    def is_thinking(self) -> bool:
        """Whether the text that came last is within thinking."""
        return self._reader.is_thinking

    def feed(self, text: str) -> list[Part]:
        """The parts that are known with this text and were not before."""
        self._reader.add(text)
        return self._go_on()

    def end(self) -> list[Part]:
        """The rest, where the output has ended."""
        self._reader.add("", is_last=True)
        parts = self._go_on()
        self._reading = None
        return parts

    def _go_on(self) -> list[Part]:
        if self._reading is not None:
            try:
                next(self._reading)
            except (EndOfOutput, StopIteration):
                self._reader.drop_call()
        parts, self._reader.parts = self._reader.parts, []
        return parts

    def _read(self) -> Reading[None]:
        form, reader = self._form, self._reader
        if form.thinking is not None:
            yield from form.thinking.read(reader)
        while form.format is not None:
            try:
                yield from form.format.read(reader, form.tools)
            except Garbled:
                reader.drop_call()
        yield from reader.read_rest()
