"""Sessions whose blocks a tier gives up last, for a time: an order of eviction, which holds nothing.

`Retention` knows which blocks those are, by their keys, at most `limit` of them; `EvictionOrder` keeps what can be
given up, those that are not retained first. Knows no tier, and time only as numbers. Used from one thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_SHARED = 16
"""How many times a tier's limit all sessions together may have, each block counted for each session that has it."""


_FEW_ENDS = 64


class SessionName(NamedTuple):
    """Sessions of different tenants are different."""

    tenant: str
    session_id: str


@dataclass(frozen=True)
class Session:
    """The session that a request belongs to, where its KV is to be kept."""

    name: SessionName
    ttl_s: float
    """Seconds after its last turn."""


class EvictionOrder(MutableMapping[K, V]):
    """The least recently used first, and those that are retained behind all others. What is retained no more comes
    first of all."""

    def __init__(self, is_retained: Callable[[K], bool], kept: Mapping[K, V] | None = None) -> None:
        """`kept`: what there is, the least recently used first, none of it retained."""
        self._is_retained = is_retained
        self._usual: OrderedDict[K, V] = OrderedDict(kept or {})
        self._retained: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._usual or key in self._retained

    def __getitem__(self, key: K) -> V:
        return self._of(key)[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._usual.pop(key, None)
        self._retained.pop(key, None)
        (self._retained if self._is_retained(key) else self._usual)[key] = value

    def __delitem__(self, key: K) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[K]:
        return chain(self._usual, self._retained)

    def __len__(self) -> int:
        return len(self._usual) + len(self._retained)

    def move_to_end(self, key: K) -> None:
        """It has been used."""
        self._of(key).move_to_end(key)

    def sort_in(self, keys: Iterable[K]) -> None:
        """Whether these are retained has changed, as far as they are here. Of a table in order the end goes first."""
        here = [key for key in keys if key in self]
        for key in here:
            if key in self._retained and not self._is_retained(key):
                self._usual[key] = self._retained.pop(key)
                self._usual.move_to_end(key, last=False)
        for key in reversed(here):
            if self._is_retained(key):
                self[key] = self.pop(key)

    def _of(self, key: K) -> OrderedDict[K, V]:
        return self._retained if key in self._retained else self._usual


@dataclass(frozen=True)
class _Turn(Generic[K]):
    """The last turn of a session: all of its blocks that are retained."""

    keys: tuple[K, ...]
    until: float


class Retention(Generic[K]):
    """The sessions of one tier, of which it retains `limit` blocks at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.on_change: Callable[[Iterable[K]], None] = lambda keys: None
        """Told the blocks that are retained, or not, other than before."""
        self._tenants: dict[str, OrderedDict[str, _Turn[K]]] = {}
        """Turns by session, the least recently used first."""
        self._num_of: Counter[str] = Counter()
        """Blocks by tenant, each as often as sessions of it have it."""
        self._owners: Counter[K] = Counter()
        self._ends: list[tuple[float, SessionName]] = []
        """A heap of the ends of all turns; a session with several is over with its last one."""
        self._most_ends = _FEW_ENDS

    def __contains__(self, key: K) -> bool:
        return key in self._owners

    def __len__(self) -> int:
        """Blocks that are retained, wherever they are now."""
        return len(self._owners)

    def sessions(self) -> Iterator[tuple[SessionName, Sequence[K], float]]:
        """Yields each with its blocks, and when its time is over."""
        for tenant, turns in self._tenants.items():
            for session_id, turn in turns.items():
                yield SessionName(tenant, session_id), turn.keys, turn.until

    def retain(self, name: SessionName, keys: Iterable[K], until: float) -> None:
        """Retains these in place of what the session had, of more than the limit the first; where they are a part of
        that, as of a turn that was cut off, it stays."""
        had = self._turn_of(name)
        new = tuple(dict.fromkeys(keys))[: self.limit]
        turn: _Turn[K] = _Turn(had.keys if had is not None and set(new) <= set(had.keys) else new, until)
        changed = dict.fromkeys(self._remove(name))
        if turn.keys:
            self._tenants.setdefault(name.tenant, OrderedDict())[name.session_id] = turn
            self._num_of[name.tenant] += len(turn.keys)
            self._owners.update(turn.keys)
            changed.update(dict.fromkeys(turn.keys))
            heappush(self._ends, (until, name))
            self._forget_ends()
        while len(self._owners) > self.limit or self._num_of.total() > MOST_SHARED * self.limit:
            changed.update(dict.fromkeys(self._remove(self._next_to_go(name))))
        self.on_change(changed)

    def end(self, name: SessionName) -> None:
        """Retains a session no more, if it does."""
        self.on_change(self._remove(name))

    def expire(self, now: float) -> None:
        """Ends the sessions whose time is over, the first one first."""
        while self._ends and self._ends[0][0] <= now:
            _, name = heappop(self._ends)
            turn = self._turn_of(name)
            if turn is not None and turn.until <= now:
                self.end(name)

    def clear(self) -> None:
        for name in [name for name, _, _ in self.sessions()]:
            self.end(name)

    def _forget_ends(self) -> None:
        """Drops those of earlier turns, once they may be half of all."""
        if len(self._ends) > self._most_ends:
            self._ends = [(until, name) for name, _, until in self.sessions()]
            heapify(self._ends)
            self._most_ends = max(_FEW_ENDS, 2 * len(self._ends))

    def _next_to_go(self, newest: SessionName) -> SessionName:
        """The least recently used session of the tenant that has the most, but for the one that came right now."""
        others = [t for t, turns in self._tenants.items() if t != newest.tenant or len(turns) > 1]
        tenant = max(others, key=lambda tenant: self._num_of[tenant])
        return SessionName(tenant, next(iter(self._tenants[tenant])))

    def _turn_of(self, name: SessionName) -> _Turn[K] | None:
        turns = self._tenants.get(name.tenant)
        return None if turns is None else turns.get(name.session_id)

    def _remove(self, name: SessionName) -> Sequence[K]:
        """Returns the blocks that nobody retains any more, in their order."""
        turn = self._turn_of(name)
        if turn is None:
            return ()
        turns = self._tenants[name.tenant]
        del turns[name.session_id]
        self._num_of[name.tenant] -= len(turn.keys)
        if not turns:
            del self._tenants[name.tenant], self._num_of[name.tenant]
        left: list[K] = []
        for key in turn.keys:
            self._owners[key] -= 1
            if not self._owners[key]:
                del self._owners[key]
                left.append(key)
        return left

    def check(self) -> list[str]:
        """Returns what is wrong with the books; nothing as a rule."""
        owners = Counter(key for _, keys, _ in self.sessions() for key in keys)
        wrong = [] if owners == self._owners else ["the owners of retained blocks are not those of the sessions"]
        ends = set(self._ends)
        wrong += [f"the end of {name} is not known" for name, _, until in self.sessions() if (until, name) not in ends]
        if len(owners) > self.limit:
            wrong.append(f"{len(owners)} blocks are retained, of at most {self.limit}")
        return wrong
