"""One attempt at a request: where it was placed and why, and how it ended if another one followed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from router.routing.load_tracker import Placement


@dataclass
class AttemptRecord:
    """Instants are on the router's clock."""

    number: int
    """As workers know it."""
    placement: Placement
    placed_at: float
    ended_at: float | None = None
    """None: no other attempt followed."""
    why: str = ""
    """What ended it."""
    has_failed: bool = False
    """It did not end because the request moved on purpose."""

    def end(self, now: float, why: str, *, has_failed: bool) -> None:
        self.ended_at, self.why, self.has_failed = now, why, has_failed
