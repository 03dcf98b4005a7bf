"""The order of waiting requests: classes by priority, tenants of a class by weight, then by arrival.

    requests that ran before -> the highest class -> the tenant with the lowest start tag -> its oldest request

Lower classes are not starved: while they wait, an eighth of the work goes to the classes below the highest, to the one
whose oldest head has waited longest. Within a class it is start-time fair queueing (Goyal, Vin, Cheng, 1996): a
tenant's next request is tagged with the later of the class's virtual time and the end of the request before it, which
is that one's tag + cost / weight. Two waiting tenants are never further apart than one request of each. A tenant that
comes back has no claim for the time in which it did not wait.

Pure: no clock, no request, only ids, tenants and costs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

LOWER_SHARE = 8
"""One part in this many of the work goes to lower classes while they wait."""


@dataclass(frozen=True)
class QueueEntry:
    """A waiting request. `cost`: tokens of its prompt and largest output."""

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
    """Sum over its waiting requests."""
    start: float = 0.0
    """Start tag of its first waiting request, or, while none waits, the end of the last one served."""

    @property
    def head(self) -> QueueEntry:
        return next(iter(self.waiting.values()))


class _Class:
    """One priority: its tenants and its virtual time. A tenant without requests is kept while ahead of that time."""

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
        """Arrival number of the oldest of the tenants' first requests."""
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
        """Largest cost that runs before a new request of a tenant."""
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
        """Order of service if nothing else arrives."""
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
    """All waiting requests, by id."""

    def __init__(self) -> None:
        self._entries: dict[str, QueueEntry] = {}
        self._returned: dict[str, QueueEntry] = {}
        self._classes: dict[int, _Class] = {}
        self._arrivals = itertools.count()
        self._owed = 0.0
        """Work served of higher classes while lower ones waited, less what those got for it."""
        self._of_tenant: dict[str, tuple[int, int]] = {}
        self.cost = 0
        """Sum over all waiting requests."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_returned(self) -> int:
        """Number of those that ran before."""
        return len(self._returned)

    def add(self, entry_id: str, *, tenant: str, weight: float, priority: int, cost: int) -> None:
        """Raises ValueError for an id that waits already, a cost below 1 or a weight that is not above 0."""
        if entry_id in self._entries or cost < 1 or not weight > 0:
            raise ValueError(f"cannot queue {entry_id!r} with weight {weight} and cost {cost}")
        entry = QueueEntry(entry_id, tenant, weight, priority, cost, next(self._arrivals))
        self._count(entry, 1)
        self._classes.setdefault(priority, _Class()).add(entry)

    def add_returned(self, entry_id: str, *, tenant: str, cost: int) -> None:
        """Adds a request that ran before: ahead of all that did not, behind those that did."""
        entry = QueueEntry(entry_id, tenant, 1.0, 0, cost, next(self._arrivals))
        self._count(entry, 1)
        self._returned[entry_id] = entry

    def first(self, *, among_returned: bool = True) -> str:
        """The next request, or the next of those that did not run before. Raises KeyError when there is none."""
        return self._choose(among_returned).entry_id

    def serve(self, *, among_returned: bool = True) -> str:
        """Removes and returns what `first` returns, or raises."""
        entry = self._choose(among_returned)
        if entry.entry_id not in self._returned:
            self._update_owed(entry)
        self._remove(entry, is_served=True)
        return entry.entry_id

    def remove(self, entry_id: str) -> None:
        """Removes a request that was not served; its tenant is not charged."""
        self._remove(self._entries[entry_id], is_served=False)

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """Number and cost of a tenant's waiting requests."""
        return self._of_tenant.get(tenant, (0, 0))

    def ahead_of(self, tenant: str, weight: float, priority: int) -> float:
        """Cost that runs before a new request if nothing else arrives."""
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
        """Order of service if nothing else arrives, without the share of lower classes."""
        yield from list(self._returned)
        for number in sorted(self._classes, reverse=True):
            yield from [entry.entry_id for entry in self._classes[number].in_order()]

    def _choose(self, among_returned: bool) -> QueueEntry:
        if self._returned and among_returned:
            return next(iter(self._returned.values()))
        if not self._classes:
            raise KeyError("no request waits")
        highest = self._classes[max(self._classes)]
        lower = self._lower()
        if lower is not None and self._owed >= (LOWER_SHARE - 1) * lower.cost:
            return lower
        return highest.first()

    def _lower(self) -> QueueEntry | None:
        """The next request of the classes below the highest."""
        numbers = sorted(self._classes)[:-1]
        if not numbers:
            return None
        return min((self._classes[number] for number in numbers), key=_Class.oldest).first()

    def _update_owed(self, entry: QueueEntry) -> None:
        """Updates what the higher classes owe the lower ones."""
        if len(self._classes) == 1:
            self._owed = 0.0
        elif entry.priority == max(self._classes):
            self._owed += entry.cost
        else:
            self._owed = max(0.0, self._owed - (LOWER_SHARE - 1) * entry.cost)

    def _remove(self, entry: QueueEntry, *, is_served: bool) -> None:
        self._count(entry, -1)
        if self._returned.pop(entry.entry_id, None) is not None:
            return
        one = self._classes[entry.priority]
        one.remove(entry, is_served=is_served)
        if not one.backlogged:  # the busy period is over: start tags are forgotten
            del self._classes[entry.priority]

    def _count(self, entry: QueueEntry, sign: int) -> None:
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
