"""Workers that fetch prefixes from one another in a ring, for the model checker: each is a holder and a target at once.

Worker k holds a prefix of one block, which worker k + 1 fetches: a `handoff_model.Model` each, whose moves come in any
order. What they share is the pool of each worker, out of which a claimed prefix and a landing one take a block each;
where none is free, the prefix that nobody has claimed is evicted, and its fetch finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from handoff_model import Model, Move
from handoff_state import Bounds

from cluster.lifecycle import RequestKey

KEY = RequestKey("q0", 1)


@dataclass(frozen=True)
class RingBounds:
    """How large a ring is explored."""

    name: str
    num_workers: int = 2
    pool_blocks: int = 1
    num_faults: int = 0

    @property
    def of_fetch(self) -> Bounds:
        return Bounds(self.name, num_tokens=1, num_slots=1, num_faults=self.num_faults, num_kept=1)


class Ring:
    """One state. A fetch that a move does not concern is shared with the state before."""

    def __init__(self, bounds: RingBounds) -> None:
        self.bounds = bounds
        self.fetches = [Model(bounds.of_fetch) for _ in range(bounds.num_workers)]
        self._names = [fetch.freeze() for fetch in self.fetches]

    def fair_moves(self) -> list[Move]:
        return [(number, move) for number, fetch in enumerate(self.fetches) for move in self._moves(number, fetch)]

    def faults(self) -> list[Move]:
        """While the budget lasts; a worker that dies is the holder of one fetch and the target of another."""
        moves = [(k, move) for k, fetch in enumerate(self.fetches) for move in fetch.faults() if move[0] != "die"]
        is_over = not self.fetches[0].faults_left
        return [] if is_over else [*moves, *(("die", k) for k in range(len(self.fetches)) if not self._is_dead(k))]

    def after(self, move: Move) -> Ring:
        """The state after a move; raises Violation."""
        ring = Ring.__new__(Ring)
        ring.bounds, ring.fetches, ring._names = self.bounds, list(self.fetches), list(self._names)
        first, what = move
        if first == "die":
            assert isinstance(what, int)
            ring._put(what, self.fetches[what].after(("die", "s0")))
            ring._put(what - 1, self.fetches[what - 1].after(("die", "r")))
        else:
            assert isinstance(first, int) and isinstance(what, tuple)
            if what[0] == "reserve" and not self._num_free(self._target(first)):
                ring._evict(self._target(first))
            ring._put(first, ring.fetches[first].after(what))
        left = min(fetch.faults_left for fetch in ring.fetches)
        for number, fetch in enumerate(ring.fetches):
            if fetch.faults_left != left:
                other = fetch.clone()
                other.faults_left = left
                ring._put(number, other)
        return ring

    def freeze(self) -> tuple[object, ...]:
        """Equal for equal states."""
        return tuple(self._names)

    def check_end(self) -> None:
        """As `Model.check_end`: none of the fetches waits for another, and all is back. Raises Violation."""
        for fetch in self.fetches:
            fetch.check_end()

    def _moves(self, number: int, fetch: Model) -> Iterator[Move]:
        has_room = self._num_held(self._target(number)) < self.bounds.pool_blocks
        for move in fetch.fair_moves():
            if move[0] not in ("reserve", "refuse") or (move[0] == "reserve") == has_room:
                yield move

    def _target(self, number: int) -> int:
        return (number + 1) % len(self.fetches)

    def _is_dead(self, worker: int) -> bool:
        return "s0" in self.fetches[worker].dead

    def _is_claimed(self, worker: int) -> bool:
        side = self.fetches[worker].at_sender.get(KEY)
        return side is not None and side.holds_pages

    def _num_held(self, worker: int) -> int:
        side = self.fetches[worker - 1].at_receiver.get(KEY)
        return self._is_claimed(worker) + (side is not None and side.holds_pages and side.outcome != "ready")

    def _num_free(self, worker: int) -> int:
        """Blocks that neither somebody holds nor the prefix has, if it is there."""
        fetch = self.fetches[worker]
        is_cached = fetch.bounds.num_kept == 1 and not self._is_claimed(worker)
        return self.bounds.pool_blocks - self._num_held(worker) - is_cached

    def _evict(self, worker: int) -> None:
        """The prefix that nobody has claimed is lost: a fetch that has not begun yet will find nothing."""
        fetch = self.fetches[worker].clone()
        if KEY not in fetch.opened:
            fetch.bounds = Bounds(**vars(fetch.bounds) | {"num_kept": 0})
            self._put(worker, fetch)

    def _put(self, number: int, fetch: Model) -> None:
        self.fetches[number] = fetch
        self._names[number] = (fetch.freeze(), fetch.bounds.num_kept)
