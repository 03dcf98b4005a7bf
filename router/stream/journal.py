"""The journal: what a generation that may be resumed has sent is written to a store before its client is sent it.

    open (a whole entry) -> catch_up before each message (an entry with what is new) -> close

All that waits goes in one batch, one batch at a time and at most one in SPACING_S, so a message waits for one round
trip, and the rest of the one under way. While the store is away nothing waits: what it missed is written whole when it
is back, as is a record that it has lost. Every so often each record is written to again, so that it lives on while its
request does.

Owns claims, numbers and how much of each record is stored. Knows no request: entries are bytes from a `Source`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from cluster.state import Claim, Guard, Log, Outcome, Store, StoreAway, Write

log = logging.getLogger(__name__)

E = TypeVar("E", bound=Hashable)
"""The extent of a record: how much of it there is."""

MOST_IN_BATCH = 64
MOST_BATCH_BYTES = 1 << 20
SPACING_S = 0.02
"""Least time from the begin of one batch to that of the next: many streams share the cost of a batch."""
REFRESH_S = 5.0
_CANCELLED_OWNER = "cancelled"


@dataclass(frozen=True)
class Source(Generic[E]):
    """The functions by which the journal reads one generation."""

    extent: Callable[[], E]
    """Returns how much there is now."""
    entry: Callable[[E | None], bytes]
    """All that there is, or what came after an extent."""


@dataclass
class _Page(Generic[E]):
    """One generation's record."""

    source: Source[E]
    claim: Claim
    stored: E | None = None
    """The extent of it that is in the store. None: the next entry is to be a whole one."""
    number: int = 0
    is_refused: bool = False
    """The store had no room for it; it is asked again with the next refresh."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


@dataclass
class _Writing(Generic[E]):
    """One write under way: when it is done, `extent` is stored, and those that wait for it may go on."""

    page: _Page[E]
    write: Write
    extent: E
    waiters: list[asyncio.Future[None]]


def _release(waiters: list[asyncio.Future[None]]) -> None:
    """Lets all that wait for a write go on."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


class Journal(Generic[E]):
    """Lives in one event loop: `start`, then `stop`.

    `on_fenced(id, is_cancelled)`: another router has taken that generation, to go on with it or to end it.
    """

    def __init__(self, store: Store, *, ttl_s: float, on_fenced: Callable[[str, bool], None]) -> None:
        """A record ends `ttl_s` after its router has."""
        self.owner = uuid.uuid4().hex
        self._store = Guard(store, self._mark_all)
        self._ttl_s = ttl_s
        self._on_fenced = on_fenced
        self._pages: dict[str, _Page[E]] = {}
        self._dirty: dict[str, None] = {}
        self._closed: dict[str, Claim] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._write_all(), name="journal"),
            asyncio.create_task(self._refresh(), name="journal refresh"),
        ]

    async def stop(self) -> None:
        """Stops writing. What is stored stays: another router may go on from it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for page in self._pages.values():
            _release(page.waiters)
        await self._store.close()

    def open(self, generation_id: str, source: Source[E], epoch: int = 1) -> None:
        """From now on it is written down."""
        self._pages[generation_id] = _Page(source, Claim(self.owner, epoch))
        self._mark(generation_id)

    async def catch_up(self, generation_id: str) -> bool:
        """Waits until all that there is now is stored, or the store is away or full. Never raises.

        True when it is stored where another router finds it once this one has died.
        """
        page = self._pages.get(generation_id)
        if page is None or self._store.is_away or page.is_refused:
            return False
        if page.stored != page.source.extent():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            page.waiters.append(waiter)
            self._mark(generation_id)
            await waiter
        return page.stored is not None and self._store.outlives_process

    def close(self, generation_id: str) -> None:
        """Removes the record, here and from the store."""
        page = self._pages.pop(generation_id, None)
        if page is not None:
            self._dirty.pop(generation_id, None)
            _release(page.waiters)
            self._closed[generation_id] = page.claim
            self._wake.set()

    async def find(self, generation_id: str) -> Log | None:
        """None when there is no such record, or it is cancelled. Raises StoreAway."""
        found = await self._store.read(generation_id)
        if found is None or found.claim in (
            self._closed.get(generation_id),
            Claim(_CANCELLED_OWNER, found.claim.epoch),
        ):
            return None
        return found

    async def take(self, generation_id: str, held: Claim, *, to_cancel: bool = False) -> int | None:
        """Makes a record this router's own, or cancelled. Returns its new epoch; None when another router was faster.

        Raises StoreAway.
        """
        owner = _CANCELLED_OWNER if to_cancel else self.owner
        wanted = Claim(owner, held.epoch + 1)
        is_taken = await self._store.take(generation_id, held, wanted, self._ttl_s)
        return wanted.epoch if is_taken else None

    def _mark(self, generation_id: str) -> None:
        self._dirty[generation_id] = None
        self._wake.set()

    def _mark_all(self) -> None:
        """After an absence of the store: what was written meanwhile is missing, and what was there may be."""
        for generation_id in self._pages:
            self._mark(generation_id)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(min(REFRESH_S, self._ttl_s / 3))
            self._mark_all()

    async def _write_all(self) -> None:
        next_at, clock = 0.0, asyncio.get_running_loop().time
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty or self._closed:
                if (pause_s := next_at - clock()) > 0:
                    await asyncio.sleep(pause_s)
                next_at = clock() + SPACING_S
                await self._write_some()

    async def _write_some(self) -> None:
        """Writes one batch. A fault in it holds nobody up."""
        batch: list[_Writing[E]] = []
        try:
            if self._closed:
                closed = dict(self._closed)
                try:
                    await self._store.delete(list(closed.items()))
                finally:
                    self._closed = {key: claim for key, claim in self._closed.items() if key not in closed}
            self._fill(batch)
            if batch:
                outcomes = await self._store.write([writing.write for writing in batch])
                fenced = [w for w, outcome in zip(batch, outcomes, strict=True) if self._is_fenced(w, outcome)]
                await asyncio.gather(*map(self._lose, fenced))
        except StoreAway:
            self._dirty.clear()
            for page in self._pages.values():
                page.stored = None
                _release(page.waiters)
        except Exception:
            log.exception("a batch of the journal could not be written")
            for writing in batch:
                writing.page.stored = None
        finally:
            for writing in batch:
                _release(writing.waiters)

    def _fill(self, batch: list[_Writing[E]]) -> None:
        """Adds what is due, within bounds."""
        size_bytes = 0
        for generation_id in list(islice(self._dirty, MOST_IN_BATCH)):
            if size_bytes >= MOST_BATCH_BYTES:
                break
            del self._dirty[generation_id]
            page = self._pages[generation_id]
            page.number += 1
            extent, data = page.source.extent(), page.source.entry(page.stored)
            size_bytes += len(data)
            write = Write(generation_id, page.claim, page.number, data, page.stored is None, self._ttl_s)
            batch.append(_Writing(page, write, extent, page.waiters))
            page.waiters = []

    def _is_fenced(self, writing: _Writing[E], outcome: Outcome) -> bool:
        """Records the outcome of a write. True when another router holds the record."""
        page, generation_id = writing.page, writing.write.key
        if self._pages.get(generation_id) is not page:
            return False  # it was closed meanwhile
        page.is_refused = outcome is Outcome.FULL
        if outcome is Outcome.DONE:
            page.stored = writing.extent
        elif outcome is Outcome.MISSING:
            page.stored = None
            page.waiters, writing.waiters = writing.waiters + page.waiters, []
            self._mark(generation_id)
        elif outcome is Outcome.FULL:
            page.stored = None
        return outcome is Outcome.FENCED

    async def _lose(self, writing: _Writing[E]) -> None:
        """Gives up a fenced record. Those that wait for the write go on once it is known who holds the record now."""
        page, generation_id = writing.page, writing.write.key
        try:
            found = await self._store.read(generation_id)
        except StoreAway:
            found = None
        if self._pages.get(generation_id) is page:
            del self._pages[generation_id]
            self._dirty.pop(generation_id, None)
            _release(page.waiters)
            self._on_fenced(generation_id, found is not None and found.claim.owner == _CANCELLED_OWNER)
