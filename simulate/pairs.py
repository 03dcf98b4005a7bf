"""Pairs of simulated ranks: what two workers have posted on a connection, and the transfer under way between them.

A pair is open once both sides have opened it. Sends and receives meet in their order, one at a time. When a side closes
it, whatever is posted on either side fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from engine.token_hash import StateArray
from kv_transfer.actions import Chunk
from simulate.wire import Flow, Flows, Nic
from worker.handoff_connection import Done


class PairRanks(Protocol):
    """The parts of the ranks on either side that a pair uses."""

    nic: Nic

    def arrived(self, pair: SimulatedPair) -> None: ...
    def answer(self, done: Done, error: str = "", size_bytes: int = 0) -> None: ...
    def fail(self, posted: Posted, error: str) -> None: ...


@dataclass(eq=False)
class Posted:
    """A send or a receive that waits for its end."""

    done: Done
    slot: int
    landing: tuple[Chunk, Sequence[int]] | None = None
    """The chunk that a receive lands, and the block table that it lands in; None: it is a send."""


class Gathered(NamedTuple):
    """A chunk in a sender's slot."""

    chunk: Chunk
    read: Callable[[], StateArray]
    """Its KV; where pages are shared, that of the sender's pages at that moment."""
    size_bytes: int
    complete_at: float
    """It lands no earlier than that."""


@dataclass(eq=False)
class PairEnd:
    """One worker's side of a pair."""

    ranks: PairRanks
    shares_pages: bool
    """The receiver reads the sender's own pages."""
    opened: Done | None = None
    is_closed: bool = False
    posted: deque[Posted] = field(default_factory=deque)
    slots: dict[int, Gathered] = field(default_factory=dict)
    """The chunks that a sender has gathered, by slot."""


class SimulatedPair:
    """Both sides of a connection's pair, by `is_sender`."""

    def __init__(self) -> None:
        self.ends: dict[bool, PairEnd] = {}
        self.is_open = False
        self.is_broken = False
        """A side has closed it."""
        self.moving: Flow | None = None

    def move(self, flows: Flows) -> None:
        """Sets the next transfer off, if both sides have posted it."""
        if not self.is_open or self.moving is not None or self.is_broken:
            return
        source, target = self.ends[True], self.ends[False]
        if not source.posted or not target.posted:
            return
        size_bytes = source.slots[source.posted[0].slot].size_bytes
        arrived = partial(target.ranks.arrived, self)
        self.moving = flows.transfer(source.ranks.nic, target.ranks.nic, size_bytes, arrived)

    def fail_all(self) -> None:
        """Whatever is posted on either side fails."""
        for end in self.ends.values():
            if end.opened is not None:
                opened, end.opened = end.opened, None
                end.ranks.answer(opened, "the pair was closed")
            while end.posted:
                end.ranks.fail(end.posted.popleft(), "the pair was closed")
