"""How fast what runs makes room for what waits, and whether more comes than leaves. Pure: the time is an argument.

Tokens are counted as they were promised: prompt and most output of each request, which it gives back when it ends. In
the same tokens the queue is as long as it is, so that their quotient is a wait. What ends while nothing waits says
nothing of how much could have ended, and is not counted.

A burst that drains is no overload, nor are clients that each wait for their answer before they ask again, however many:
as much leaves as comes. An overload is what stays: a queue that has stood for a while, into which clearly more came
than left. It is over when nothing waits and nobody was turned away for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 10.0
"""What was measured so long ago (of time under pressure) counts by a third."""
LEAST_S = 0.25
LEAST_ENDS = 4
"""Before so much time under pressure, and so many ends in it, nothing is known."""
BURST_S = 0.5
"""What comes so soon after the queue began to stand is a burst's, and not counted as growth."""
STANDING_S = 1.0
"""A queue that has not stood for so long is no overload."""
LEAST_ARRIVALS = 8
CLEARLY = 1.5
"""Standard deviations of the number of arrivals, were they independent."""
CALM_S = 2.0
"""After so long without a refusal, an overload is over."""


class DrainRate:
    """By worker, as workers come and go."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._num_ends = 0
        self._at: float | None = None
        self._is_pressed = False

    def press(self, now: float, *, is_pressed: bool) -> None:
        """From now on, something waits or is turned away, or not."""
        self._advance(now)
        self._is_pressed = is_pressed

    def note_end(self, now: float, num_tokens: int, num_workers: int) -> None:
        """A request gave its tokens back, with so many decode workers ready."""
        self._advance(now)
        if self._is_pressed:
            self._tokens += num_tokens / max(1, num_workers)
            self._num_ends += 1

    @property
    def num_seconds(self) -> float:
        """That it has looked at, by what they count today."""
        return self._seconds

    def tokens_per_s(self, num_workers: int) -> float | None:
        """None: not known."""
        if self._seconds < LEAST_S or self._num_ends < LEAST_ENDS or not num_workers:
            return None
        return max(1.0, self._tokens / self._seconds) * num_workers

    def _advance(self, now: float) -> None:
        if self._is_pressed and self._at is not None and now > self._at:
            kept = math.exp((self._at - now) / MEMORY_S)
            self._tokens *= kept
            self._seconds = self._seconds * kept + MEMORY_S * (1 - kept)
        self._at = now


@dataclass
class _Standing:
    """A queue since it began to stand."""

    since: float
    num_came: int = 0
    came: float = 0.0
    """Tokens."""
    left: float = 0.0


class Overload:
    """Whether there is one. `stands` and `is_empty` follow the queue."""

    def __init__(self) -> None:
        self._standing: _Standing | None = None
        self._refused_at: float | None = None

    def stands(self, now: float) -> None:
        """Something waits."""
        if self._standing is None:
            self._standing = _Standing(now)

    def is_empty(self, now: float) -> None:
        """Nothing waits."""
        if not self.is_on(now):
            self._standing = None

    def came(self, now: float, num_tokens: float) -> None:
        """A request, whether it is taken or not."""
        standing = self._standing
        if standing is not None and now > standing.since + BURST_S:
            standing.num_came += 1
            standing.came += num_tokens

    def left(self, now: float, num_tokens: float) -> None:
        standing = self._standing
        if standing is not None and now > standing.since + BURST_S:
            standing.left += num_tokens

    def refused(self, now: float) -> None:
        """Somebody was turned away because of it."""
        self._refused_at = now

    def is_on(self, now: float) -> bool:
        return self._refused_at is not None and now - self._refused_at < CALM_S

    def may_begin(self, now: float) -> bool:
        """Whether the queue has stood for long enough, and clearly more came than left."""
        standing = self._standing
        if standing is None or now - standing.since < STANDING_S or standing.num_came < LEAST_ARRIVALS:
            return False
        spread = CLEARLY * math.sqrt(standing.num_came) * standing.came / standing.num_came
        return standing.came - standing.left > spread

    @property
    def excess(self) -> float:
        """How many times more came than left, at least 1."""
        standing = self._standing
        if standing is None or standing.came <= standing.left:
            return 1.0
        return standing.came / max(standing.left, standing.came / 100)
