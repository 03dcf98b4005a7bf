"""The page of the controller: what is on it, and that it is there from the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from controller import metrics as module
from controller.event_log import EventKind, EventLog
from controller.metrics import METRICS, ControllerMetrics
from controller.rebalance_policy import Reason
from controller.supervisor import SupervisorState

ROOT = Path(__file__).resolve().parents[3]


class Controller:
    """What the page is made of."""

    config_version = 7
    num_auto_moves = 2
    auto_gain = 0.25

    def __init__(self) -> None:
        self.log = EventLog()
        self.verdicts: Counter[Reason] = Counter()
        self.by_role: Counter[tuple[str, SupervisorState]] = Counter()

    @property
    def events_by_kind(self) -> Mapping[EventKind, int]:
        return self.log.num_by_kind

    def workers(self) -> Counter[tuple[str, SupervisorState]]:
        return self.by_role


def read(controller: Controller) -> dict[tuple[str, ...], float]:
    """Each series, by its name and the values of its labels."""
    page = generate_latest(ControllerMetrics(controller).registry).decode()
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
    controller.verdicts.update({Reason.MOVES: 2, Reason.DWELL: 9})
    told = read(controller)
    assert told["baton_workers", "decode", "ready"] == 3 and told["baton_workers", "prefill", "backing_off"] == 1
    outcomes = [told["baton_changes_total", outcome] for outcome in ("done", "failed", "refused")]
    assert outcomes == [1, 0, 2] and told["baton_workers_lost_total",] == 1
    assert told["baton_auto_verdicts_total", "dwell"] == 9 and told["baton_auto_verdicts_total", "moves"] == 2
    assert (told["baton_auto_moves_total",], told["baton_auto_gain",], told["baton_config_version",]) == (2, 0.25, 7)


def test_the_reference_is_what_the_code_declares() -> None:
    assert (ROOT / "docs" / "controller-metrics.md").read_text() == module.reference()
