"""One rank's share of a pair of workers: its routes, what may touch each of their slots, and how it ends.

    FREE -> GATHERED -> POSTED -> FREE      sender: gather, send, sent
    FREE -> POSTED -> LANDED -> FREE        receiver: posted, arrived, written to the pages

Slot i of a link is slot i of each of its routes. A link that has ended does nothing more: its pairs are closed, and its
slots are let go of with them. Slots with operations posted on them are quarantined, that is, held, until their pair is
closed; for ever, if it cannot be. It copies nothing (`mover`) and moves nothing (`transport`). Safe from any thread.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from kv_transfer.actions import Range
from kv_transfer.codec import SlotCodec
from kv_transfer.failures import TransferFailed
from kv_transfer.layout import KvLayout
from kv_transfer.transports.interface import Pair

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairSpec:
    """A pair of workers, as a rank is told of it; transport, sizes and formats are the same on both sides."""

    pair_epoch: str
    store_address: str
    is_sender: bool
    remote: KvLayout
    transport: str
    wire_format: str
    chunk_tokens: int
    """Tokens of all layers that one slot holds."""
    num_slots: int


@dataclass(frozen=True)
class SlotRange:
    """A range of one request's KV and the slot it is gathered into or lands in."""

    pair_epoch: str
    slot: int
    tag: int
    """Names the chunk: what lands must carry the tag that was expected."""
    range: Range


class Use(Enum):
    """What may touch a slot."""

    FREE = "free"
    GATHERED = "gathered"
    POSTED = "posted"
    LANDED = "landed"


@dataclass(frozen=True, eq=False)
class Lane:
    """One route of a link, and what keeps its slots alive."""

    codec: SlotCodec
    pair: Pair
    slots: list[Tensor]


class Link:
    """The routes of one pair of workers on this rank."""

    def __init__(self, spec: PairSpec, stream: Any = None) -> None:
        """`stream`: the torch.cuda.Stream on which its pages are copied."""
        self.spec = spec
        self.stream = stream
        self.ended: str | None = None
        """Why it can be used no more."""
        self._uses = [Use.FREE] * spec.num_slots
        self._gathered: dict[int, list[int]] = {}  # slot -> bytes on each route
        self._lanes: list[Lane] = []
        self._held: list[Tensor] = []
        self._is_open = False
        self._lock = threading.Lock()

    @property
    def quarantined(self) -> list[Tensor]:
        """Slots that a pair may still touch although the link has ended."""
        with self._lock:
            return list(self._held)

    @property
    def num_landed(self) -> int:
        """Slots whose chunk has arrived and is being checked and written to the pages."""
        with self._lock:
            return self._uses.count(Use.LANDED) if self.ended is None else 0

    def add(self, codec: SlotCodec, pair: Pair) -> None:
        """One more route. Raises TransferFailed when the link has ended meanwhile; then the pair is closed."""
        with self._lock:
            if self.ended is None:
                self._lanes.append(Lane(codec, pair, list(pair.slots)))
                return
        pair.close()
        raise TransferFailed(f"pair {self.spec.pair_epoch} was given up while it opened: {self.ended}")

    def open(self) -> None:
        """All routes are there."""
        with self._lock:
            self._is_open = True

    def check(self, *, is_sender: bool, slot: int) -> None:
        """Raises TransferFailed unless the link can be used, and ValueError for a use that is not its own."""
        with self._lock:
            self._check_usable()
        if self.spec.is_sender is not is_sender:
            side = "sender" if self.spec.is_sender else "receiver"
            raise ValueError(f"pair {self.spec.pair_epoch} was opened as the {side}")
        if not 0 <= slot < self.spec.num_slots:
            raise ValueError(f"slot {slot} is outside [0, {self.spec.num_slots})")

    def begin_gather(self, slot: int) -> list[Lane]:
        """The slot is being overwritten: what it held is sent no more. Raises TransferFailed, ValueError."""
        with self._lock:
            self._check_usable()
            if self._uses[slot] is Use.POSTED:
                raise ValueError(f"slot {slot} is being sent; wait for it before it is used again")
            self._uses[slot] = Use.FREE
            return list(self._lanes)

    def end_gather(self, slot: int, sizes: list[int]) -> None:
        """The slot holds so many bytes on each route."""
        with self._lock:
            self._uses[slot] = Use.GATHERED
            self._gathered[slot] = sizes

    def post_send(self, slot: int) -> list[tuple[Lane, int]]:
        """The routes, and the bytes to send on each. Raises TransferFailed, ValueError."""
        with self._lock:
            lanes = self._post(slot, Use.GATHERED, "gather it first")
            return list(zip(lanes, self._gathered[slot], strict=True))

    def post_receive(self, slot: int) -> list[Lane]:
        """The routes to receive on. Raises TransferFailed, ValueError."""
        with self._lock:
            return self._post(slot, Use.FREE, "wait for it before it is used again")

    def arrived(self, slot: int) -> None:
        """What was to be received is there."""
        with self._lock:
            self._uses[slot] = Use.LANDED

    def free(self, slot: int) -> None:
        """Nothing is posted on the slot any more."""
        with self._lock:
            self._uses[slot] = Use.FREE

    def end(self, why: str) -> bool:
        """Closes all pairs, which wakes whoever waits on them; True for the call that did it."""
        with self._lock:
            if self.ended is not None:
                return False
            self.ended = why
            lanes, self._lanes = self._lanes, []
            posted = [slot for slot, use in enumerate(self._uses) if use in (Use.POSTED, Use.LANDED)]
            self._held = [lane.slots[slot] for lane in lanes for slot in posted]
        stuck: list[Tensor] = []
        for lane in lanes:
            try:
                lane.pair.close()
            except TransferFailed as error:
                stuck += [lane.slots[slot] for slot in posted]
                logger.error("pair %s: %s; its slots stay quarantined", self.spec.pair_epoch, error.message)
        with self._lock:
            self._held = stuck
        return True

    def _post(self, slot: int, expected: Use, remedy: str) -> list[Lane]:
        self._check_usable()
        if self._uses[slot] is not expected:
            raise ValueError(f"slot {slot} is {self._uses[slot].value}; {remedy}")
        self._uses[slot] = Use.POSTED
        return list(self._lanes)

    def _check_usable(self) -> None:
        if self.ended is not None or not self._is_open:
            why = self.ended or "it is still being opened"
            raise TransferFailed(f"pair {self.spec.pair_epoch} cannot be used: {why}")
