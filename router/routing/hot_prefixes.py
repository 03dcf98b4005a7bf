"""Prefixes that many prompts begin with, copied to one more prefill worker before their holders are a bottleneck.

    placed -> counted, for each beginning that somebody holds -> hot, and its holders are busy -> fetched ahead

A prefix ends where a group of blocks does (`cluster.prefix_hash`). It is hot when HOT_REQUESTS came lately. Its holders
are a bottleneck when the next prompt would wait longer for the least busy one than for another worker, by more than
such a prompt takes (queue), or when such prompts take half of their time (share). Copies are fetches like others
(`router.routing.prefix_fetches`), only where that is quicker than computing; requests that need the same one meanwhile
wait for it. Bounded: MOST_AT_ONCE, one to each worker, a quarter of its pool. Decides only; knows no connection.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from cluster.prefix_hash import GROUP
from router.routing.candidate_pool import MOST_HOLDERS, CandidatePool, find
from router.routing.fetch_plan import Holding, Work, best_fetch
from router.routing.load_tracker import Fetch, Placement
from router.routing.policies.interface import Candidates, RoutingContext, RoutingRequest
from router.routing.prefix_index import Candidate

MOST_AT_ONCE = 2
"""Copies that are under way."""
MEMORY_S = 10.0
"""Requests count for about so long; a prefix goes to the same worker once in that time."""
HOT_REQUESTS = 4.0
QUEUED = 1.5
"""Times that a prompt takes by which the next one would wait longer: that of one is computed in any case."""
BUSY_SHARE = 0.5
"""Share of the time of a prefix's holders that its prompts may take."""
POOL_SHARE = 0.25
"""Part of a worker's pool that a copy may take."""
MOST_PREFIXES = 4096
MOST_GROUPS = 64
"""Of a prompt that are counted."""
_MOST_TARGETS = 16
"""Least busy workers among which one without the prefix is looked for."""


class Copy(NamedTuple):
    """A prefix that a worker is to have before a request needs it."""

    fetch: Fetch
    target_id: str
    why: str
    """The kind of bottleneck: queue or share."""
    explanation: str


@dataclass(slots=True)
class _Use:
    """Requests for one prefix, and seconds of steps for what they do not have in common; older ones fade."""

    num_requests: float = 0.0
    seconds: float = 0.0
    at: float = 0.0
    copied_at: dict[str, float] = field(default_factory=dict)
    """By worker that was to have it."""

    def add(self, seconds: float, now: float) -> None:
        left = math.exp((self.at - now) / MEMORY_S)
        self.num_requests, self.seconds, self.at = left * self.num_requests + 1, left * self.seconds + seconds, now


class HotPrefixes:
    """What is asked for lately, and the workers that have a copy under way."""

    def __init__(self, context: RoutingContext) -> None:
        self._context = context
        self._uses: OrderedDict[bytes, _Use] = OrderedDict()
        self._under_way: set[str] = set()

    def placed(self, request: RoutingRequest, placement: Placement, prefill: Candidates) -> Copy | None:
        """Counts a request that was placed, and charged, and returns what is to be copied now; `over` ends it."""
        worker = find(prefill, placement.computing_id)
        if self._context.limits.prefix_fetch == "off" or not request.uses_cache or worker is None or len(prefill) < 2:
            return None
        index, cost, num_tokens = worker.prefix_index, worker.step_cost, request.work.num_prompt_tokens
        if index is None or cost is None:
            return None
        depths = request.prompt.depths(index.holders, index.block_size).groups
        num_groups = min(depths[-1][0] if depths else 0, MOST_GROUPS)
        seconds = cost.of_prompt(num_tokens - placement.num_cached_tokens, placement.num_cached_tokens)
        now, hashes = self._context.clock(), request.prompt.of(index.block_size)
        names = [hashes.end_of_group(group) for group in range(min(num_groups, hashes.num_blocks // GROUP))]
        for name in names:
            self._uses.setdefault(name, _Use(at=now)).add(seconds, now)
            self._uses.move_to_end(name)
        while len(self._uses) > MOST_PREFIXES:
            self._uses.popitem(last=False)
        if len(self._under_way) >= MOST_AT_ONCE:
            return None
        copies = (
            self._copy_of(request, name, (number + 1) * GROUP * index.block_size, worker, prefill, now)
            for number, name in reversed(list(enumerate(names)))
            if self._uses[name].num_requests >= HOT_REQUESTS
        )
        copy = next(filter(None, copies), None)
        if copy is not None:
            self._under_way.add(copy.target_id)
            for name in names[: copy.fetch.num_tokens // (GROUP * index.block_size)]:
                self._uses[name].copied_at[copy.target_id] = now
        return copy

    def over(self, copy: Copy) -> None:
        """Whether it has come or not."""
        self._under_way.discard(copy.target_id)

    def _copy_of(
        self, request: RoutingRequest, name: bytes, num_tokens: int, like: Candidate, prefill: Candidates, now: float
    ) -> Copy | None:
        """The longest hot beginning comes first. `like`: a worker whose blocks are those of the prefix."""
        assert like.prefix_index is not None
        use, table = self._uses[name], like.prefix_index.holders
        mask = table.mask_of(name)
        if mask.bit_count() > MOST_HOLDERS:
            return None
        holders = [w for worker_id in table.worker_ids(mask) if (w := find(prefill, worker_id)) is not None]
        others = (w for w in self._least_busy(prefill) if self._may_have(w, like, mask, num_tokens, use, now))
        target = next(others, None)
        if not holders or target is None:
            return None
        mean_s, share = use.seconds / use.num_requests, use.seconds / MEMORY_S / len(holders)
        wait_s, other_s = min(map(self._wait_s, holders)), self._wait_s(target)
        if wait_s - other_s > QUEUED * mean_s:
            why, text = "queue", f"the next prompt would wait {1000 * wait_s:.0f} ms, and {1000 * other_s:.0f} ms there"
        elif share > BUSY_SHARE:
            why, text = "share", f"prompts with it take {100 * share:.0f} % of the time of each of {len(holders)}"
        else:
            return None
        work = Work(num_tokens + 1, target.step_cost or like.step_cost)
        always, times = self._context.limits.prefix_fetch == "always", self._context.fetch_times
        held = [Holding(holder, num_tokens) for holder in holders]
        fetch = best_fetch(request.prompt, work, target, held, times, now, always=always)
        if fetch is None:
            return None
        num = f"{use.num_requests:.0f} requests lately, {len(holders)} of {len(prefill)} workers have it; {text}"
        return Copy(fetch, target.worker_id, why, num)

    def _may_have(self, worker: Candidate, like: Candidate, mask: int, num_tokens: int, use: _Use, now: float) -> bool:
        """Whether it lacks a prefix that it has room for, and was not to have it lately."""
        index = worker.prefix_index
        return (
            index is not None
            and not index.bit & mask
            and worker.worker_id not in self._under_way
            and (worker.prefix_format, worker.weights_revision) == (like.prefix_format, like.weights_revision)
            and num_tokens <= POOL_SHARE * worker.kv_tokens
            and now - use.copied_at.get(worker.worker_id, -math.inf) >= MEMORY_S
        )

    def _least_busy(self, prefill: Candidates) -> Iterator[Candidate]:
        if isinstance(prefill, CandidatePool):
            return islice(prefill.ranked(self._wait_s), _MOST_TARGETS)
        return iter(sorted(prefill, key=lambda worker: (self._wait_s(worker), worker.worker_id)))

    def _wait_s(self, worker: Candidate) -> float:
        """Seconds until the prompts of a worker are computed; without end where it has some and nobody knows."""
        cost, load = worker.step_cost, self._context.loads[worker.worker_id]
        if not load.num_prompts:
            return 0.0
        return math.inf if cost is None else cost.of(load.prompts)
