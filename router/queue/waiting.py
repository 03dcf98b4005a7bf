"""The requests that wait for a worker, in their order. Each has a timer that takes it out when it has waited too long.

Whose turn it is says `FairOrder`; a request that has run before (its worker was lost) waits at the head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.api.call import Principal
from router.queue.fair_order import FairOrder
from router.stream.request import LiveRequest


@dataclass(frozen=True)
class Waiter:
    """One request in the queue."""

    live: LiveRequest
    timer: asyncio.TimerHandle


class WaitingQueue:
    """By generation id."""

    def __init__(self) -> None:
        self._waiters: dict[str, Waiter] = {}
        self._order = FairOrder()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, generation_id: str) -> bool:
        return generation_id in self._waiters

    def __getitem__(self, generation_id: str) -> Waiter:
        return self._waiters[generation_id]

    def __iter__(self) -> Iterator[LiveRequest]:
        """In the order in which they will run."""
        return (self._waiters[generation_id].live for generation_id in self._order.in_order())

    @property
    def num_tokens(self) -> int:
        """Prompts and most outputs of all."""
        return self._order.cost

    @property
    def first(self) -> Waiter:
        """Whose turn it is. Raises KeyError when nobody waits."""
        return self._waiters[self._order.first()]

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """How many requests of a tenant wait, and their tokens."""
        return self._order.of_tenant(tenant)

    def num_tokens_before(self, caller: Principal, priority: int) -> float:
        """Tokens of those that would run before a request that is not here yet."""
        return self._order.ahead_of(caller.tenant, caller.weight, priority)

    def add(self, live: LiveRequest, timeout_s: float, on_timeout: Callable[[str], None]) -> None:
        """In its order; at the head if it has run before. After `timeout_s`, `on_timeout` is called with its id."""
        generation_id, caller = live.key.request_id, live.caller
        timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), on_timeout, generation_id)
        self._waiters[generation_id] = Waiter(live, timer)
        cost = live.work.num_output_tokens
        if not live.has_run:
            priority = live.request.priority
            self._order.add(generation_id, tenant=caller.tenant, weight=caller.weight, priority=priority, cost=cost)
        else:
            self._order.add_returned(generation_id, tenant=caller.tenant, cost=cost)

    def find(self, generation_id: str) -> LiveRequest | None:
        waiter = self._waiters.get(generation_id)
        return None if waiter is None else waiter.live

    def pop(self, generation_id: str) -> Waiter | None:
        """Takes one out that is not to run; None when it does not wait here."""
        waiter = self._waiters.pop(generation_id, None)
        if waiter is not None:
            waiter.timer.cancel()
            self._order.remove(generation_id)
        return waiter

    def next(self) -> Waiter:
        """Takes out whose turn it is. Raises KeyError when nobody waits."""
        waiter = self._waiters.pop(self._order.serve())
        waiter.timer.cancel()
        return waiter
