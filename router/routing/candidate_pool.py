"""The workers that may get new work of one role, kept as they come and go instead of listed for each decision.

Answers what decisions ask of all of them at once without looking at each: how many there are, what their pools hold
together, which have certain weights, and which come first by a key, such as the time for which a worker is busy. A key
is computed again only for workers that have changed since. Pure: knows no connection and no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

from cluster.step_cost import StepCost, UsualCost
from router.routing.prefix_index import MOST_HOLDERS, Candidate, Depths, Holders, PromptHashes, Step

C = TypeVar("C", bound=Candidate)
Some = Sequence[Candidate]
"""A pool, or a list of a few."""
Key = Callable[[C], Any]
"""A worker's place in a ranking: smaller ones come first."""

FEW = 16
"""Sequence[Candidate] of a role that a decision looks at one by one; of more, only those that may be the best."""
MOST_CHANGED = 32
"""Workers whose places are looked up together; more never wait for the next decision."""


def _id_of(candidate: Candidate) -> str:
    return candidate.worker_id


class Ranking(Generic[C]):
    """Workers by a key, and by id among equals. A sorted list: to insert moves 32 KB at most among 4,096 workers."""

    def __init__(self, key: Key[C]) -> None:
        self._key = key
        self._order: list[tuple[Any, str]] = []
        self._places: dict[str, tuple[Any, str]] = {}

    def __iter__(self) -> Iterator[str]:
        return (worker_id for _, worker_id in self._order)

    def first(self, count: int) -> list[str]:
        """The ids of so many that come first."""
        return [worker_id for _, worker_id in self._order[:count]]

    def place(self, worker: C) -> None:
        """Adds a worker, or moves it to where it belongs now."""
        key, old = self._key(worker), self._places.get(worker.worker_id)
        if old is not None:
            if old[0] == key:
                return
            del self._order[bisect_left(self._order, old)]
        self._places[worker.worker_id] = new = key, worker.worker_id
        insort(self._order, new)

    def discard(self, worker_id: str) -> None:
        old = self._places.pop(worker_id, None)
        if old is not None:
            del self._order[bisect_left(self._order, old)]

    def place_of(self, worker: C) -> tuple[Any, str]:
        """The key and the id by which a worker has its place."""
        return self._places[worker.worker_id]


class _Member(NamedTuple):
    """A worker with what it counted for when it was added."""

    kv_tokens: int
    max_num_seqs: int
    weights_revision: str
    cache: tuple[Holders, int] | None
    """The table in which its cached blocks are, and their size."""

    @classmethod
    def of(cls, candidate: Candidate) -> _Member:
        index = candidate.prefix_index
        cache = None if index is None else (index.holders, index.block_size)
        return cls(candidate.kv_tokens, candidate.max_num_seqs, candidate.weights_revision, cache)


class CandidatePool(Sequence[C]):
    """A sequence in the order of ids. `touch` a worker whose load or costs have changed, `add` one whose size has."""

    def __init__(self, candidates: Iterable[C] = (), *, revision: str | None = None) -> None:
        """`revision`: all have these weights; None: any."""
        self.kv_tokens = 0
        """Of all KV pools together."""
        self.max_num_seqs = 0
        """Sequences that all decode at a time."""
        self.num_sized = 0
        """Workers of which that is known."""
        self._in_order: list[C] = []
        self._by_id: dict[str, C] = {}
        self._members: dict[str, _Member] = {}
        self._costs: dict[str, StepCost] = {}
        """Of those that have measured it."""
        self._usual_cost = UsualCost()
        self._caches = Counter[tuple[Holders, int]]()
        """Tables and block sizes, with the number of workers that have them."""
        self._rankings: dict[Key[C], Ranking[C]] = {}
        self._changed: dict[str, None] = {}
        """Workers whose places in the rankings are to be looked up again."""
        self._is_mixed = revision is None
        self._by_revision: dict[str, CandidatePool[C]] = {} if revision is None else {revision: self}
        for candidate in candidates:
            self.add(candidate)

    def __len__(self) -> int:
        return len(self._in_order)

    @overload
    def __getitem__(self, index: int) -> C: ...
    @overload
    def __getitem__(self, index: slice) -> list[C]: ...
    def __getitem__(self, index: int | slice) -> C | list[C]:
        return self._in_order[index]

    def __iter__(self) -> Iterator[C]:
        return iter(self._in_order)

    def __contains__(self, candidate: object) -> bool:
        return self._by_id.get(getattr(candidate, "worker_id", "")) is candidate

    def get(self, worker_id: str) -> C | None:
        return self._by_id.get(worker_id)

    def after(self, worker_id: str) -> C:
        """The worker that follows this id, which it need not have; the first one after the last."""
        index = bisect_right(self._in_order, worker_id, key=_id_of)
        return self._in_order[index % len(self._in_order)]

    @property
    def revisions(self) -> list[str]:
        """Of the weights that any of them has, in order."""
        return sorted(self._by_revision)

    def of_revision(self, revision: str) -> CandidatePool[C]:
        """Those that have these weights, as a pool that is kept as well."""
        found = self._by_revision.get(revision)
        return CandidatePool(revision=revision) if found is None else found

    def ranked(self, key: Key[C]) -> Iterator[C]:
        """All, by `key`, which depends on nothing but the worker, its load and its costs. The same function has the
        same ranking, which is kept from its first use on."""
        return map(self._by_id.__getitem__, self._ranking(key))

    def _ranking(self, key: Key[C]) -> Ranking[C]:
        ranking = self._rankings.get(key)
        if ranking is None:
            ranking = self._rankings[key] = Ranking(key)
            for candidate in self._in_order:
                ranking.place(candidate)
        if self._changed:
            self._replace_changed()
        return ranking

    def holders(self, prompt: PromptHashes, key: Key[C], each: int, most: int) -> Iterator[tuple[C, Any, int]]:
        """Yields workers whose caches hold the beginning of a prompt, each with its key and the tokens that they hold.

        Those that hold the most come first, until there are `most`, and at last some of those that are most often met
        (all have the same system prompt, say). Of those that hold equally much: the first `each` by `key`; of many,
        those that come first among some.
        """
        ranking = self._ranking(key)
        for table, block_size in self._caches:
            depths, num_found = prompt.depths(table, block_size), 0
            widest = depths.widest
            for step in depths.deepest_first():
                if num_found >= most:
                    break
                found = self._holders_of(depths, step, ranking, each) if step is not widest else []
                num_found += len(found)
                for worker in found:
                    yield worker, ranking.place_of(worker)[0], step.depth * block_size
            if widest is not None:
                for worker in self._holders_of(depths, widest, ranking, each):
                    yield worker, ranking.place_of(worker)[0], widest.depth * block_size

    def _holders_of(self, depths: Depths, step: Step, ranking: Ranking[C], each: int) -> list[C]:
        """Some that hold as much as this, and no more."""
        found = list[C]()
        if step.holding.bit_count() > MOST_HOLDERS:
            found = self._first_holders(ranking, step.holding, each)
        if not found:
            found = [worker for i in depths.ids(step) if (worker := self._by_id.get(i)) is not None]
        return sorted(found, key=ranking.place_of)[:each] if len(found) > each else found

    def _first_holders(self, ranking: Ranking[C], holding: int, each: int) -> list[C]:
        found = list[C]()
        for worker in map(self._by_id.__getitem__, ranking.first(MOST_HOLDERS)):
            index = worker.prefix_index
            if index is not None and index.bit & holding:
                found.append(worker)
                if len(found) == each:
                    break
        return found

    @property
    def usual_cost(self) -> UsualCost:
        """Of all that have measured what their steps cost."""
        self._replace_changed()
        return self._usual_cost

    def add(self, candidate: C) -> None:
        """Adds a worker, or takes over what has changed of one that is here."""
        worker_id = candidate.worker_id
        member = _Member.of(candidate)
        if candidate in self and self._members[worker_id] == member:
            self._place(candidate)
            if self._is_mixed:
                self._by_revision[member.weights_revision].add(candidate)
            return
        self.discard(candidate)
        self._members[worker_id], self._by_id[worker_id] = member, candidate
        self._count(member, 1)
        insort(self._in_order, candidate, key=_id_of)
        self._place(candidate)
        if self._is_mixed:
            revision = member.weights_revision
            self._by_revision.setdefault(revision, CandidatePool(revision=revision)).add(candidate)

    def discard(self, candidate: C) -> None:
        worker_id = candidate.worker_id
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        del self._by_id[worker_id]
        self._changed.pop(worker_id, None)
        self._count(member, -1)
        del self._in_order[bisect_left(self._in_order, worker_id, key=_id_of)]
        self._take_cost(worker_id, None)
        for ranking in self._rankings.values():
            ranking.discard(worker_id)
        if self._is_mixed:
            alike = self._by_revision[member.weights_revision]
            alike.discard(candidate)
            if not alike:
                del self._by_revision[member.weights_revision]

    def has_sizes_of(self, candidate: C) -> bool:
        """Whether a worker that is here counts for what it has now."""
        return self._members.get(candidate.worker_id) == _Member.of(candidate)

    def touch(self, worker_id: str) -> None:
        """The load or the costs of a worker have changed; without effect for one that is not here."""
        member = self._members.get(worker_id)
        if member is None:
            return
        self._changed[worker_id] = None
        if len(self._changed) >= MOST_CHANGED:
            self._replace_changed()
        if self._is_mixed:
            self._by_revision[member.weights_revision].touch(worker_id)

    def _replace_changed(self) -> None:
        for worker_id in self._changed:
            self._place(self._by_id[worker_id])
        self._changed.clear()

    def _place(self, candidate: C) -> None:
        self._take_cost(candidate.worker_id, candidate.step_cost)
        for ranking in self._rankings.values():
            ranking.place(candidate)

    def _take_cost(self, worker_id: str, cost: StepCost | None) -> None:
        last = self._costs.get(worker_id)
        if cost is last:
            return
        if last is not None:
            self._usual_cost.remove(self._costs.pop(worker_id))
        if cost is not None:
            self._usual_cost.add(cost)
            self._costs[worker_id] = cost

    def _count(self, member: _Member, sign: int) -> None:
        self.kv_tokens += sign * member.kv_tokens
        self.max_num_seqs += sign * member.max_num_seqs
        self.num_sized += sign * bool(member.max_num_seqs)
        if member.cache is not None:
            self._caches[member.cache] += sign
            if not self._caches[member.cache]:
                del self._caches[member.cache]


def of_revision(candidates: Some, revision: str) -> Some:
    """Those that have these weights."""
    if isinstance(candidates, CandidatePool):
        return candidates.of_revision(revision)
    return [candidate for candidate in candidates if candidate.weights_revision == revision]


def by_revision(prefill: Some, decode: Some) -> Iterator[tuple[Some, Some]]:
    """Yields the workers of both roles for each revision of the weights that a decode worker has."""
    revisions = decode.revisions if isinstance(decode, CandidatePool) else sorted({d.weights_revision for d in decode})
    for revision in revisions:
        yield of_revision(prefill, revision), of_revision(decode, revision)


def first(candidates: Some, key: Key[Candidate]) -> Candidate:
    """The one with the smallest key, by id among equals."""
    if isinstance(candidates, CandidatePool):
        found: Candidate = next(candidates.ranked(key))
        return found
    return min(candidates, key=lambda candidate: (key(candidate), candidate.worker_id))
