"""Clusters with faults, by seed: every request ends, tokens are those of the undisturbed run, nothing stays held."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cluster.lifecycle import RequestState
from router.stream.request import LiveRequest
from simulate import virtual_loop
from simulate.__main__ import main
from simulate.faults import NETWORK_FAULTS, RATED_FAULTS, WORKER_FAULTS, FaultEvent, FaultPlan
from simulate.model import KvPages, PageAlarm
from simulate.scenario import Scenario
from simulate.virtual_loop import Stuck
from simulate.worker import SimulatedWorker
from simulate.workload import RequestShape
from simulate.world import Cluster, ClusterSpec

SEEDS = 30


def test_whatever_befalls_a_cluster_every_request_ends_and_nothing_stays_held() -> None:
    faults: Counter[str] = Counter()
    ends: Counter[RequestState] = Counter()
    for seed in range(SEEDS):
        result = Scenario.of(seed).run()
        faults.update(result.num_faults)
        ends.update(outcome.state for outcome in result.outcomes)
    assert set(faults) == {*WORKER_FAULTS, *NETWORK_FAULTS, *RATED_FAULTS}
    assert ends[RequestState.FINISHED] > 0.7 * ends.total()


def test_a_worker_that_dies_while_it_decodes_costs_its_requests_no_token() -> None:
    spec = ClusterSpec.of_ratio(1, 2)
    shapes = [RequestShape(0.01 * number, 200, 100) for number in range(10)]
    plan = FaultPlan((FaultEvent(0.25, "worker died", 1.0, "decode-0"),), until_s=2.0)
    result = Cluster(spec, faults=plan).run(shapes)
    assert all(outcome.is_finished and len(outcome.token_ids) == 100 for outcome in result.outcomes)
    assert {outcome.num_attempts for outcome in result.outcomes} == {1, 2}


def test_a_scenario_runs_twice_in_the_same_way() -> None:
    first, second = (Scenario.of(7).run(keeps_trace=True) for _ in range(2))
    assert first.trace == second.trace and len(first.trace) > 100


def test_kv_that_does_not_land_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvPages, "land", lambda self, *arguments: None)
    with pytest.raises(PageAlarm):
        Cluster(ClusterSpec.of_ratio(1, 1)).run([RequestShape(0.0, 3000, 10)])


def test_an_error_that_is_only_logged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveRequest, "on_phase", lambda *arguments: 1 / 0)
    with pytest.raises(AssertionError, match="INTERNAL"):
        Cluster(ClusterSpec.of_ratio(1, 1)).run([RequestShape(0.0, 3000, 10)])


def test_a_circle_in_which_no_time_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_loop, "MOST_CALLS_AT_ONCE", 10_000)
    monkeypatch.setattr(SimulatedWorker, "_turn", lambda self: self._cluster.loop.call_soon(self._turn))
    with pytest.raises(Stuck, match="goes round in a circle"):
        Cluster(ClusterSpec.of_ratio(1, 1)).run([RequestShape(0.0, 100, 10)])


def test_a_seed_that_fails_is_printed_as_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Scenario.of(3)
    broken = replace(whole, spec=replace(whole.spec, workers=whole.spec.workers[:0]))
    monkeypatch.setattr(Scenario, "of", lambda seed: broken)
    assert main(["--first", "3"]) == 1
    printed = capsys.readouterr()
    assert "python -m simulate --first 3 --trace" in printed.err and "1 seeds, 1 failed" in printed.out
