"""How long outputs get, learned from those that ended lately: one guess, for whoever predicts or reserves.

Clients that ask for about as much (the same power of two of `max_output_tokens`) are taken for alike, since some ask
for what they need and others for the whole context. Pure.
"""

from __future__ import annotations

FIRST_GUESS_TOKENS = 128
"""Of one output, before any of its like has ended."""
_MEMORY = 0.95
"""What an ended sequence leaves of those before it."""


class _Alike:
    """Outputs of clients that asked for about as much: what they got and might have got, older ones fading."""

    def __init__(self) -> None:
        self.num_tokens = self.num_most = 0.0

    def add(self, num_tokens: int, most: int) -> None:
        self.num_tokens = _MEMORY * self.num_tokens + num_tokens
        self.num_most = _MEMORY * self.num_most + most


class OutputLengths:
    """Of one router."""

    def __init__(self) -> None:
        self._alike: dict[int, _Alike] = {}

    def ended(self, num_tokens: int, most: int) -> None:
        """One sequence, after so many of the tokens that it might have got."""
        self._alike.setdefault(most.bit_length(), _Alike()).add(num_tokens, most)

    def expected(self, most: int) -> float:
        """Tokens of a sequence that may get `most`."""
        alike = self._alike.get(most.bit_length())
        if alike is None or not alike.num_most:
            return min(FIRST_GUESS_TOKENS, most)
        return min(most, max(1.0, most * alike.num_tokens / alike.num_most))
