"""The requests that wait for a worker, in their order. Each has a timer that takes it out when it has waited too long.

A request that has run before (its worker was lost) carries its trail and waits at the head.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.request import LiveRequest
from router.retry import Trail


@dataclass(frozen=True)
class Waiter:
    """One request in the queue."""

    live: LiveRequest
    timer: asyncio.TimerHandle
    trail: Trail | None
    """None: it has not run yet."""


class WaitingQueue:
    """By generation id."""

    def __init__(self) -> None:
        self._waiters: OrderedDict[str, Waiter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, generation_id: str) -> bool:
        return generation_id in self._waiters

    def __iter__(self) -> Iterator[LiveRequest]:
        """In the order in which they will run."""
        return (waiter.live for waiter in self._waiters.values())

    def add(
        self, live: LiveRequest, timeout_s: float, on_timeout: Callable[[str], None], trail: Trail | None = None
    ) -> None:
        """At the end, or, with a trail, at the head. After `timeout_s`, `on_timeout` is called with its id."""
        generation_id = live.key.request_id
        timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), on_timeout, generation_id)
        self._waiters[generation_id] = Waiter(live, timer, trail)
        if trail is not None:
            self._waiters.move_to_end(generation_id, last=False)

    def find(self, generation_id: str) -> LiveRequest | None:
        waiter = self._waiters.get(generation_id)
        return None if waiter is None else waiter.live

    def pop(self, generation_id: str) -> Waiter | None:
        """Takes one out; None when it does not wait here."""
        waiter = self._waiters.pop(generation_id, None)
        if waiter is not None:
            waiter.timer.cancel()
        return waiter

    def next(self) -> Waiter:
        """Takes out whose turn it is. Raises KeyError when nobody waits."""
        _, waiter = self._waiters.popitem(last=False)
        waiter.timer.cancel()
        return waiter
