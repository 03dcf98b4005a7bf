"""Loads of benchmarks/colocated.py on simulated workers that have a part of a core each."""

from __future__ import annotations

import random

from benchmarks.open_loop import Kind, poisson
from benchmarks.simulated_cluster import Machine
from benchmarks.steered_simulated import Bench
from cluster.config.schema import AutoSection, SloSection
from cluster.step_cost import StepCost
from simulate.curves import LinearCurve
from simulate.worker import WorkerSpec

KIND = Kind("short", 64, 16)
WORKER = WorkerSpec("", "decode", curve=LinearCurve(StepCost(1e-3, 5e-5, 0.0, 1e-4, 0.0)), core_share=0.4)


def test_what_workers_complete_is_kept_in_time_and_more_is_not() -> None:
    bench = Bench(WORKER, Machine(2e-4, None, cores=2), SloSection(1000.0, 30.0))
    capacity = bench.capacity((0, 2), [(KIND, 1.0)], streams=24)
    assert 40 < capacity < 400
    kept = []
    for share in (0.5, 3.0):
        arrivals = poisson([(KIND, share * capacity)], 0.0, 3.0, random.Random(1))
        row = bench.row("", 0.0, "", bench.run(bench.spec((0, 2)), arrivals), 1.0, 2.0)
        kept.append(row.kept)
        assert row.num_moves == 0 and row.ttft_p50_ms > 0 and row.tpot_p50_ms > 0
    assert kept[0] == 1.0 and kept[1] < 0.7
    assert bench.spec((1, 1), auto=AutoSection()).controller is not None
