"""Whose turn it is among requests that wait: classes by priority, tenants of a class by weight, then by arrival.

    those that ran before -> the highest class -> the tenant with the lowest start tag -> its oldest request

A class below is not starved: while it waits, an eighth of the work goes to the classes below the highest, to that of
them whose oldest head has waited longest. Within a class it is start-time fair queueing (Goyal, Vin, Cheng, 1996): a
tenant's next request is tagged with the later of the class's virtual time and the end of the one before it, which is
its tag + cost / weight. Two tenants that both wait are never further apart than one request of each. A tenant that
comes back has no claim from the time that it did not wait.

Pure: no clock, no request, only ids, tenants and costs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

LOWER_SHARE = 8
"""One in so many parts of the work goes to lower classes while they wait."""


@dataclass(frozen=True)
class QueueEntry:
    """One that waits. `cost`: tokens of prompt and most output."""

    entry_id: str
    tenant: str
    weight: float
    priority: int
    cost: int
    arrival: int
    """Counts up."""


@dataclass
class _Tenant:
    waiting: OrderedDict[str, QueueEntry] = field(default_factory=OrderedDict)
    cost: int = 0
    """Of all that wait."""
    start: float = 0.0
    """Tag of the first that waits, or, while none does, the end of the last that left."""

    @property
    def head(self) -> QueueEntry:
        return next(iter(self.waiting.values()))


class _Class:
    """One priority: its tenants and its virtual time. A tenant without requests is kept while it is ahead of that."""

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant] = {}
        self.backlogged: dict[str, _Tenant] = {}
        self.virtual = 0.0
        self.cost = 0

    def add(self, entry: QueueEntry) -> None:
        tenant = self.tenants.setdefault(entry.tenant, _Tenant())
        if not tenant.waiting:
            tenant.start = max(tenant.start, self.virtual)
            self.backlogged[entry.tenant] = tenant
        tenant.waiting[entry.entry_id] = entry
        tenant.cost += entry.cost
        self.cost += entry.cost

    def first(self) -> QueueEntry:
        name = min(self.backlogged, key=lambda n: (self.backlogged[n].start, self.backlogged[n].head.arrival))
        return self.backlogged[name].head

    def oldest(self) -> int:
        """When the oldest of the tenants' first came."""
        return min(tenant.head.arrival for tenant in self.backlogged.values())

    def remove(self, entry: QueueEntry, *, is_served: bool) -> None:
        tenant = self.tenants[entry.tenant]
        del tenant.waiting[entry.entry_id]
        tenant.cost -= entry.cost
        self.cost -= entry.cost
        if is_served:
            self.virtual = max(self.virtual, tenant.start)
            tenant.start += entry.cost / entry.weight
        if not tenant.waiting:
            del self.backlogged[entry.tenant]
        for name in [n for n, t in self.tenants.items() if not t.waiting and t.start <= self.virtual]:
            del self.tenants[name]

    def ahead_of(self, name: str, weight: float) -> float:
        """Cost of what runs before a new request of a tenant, at most."""
        own = self.tenants.get(name)
        tag = max(self.virtual, own.start) if own else self.virtual
        ahead = float(own.cost) if own else 0.0
        tag += ahead / weight
        for other in (other for other_name, other in self.backlogged.items() if other_name != name):
            start = other.start
            for entry in other.waiting.values():
                if start > tag:
                    break
                ahead += entry.cost
                start += entry.cost / entry.weight
        return ahead

    def in_order(self) -> Iterator[QueueEntry]:
        """As if nothing else came."""
        heads = [(t.start, t.head.arrival, n, iter(t.waiting.values())) for n, t in self.backlogged.items()]
        queue = [(start, arrival, name, next(rest), rest) for start, arrival, name, rest in heads]
        heapq.heapify(queue)
        while queue:
            start, _, name, entry, rest = heapq.heappop(queue)
            yield entry
            following = next(rest, None)
            if following is not None:
                tag = start + entry.cost / entry.weight
                heapq.heappush(queue, (tag, following.arrival, name, following, rest))


class FairOrder:
    """All that wait, by id."""

    def __init__(self) -> None:
        self._entries: dict[str, QueueEntry] = {}
        self._returned: OrderedDict[str, QueueEntry] = OrderedDict()
        self._classes: dict[int, _Class] = {}
        self._arrivals = itertools.count()
        self._owed = 0.0
        """Work that higher classes were given while lower ones waited, less what those got for it."""
        self._of_tenant: dict[str, tuple[int, int]] = {}
        self.cost = 0
        """Of all."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry_id: str, *, tenant: str, weight: float, priority: int, cost: int) -> None:
        """Raises ValueError for an id that waits already, a cost below 1 or a weight that is not above 0."""
        if entry_id in self._entries or cost < 1 or not weight > 0:
            raise ValueError(f"cannot queue {entry_id!r} with weight {weight} and cost {cost}")
        entry = QueueEntry(entry_id, tenant, weight, priority, cost, next(self._arrivals))
        self._note(entry, 1)
        self._classes.setdefault(priority, _Class()).add(entry)

    def add_returned(self, entry_id: str, *, tenant: str, cost: int) -> None:
        """One that ran before: at the head of all."""
        entry = QueueEntry(entry_id, tenant, 1.0, 0, cost, next(self._arrivals))
        self._note(entry, 1)
        self._returned[entry_id] = entry
        self._returned.move_to_end(entry_id, last=False)

    def first(self) -> str:
        """Whose turn it is. Raises KeyError when nobody waits."""
        return self._choose().entry_id

    def serve(self) -> str:
        """Takes out whose turn it is. Raises KeyError when nobody waits."""
        entry = self._choose()
        if entry.entry_id not in self._returned:
            self._settle(entry)
        self._take_out(entry, is_served=True)
        return entry.entry_id

    def remove(self, entry_id: str) -> None:
        """It left without having been served; what it would have cost is not charged."""
        self._take_out(self._entries[entry_id], is_served=False)

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """How many of a tenant's requests wait, and what they cost."""
        return self._of_tenant.get(tenant, (0, 0))

    def ahead_of(self, tenant: str, weight: float, priority: int) -> float:
        """Cost of what runs before a new request, if nothing else comes."""
        ahead = float(sum(entry.cost for entry in self._returned.values()))
        below = 0
        for number, one in self._classes.items():
            if number > priority:
                ahead += one.cost
            elif number == priority:
                ahead += one.ahead_of(tenant, weight)
            else:
                below += one.cost
        return ahead + min(below, ahead / (LOWER_SHARE - 1))

    def in_order(self) -> Iterator[str]:
        """As they will run if nothing else comes, but for the share of lower classes."""
        yield from list(self._returned)
        for number in sorted(self._classes, reverse=True):
            yield from [entry.entry_id for entry in self._classes[number].in_order()]

    def _choose(self) -> QueueEntry:
        if self._returned:
            return next(iter(self._returned.values()))
        if not self._classes:
            raise KeyError("nobody waits")
        highest = self._classes[max(self._classes)]
        lower = self._lower()
        if lower is not None and self._owed >= (LOWER_SHARE - 1) * lower.cost:
            return lower
        return highest.first()

    def _lower(self) -> QueueEntry | None:
        """Who is next of the classes below the highest."""
        numbers = sorted(self._classes)[:-1]
        if not numbers:
            return None
        return min((self._classes[number] for number in numbers), key=_Class.oldest).first()

    def _settle(self, entry: QueueEntry) -> None:
        """Notes what the higher classes owe the lower ones."""
        if len(self._classes) == 1:
            self._owed = 0.0
        elif entry.priority == max(self._classes):
            self._owed += entry.cost
        else:
            self._owed = max(0.0, self._owed - (LOWER_SHARE - 1) * entry.cost)

    def _take_out(self, entry: QueueEntry, *, is_served: bool) -> None:
        self._note(entry, -1)
        if self._returned.pop(entry.entry_id, None) is not None:
            return
        one = self._classes[entry.priority]
        one.remove(entry, is_served=is_served)
        if not one.backlogged:  # a busy period is over: who was ahead in it is forgotten
            del self._classes[entry.priority]

    def _note(self, entry: QueueEntry, sign: int) -> None:
        number, cost = self.of_tenant(entry.tenant)
        total = (number + sign, cost + sign * entry.cost)
        self.cost += sign * entry.cost
        if total[0]:
            self._of_tenant[entry.tenant] = total
        else:
            del self._of_tenant[entry.tenant]
        if sign > 0:
            self._entries[entry.entry_id] = entry
        else:
            del self._entries[entry.entry_id]
