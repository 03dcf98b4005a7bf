"""The text of one output as it comes, read by a format: text, thinking and calls of tools, in order.

A format is a generator that takes text with the methods of `OutputReader` and waits in them for more. What has been
told after any prefix of the text depends on that prefix alone, so it does not matter how the text is cut. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Waits for more text at each yield."""

_BLANKS = " \t\r\n"


class Text(NamedTuple):
    """A piece of the answer."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the thinking before the answer."""

    text: str


class CallBegin(NamedTuple):
    """The model calls a tool."""

    name: str
    id: str = ""
    """As the model wrote it; empty where its format has none."""


class Arguments(NamedTuple):
    """The next piece of the open call's arguments; joined, they are a JSON object."""

    text: str


class CallEnd(NamedTuple):
    """The open call is whole."""


Part = Text | Reasoning | CallBegin | Arguments | CallEnd


class Garbled(Exception):
    """What was read is no call of this format."""


class EndOfOutput(Exception):
    """The output has ended, and more of it was asked for."""


class OutputReader:
    """Where a format has come to. Its methods named `read_…` and `take_…` are generators: `yield from` them."""

    def __init__(self, *, streams_calls: bool) -> None:
        """`streams_calls`: tell a call piece by piece, as the output is constrained to be one; else when it is whole,
        and as text if it never is."""
        self.streams_calls = streams_calls
        self.is_thinking = False
        """Whether what comes next is thinking, as far as is known."""
        self.parts: list[Part] = []
        """What was read and not yet taken by the caller."""
        self._text = ""
        self._at = 0
        """The first character of `_text` that was not read."""
        self._is_ended = False
        self._call: int | None = None
        """Where in `_text` the open call goes on behind its mark; None: no call is open."""
        self._mark = ""
        """What of the open call was read before."""
        self._blanks = ""
        """White space that was read before the last mark."""
        self._held: list[Part] = []
        """Parts of the open call, until it is whole."""
        self._is_told = False
        """Pieces of the open call were told."""
        self._ids: set[str] = set()

    def add(self, text: str, *, is_last: bool = False) -> None:
        if self._call is None:
            self._text, self._at = self._text[self._at :], 0
        self._text += text
        self._is_ended = self._is_ended or is_last

    def tell(self, *parts: Part) -> None:
        for part in parts:
            if isinstance(part, Text | Reasoning | Arguments) and not part.text:
                continue
            if isinstance(part, CallBegin):
                if part.id in self._ids:  # clients find calls by their ids
                    part = part._replace(id="")
                self._ids.add(part.id)
            if self._call is None:
                self.parts.append(part)
            elif self.streams_calls:
                self.parts.append(part)
                self._is_told = True
            else:
                self._held.append(part)

    @property
    def position(self) -> int:
        """A place in the text that `go_back` takes while the same call is open."""
        return self._at

    def go_back(self, position: int) -> None:
        self._at = position

    # Characters.

    def more(self) -> Reading[None]:
        """Waits for at least one character that was not read. Raises EndOfOutput."""
        while self._at >= len(self._text):
            if self._is_ended:
                raise EndOfOutput
            yield

    def starts_with(self, text: str) -> Reading[bool]:
        """Whether `text` is what comes next; it is not read."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text or not text.startswith(here) or self._is_ended:
                return here == text
            yield

    def take(self, *texts: str) -> Reading[str]:
        """Reads one of these texts and returns it, the longest if several fit. Raises Garbled."""
        for text in sorted(texts, key=len, reverse=True):
            if (yield from self.starts_with(text)):
                self._at += len(text)
                return text
        raise Garbled

    def take_characters(self, number: int) -> Reading[str]:
        """Reads so many characters."""
        while len(self._text) < self._at + number:
            if self._is_ended:
                raise EndOfOutput
            yield
        self._at += number
        return self._text[self._at - number : self._at]

    def take_blanks(self) -> Reading[None]:
        """Reads white space, up to something else."""
        while True:
            yield from self.more()
            if self._text[self._at] not in _BLANKS:
                return
            self._at += 1

    def take_while(self, fits: Callable[[str], bool]) -> Reading[str]:
        """Reads characters as long as each fits, and returns them."""
        found = ""
        while True:
            yield from self.more()
            if not fits(self._text[self._at]):
                return found
            found += self._text[self._at]
            self._at += 1

    def take_until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Reads up to the first of these texts, and it. Returns what was before it, and which it was. Raises
        EndOfOutput."""
        before = ""
        while True:
            piece, mark = yield from self.take_some(*marks)
            before += piece
            if mark:
                return before, mark

    def take_some(self, *marks: str) -> Reading[tuple[str, str]]:
        """Reads and returns what is here and surely before each mark, and the mark if it is here; "" if not. Raises
        EndOfOutput."""
        while True:
            yield from self.more()
            found = min(
                ((at, -len(mark), mark) for mark in marks if (at := self._text.find(mark, self._at)) >= 0), default=None
            )
            if found is not None:
                end, mark = found[0], found[2]
            else:
                end, mark = len(self._text) - (0 if self._is_ended else self._begun(marks)), ""
            if end > self._at or mark:
                piece = self._text[self._at : end]
                self._at = end + len(mark)
                return piece, mark
            yield

    def take_json(self, tell: Callable[[str], None] | None = None) -> Reading[Any]:
        """Reads one JSON value and returns it. `tell` gets its text piece by piece; control characters in strings,
        which JSON has not and models write, are escaped in it. Raises Garbled."""
        text, depth, is_text, is_escaped, is_scalar, is_over = "", 0, False, False, False, False
        while not is_over:
            yield from self.more()
            pieces, begin = [], self._at
            while self._at < len(self._text) and not is_over:
                sign = self._text[self._at]
                if is_text:
                    if sign < " ":
                        if is_escaped:
                            raise Garbled
                        pieces += [self._text[begin : self._at], f"\\u{ord(sign):04x}"]
                        begin = self._at + 1
                    is_text = is_escaped or sign != '"'
                    is_escaped = sign == "\\" and not is_escaped
                    is_over = not is_text and depth == 0
                elif is_scalar:
                    if sign in ",]}:)<" or sign in _BLANKS:
                        is_over = True
                        break
                elif sign == '"':
                    is_text = True
                elif sign in "[{":
                    depth += 1
                elif sign in "]}":
                    depth -= 1
                    is_over = depth == 0
                    if depth < 0:
                        raise Garbled
                elif depth == 0 and sign not in _BLANKS:
                    is_scalar = True
                self._at += 1
            piece = "".join([*pieces, self._text[begin : self._at]])
            text += piece
            if tell is not None and piece:
                tell(piece)
        try:
            return json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise Garbled from error

    # Text and thinking.

    def read_text(self, *marks: str) -> Reading[str]:
        """Tells text up to the first of these marks, reads it, and returns which it was. White space before a mark
        belongs to it, and is text where the mark begins no call. Raises EndOfOutput, when all text was told."""
        return (yield from self._read_up_to(marks, Text))

    def read_reasoning(self, *marks: str) -> Reading[str]:
        """Tells thinking, as `read_text` tells text."""
        return (yield from self._read_up_to(marks, Reasoning))

    def read_rest(self) -> Reading[None]:
        """Tells all that comes as text. Raises EndOfOutput."""
        while True:
            yield from self.more()
            self.tell(Text(self._text[self._at :]))
            self._at = len(self._text)

    def _read_up_to(self, marks: Sequence[str], kind: Callable[[str], Part]) -> Reading[str]:
        blanks = ""
        try:
            while True:
                piece, mark = yield from self.take_some(*marks)
                piece = blanks + piece
                kept = piece.rstrip(_BLANKS)
                blanks = piece[len(kept) :]
                self.tell(kind(kept))
                if mark:
                    self._blanks = blanks
                    return mark
        except EndOfOutput:
            self.tell(kind(blanks))
            raise

    def _begun(self, marks: Sequence[str]) -> int:
        """Characters at the end that may be the begin of a mark."""
        longest = min(max(map(len, marks), default=0) - 1, len(self._text) - self._at)
        for length in range(longest, 0, -1):
            tail = self._text[-length:]
            if any(mark.startswith(tail) for mark in marks):
                return length
        return 0

    # Calls.

    def begin_call(self, mark: str = "") -> None:
        """What follows is a call, of which `mark` was read."""
        self._call, self._held, self._is_told = self._at, [], False
        self._mark, self._blanks = self._blanks + mark, ""

    def end_call(self) -> None:
        """The open call is whole, and told."""
        self.tell(CallEnd())
        held, self._held, self._call = self._held, [], None
        self.parts += held

    def drop_call(self) -> None:
        """The open call is none: what was read of it is text, unless pieces of it were told."""
        if self._call is None:
            return
        text = "" if self._is_told else self._mark + self._text[self._call : self._at]
        self._call, self._held = None, []
        self.tell(Text(text))


def _refuse(constant: str) -> None:
    """NaN and infinities are no JSON."""
    raise ValueError(constant)
