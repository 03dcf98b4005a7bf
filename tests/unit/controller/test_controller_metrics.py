"""The page of the controller: what is on it, and that it is there from the start."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from controller import metrics as module
from controller.events import EventKind, EventLog
from controller.metrics import METRICS, ControllerMetrics
from controller.rebalance_policy import Reason
from controller.rebalancer import Rebalancer
from controller.supervisor import SupervisorState

ROOT = Path(__file__).resolve().parents[3]


class Decisions:
    """The rebalancer's figures."""

    num_moves = 2
    gain = 0.25

    def __init__(self) -> None:
        self.num_decisions: Counter[Reason] = Counter()


class Controller:
    """What the page is made of."""

    def __init__(self) -> None:
        self.log = EventLog()
        self.log.version = 7
        self.rebalancer = Decisions()
        self.by_role: Counter[tuple[str, SupervisorState]] = Counter()


def read(controller: Controller) -> dict[tuple[str, ...], float]:
    """Each series, by its name and the values of its labels."""
    metrics = ControllerMetrics(controller.log, cast(Rebalancer, controller.rebalancer), lambda: controller.by_role)
    page = generate_latest(metrics.registry).decode()
    families = text_string_to_metric_families(page)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_every_series_is_there_from_the_start_and_as_declared() -> None:
    told = read(Controller())
    assert {name for name, *_ in told} == {metric.name for metric in METRICS}
    for metric in METRICS:
        count = 1
        for _, values in metric.labels:
            count *= len(values)
        assert sum(name == metric.name for name, *_ in told) == count, metric.name


def test_it_tells_workers_changes_and_why_auto_moves_or_does_not() -> None:
    controller = Controller()
    controller.by_role.update({("decode", SupervisorState.READY): 3, ("prefill", SupervisorState.BACKING_OFF): 1})
    for kind in (EventKind.CHANGED, EventKind.REFUSED, EventKind.REFUSED, EventKind.WORKER_LOST, EventKind.AUTO):
        controller.log.add(kind, "text")
    controller.rebalancer.num_decisions.update({Reason.MOVES: 2, Reason.DWELL: 9})
    told = read(controller)
    assert told["baton_workers", "decode", "ready"] == 3 and told["baton_workers", "prefill", "backing_off"] == 1
    outcomes = [told["baton_changes_total", outcome] for outcome in ("done", "failed", "refused")]
    assert outcomes == [1, 0, 2] and told["baton_workers_lost_total",] == 1
    assert told["baton_auto_verdicts_total", "dwell"] == 9 and told["baton_auto_verdicts_total", "moves"] == 2
    assert (told["baton_auto_moves_total",], told["baton_auto_gain",], told["baton_config_version",]) == (2, 0.25, 7)


def test_the_reference_is_what_the_code_declares() -> None:
    assert (ROOT / "docs" / "controller-metrics.md").read_text() == module.reference()
