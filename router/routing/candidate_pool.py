"""The workers that may get new work of one role, kept as they come and go instead of listed for each decision.

Answers what decisions ask of all of them at once without looking at each: how many there are, what their pools hold
together, which have certain weights, and which come first by a key, such as the time for which a worker is busy. A key
is computed again only for workers that have changed since. Pure: knows no connection and no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, overload

from cluster.step_cost import StepCost, UsualCost
from router.routing.prefix_index import Candidate, Holders, PromptHashes

C = TypeVar("C", bound=Candidate)
Some = Sequence[Candidate]
"""A pool, or a list of a few."""
Key = Callable[[C], Any]
"""A worker's place in a ranking: smaller ones come first."""

FEW = 16
"""Sequence[Candidate] of a role that a decision looks at one by one; of more, only those that may be the best."""
MOST_HOLDERS = 64
"""Workers that hold equally much of a prompt, and are looked at one by one."""
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

    def first(self, count: int) -> Iterator[tuple[Any, str]]:
        """The places of so many that come first."""
        return islice(self._order, count)

    @property
    def least(self) -> Any:
        """The key of the one that comes first."""
        return self._order[0][0]

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

    def place_of(self, worker_id: str) -> tuple[Any, str]:
        """The key and the id by which a worker has its place."""
        return self._places[worker_id]


class _Member(NamedTuple):
    """A worker with what it counted for when it was added."""

    kv_tokens: int
    max_num_seqs: int
    weights_revision: str
    cache: tuple[Holders, int] | None
    """The table in which its cached blocks are, and their size."""
    bit: int
    """Its own in that table."""

    @classmethod
    def of(cls, candidate: Candidate) -> _Member:
        index = candidate.prefix_index
        cache, bit = (None, 0) if index is None else ((index.holders, index.block_size), index.bit)
        return cls(candidate.kv_tokens, candidate.max_num_seqs, candidate.weights_revision, cache, bit)


class CandidatePool(Sequence[C]):
    """A sequence in the order of ids. `touch` a worker whose load has changed, `place` one whose costs have, `add` one
    whose size has."""

    def __init__(self, candidates: Iterable[C] = (), *, revision: str | None = None) -> None:
        """`revision`: all have these weights; None: any."""
        self.kv_tokens = 0
        """Tokens of all KV pools together."""
        self.max_num_seqs = 0
        """Sequences that all decode at a time."""
        self.num_sized = 0
        """Workers of which that is known."""
        self._in_order: list[C] = []
        self._by_id: dict[str, C] = {}
        self._members: dict[str, _Member] = {}
        self._costs: dict[str, StepCost] = {}
        """Step costs of the workers that have measured them; where weights are mixed, those of each revision keep their
        own."""
        self._usual_cost = UsualCost()
        self._caches: dict[tuple[Holders, int], int] = {}
        """Tables and block sizes, with the bits of the workers that have them."""
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
        """The revisions of the weights that any of them has, in order."""
        return sorted(self._by_revision)

    def of_revision(self, revision: str) -> CandidatePool[C]:
        """Returns the workers that have these weights, as a pool that is kept as well."""
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

    def holders(self, prompt: PromptHashes, key: Key[C], saved: float, each: int, most: int) -> list[C]:
        """Returns `most` workers at most whose caches hold the beginning of a prompt: those that come first by `key`,
        less `saved` for each token that they hold.

        Those that hold the most are looked at first, until no other can come before them, or as many are found: then
        some follow of those that are most often met (all have the same system prompt, say). Of those that hold equally
        much: the first `each` by `key`; of many, those that come first among some.
        """
        ranking = self._ranking(key)
        found = list[tuple[Any, str]]()
        for (table, block_size), own in self._caches.items():
            depths, token = prompt.depths(table, block_size), block_size * saved
            for step in depths.deepest_first(own):
                if found and min(found)[0] <= ranking.least - step.depth * token:
                    break
                is_enough = len(found) >= most
                last = depths.widest(own) if is_enough else step
                if last is not None and last.depth <= step.depth:
                    places = self._holders_of(table, last.holding, ranking, each)
                    found += [(place - last.depth * token, worker_id) for place, worker_id in places]
                if is_enough:
                    break
        return [self._by_id[worker_id] for _, worker_id in sorted(found)[:most]]

    def deepest(self, prompt: PromptHashes, most: int = 4) -> list[C]:
        """Returns some of the workers that hold the longest beginning of a prompt, of those of each block size."""
        found = list[C]()
        for (table, block_size), own in self._caches.items():
            step = next(prompt.depths(table, block_size).deepest_first(own), None) if block_size else None
            if step is not None:
                found += [self._by_id[worker_id] for worker_id in islice(table.worker_ids(step.holding), most)]
        return found

    def _holders_of(self, table: Holders, holding: int, ranking: Ranking[C], each: int) -> list[tuple[Any, str]]:
        """Places in a ranking of some of these workers."""
        found = list[tuple[Any, str]]()
        if holding.bit_count() > MOST_HOLDERS:
            for place in ranking.first(MOST_HOLDERS):
                index = self._by_id[place[1]].prefix_index
                if index is not None and index.bit & holding:
                    found.append(place)
                    if len(found) == each:
                        return found
        if not found:
            found = [ranking.place_of(worker_id) for worker_id in islice(table.worker_ids(holding), MOST_HOLDERS)]
        return sorted(found)[:each] if len(found) > each else found

    @property
    def usual_cost(self) -> UsualCost:
        """The usual cost of all that have measured what their steps cost."""
        if not self._is_mixed:
            self._replace_changed()
            return self._usual_cost
        each = [pool.usual_cost for pool in self._by_revision.values()]
        return reduce(UsualCost.merge, each) if each else UsualCost()

    def add(self, candidate: C) -> None:
        """Adds a worker, or takes over what has changed of one that is here."""
        worker_id = candidate.worker_id
        member = _Member.of(candidate)
        if candidate in self and self._members[worker_id] == member:
            self.place(candidate)
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

    def place(self, candidate: C) -> None:
        """The costs of a worker that is here have changed."""
        self._place(candidate)
        if self._is_mixed:
            self._by_revision[self._members[candidate.worker_id].weights_revision].place(candidate)

    def touch(self, worker_id: str) -> None:
        """The load of a worker has changed; without effect for one that is not here."""
        member = self._members.get(worker_id)
        if member is None:
            return
        if self._rankings:
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
        if not self._is_mixed:
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
            self._caches[member.cache] = self._caches.get(member.cache, 0) ^ member.bit
            if not self._caches[member.cache]:
                del self._caches[member.cache]


def of_revision(candidates: Some, revision: str) -> Some:
    """Returns the workers that have these weights."""
    if isinstance(candidates, CandidatePool):
        return candidates.of_revision(revision)
    return [candidate for candidate in candidates if candidate.weights_revision == revision]


def find(candidates: Some, worker_id: str) -> Candidate | None:
    """Returns the one of that id; None: it is not among them."""
    if isinstance(candidates, CandidatePool):
        found: Candidate | None = candidates.get(worker_id)
        return found
    return next((candidate for candidate in candidates if candidate.worker_id == worker_id), None)


def deepest(candidates: Some, prompt: PromptHashes) -> Sequence[Candidate]:
    """Returns workers among which one holds the longest beginning of a prompt, if any holds some."""
    if isinstance(candidates, CandidatePool):
        return candidates.deepest(prompt)
    return candidates


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
