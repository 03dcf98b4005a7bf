"""A circuit breaker around a store: a call takes `timeout_s` at most, and none at all while the store is away.

    THERE -> (a call failed, or took too long) -> AWAY -> (a probe in the background succeeded) -> THERE

Owns the time limit, the probe and what is logged, once for each change. Knows no log's content.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cluster.state.store import Claim, Log, Outcome, Store, StoreAway, Write

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 0.25
FIRST_PROBE_S = 0.1
LONGEST_PROBE_S = 1.0


class Guard:
    """A Store itself. `on_back` is called when the store can be used again."""

    def __init__(self, store: Store, on_back: Callable[[], None] = lambda: None, timeout_s: float = TIMEOUT_S) -> None:
        self.is_away = False
        self.on_back = on_back
        self._store = store
        self._timeout_s = timeout_s
        self._probing: asyncio.Task[None] | None = None

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        return await self._call(lambda: self._store.write(writes))

    async def read(self, key: str) -> Log | None:
        return await self._call(lambda: self._store.read(key))

    async def take(self, key: str, held: Claim, wanted: Claim, ttl_s: float) -> bool:
        return await self._call(lambda: self._store.take(key, held, wanted, ttl_s))

    async def delete(self, keys: Sequence[tuple[str, Claim]]) -> None:
        await self._call(lambda: self._store.delete(keys))

    async def probe(self) -> None:
        await self._call(self._store.probe)

    async def reset(self) -> None:
        await self._store.reset()

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self._store.close()

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        if self.is_away:
            raise StoreAway("the store is away")
        try:
            return await self._in_time(call)
        except StoreAway as error:
            self._trip(error)
            raise

    async def _in_time(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call()
        except TimeoutError as error:
            raise StoreAway(f"no answer within {self._timeout_s:g} s") from error

    def _trip(self, error: StoreAway) -> None:
        if not self.is_away:
            self.is_away = True
            log.warning("the state store is away, generations survive no router meanwhile: %s", error)
            self._probing = asyncio.create_task(self._probe(), name="probe of the state store")

    async def _probe(self) -> None:
        pause_s = FIRST_PROBE_S
        while True:
            await self._store.reset()
            await asyncio.sleep(pause_s)
            try:
                await self._in_time(self._store.probe)
                break
            except StoreAway:
                pause_s = min(LONGEST_PROBE_S, 2 * pause_s)
        self.is_away = False
        log.warning("the state store is back")
        self.on_back()
