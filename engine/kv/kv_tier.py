"""The index of one tier of KV below the device's pool: which block's content lies in which slot of it.

A slot is free, moving (content is on its way in, nobody finds it yet) or kept (findable by its key, the least recently
used is given up first); one that is kept may be pinned while it is read, and stays then. Invariant, always:
free + moving + kept == total; `check` proves it. Decides only: what moves the bytes is `kv_transfer.tier_copies`.
Used from one thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Literal, TypeVar

from engine.kv.retention import EvictionOrder, Retention

KvTierName = Literal["device", "host", "disk", "store"]
"""Where KV lies: in the device's pool, or in a tier below it."""
TierKey = tuple[int, bytes]
"""The group of layers, and the digest (`cluster.prefix_hash`) of a full block's tokens and all before them."""

MOST_BLOCKS = 64
"""Blocks of one move: the next one begins when it has ended."""
Item = TypeVar("Item")


class MoveKind(Enum):
    """From where to where blocks are copied."""

    SAVE = "save"
    """From the pool to host memory."""
    LOAD = "load"
    """From host memory to the pool."""
    SPILL = "spill"
    """From host memory to the disk."""
    READ = "read"
    """From the disk to the pool."""
    PUSH = "push"
    """From host memory to the store."""
    FETCH = "fetch"
    """From the store to the pool."""

    @property
    def is_up(self) -> bool:
        """Whether it ends in the pool."""
        return self in FROM


FROM: dict[MoveKind, KvTierName] = {MoveKind.LOAD: "host", MoveKind.READ: "disk", MoveKind.FETCH: "store"}
"""The tier that each way up begins in, the quickest first."""


@dataclass(frozen=True)
class BlockMove:
    """Blocks that are copied, each from a block or slot to the one at the same place."""

    kind: MoveKind
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    keys: tuple[TierKey, ...]


@dataclass
class TierCounts:
    """Blocks since the start."""

    saved: int = 0
    loaded: int = 0
    spilled: int = 0
    read: int = 0
    pushed: int = 0
    fetched: int = 0
    unsaved: int = 0
    """Evicted from the pool before they were saved."""
    given_up: int = 0
    """That the last tier which had them has given up."""
    failed: int = 0
    """Whose copy failed."""
    declined: int = 0
    """Found in a tier, and computed because that was quicker."""

    def add(self, kind: MoveKind, number: int) -> None:
        """Blocks that were copied, and are wanted."""
        name = _COUNTED[kind]
        setattr(self, name, getattr(self, name) + number)


_COUNTED = {
    MoveKind.SAVE: "saved",
    MoveKind.LOAD: "loaded",
    MoveKind.SPILL: "spilled",
    MoveKind.READ: "read",
    MoveKind.PUSH: "pushed",
    MoveKind.FETCH: "fetched",
}


class KvTier:
    """Slots [0, num_slots), each of which holds one block of the pool above."""

    def __init__(self, num_slots: int) -> None:
        self.num_total = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._moving: set[int] = set()
        self._kept: OrderedDict[TierKey, int] | EvictionOrder[TierKey, int] = OrderedDict()  # in the order of giving up
        self._pins: Counter[int] = Counter()
        self._given_up: set[int] = set()
        """Slots that are pinned, and free as soon as they are not: nobody finds them any more."""

    def retain_for_sessions(self, share: float) -> Retention[TierKey]:
        """Gives up last from now on what is retained, so large a part of the tier at most."""
        retention: Retention[TierKey] = Retention(int(self.num_total * share))
        kept = EvictionOrder(retention.__contains__, self._kept)
        retention.on_change, self._kept = kept.sort_in, kept
        return retention

    def __contains__(self, key: TierKey) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_moving(self) -> int:
        return len(self._moving) + len(self._given_up)

    def __iter__(self) -> Iterator[TierKey]:
        """All that is kept, the least recently used first."""
        return iter(self._kept)

    def take(self, num_slots: int) -> tuple[list[int], list[TierKey]]:
        """Takes slots for content that is to come, fewer where pins leave no more; returns the keys given up for
        them."""
        num_short = num_slots - len(self._free)
        lost: list[TierKey] = []
        if num_short > 0:
            lost = list(islice((key for key, slot in self._kept.items() if not self._pins[slot]), num_short))
            self._free += [self._kept.pop(key) for key in lost]
        taken = self._free[: -num_slots - 1 : -1] if num_slots else []
        del self._free[len(self._free) - len(taken) :]
        self._moving.update(taken)
        return taken, lost

    def keep(self, slot: int, key: TierKey) -> None:
        """The content of a moving slot is there. One with the same content is kept already: the slot is free again."""
        self._moving.remove(slot)
        if key in self._kept:
            self._free.append(slot)
        else:
            self._kept[key] = slot

    def put_back(self, slot: int) -> None:
        """The content of a moving slot did not come, or nobody wants it any more."""
        self._moving.remove(slot)
        self._free.append(slot)

    def touch(self, key: TierKey) -> None:
        """Makes what is kept under a key, if anything, the most recently used."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def pin(self, key: TierKey) -> int:
        """Returns the slot of a key that is kept; it is not given up before `unpin`."""
        slot = self._kept[key]
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._given_up:
                self._given_up.remove(slot)
                self._free.append(slot)

    def adopt(self, slots: Iterable[tuple[int, TierKey]]) -> list[TierKey]:
        """Keeps what free slots hold from before, and returns it; of slots with the same content the first."""
        free, adopted = dict.fromkeys(self._free), list[TierKey]()
        for slot, key in slots:
            if slot in free and key not in self._kept:
                self._kept[key] = slot
                del free[slot]
                adopted.append(key)
        self._free = list(free)
        return adopted

    def drop(self, key: TierKey) -> bool:
        """Makes what a key names unfindable; False if it was not kept."""
        slot = self._kept.pop(key, None)
        if slot is None:
            return False
        if self._pins[slot]:
            self._given_up.add(slot)
        else:
            self._free.append(slot)
        return True

    def flush(self) -> None:
        """Drops everything."""
        for key in list(self._kept):
            self.drop(key)

    def check(self) -> list[str]:
        """Returns what is wrong with the books; nothing as a rule."""
        places = Counter([*self._free, *self._moving, *self._kept.values(), *self._given_up])
        wrong = [f"slot {slot} is in {count} places" for slot, count in places.items() if count != 1]
        missing = self.num_total - len(places)
        if missing:
            wrong.append(f"{missing} of {self.num_total} slots are nowhere")
        loose = self._pins.keys() - self._given_up - set(self._kept.values())
        return wrong + [f"slot {slot} is pinned, and holds nothing" for slot in loose]


def first_of(left: deque[Item]) -> list[Item]:
    """Takes as many from the front as one move has."""
    return [left.popleft() for _ in range(min(len(left), MOST_BLOCKS))]


def as_many_as(items: list[Item], slots: Sequence[int], left: deque[Item]) -> list[Item]:
    """Returns the items that there are slots for; puts the others back in front of what is `left`."""
    left.extendleft(reversed(items[len(slots) :]))
    return items[: len(slots)]


def halves_of(move: BlockMove) -> Iterator[BlockMove]:
    """Yields a move of several blocks as two."""
    half = len(move.keys) // 2
    for part in (slice(half), slice(half, None)):
        yield BlockMove(move.kind, move.sources[part], move.targets[part], move.keys[part])
