"""Thinking that a model writes before its answer, between two marks."""

from __future__ import annotations

from dataclasses import dataclass

from router.tool_calls.format import ToolFormat
from router.tool_calls.lark import Lark
from router.tool_calls.reader import OutputReader, Reading


@dataclass(frozen=True)
class Thinking:
    """Two marks, `<think>` and `</think>` for most models."""

    name: str
    begin: str
    end: str
    channels: ToolFormat | None = None
    """The format of the whole output, where thinking is one of its channels; it is read also without tools."""

    @property
    def marks(self) -> tuple[str, str]:
        return self.begin, self.end

    def is_of(self, template: str) -> bool:
        """Whether the model of a chat template thinks in this way, by its source."""
        return self.begin in template or self.end in template

    def read(self, reader: OutputReader) -> Reading[None]:
        """Tells the thinking, if the output begins with it or goes on with the prompt's, and returns where the answer
        begins. A model may write the first mark again after the prompt's."""
        if self.channels is not None:
            return
        yield from reader.take_blanks()
        if (yield from reader.starts_with(self.begin)):
            yield from reader.take(self.begin)
            reader.is_thinking = True
        if reader.is_thinking:
            yield from reader.take_blanks()
            yield from reader.read_reasoning(self.end)
            reader.is_thinking = False
            yield from reader.take_blanks()

    def text(self, lark: Lark, text: str | None) -> str | None:
        """The answer where it is text: an expression of Lark. `text`: what it is held to; None: to nothing."""
        return text

    def grammar(
        self, lark: Lark, answer: str, *, is_thinking: bool, most_tokens: int | None, may_say: bool = False
    ) -> str:
        """Thinking, then the answer, which does not begin with the first mark: an expression of Lark. `may_say`: text
        may be between them."""
        thought = lark.text_up_to(self.end, most_tokens=most_tokens)
        blanks = lark.rule("BLANKS", r"/[ \t\r\n]{0,8}/")
        if is_thinking:
            return f"{thought} {blanks} {answer}"
        return f"({lark.literal(self.begin)} {thought} {blanks})? {answer}"
