"""One rank's share of a pair of workers: its routes, what may touch each of their slots, its work, and how it ends.

    FREE -> GATHERED -> POSTED -> FREE      sender: gather, send, sent
    FREE -> POSTED -> LANDED -> FREE        receiver: posted, arrived, written to the pages

Slot i of a pair is slot i of each of its routes. A pair that has ended does nothing more: its routes are closed, and
its slots are released with them. Slots with operations posted on them are quarantined, that is, held, until their route
is closed; for ever, if it cannot be. What waits for the peer (to meet it, to finish a send or a receive) is queued as
work, which one thread does in order (`run_queue`); it ends with the pair. The pair copies nothing (`transfer_engine`)
and moves nothing (`transports`). Safe from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from cluster.errors import TransferFailed
from cluster.pb import rank_pb2
from kv_transfer.codec import ChunkCodec
from kv_transfer.transports.interface import Pair

logger = logging.getLogger(__name__)


class Use(Enum):
    """The operation that may touch a slot."""

    FREE = "free"
    GATHERED = "gathered"
    POSTED = "posted"
    LANDED = "landed"


@dataclass(frozen=True, eq=False)
class RouteEnd:
    """This rank's end of one route, and what keeps its slots alive."""

    codec: ChunkCodec
    pair: Pair
    slots: list[Tensor]


class RankPair:
    """The pair of one connection on this rank."""

    def __init__(self, spec: rank_pb2.OpenPair, stream: Any = None) -> None:
        """`stream`: the torch.cuda.Stream on which its pages are copied."""
        self.spec = spec
        self.epoch: str = spec.pair_epoch
        self.stream = stream
        self.ended: str | None = None
        """Why it can be used no more."""
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._uses = [Use.FREE] * spec.agreed.num_slots
        self._gathered: dict[int, tuple[list[int], Any]] = {}  # slot -> bytes on each route, event of the gather's end
        self._routes: list[RouteEnd] = []
        self._held: list[Tensor] = []
        self._is_open = False
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def enqueue(self, work: Callable[[], None]) -> bool:
        """Adds work for the pair's thread; False when the pair has ended, and nobody would do it."""
        with self._lock:
            if self.ended is None:
                self._queue.put(work)
            return self.ended is None

    def run_queue(self) -> None:
        """Does the work that is queued, in order; returns when the pair has ended and what was queued is done."""
        while (work := self._queue.get()) is not None:
            work()

    @property
    def quarantined(self) -> list[Tensor]:
        """Slots that a pair may still touch although this one has ended."""
        with self._lock:
            return list(self._held)

    @property
    def num_landed(self) -> int:
        """Slots whose chunk has arrived and is being checked and written to the pages."""
        with self._lock:
            return self._uses.count(Use.LANDED) if self.ended is None else 0

    def add_route(self, codec: ChunkCodec, pair: Pair) -> None:
        """Raises TransferFailed when the pair has ended meanwhile; then the route is closed."""
        with self._lock:
            if self.ended is None:
                self._routes.append(RouteEnd(codec, pair, list(pair.slots)))
                return
        pair.close()
        self.check_wanted()

    def check_wanted(self) -> None:
        """Raises TransferFailed when the pair was closed before it was open."""
        if self.ended is not None:
            raise TransferFailed(f"pair {self.epoch} was given up while it opened: {self.ended}")

    def open(self) -> None:
        """All routes are there."""
        with self._lock:
            self._is_open = True

    def check(self, *, is_sender: bool, slot: int) -> None:
        """Raises TransferFailed unless the pair can be used, and ValueError for a use that is not its own."""
        with self._lock:
            self._check_usable()
        if self.spec.is_sender is not is_sender:
            side = "sender" if self.spec.is_sender else "receiver"
            raise ValueError(f"pair {self.epoch} was opened as the {side}")
        if not 0 <= slot < len(self._uses):
            raise ValueError(f"slot {slot} is outside [0, {len(self._uses)})")

    def begin_gather(self, slot: int) -> list[RouteEnd]:
        """The slot is being overwritten: what it held is sent no more. Raises TransferFailed, ValueError."""
        with self._lock:
            self._check_usable()
            if self._uses[slot] is Use.POSTED:
                raise ValueError(f"slot {slot} is being sent; wait for it before it is used again")
            self._uses[slot] = Use.FREE
            return list(self._routes)

    def end_gather(self, slot: int, sizes: list[int], ended: Any = None) -> None:
        """The slot holds so many bytes on each route, on a GPU: once the event `ended` has happened."""
        with self._lock:
            self._uses[slot] = Use.GATHERED
            self._gathered[slot] = sizes, ended

    def post_send(self, slot: int) -> tuple[list[RouteEnd], list[int], Any]:
        """The routes, the bytes to send on each, the event of the gather's end. Raises TransferFailed, ValueError."""
        with self._lock:
            routes = self._post(slot, Use.GATHERED, "gather it first")
            return routes, *self._gathered.pop(slot)

    def post_receive(self, slot: int) -> list[RouteEnd]:
        """The routes to receive on. Raises TransferFailed, ValueError."""
        with self._lock:
            return self._post(slot, Use.FREE, "wait for it before it is used again")

    def arrived(self, slot: int) -> None:
        """The chunk has arrived."""
        with self._lock:
            self._uses[slot] = Use.LANDED

    def free(self, slot: int) -> None:
        """Nothing is posted on the slot any more."""
        with self._lock:
            self._uses[slot] = Use.FREE

    def end(self, why: str) -> bool:
        """Closes all routes, which wakes whoever waits on them, and the queue; True for the call that did it."""
        with self._lock:
            if self.ended is not None:
                return False
            self.ended = why
            self._queue.put(None)
            routes, self._routes = self._routes, []
            posted = [slot for slot, use in enumerate(self._uses) if use in (Use.POSTED, Use.LANDED)]
            self._held = [route.slots[slot] for route in routes for slot in posted]
        try:
            stuck = [slot for route in routes for slot in self._close(route, posted)]
            with self._lock:
                self._held = stuck
        finally:
            self._closed.set()
        return True

    def _close(self, route: RouteEnd, posted: list[int]) -> list[Tensor]:
        """Returns the slots that something may still write to."""
        try:
            route.pair.close()
        except TransferFailed as error:
            logger.error("pair %s: %s; its slots stay quarantined", self.epoch, error.message)
            return [route.slots[slot] for slot in posted]
        return []

    def await_closed(self) -> None:
        """Blocks until the routes of a pair that has ended are closed, whoever closes them."""
        self._closed.wait()

    def _post(self, slot: int, expected: Use, remedy: str) -> list[RouteEnd]:
        self._check_usable()
        if self._uses[slot] is not expected:
            raise ValueError(f"slot {slot} is {self._uses[slot].value}; {remedy}")
        self._uses[slot] = Use.POSTED
        return list(self._routes)

    def _check_usable(self) -> None:
        if self.ended is not None or not self._is_open:
            why = self.ended or "it is still being opened"
            raise TransferFailed(f"pair {self.epoch} cannot be used: {why}")
