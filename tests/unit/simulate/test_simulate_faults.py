"""Clusters with faults, by seed: every request ends, tokens are those of the undisturbed run, nothing stays held."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.lifecycle import RequestState
from router.stream.request import LiveRequest
from simulate import virtual_loop
from simulate.client import SimRequest
from simulate.faults import (
    CONTROLLER_FAULTS,
    LABEL_FAULTS,
    NETWORK_FAULTS,
    RATED_FAULTS,
    ROUTER_FAULTS,
    WORKER_FAULTS,
    FaultEvent,
    FaultPlan,
)
from simulate.model import KvPages, PageAlarm
from simulate.scenario import Scenario
from simulate.virtual_loop import Stuck
from simulate.worker import SimulatedWorker
from simulate.workload import RequestShape
from simulate.world import Cluster, ClusterSpec

SEEDS = (5, 7, 11, 13, 21, 52, 57)
"""Every kind of fault takes effect in one of them; `make simulate` has hundreds."""


def test_whatever_befalls_a_cluster_every_request_ends_and_nothing_stays_held() -> None:
    faults: Counter[str] = Counter()
    ends: Counter[RequestState] = Counter()
    for seed in SEEDS:
        result = Scenario.of(seed).run()
        faults.update(result.num_faults)
        ends.update(outcome.state for outcome in result.outcomes)
    of_processes = {*WORKER_FAULTS, *LABEL_FAULTS, *ROUTER_FAULTS, *CONTROLLER_FAULTS}
    assert set(faults) == {*of_processes, *NETWORK_FAULTS, *RATED_FAULTS}
    assert ends[RequestState.FINISHED] > 0.7 * ends.total()


def test_workers_full_of_reservations_for_what_they_compute_for_one_another_go_on() -> None:
    """Each prompt waits for blocks that are reserved for another hand-off, whose prompt waits in the same way."""
    result = Scenario.of(9547).run()
    assert result.num_faults["role changed"] > 1 and result.duration_s < 60


def test_a_worker_that_dies_while_it_decodes_costs_its_requests_no_token() -> None:
    spec = ClusterSpec.of_ratio(1, 2)
    shapes = [RequestShape(0.01 * number, 200, 100) for number in range(10)]
    plan = FaultPlan((FaultEvent(0.25, "worker died", 1.0, "decode-0"),), until_s=2.0)
    result = Cluster(spec, faults=plan).run(shapes)
    assert all(outcome.is_finished and len(outcome.token_ids) == 100 for outcome in result.outcomes)
    assert {outcome.num_attempts for outcome in result.outcomes} == {1, 2}


def test_seeds_give_the_same_traces_and_logs_whatever_the_hashes_of_their_process() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-m", "simulate", "--first", "5", "--seeds", "2", "--trace"],
            cwd=Path(__file__).resolve().parents[3],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        for hash_seed in ("1", "2")
    ]
    first, second = ((run.stdout.splitlines()[:-2], run.stderr) for run in runs)
    assert first == second and len(first[0]) > 200 and any(" fault " in line for line in first[0])


def test_a_client_goes_on_at_another_router_when_its_own_is_lost() -> None:
    spec = replace(ClusterSpec.of_ratio(1, 2), num_routers=2, is_watched=True)
    load = [SimRequest(RequestShape(0.01 * number, 200, 200), may_resume=True) for number in range(10)]
    plan = FaultPlan((FaultEvent(0.5, "router died", 1.0, "decode-0"),), until_s=2.0)
    outcomes = Cluster(spec, faults=plan).run(load).outcomes
    assert all(outcome.is_finished and len(outcome.token_ids) == 200 for outcome in outcomes)
    assert {outcome.num_attempts for outcome in outcomes} == {1, 2}


def test_kv_that_does_not_land_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvPages, "land", lambda self, *arguments: None)
    with pytest.raises(PageAlarm):
        Cluster(ClusterSpec.of_ratio(1, 1)).run([RequestShape(0.0, 3000, 10)])


def test_an_error_that_is_only_logged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveRequest, "on_phase", lambda *arguments: 1 / 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        Cluster(ClusterSpec.of_ratio(1, 1)).run([RequestShape(0.0, 3000, 10)])


def test_a_circle_in_which_no_time_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_loop, "MOST_CALLS_AT_ONCE", 10_000)
    monkeypatch.setattr(SimulatedWorker, "_turn", lambda self: self._cluster.loop.call_soon(self._turn))
    with pytest.raises(Stuck, match="goes round in a circle"):
        Cluster(ClusterSpec.of_ratio(1, 1)).run([RequestShape(0.0, 100, 10)])
