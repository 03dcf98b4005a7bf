"""Idle capacity for the lines of batches: they run one after another, as they ask, while workers have some to spare.

Counts the lines that run; `has_spare` decides. A waiting line stands in the queue of its tenant, and the first of each
queue waits in a common one: so tenants take turns, however many lines each has.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable

LOOK_AGAIN_S = 0.05
"""The end of an overload is not reported, so that it is looked for so often."""


class IdleCapacity:
    """`has_spare` gets the number of lines that run."""

    def __init__(self, has_spare: Callable[[int], bool]) -> None:
        self.num_running = 0
        self._has_spare = has_spare
        self._queues: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._queue = asyncio.Lock()
        self._left = asyncio.Event()

    @contextlib.asynccontextmanager
    async def place(self, tenant: str, *, is_alone: bool = False) -> AsyncIterator[None]:
        """Entered when a line of the tenant may run, for as long as it runs; `is_alone`: beside no other line."""
        tenant_queue = self._queues.setdefault(tenant, asyncio.Lock())
        async with contextlib.AsyncExitStack() as queued:
            await queued.enter_async_context(tenant_queue)
            await queued.enter_async_context(self._queue)
            await self._until_spare(is_alone)
            if not is_alone:
                await queued.aclose()
            self.num_running += 1
            try:
                yield
            finally:
                self.num_running -= 1
                self._left.set()

    async def _until_spare(self, is_alone: bool) -> None:
        while (is_alone and self.num_running) or not self._has_spare(self.num_running):
            self._left.clear()
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._left.wait()
            except TimeoutError:
                continue
