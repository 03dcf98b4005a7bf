"""What has happened in the cluster, numbered, for whoever listens: the newest are kept, and waited for.

One event loop. A listener says after which event it goes on, so that nothing falls between an answer and its watch.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum

_KEPT = 1000


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


class EventLog:
    """`on_event` is called with each event as it comes."""

    def __init__(self, on_event: Callable[[ClusterEvent], None] = lambda _: None) -> None:
        self.version = 1
        """Stamped on each event."""
        self.last_sequence = 0
        self.num_by_kind: Counter[EventKind] = Counter()
        self._events: deque[ClusterEvent] = deque(maxlen=_KEPT)
        self._on_event = on_event
        self._came = asyncio.Event()

    def add(self, kind: EventKind, text: str, worker_id: str = "") -> None:
        self.last_sequence += 1
        self.num_by_kind[kind] += 1
        event = ClusterEvent(self.last_sequence, kind, text, self.version, worker_id, time.time())
        self._events.append(event)
        self._on_event(event)
        came, self._came = self._came, asyncio.Event()
        came.set()

    def since(self, sequence: int) -> list[ClusterEvent]:
        """Those after that one, of what is kept."""
        return [event for event in self._events if event.sequence > sequence]

    def newest(self, count: int) -> list[ClusterEvent]:
        """Oldest first."""
        return list(self._events)[-count:]

    async def after(self, sequence: int) -> AsyncIterator[ClusterEvent]:
        """Those that are kept, then each as it comes; for ever."""
        while True:
            came = self._came
            for event in self.since(sequence):
                sequence = event.sequence
                yield event
            if sequence >= self.last_sequence:
                await came.wait()
