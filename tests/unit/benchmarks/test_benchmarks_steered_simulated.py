"""What benchmarks/colocated.py and benchmarks/auto_ratio.py measured, on simulated workers."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import auto_ratio, colocated
from benchmarks.open_loop import Figures, Kind, poisson
from benchmarks.simulated_cluster import Machine, configured, slowed
from benchmarks.steered_simulated import Bench, rows_of
from benchmarks.timed_cluster import CONFIG

KIND, LONG = Kind("short", 64, 16), Kind("long", 1024, 2)
REAL = asdict(Figures(1, 1.0, 0.75, 30.0, 40.0, 5.0, 6.0, 7.0))


def bench_of(**values: Any) -> Bench:
    return Bench(
        configured(CONFIG, {"roles.prefill.min_workers": 0, **values}), Machine(2e-4, None, cores=2), share=0.0
    )


def test_what_workers_compute_is_kept_in_time_and_more_is_not() -> None:
    kept = []
    for rate in (2.0, 45.0):
        found = bench_of().run((0, 2), poisson([(LONG, rate)], 0.0, 5.0, random.Random(1)), from_s=1.0)
        kept.append(found.kept)
        assert found.num_moves == 0 and found.ttft_p50_ms > 20.4 and found.tpot_p50_ms > 20.4
    assert kept[0] == 1.0 and kept[1] < 0.7


@pytest.mark.parametrize("mode", colocated.MODES)
def test_a_point_of_the_grid_is_simulated_as_it_was_offered(mode: str) -> None:
    point = colocated.Point("64 + 16", ((KIND, 1.0),), 4.0, rate=3.0)
    run = {"point": point.name, "mode": mode, "rate": point.rate, "figures": REAL}
    [row] = rows_of({"points": [asdict(point)], "runs": [run]}, bench_of())
    assert (row.load, row.rate, row.name, row.real.kept, row.real.tpot_p50_ms) == (point.name, 3.0, mode, 0.75, 7.0)
    assert row.simulated.kept == 1.0 and row.simulated.ttft_p50_ms > 20.4


def test_a_load_that_turns_is_simulated_over_each_split_with_its_seed() -> None:
    load = auto_ratio.Load(phase_s=3.0, prompts_rate=5.0, outputs_rate=0.5)
    runs = [{"name": name, "seed": 1, "figures": REAL, "num_moves": 3} for name in ("1:3", "3:1", "auto")]
    rows = rows_of({"load": asdict(load), "runs": runs}, bench_of(**slowed(configured(CONFIG, {}), 5.0)))
    few, many, steered = (row.simulated for row in rows)
    assert many.ttft_p50_ms < steered.ttft_p50_ms < few.ttft_p50_ms
    assert [(row.real.num_moves, row.simulated.num_moves) for row in rows] == [(3, 0)] * 3
    assert rows[0].rate == len(load.arrivals(1)) / 9.0


def test_slower_steps_take_so_many_times_longer_and_so_do_the_objectives() -> None:
    config = configured(CONFIG, {})
    slower = configured(CONFIG, slowed(config, 5.0))
    assert slower.engine.timed_steps.cost.fixed_s == pytest.approx(5 * config.engine.timed_steps.cost.fixed_s)
    assert slower.rebalance.slo.ttft_ms == 5 * config.rebalance.slo.ttft_ms
    assert slowed(config, 1.0) == {} and Path(slower.model.path) == Path(config.model.path)
