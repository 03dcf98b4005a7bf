"""Offers a load: each request at its time, or as many at once as may be; and waits until all have ended.

Without a bound on how many are under way, a request is timed from when it should have been sent: where the client
itself is late, that counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from tools.bench.samples import Sample


class Timed(Protocol):
    """What is to be sent."""

    @property
    def at(self) -> float:
        """When, in seconds from the start."""
        ...


R = TypeVar("R", bound=Timed)
S = TypeVar("S", bound=Sample)


async def offer(
    requests: Sequence[R],
    send: Callable[[R, float], Awaitable[S]],
    *,
    most_at_once: int | None,
    on_end: Callable[[S], object],
) -> list[S]:
    """What became of each, in their order. `send` gets a request and the instant that it is timed from, and raises
    nothing that the server did. `most_at_once`: requests under way; None: however many come. `on_end` hears of each."""
    room = asyncio.Semaphore(most_at_once or len(requests))
    begun = time.perf_counter()

    async def one(request: R) -> S:
        async with room:
            sample = await send(request, begun + request.at if most_at_once is None else time.perf_counter())
            sample.ended_at = time.perf_counter()
        on_end(sample)
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in requests:
            await asyncio.sleep(max(0.0, begun + request.at - time.perf_counter()))
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks]
