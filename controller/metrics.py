"""Metrics of the controller: workers and their roles, changes, and why `mode: auto` moves or does not.

Nothing is counted here: when the page is read, the controller is asked. `python -m controller.metrics` prints
docs/controller-metrics.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.config.schema import ROLES
from cluster.metrics import Metric, counter_family, render_reference
from controller.events import EventKind, EventLog
from controller.rebalance_policy import Reason
from controller.rebalancer import Rebalancer
from controller.supervisor import SupervisorState

OUTCOMES = {"done": EventKind.CHANGED, "failed": EventKind.FAILED, "refused": EventKind.REFUSED}
_STATES = tuple(state.value.replace(" ", "_") for state in SupervisorState)

WORKERS = Metric(
    "baton_workers",
    "gauge",
    "Workers by the role whose work they get now, and by how they are.",
    (("role", ROLES), ("state", _STATES)),
)
LOST = Metric(
    "baton_workers_lost_total", "counter", "Lives of workers and routers that ended unasked, or did not begin."
)
VERSION = Metric("baton_config_version", "gauge", "Of the configuration that runs; one more after each change.")
CHANGES = Metric(
    "baton_changes_total",
    "counter",
    "Changes of the configuration that were asked for, by an operator or by mode auto, and what became of them.",
    (("outcome", tuple(OUTCOMES)),),
)
VERDICTS = Metric(
    "baton_auto_verdicts_total",
    "counter",
    "What mode auto made of the load, once a second. moves: another split pays. grows, shrinks: so does one more "
    "worker, or one fewer is enough. It stays: too little has been measured (unknown); the present split serves most "
    "(best), or nearly (margin); the gain has not lasted long enough (confirm); the last move was just now (cooldown), "
    "or in the other direction lately (dwell); Ray has no room for one more worker yet (room); the roles differ in "
    "tensor_parallel (unequal).",
    (("reason", tuple(Reason)),),
)
MOVES = Metric("baton_auto_moves_total", "counter", "Splits that mode auto asked for.")
GAIN = Metric(
    "baton_auto_gain",
    "gauge",
    "Share by which the best split is predicted to serve more than the present one; 0 in another mode.",
)
METRICS = (WORKERS, LOST, VERSION, CHANGES, VERDICTS, MOVES, GAIN)


class ControllerMetrics(Collector):
    """The page's registry is `registry`."""

    def __init__(
        self,
        events: EventLog,
        rebalancer: Rebalancer,
        workers_by_state: Callable[[], Counter[tuple[str, SupervisorState]]],
    ) -> None:
        """`workers_by_state` counts by role and state. All are read on the page's thread: counts and copies only."""
        self._events = events
        self._rebalancer = rebalancer
        self._workers_by_state = workers_by_state
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> list[MetricFamily]:
        return []

    def collect(self) -> Iterator[MetricFamily]:
        workers = GaugeMetricFamily(WORKERS.name, WORKERS.doc, labels=WORKERS.label_names)
        by_role = self._workers_by_state()
        for role in ROLES:
            for name, state in zip(_STATES, SupervisorState, strict=True):
                workers.add_metric((role, name), by_role[role, state])
        yield workers
        events = dict(self._events.num_by_kind)
        yield CounterMetricFamily(LOST.name, LOST.doc, value=events.get(EventKind.WORKER_LOST, 0))
        yield GaugeMetricFamily(VERSION.name, VERSION.doc, value=self._events.version)
        yield counter_family(CHANGES, {outcome: events.get(kind, 0) for outcome, kind in OUTCOMES.items()})
        decisions = dict(self._rebalancer.num_decisions)
        yield counter_family(VERDICTS, {reason: decisions.get(reason, 0) for reason in Reason})
        yield CounterMetricFamily(MOVES.name, MOVES.doc, value=self._rebalancer.num_moves)
        yield GaugeMetricFamily(GAIN.name, GAIN.doc, value=self._rebalancer.gain)


_INTRODUCTION = """\
# Metrics of the controller

The controller serves its metrics for Prometheus at `http://ADDRESS/metrics`; `baton serve` names the address when it
starts, and so does `GetCluster.metrics_address`; `metrics.controller: false` in [cluster.yaml](../cluster.yaml) turns
the page off. It is served on the host of the AdminService where that is loopback or `admin.insecure` allows it, else on
127.0.0.1, at a free port. Beyond loopback and without `internal_tls`, a reader needs a key with the scope `admin` where
the cluster has API keys. Counters start at zero with the process and have every series from the start. What routers
and workers measure is in [router-metrics.md](router-metrics.md) and [metrics.md](metrics.md).

This page is made from the code: `python -m controller.metrics > docs/controller-metrics.md`.
"""


def reference() -> str:
    """docs/controller-metrics.md."""
    return render_reference(_INTRODUCTION, METRICS)


if __name__ == "__main__":
    print(reference(), end="")
