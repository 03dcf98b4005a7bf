"""The form of one request's outputs: whether they begin with thinking, and how they call tools.

`OutputForm` makes the grammar that outputs are held to and a parser for each of them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    def marks(self) -> frozenset[str]:
        """Texts that keep their place in the output where they are special tokens."""
        of_tools = () if self.tool_format is None else (*self.tool_format.begins, *self.tool_format.marks)
        of_thinking = () if self.thinking is None else self.thinking.marks
        return frozenset((*of_tools, *of_thinking))

    def grammar(self, special_ids: Mapping[str, int], content: str | None = None) -> str | None:
        """The grammar of the outputs, as llguidance takes it; None: they are free.

        `content`: the grammar that the answer itself is held to, the same library's. `special_ids`: the model's
        special tokens by their text."""
        lark, others = Lark(special_ids), []
        answer = None
        if content is not None:
            found = json.loads(content)["grammars"] if content.lstrip().startswith("{") else [{"lark_grammar": content}]
            others = [{**found[0], "name": "content"}, *found[1:]]
            answer = "@content"
        tools = list(self.tools.values())
        if self.tool_format is not None and tools:
            answer = self._calls(lark, tools, answer)
        most = self.most_thinking_tokens
        if answer is None and (self.thinking is None or most is None):
            return None
        if self.thinking is not None:
            answer = self.thinking.grammar(lark, answer, is_thinking=self.is_thinking, most_tokens=most)
        assert answer is not None
        grammar = json.loads(lark.grammar(answer))
        return json.dumps({"grammars": [*grammar["grammars"], *others]})

    def _calls(self, lark: Lark, tools: Sequence[Tool], text: str | None) -> str:
        """Text, or calls, or both."""
        form = self.tool_format
        assert form is not None
        rest = lark.rule("calls", form.calls(lark, tools, is_single=self.is_single))
        begun = [f"{lark.literal(begin)} {rest}" for begin in form.begins]
        if self.must_call:
            return lark.rule("answer", " | ".join(begun))
        if text is not None:
            return lark.rule("answer", " | ".join([text, *begun]))
        if form.is_at_start:
            return lark.rule("answer", " | ".join([lark.text_not_beginning(*form.begins), *begun]))
        after_text = [f"{lark.text_up_to(begin)} {rest}" for begin in form.begins]
        return lark.rule("answer", " | ".join([lark.text_without(*form.begins), *after_text]))

    def parser(self, *, streams_calls: bool) -> OutputParser:
        """A parser for one output. `streams_calls` as in OutputReader."""
        return OutputParser(OutputReader(streams_calls=streams_calls), self)


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
        while form.tool_format is not None:
            try:
                yield from form.tool_format.read(reader, form.tools)
            except Garbled:
                reader.drop_call()
        yield from reader.read_rest()
