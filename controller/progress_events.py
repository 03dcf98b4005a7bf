"""What the controller tells whoever started it, or looks on: numbered, the newest kept, and waited for.

One event loop. Several may listen, also after each other, and nobody has to: what comes once (`ONCE`) is told to
everybody, of the rest the newest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Literal

NoticeKind = Literal["progress", "ready", "lost", "failed", "admin", "http", "serving", "change"]
ONCE: frozenset[NoticeKind] = frozenset({"failed", "admin", "http", "serving"})
_KEPT = 1000


@dataclass(frozen=True)
class Notice:
    """Something an operator wants to see. `admin`, `http` (addresses of these) and then `serving` (every worker and the
    router are up; the router's address) come once."""

    kind: NoticeKind
    who: str
    text: str
    is_mistake: bool = False


@dataclass(frozen=True)
class News:
    """`last`: the number to ask with for what comes after these."""

    notices: tuple[Notice, ...]
    last: int


class NoticeBoard:
    def __init__(self) -> None:
        self._last = 0
        self._once: list[tuple[int, Notice]] = []
        self._newest: deque[tuple[int, Notice]] = deque(maxlen=_KEPT)
        self._came = asyncio.Event()

    def put(self, notice: Notice) -> None:
        self._last += 1
        (self._once if notice.kind in ONCE else self._newest).append((self._last, notice))
        came, self._came = self._came, asyncio.Event()
        came.set()

    async def after(self, number: int) -> News:
        """Those that are kept of the ones after `number` (0: all); waits until there is one."""
        while self._last <= number:
            await self._came.wait()
        kept = sorted((*self._once, *self._newest), key=lambda numbered: numbered[0])
        return News(tuple(notice for at, notice in kept if at > number), self._last)
