"""Judges by its silence whether a peer is alive.

Silence is counted in the listener's own ticks, and one tick counts for little more than it should have taken: a process
that was itself stopped or starved finds old messages waiting to be read, and must not take its own absence for the
peer's. Pure: the clock is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

TICKS_PER_HEARTBEAT = 4
"""Ticks in a heartbeat: a peer is found dead at most a quarter of a heartbeat late."""
MOST_TICKS_AT_ONCE = 2
"""A late tick counts for this many at most."""


@dataclass(frozen=True)
class FailureTimeouts:
    """Seconds of silence after which a peer is suspected, and taken for dead."""

    heartbeat_s: float
    suspect_after_s: float
    dead_after_s: float

    @property
    def tick_s(self) -> float:
        return self.heartbeat_s / TICKS_PER_HEARTBEAT


class Liveness(Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class FailureDetector:
    """Watches one peer. Call `heard` from any thread, the rest from one: only `tick` changes `silence_s`."""

    def __init__(self, timing: FailureTimeouts) -> None:
        self._timing = timing
        self._was_heard = False
        self.silence_s = 0.0
        """Seconds since the peer was heard, as of the latest tick."""

    def heard(self) -> None:
        """Anything at all came from the peer."""
        self._was_heard = True

    def tick(self, elapsed_s: float) -> Liveness:
        """`elapsed_s` after the tick before."""
        if self._was_heard:
            self._was_heard = False
            self.silence_s = 0.0
        self.silence_s += min(elapsed_s, MOST_TICKS_AT_ONCE * self._timing.tick_s)
        if self.silence_s >= self._timing.dead_after_s:
            return Liveness.DEAD
        return Liveness.SUSPECT if self.silence_s >= self._timing.suspect_after_s else Liveness.ALIVE
