"""One response that a router works on in the background: its events so far, and how they are stored.

Events are stored as they come, with the hold of the router on the response, and told once they are. What another router
has changed meanwhile is not written over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from cluster.errors import BatonError, NotFound
from cluster.state import StoreAway
from router.api.call import TurnTokens
from router.responses.answers import Event
from router.responses.events import ResponseEvents
from router.responses.store import EVENTS_IN_PIECE, KeptResponse, ResponseStore, StoredResponse

log = logging.getLogger(__name__)

SPACING_S = 0.1
"""Least time between two writes of events."""
_AGAIN_S = 1.0
_AWAY_S = 60.0
"""An end is written for so long, where the store is away."""


class Lost(Exception):
    """Another one has changed the response: it was taken over, cancelled or deleted."""


class BackgroundRun:
    """A response that this router works on."""

    def __init__(
        self, store: ResponseStore, lease_s: float, kept: KeptResponse, events: ResponseEvents, names: Mapping[str, str]
    ) -> None:
        """`lease_s`: for how long each write holds it. `names`: of its body's fields, as `failure_of` takes them."""
        self._store = store
        self._lease_s = lease_s
        self.kept = kept
        self.events = events
        self.names = names
        self.log: list[Event] = []
        """All events of this run."""
        self.turns: list[TurnTokens] = []
        """As `ResponseCall.kept_turns`."""
        self.generation_id = kept.response.generation_id
        self.refusal: BatonError | None = None
        """Why it did not begin."""
        self.task: asyncio.Task[None] | None = None
        self.begun = asyncio.Event()
        """Set once it is known whether it begins."""
        self.grew = asyncio.Event()
        self.is_over = asyncio.Event()
        self.stored = asyncio.Event()
        """Set, and replaced, when more is stored."""
        self.renew_at = 0.0
        """By the monotonic clock."""

    @property
    def response(self) -> StoredResponse:
        return self.kept.response

    def tell(self, *events: Event) -> None:
        self.log += events
        self.grew.set()

    def tell_stored(self) -> None:
        self.stored.set()
        self.stored = asyncio.Event()

    async def store_all(self) -> None:
        """Stores events as they come, and renews the hold, until the run is over. Raises Lost."""
        is_away = False
        while not self.is_over.is_set():
            self.grew.clear()
            try:
                await self._store_events()
                is_away = False
            except StoreAway as error:
                if not is_away:
                    log.warning("events of response %s wait for the store: %s", self.response.response_id, error)
                is_away = True
            await within(SPACING_S if not is_away else _AGAIN_S, self.is_over)
            if not is_away:
                await within(self._lease_s / 3, self.grew)

    async def _store_events(self, *, is_last: bool = False) -> None:
        """Stores what was told and is not stored. Raises Lost or StoreAway."""
        response, told, num_events = self.response, self.events.told, len(self.log)
        if num_events == response.runs[-1] and not is_last and time.monotonic() < self.renew_at:
            return
        first = response.runs[-1] - response.runs[-1] % EVENTS_IN_PIECE
        size_bytes = response.size_bytes
        for begin in range(first, num_events, EVENTS_IN_PIECE):
            piece = self.log[begin : min(begin + EVENTS_IN_PIECE, num_events)]
            num_bytes = await self._store.put_events(response, begin // EVENTS_IN_PIECE, piece)
            size_bytes += num_bytes if len(piece) == EVENTS_IN_PIECE or is_last else 0
        answer = self.events.answer
        if is_last:
            size_bytes += await self._store.put_answer(response, answer, *self.turns[-1:])
        changed = replace(
            response,
            status=answer["status"] if is_last or answer["status"] == "in_progress" else response.status,
            generation_id=self.generation_id,
            runs=[*response.runs[:-1], num_events],
            position=told.position,
            size_bytes=size_bytes,
            held_until=0.0 if is_last else time.time() + self._lease_s,
        )
        kept = await self._store.replace(self.kept, changed)
        if kept is None:
            raise Lost
        self.kept, self.renew_at = kept, time.monotonic() + self._lease_s / 3
        self.tell_stored()

    async def store_end(self) -> None:
        """Stores the last events and the answer. Raises Lost or StoreAway."""
        until = time.monotonic() + _AWAY_S
        while True:
            try:
                await self._store_events(is_last=True)
                return
            except StoreAway:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def release(self) -> None:
        """Lets another router go on at once, unless one does already."""
        with suppress(StoreAway, NotFound):
            owner = self.response.owner
            while self.response.owner == owner and self.response.is_open:
                *before, num_events = self.response.runs  # a run that told nothing is none, and its router is not lost
                runs = [*before, num_events] if num_events else before
                free = replace(self.response, generation_id=self.generation_id, held_until=time.time(), runs=runs)
                if await self._store.replace(self.kept, free) is not None:
                    return
                self.kept = await self._store.find(self.response.tenant, self.response.response_id)  # a last write


async def within(limit_s: float, event: asyncio.Event) -> None:
    """Waits for an event, and no longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
