"""Finds stop strings in text that comes in pieces, wherever the pieces are cut.

The string that ends first wins, among those that end together the longest. Text that may be the beginning of a stop
string is held back. Knows no token.

Each stop string has a Knuth-Morris-Pratt automaton: one step a character, and its state is the length of the
beginning that the text now ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fed:
    """`text` may go to the client; `stop` is the stop string that ended the sequence, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Over after the first match: feed it nothing more."""

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
        """What was held back, as no text will follow."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = _fallbacks(stop)

    def advance(self, piece: str) -> int | None:
        """Reads the whole piece; how many of its characters the first match took, None without one."""
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
    """For each length of a beginning: the length of its longest proper suffix that is a beginning too."""
    fallback = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = fallback[length]
        if stop[length] == character:
            length += 1
        fallback.append(length)
    return fallback
