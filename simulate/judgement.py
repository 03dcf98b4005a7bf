"""The checks that every run is held to after its end: how requests ended, what they were told, and that nothing is left
behind.

Each check raises AssertionError with what it has found.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import QuotaExceeded
from cluster.lifecycle import RequestState
from router.queue.quota import UNLIMITED
from router.routing.dispatcher import Dispatcher
from router.routing.load_tracker import NOTHING, RequestLoad
from simulate.client import RequestOutcome
from simulate.virtual_loop import VirtualLoop
from simulate.worker import SimulatedWorker

_SOON_S = 1e-6
"""Two things so close together may have come in either order."""
_ANY_SIZE = RequestLoad(10**9, 10**6, 10**10)


class JudgedCluster(Protocol):
    """The parts of a cluster that the checks look at."""

    @property
    def workers(self) -> Mapping[str, SimulatedWorker]: ...
    @property
    def dispatchers(self) -> list[Dispatcher]: ...
    @property
    def seed(self) -> int: ...
    @property
    def is_fast(self) -> bool: ...
    @property
    def is_watched(self) -> bool: ...
    @property
    def loop(self) -> VirtualLoop: ...


def check_run(cluster: JudgedCluster, outcomes: Sequence[RequestOutcome], queue_timeout_s: float) -> None:
    """To be called once everything has healed and come to rest. `queue_timeout_s`: of the routers."""
    workers = {name: worker for name, worker in cluster.workers.items() if not worker.is_dead}
    for dispatcher in cluster.dispatchers:
        check_router(dispatcher, workers, cluster.loop.time())
    for outcome in outcomes:
        assert outcome.state is not RequestState.QUEUED, f"request {outcome.number} has no end"
        assert outcome.reason not in ("INTERNAL", "INVALID_REQUEST"), f"request {outcome.number}: {outcome.reason}"
        if cluster.is_fast:
            outcome.check_length()
        else:
            outcome.check(cluster.seed)
        if cluster.is_watched:
            outcome.check_times(queue_timeout_s)
    if cluster.is_watched:
        check_quotas(outcomes)
        check_fairness(outcomes)
    for worker in workers.values():
        worker.check_idle()


def check_router(dispatcher: Dispatcher, workers: Mapping[str, SimulatedWorker], now: float) -> None:
    """The router holds no request, charges no worker for one, and knows what each has cached. `workers`: those that
    run, and that it must know."""
    for name, worker in workers.items():
        index, cached = dispatcher.fleet[name].prefix_index, worker.core.blocks.cached_hashes
        assert index is None or index.hashes == cached, f"the router knows another cache of {name}"
    assert not dispatcher.running.fetches, "the router still has prefixes fetched"
    assert not dispatcher.num_queued and not dispatcher.num_running, "the router still holds requests"
    loads = dispatcher.context.loads
    for name in workers:
        assert loads[name] == NOTHING, f"the router still charges {name} for {loads[name]}"
    assert loads.num_retries == 0, f"the router still counts {loads.num_retries} retries"
    # Only while nothing is in flight has it room for anything.
    assert dispatcher.admission.has_room(_ANY_SIZE, now), "admission still counts requests in flight"


# Quotas


def check_quotas(outcomes: Sequence[RequestOutcome]) -> None:
    """Checks for each key with limits that no request was accepted beyond them, and none refused that kept them. Looks
    at requests whose router was watched: quotas are counted by router."""
    by_key: defaultdict[str, list[RequestOutcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.request.quota != UNLIMITED and outcome.over_s is not None:
            by_key[outcome.request.tenant].append(outcome)
    for of_key in by_key.values():
        accepted: list[RequestOutcome] = []
        for outcome in of_key:  # in the order of their arrival
            is_refused = outcome.placed_s is None and (outcome.over_s or 0.0) - outcome.request.at_s < _SOON_S
            if not is_refused:
                what = _exceeded(accepted, outcome, is_lenient=True)
                assert not what, f"request {outcome.number} was accepted beyond its quota of {what}"
                accepted.append(outcome)
            elif outcome.reason == QuotaExceeded.reason:
                assert _exceeded(accepted, outcome, is_lenient=False), (
                    f"request {outcome.number} was refused for its quota, which it keeps"
                )


def _exceeded(accepted: Iterable[RequestOutcome], new: RequestOutcome, *, is_lenient: bool) -> str:
    """The limit of its key that a new request would exceed beside those accepted before it; empty: none.
    `is_lenient`: what came at the same instant counts for it."""
    quota, now = new.request.quota, new.request.at_s
    until = now - _SOON_S if is_lenient else now + _SOON_S
    slack = _SOON_S if is_lenient else -_SOON_S
    begun = [(o.request.at_s, 1.0, float(o.request.shape.num_prompt_tokens)) for o in accepted]
    outputs = sorted((at, 1.0) for o in accepted for at in o.output_s if at < until)
    num_live = sum(o.over_s is not None and o.over_s > until + 2 * slack for o in accepted)
    if quota.max_concurrent is not None and num_live >= quota.max_concurrent:
        return "max_concurrent"
    rates = (
        ("requests_per_min", quota.requests_per_min, [(at, number) for at, number, _ in begun], 1.0),
        (
            "prompt_tokens_per_min",
            quota.prompt_tokens_per_min,
            [(at, num_tokens) for at, _, num_tokens in begun],
            float(new.request.shape.num_prompt_tokens),
        ),
        ("output_tokens_per_min", quota.output_tokens_per_min, outputs, 1.0),
    )
    for name, per_min, charges, amount in rates:
        if per_min is not None and _left(charges, per_min, now) < amount - slack:
            return name
    return ""


def _left(charges: Iterable[tuple[float, float]], per_min: float, now: float) -> float:
    """Returns what a minute's worth, which flows back evenly, has left after some charges."""
    level, at_s = per_min, 0.0
    for charged_s, amount in charges:
        level, at_s = min(per_min, level + (charged_s - at_s) * per_min / 60) - amount, charged_s
    return min(per_min, level + (now - at_s) * per_min / 60)


# Fairness


@dataclass(frozen=True)
class _Wait:
    """A request that waited."""

    from_s: float
    to_s: float
    share: float
    """Its cost over its tenant's weight."""
    is_served: bool


def check_fairness(outcomes: Sequence[RequestOutcome]) -> None:
    """Two tenants of one priority that both wait get as much by their weights, but for a request or two of each."""
    waits: defaultdict[int, defaultdict[str, list[_Wait]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        request, to_s = outcome.request, outcome.over_s if outcome.placed_s is None else outcome.placed_s
        if outcome.over_s is not None and to_s is not None and to_s > request.at_s:
            wait = _Wait(request.at_s, to_s, request.cost / request.weight, outcome.placed_s is not None)
            waits[request.priority][request.tenant].append(wait)
    for of_tenants in waits.values():
        for one, other in itertools.combinations(of_tenants, 2):
            _check_pair(one, of_tenants[one], other, of_tenants[other])


def _check_pair(one: str, ones: list[_Wait], other: str, others: list[_Wait]) -> None:
    for (start, end), (other_start, other_end) in itertools.product(_busy(ones), _busy(others)):
        begin_s, end_s = max(start, other_start), min(end, other_end)
        served = [
            (wait.to_s, sign * wait.share)
            for sign, of_one in ((1, ones), (-1, others))
            for wait in of_one
            if wait.is_served and begin_s + _SOON_S < wait.to_s < end_s - _SOON_S
        ]
        lead = least = most = 0.0
        for _, together in itertools.groupby(sorted(served), key=lambda each: each[0]):
            lead += sum(share for _, share in together)
            least, most = min(least, lead), max(most, lead)
        bound = 2 * (max(w.share for w in ones) + max(w.share for w in others))
        assert most - least <= bound, (
            f"while both waited, from {begin_s:.3f} s to {end_s:.3f} s, one of the tenants {one!r} and {other!r} got "
            f"{most - least:.0f} tokens more by its weight, and {bound:.0f} are most"
        )


def _busy(waits: list[_Wait]) -> Iterator[tuple[float, float]]:
    """The spans in which one of them waits at every instant."""
    start = end = -1.0
    for wait in sorted(waits, key=lambda wait: wait.from_s):
        if wait.from_s > end:
            if end > start:
                yield start, end
            start, end = wait.from_s, wait.to_s
        end = max(end, wait.to_s)
    if end > start:
        yield start, end
