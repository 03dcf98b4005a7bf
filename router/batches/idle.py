"""When the next line of any batch may run: one after another, as they ask, while workers have capacity to spare.

Owns how many lines run. What capacity is spare is for `has_spare`; those who wait stand in a row,
so that batches take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_AGAIN_S = 0.05
"""An overload, or the time that prompts take, ends without anybody saying so."""


class IdleCapacity:
    """`has_spare` is given how many lines run."""

    def __init__(self, has_spare: Callable[[int], bool]) -> None:
        self.num_running = 0
        self._has_spare = has_spare
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    async def enter(self, begin: Callable[[], asyncio.Task[None]]) -> None:
        """Begins a line when it may run, and counts it until its task has ended, however that does."""
        async with self._turn:
            await self._until_spare(0)
            task = begin()
            self.num_running += 1
            task.add_done_callback(self._leave)

    async def again(self) -> None:
        """One that runs already may try once more: it does not count itself."""
        await self._until_spare(1)

    def _leave(self, _: asyncio.Task[None]) -> None:
        self.num_running -= 1
        self._left.set()

    async def _until_spare(self, num_own: int) -> None:
        while not self._has_spare(self.num_running - num_own):
            self._left.clear()
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._left.wait()
            except TimeoutError:
                continue
