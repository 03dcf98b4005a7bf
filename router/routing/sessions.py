"""On which workers the last turn of each session ran. Pure: knows no clock and no policy.

A client names its session (`scheduling.session_id`); the same name of two tenants is two sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from router.routing.load_tracker import Placement

MOST_SESSIONS = 16_384
"""Beyond this, the one whose last turn is longest ago is forgotten."""


@dataclass(frozen=True)
class SessionKey:
    """Whose session it is, and what they call it."""

    tenant: str
    session_id: str


class Sessions:
    """At most `most` of them."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._homes: OrderedDict[SessionKey, Placement] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home_of(self, key: SessionKey | None) -> Placement | None:
        """Where its last turn was placed; None for no session, or one that is not known (any more)."""
        return self._homes.get(key) if key is not None else None

    def placed(self, key: SessionKey | None, placement: Placement) -> None:
        """A turn was."""
        if key is None:
            return
        self._homes[key] = placement
        self._homes.move_to_end(key)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def lost(self, worker_id: str) -> None:
        """What a worker held is gone: sessions that were there are at home nowhere."""
        for key in [k for k, home in self._homes.items() if worker_id in (home.prefill_id, home.decode_id)]:
            del self._homes[key]
