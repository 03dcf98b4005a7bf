"""Thinking that a model writes before its answer, between two marks."""

from __future__ import annotations

from dataclasses import dataclass

from router.tool_calls.lark import Lark
from router.tool_calls.reader import OutputReader, Reading


@dataclass(frozen=True)
class Thinking:
    """Two marks, `<think>` and `</think>` for most models."""

    name: str
    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, str]:
        return self.begin, self.end

    def read(self, reader: OutputReader) -> Reading[None]:
        """Tells the thinking, if the output begins with it or goes on with the prompt's, and returns where the answer
        begins. A model may write the first mark again after the prompt's."""
        yield from reader.take_blanks()
        if (yield from reader.starts_with(self.begin)):
            yield from reader.take(self.begin)
            reader.is_thinking = True
        if reader.is_thinking:
            yield from reader.take_blanks()
            yield from reader.read_reasoning(self.end)
            reader.is_thinking = False
            yield from reader.take_blanks()

    def grammar(self, lark: Lark, answer: str | None, *, is_thinking: bool, most_tokens: int | None) -> str:
        """Thinking, then the answer (None: any text): an expression of Lark."""
        then = answer or lark.text_without()
        end = lark.literal(self.end)
        if most_tokens is None:
            thought = lark.text_up_to(self.end)
        else:
            free = lark.rule("thought", "/(?s:.*)/", f"[max_tokens={most_tokens}, stop={end}]")
            thought = f"{free} {end}"
        blanks = lark.rule("BLANKS", r"/[ \t\r\n]*/")
        if is_thinking:
            return f"{thought} {blanks} {then}"
        return f"({lark.literal(self.begin)} {thought} {blanks})? {then}"
