"""Tokens to text as they come, and the stop strings in that text.

Never half a UTF-8 character, and a constant amount of work for each token. The tokenizer's decoder chooses between two
ways. `ByteDetokenizer`: each token is bytes (byte-level BPE), so an incremental UTF-8 decoder gives exactly the text
that decoding all tokens together would. `WindowDetokenizer`: any other decoder, applied to a small window of tokens.

`StopMatcher` finds stop strings wherever the text is cut into pieces. The string that ends first wins, among those that
end together the longest. Text that may be the beginning of a stop string is held back. Knows no sequence.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6
"""Tokens of the prompt that a window begins with, so that a word's leading space survives."""
MOST_HELD_TOKENS = 8
"""A character has at most 4 bytes; that many tokens without a whole character are not valid UTF-8, and are released."""


class Detokenizer(Protocol):
    """The deltas of `push` and `flush`, joined, are the text of all tokens."""

    @property
    def is_whole(self) -> bool:
        """No text is held back."""
        ...

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens; may be empty."""
        ...

    def flush(self) -> str:
        """The text that was held back, as no token will follow: U+FFFD for an unfinished character."""
        ...


class ByteDetokenizer:
    """The detokenizer for decoders that turn each token into bytes by itself."""

    def __init__(self, bytes_of: Callable[[int], bytes], whole: dict[int, str] | None = None) -> None:
        """`whole`: the texts of tokens that begin and end with a character, which all detokenizers of a tokenizer share
        and fill."""
        self._bytes_of = bytes_of
        self._whole = {} if whole is None else whole
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.is_whole = True

    def push(self, token_ids: Sequence[int]) -> str:
        is_one = len(token_ids) == 1 and self.is_whole
        if is_one and (known := self._whole.get(token_ids[0])) is not None:
            return known
        bytes_of = self._bytes_of
        text = self._decoder.decode(b"".join([bytes_of(token_id) for token_id in token_ids]))
        self.is_whole = not self._decoder.getstate()[0]
        if is_one and self.is_whole:
            self._whole[token_ids[0]] = text
        return text

    def flush(self) -> str:
        self.is_whole = True
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """The detokenizer for every other decoder: text of (tokens before + new tokens) minus text of the tokens before.

    Equal to decoding all tokens together for every valid text; a decoder that judges a long run of byte tokens as one
    may replace more characters in an invalid one.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = (), silent: Container[int] = ()
    ) -> None:
        """`context` are the last tokens of the prompt; `silent` ids have no text."""
        self._decode = decode
        self._silent = silent
        self._window = list(context)
        self._num_before = len(self._window)
        self._text_before = decode(self._window) if self._window else ""

    @property
    def is_whole(self) -> bool:
        return len(self._window) == self._num_before

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._silent])

    def flush(self) -> str:
        return self._emit(self._decode(self._window)) if len(self._window) > self._num_before else ""

    def _push(self, token_id: int) -> str:
        """One by one: a decoder may judge a run of bytes as one, and a character that is whole must leave it first."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_before <= MOST_HELD_TOKENS:
            return ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        delta = text[len(self._text_before) :]
        if delta:
            self._window = self._window[self._num_before :]
            self._num_before = len(self._window)
            self._text_before = self._decode(self._window)
        return delta


@dataclass(frozen=True)
class Fed:
    """`text` may go to the client; `stop` is the stop string that ended the sequence, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first of several stop strings. Feed it nothing after a match."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def feed(self, piece: str, *, can_stop: bool = True) -> Fed:
        """Adds a piece. With `can_stop` False, a stop string that ends inside it does not count."""
        text = self._held + piece
        ends = [(end, -len(a.stop), a.stop) for a in self._automata if (end := a.advance(piece)) is not None]
        if ends and can_stop:
            end, _, stop = min(ends)
            end += len(self._held)
            self._held = ""
            return Fed(text[: end if self._include_stop else end - len(stop)], stop)
        num_sure = len(text) - max((automaton.state for automaton in self._automata), default=0)
        self._held = text[num_sure:]
        return Fed(text[:num_sure])

    def flush(self) -> str:
        """Returns the text that was held back, as none will follow."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth, Morris and Pratt's: one step a character; `state` is the length of the beginning of `stop` that the text
    ends with now."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = _fallbacks(stop)

    def advance(self, piece: str) -> int | None:
        """Reads the whole piece; returns how many of its characters the first match took, None without one."""
        stop, fallback, state = self.stop, self._fallback, self.state
        if state == 0 and stop[0] not in piece:
            return None
        first_end: int | None = None
        for position, character in enumerate(piece, start=1):
            while state and stop[state] != character:
                state = fallback[state]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                state = fallback[state]
                first_end = first_end or position
        self.state = state
        return first_end


def _fallbacks(stop: str) -> list[int]:
    """Returns for each length of a beginning the length of its longest proper suffix that is a beginning too."""
    fallback = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = fallback[length]
        if stop[length] == character:
            length += 1
        fallback.append(length)
    return fallback
