"""When the next line of any batch may run: one after another, as they ask, while workers have capacity to spare.

Owns how many lines run. What capacity is spare is for `has_spare`. Who waits stands in the row of its tenant, and the
first of each in the row of all: so tenants take turns, however many lines each has.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable

LOOK_AGAIN_S = 0.05
"""An overload, or the time that prompts take, ends without anybody saying so."""


class IdleCapacity:
    """`has_spare` is given how many lines run."""

    def __init__(self, has_spare: Callable[[int], bool]) -> None:
        self.num_running = 0
        self._has_spare = has_spare
        self._rows: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._row = asyncio.Lock()
        self._left = asyncio.Event()

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Entered when a line of the tenant may run; it runs until it is left."""
        own_row = self._rows.setdefault(tenant, asyncio.Lock())
        async with own_row, self._row:
            await self._until_spare()
            self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._left.set()

    async def _until_spare(self) -> None:
        while not self._has_spare(self.num_running):
            self._left.clear()
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._left.wait()
            except TimeoutError:
                continue
