"""Numbered events: the newest are kept, and listeners wait for the next ones.

Two logs in one event loop. `EventLog` holds what happens to the cluster, for AdminService.WatchEvents and the metrics;
`ProgressLog` what `baton serve` shows while the cluster starts and runs. A listener names the event that it has seen
last, so that nothing falls between an answer and the next call.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

_KEPT = 1000


class _Numbered:
    """Counts events from 1, or from the number after `before`, and wakes those who wait for the next."""

    def __init__(self, before: int = 0) -> None:
        self.last_sequence = before
        self._came = asyncio.Event()

    def _next_sequence(self) -> int:
        self.last_sequence += 1
        came, self._came = self._came, asyncio.Event()
        came.set()
        return self.last_sequence

    async def _wait_beyond(self, sequence: int) -> None:
        while self.last_sequence <= sequence:
            await self._came.wait()


class EventKind(Enum):
    """The names are those of ClusterEvent.Kind."""

    PLANNED = "planned"
    STEP = "step"
    STEP_DONE = "step done"
    CHANGED = "changed"
    FAILED = "failed"
    REFUSED = "refused"
    WORKER_READY = "worker ready"
    WORKER_LOST = "worker lost"
    AUTO = "auto"


@dataclass(frozen=True)
class ClusterEvent:
    """`version`: of the configuration at that time."""

    sequence: int
    kind: EventKind
    text: str
    version: int
    worker_id: str
    time: float


class EventLog(_Numbered):
    """`on_event` is called with each event as it comes."""

    def __init__(self, on_event: Callable[[ClusterEvent], None] = lambda _: None, before: int = 0) -> None:
        super().__init__(before)
        self.version = 1
        """Stamped on each event."""
        self.num_by_kind: Counter[EventKind] = Counter()
        self._events: deque[ClusterEvent] = deque(maxlen=_KEPT)
        self._on_event = on_event

    def add(self, kind: EventKind, text: str, worker_id: str = "") -> None:
        self.num_by_kind[kind] += 1
        event = ClusterEvent(self._next_sequence(), kind, text, self.version, worker_id, time.time())
        self._events.append(event)
        self._on_event(event)

    def since(self, sequence: int) -> list[ClusterEvent]:
        """The kept events after that one."""
        return [event for event in self._events if event.sequence > sequence]

    def newest(self, count: int) -> list[ClusterEvent]:
        """Oldest first."""
        return list(self._events)[-count:]

    async def after(self, sequence: int) -> AsyncIterator[ClusterEvent]:
        """Yields the kept events after that one, then each as it comes; for ever."""
        while True:
            for event in self.since(sequence):
                sequence = event.sequence
                yield event
            await self._wait_beyond(sequence)


ProgressKind = Literal["progress", "ready", "lost", "failed", "refused", "admin", "http", "serving", "change"]
ONCE: frozenset[ProgressKind] = frozenset({"failed", "refused", "admin", "http", "serving"})


@dataclass(frozen=True)
class ProgressEvent:
    """A line that an operator wants to see. `admin`, `http` (addresses of these) and then `serving` (every worker and
    the router are up; the router's address) come once. `refused`: the controller leaves alone what runs, which speaks
    another protocol; nothing comes after it."""

    kind: ProgressKind
    who: str
    text: str
    is_mistake: bool = False


@dataclass(frozen=True)
class ProgressBatch:
    """`last`: the number to ask with for what comes after these."""

    events: tuple[ProgressEvent, ...]
    last: int


class ProgressLog(_Numbered):
    """Events that come once (`ONCE`) are kept for every listener; of the others the newest."""

    def __init__(self, before: int = 0) -> None:
        super().__init__(before)
        self._once: list[tuple[int, ProgressEvent]] = []
        self._newest: deque[tuple[int, ProgressEvent]] = deque(maxlen=_KEPT)

    def add(self, event: ProgressEvent) -> None:
        numbered = self._next_sequence(), event
        (self._once if event.kind in ONCE else self._newest).append(numbered)

    async def after(self, sequence: int) -> ProgressBatch:
        """The kept events after `sequence` (0: all); waits until there is one."""
        await self._wait_beyond(sequence)
        kept = sorted((*self._once, *self._newest), key=lambda numbered: numbered[0])
        return ProgressBatch(tuple(event for at, event in kept if at > sequence), self.last_sequence)
