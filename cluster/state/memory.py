"""The store in a process's own memory: it ends with the process, and is never away."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.state.store import Claim, Log, Outcome, Write, judge


@dataclass
class _Held:
    claim: Claim
    number: int
    entries: list[bytes]
    ends_at: float

    def log(self) -> Log:
        return Log(self.claim, self.number, tuple(self.entries))


class MemoryStore:
    """Used from one event loop; routers in one process may share it."""

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
