"""The store of what must outlive a router: short logs with one writer at a time, which expire.

Owns the interface, the store in a process's own memory, and `Guard`, which makes a store's absence cheap; those in a
file and in Redis are `cluster.file_store` and `cluster.redis_store`. Knows nothing of requests: what is in a log is its
writer's own.

A log belongs to a claim: an owner and an epoch. Another router that takes it writes with the next epoch, and a
write with an older one is refused (FENCED). Writes of one claim are numbered, so that one that was abandoned and comes
late changes nothing, and a log that has lost something (a flush, say) is noticed (MISSING) and written whole again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 2.0
"""A store that does not answer for so long is away. One that is only slow is waited for."""
_LOOKS = 8
"""Times that a call looks for its answer before it gives up: a loop that stood still has used up one look."""
FIRST_PROBE_S = 0.1
LONGEST_PROBE_S = 1.0


class StoreAway(Exception):
    """The store did not answer in time, refused, or is known to be away."""


class Outcome(enum.Enum):
    """The result of a write."""

    DONE = "it is stored"
    MISSING = "the log is not what the writer thinks: it has to be written whole"
    FENCED = "another one has taken the log"
    FULL = "there is no room for another log"


@dataclass(frozen=True)
class Claim:
    """The right to write. Epochs count from 1; a later one wins."""

    owner: str
    epoch: int

    def is_fenced_by(self, other: Claim) -> bool:
        return other.epoch > self.epoch or (other.epoch == self.epoch and other.owner != self.owner)


@dataclass(frozen=True)
class Write:
    """Replaces a log by `data` (`is_whole`), or appends to it. Empty data only makes it live longer."""

    key: str
    claim: Claim
    number: int
    """Among the writes of this claim, each one more than the one before, from 1 on."""
    data: bytes
    is_whole: bool
    ttl_s: float
    """The log ends so long after its last write."""


@dataclass(frozen=True)
class Log:
    """The entries of a log, in their order."""

    claim: Claim
    number: int
    """Number of the claim's last write; 0 after it was taken."""
    entries: tuple[bytes, ...]


class Store(Protocol):
    """Every method but `close` raises StoreAway."""

    @property
    def outlives_process(self) -> bool:
        """Whether values are still there when the process that wrote them has died."""
        ...

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        """In one round trip; each by itself."""
        ...

    async def read(self, key: str) -> Log | None: ...

    async def take(self, key: str, held: Claim, wanted: Claim, ttl_s: float) -> bool:
        """Compare and set: the log goes from one claim to one of a later epoch. False when it is no longer `held`."""
        ...

    async def delete(self, keys: Sequence[tuple[str, Claim]]) -> None:
        """Deletes the logs that still belong to their claim."""
        ...

    async def probe(self) -> None:
        """Raises StoreAway unless writes would succeed."""
        ...

    async def reset(self) -> None:
        """Forgets the connections: one of them was given up in the middle of a call."""
        ...

    async def close(self) -> None: ...


def judge(held: Log | None, write: Write) -> Outcome:
    """The outcome of a write on a held log. The Lua of `redis_store` decides in the same way."""
    if held is None:
        return Outcome.DONE if write.is_whole else Outcome.MISSING
    if write.claim.is_fenced_by(held.claim):
        return Outcome.FENCED
    if held.claim.epoch < write.claim.epoch:
        return Outcome.DONE if write.is_whole else Outcome.MISSING
    is_next = write.number > held.number if write.is_whole else write.number == held.number + 1
    return Outcome.DONE if is_next else Outcome.MISSING


@dataclass
class _Held:
    claim: Claim
    number: int
    entries: list[bytes]
    ends_at: float

    def log(self) -> Log:
        return Log(self.claim, self.number, tuple(self.entries))


class MemoryStore:
    """Ends with its process and is never away. Used from one event loop; routers in one process may share it."""

    outlives_process = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logs: OrderedDict[str, _Held] = OrderedDict()
        """The one written last at the end."""

    async def write(self, writes: Sequence[Write]) -> list[Outcome]:
        self._drop_ended()
        return [self._write(write) for write in writes]

    async def read(self, key: str) -> Log | None:
        held = self._find(key)
        return None if held is None else held.log()

    async def take(self, key: str, held: Claim, wanted: Claim, ttl_s: float) -> bool:
        found = self._find(key)
        if found is None or found.claim != held:
            return False
        found.claim, found.number, found.ends_at = wanted, 0, self._clock() + ttl_s
        return True

    async def delete(self, keys: Sequence[tuple[str, Claim]]) -> None:
        for key, claim in keys:
            found = self._logs.get(key)
            if found is not None and found.claim == claim:
                del self._logs[key]

    async def probe(self) -> None:
        return

    async def reset(self) -> None:
        return

    async def close(self) -> None:
        return

    def _write(self, write: Write) -> Outcome:
        held = self._find(write.key)
        outcome = judge(None if held is None else held.log(), write)
        if outcome is not Outcome.DONE:
            return outcome
        if held is None or write.is_whole:
            held = self._logs[write.key] = _Held(write.claim, 0, [], 0.0)
        if write.data:
            held.entries.append(write.data)
        held.number, held.ends_at = write.number, self._clock() + write.ttl_s
        self._logs.move_to_end(write.key)
        return outcome

    def _find(self, key: str) -> _Held | None:
        held = self._logs.get(key)
        return None if held is None or held.ends_at <= self._clock() else held

    def _drop_ended(self) -> None:
        """From the oldest on, as far as they have ended."""
        now = self._clock()
        while self._logs and next(iter(self._logs.values())).ends_at <= now:
            self._logs.popitem(last=False)


class Guard:
    """A circuit breaker around a store, and a store itself: a call takes `timeout_s` at most, and none at all while the
    store is away. `on_back` is called when it can be used again.

        THERE -> (a call failed, or took too long) -> AWAY -> (a probe in the background succeeded) -> THERE

    Owns the time limit, the probe and what is logged, once for each change.
    """

    def __init__(self, store: Store, on_back: Callable[[], None] = lambda: None, timeout_s: float = TIMEOUT_S) -> None:
        self.is_away = False
        self.on_back = on_back
        self._store = store
        self._timeout_s = timeout_s
        self._probing: asyncio.Task[None] | None = None

    @property
    def outlives_process(self) -> bool:
        return self._store.outlives_process

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
        loop, num_looks, look_s = asyncio.get_running_loop(), 0, self._timeout_s / _LOOKS
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer, num_looks
            num_looks += 1
            if num_looks == _LOOKS:
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(look_s, look)

        timer = loop.call_later(look_s, look)
        try:
            async with asyncio.timeout(None) as limit:
                return await call()
        except TimeoutError as error:
            raise StoreAway(f"no answer within {self._timeout_s:g} s") from error
        finally:
            timer.cancel()

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
