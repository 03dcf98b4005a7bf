"""The journal: what is told of generations that may be resumed is written to a store before it is told.

    open (the request itself) -> catch_up before each message (what is new) -> close

All that waits goes in one batch, one batch at a time, so a message waits for one round trip at most, and the rest of
the one under way. While the store is away nothing waits: what it missed is written whole when it is back, as is a
record that it has lost. Every so often each record is written to again, so that it lives on while its request does.

Owns claims, numbers and how much of each record is stored. Knows no client and no worker.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from cluster.pb.journal_pb2 import JournalOrigin
from cluster.state import Claim, Guard, Outcome, Store, StoreAway, Write
from router.stream.record import Extent, GenerationRecord, entry_since, read_record, whole_entry
from router.stream.request import LiveRequest

log = logging.getLogger(__name__)

MOST_IN_BATCH = 64
MOST_BATCH_BYTES = 1 << 20
REFRESH_S = 5.0
_CANCELLED_OWNER = "cancelled"


@dataclass
class _Page:
    """One generation's record. `stored`: how much of it is in the store."""

    live: LiveRequest
    origin: JournalOrigin
    claim: Claim
    stored: Extent
    number: int = 0
    is_whole_due: bool = True
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def has_news(self) -> bool:
        return self.is_whole_due or self.stored != Extent.of(self.live)

    def release(self) -> None:
        """Nobody waits for it any more."""
        _release(self.waiters)


@dataclass
class _Writing:
    """One write under way: when it is done, so much is stored, and those who wait for it may go on."""

    page: _Page
    write: Write
    extent: Extent
    waiters: list[asyncio.Future[None]]

    def release(self) -> None:
        _release(self.waiters)


def _release(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


@dataclass(frozen=True)
class Found:
    """A record in the store, with who holds it."""

    record: GenerationRecord
    claim: Claim


class Journal:
    """Lives in one event loop: `start`, then `stop`.

    `on_fenced(id, is_cancelled)`: another router has taken that generation, to go on with it or to end it.
    """

    def __init__(self, store: Store, *, ttl_s: float, on_fenced: Callable[[str, bool], None]) -> None:
        """A record ends `ttl_s` after its router has."""
        self.owner = uuid.uuid4().hex
        self._store = Guard(store, self._on_back)
        self._ttl_s = ttl_s
        self._on_fenced = on_fenced
        self._pages: dict[str, _Page] = {}
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
        """What is stored stays: another router may go on from it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for page in self._pages.values():
            page.release()
        await self._store.close()

    def open(self, live: LiveRequest, origin: JournalOrigin, epoch: int = 1) -> None:
        """From now on it is written down."""
        generation_id = live.key.request_id
        nothing = Extent.nothing(len(live.sequences))
        self._pages[generation_id] = _Page(live, origin, Claim(self.owner, epoch), nothing)
        self._mark(generation_id)

    async def catch_up(self, generation_id: str) -> None:
        """Until all that is known of it now is stored, or the store is away. Never raises."""
        page = self._pages.get(generation_id)
        if page is None or self._store.is_away or not page.has_news:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        page.waiters.append(waiter)
        self._mark(generation_id)
        await waiter

    def close(self, generation_id: str) -> None:
        """Forgets it, here and in the store."""
        page = self._pages.pop(generation_id, None)
        if page is not None:
            self._dirty.pop(generation_id, None)
            page.release()
            self._closed[generation_id] = page.claim
            self._wake.set()

    def record(self, generation_id: str) -> tuple[GenerationRecord, int]:
        """What is known here of one that is open, and its epoch."""
        page = self._pages[generation_id]
        record = read_record([whole_entry(page.live, page.origin).SerializeToString()])
        assert record is not None, generation_id
        return record, page.claim.epoch

    async def find(self, generation_id: str) -> Found | None:
        """None when there is no such record, or nobody may go on with it. Raises StoreAway."""
        found = await self._store.read(generation_id)
        if found is None or found.claim.owner == _CANCELLED_OWNER:
            return None
        record = read_record(found.entries)
        if record is None:
            log.warning("the record of %s cannot be read", generation_id)
        return None if record is None else Found(record, found.claim)

    async def take(self, generation_id: str, found: Found, *, to_cancel: bool = False) -> int | None:
        """Makes it this router's own, or nobody's; its new epoch, or None when another was faster. Raises StoreAway."""
        owner = _CANCELLED_OWNER if to_cancel else self.owner
        wanted = Claim(owner, found.claim.epoch + 1)
        is_taken = await self._store.take(generation_id, found.claim, wanted, self._ttl_s)
        return wanted.epoch if is_taken else None

    def _mark(self, generation_id: str) -> None:
        self._dirty[generation_id] = None
        self._wake.set()

    def _on_back(self) -> None:
        """What was written meanwhile is missing, and whatever was there may be."""
        for generation_id in self._pages:
            self._mark(generation_id)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(min(REFRESH_S, self._ttl_s / 3))
            self._on_back()

    async def _write_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty or self._closed:
                await self._write_some()

    async def _write_some(self) -> None:
        """One batch. What goes wrong in it holds nobody up."""
        batch: list[_Writing] = []
        try:
            if self._closed:
                closed, self._closed = self._closed, {}
                await self._store.delete(list(closed.items()))
            self._fill(batch)
            if batch:
                outcomes = await self._store.write([writing.write for writing in batch])
                fenced = [w for w, outcome in zip(batch, outcomes, strict=True) if self._is_fenced(w, outcome)]
                await asyncio.gather(*map(self._lose, fenced))
        except StoreAway:
            self._dirty.clear()
            for page in self._pages.values():
                page.is_whole_due = True
                page.release()
        except Exception:
            log.exception("a batch of the journal could not be written")
            for writing in batch:
                writing.page.is_whole_due = True
        finally:
            for writing in batch:
                writing.release()

    def _fill(self, batch: list[_Writing]) -> None:
        """With what is due, within bounds."""
        size_bytes = 0
        for generation_id in list(islice(self._dirty, MOST_IN_BATCH)):
            if size_bytes >= MOST_BATCH_BYTES:
                break
            del self._dirty[generation_id]
            page = self._pages[generation_id]
            page.number += 1
            extent = Extent.of(page.live)
            entry = whole_entry(page.live, page.origin) if page.is_whole_due else entry_since(page.live, page.stored)
            data = entry.SerializeToString()
            size_bytes += len(data)
            write = Write(generation_id, page.claim, page.number, data, page.is_whole_due, self._ttl_s)
            batch.append(_Writing(page, write, extent, page.waiters))
            page.waiters = []

    def _is_fenced(self, writing: _Writing, outcome: Outcome) -> bool:
        """Notes what became of a write, unless that was in vain."""
        page, generation_id = writing.page, writing.write.key
        if self._pages.get(generation_id) is not page:
            return False  # it was closed meanwhile
        if outcome is Outcome.DONE:
            page.stored, page.is_whole_due = writing.extent, False
            writing.release()
        elif outcome is Outcome.MISSING:
            page.is_whole_due = True
            page.waiters, writing.waiters = writing.waiters + page.waiters, []
            self._mark(generation_id)
        else:
            return True
        return False

    async def _lose(self, writing: _Writing) -> None:
        """Who waits for the write is told nothing before it is known whose the record is now."""
        page, generation_id = writing.page, writing.write.key
        try:
            found = await self._store.read(generation_id)
        except StoreAway:
            found = None
        if self._pages.get(generation_id) is page:
            del self._pages[generation_id]
            self._dirty.pop(generation_id, None)
            page.release()
            self._on_fenced(generation_id, found is not None and found.claim.owner == _CANCELLED_OWNER)
