"""What every run is held to after its end: how requests ended, what they were told, and that nothing is left behind.

Each check raises AssertionError with what it has found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from cluster.lifecycle import RequestState
from router.routing.dispatcher import Dispatcher
from router.routing.load_tracker import NOTHING, RequestLoad
from simulate.client import RequestOutcome
from simulate.worker import SimulatedWorker

_ANY_SIZE = RequestLoad(10**9, 10**6, 10**10)


class JudgedCluster(Protocol):
    """What is asked of a cluster."""

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
    def now(self) -> float:
        """Seconds of its clock."""
        ...

    @property
    def queue_timeout_s(self) -> float: ...


def check_run(cluster: JudgedCluster, outcomes: Iterable[RequestOutcome]) -> None:
    """To be called once everything has healed and come to rest."""
    workers = {name: worker for name, worker in cluster.workers.items() if not worker.is_dead}
    for dispatcher in cluster.dispatchers:
        check_router(dispatcher, workers, cluster.now)
    for outcome in outcomes:
        assert outcome.state is not RequestState.QUEUED, f"request {outcome.number} has no end"
        assert outcome.reason not in ("INTERNAL", "INVALID_REQUEST"), f"request {outcome.number}: {outcome.reason}"
        if cluster.is_fast:
            outcome.check_length()
        else:
            outcome.check(cluster.seed)
        if cluster.is_watched:
            outcome.check_times(cluster.queue_timeout_s)
    for worker in workers.values():
        worker.check_idle()


def check_router(dispatcher: Dispatcher, workers: Mapping[str, SimulatedWorker], now: float) -> None:
    """The router holds no request, charges no worker for one, and knows what each has cached. `workers`: those that
    run, and that it must know."""
    for name, worker in workers.items():
        index, cached = dispatcher.fleet[name].prefix_index, worker.core.blocks.cached_hashes
        assert index is None or index.hashes == cached, f"the router knows another cache of {name}"
    assert not dispatcher.num_queued and not dispatcher.num_running, "the router still holds requests"
    loads = dispatcher.context.loads
    for name in workers:
        assert loads[name] == NOTHING, f"the router still charges {name} for {loads[name]}"
    assert loads.num_retries == 0, f"the router still counts {loads.num_retries} retries"
    # Only while nothing is in flight has it room for anything.
    assert dispatcher.admission.has_room(_ANY_SIZE, now), "admission still counts requests in flight"
