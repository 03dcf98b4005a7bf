"""A cluster of queues against one of whole workers, and the real rebalancer over it."""

from __future__ import annotations

import pytest

from cluster.config.schema import AutoSection, SloSection
from cluster.step_cost import StepCost
from simulate.controller import ControllerSpec, config_of
from simulate.curves import LinearCurve
from simulate.report import RunReport
from simulate.turning_pools import TurningPools
from simulate.workload import DayShape, RequestShape, at_rate, lognormal, over_a_day, random_shapes, uniform
from simulate.world import Cluster, ClusterSpec, WorkerSpec

COST = StepCost(20e-3, 4e-4, 0.0, 1e-3, 0.0)
WORKER = WorkerSpec("", "decode", LinearCurve(COST), max_num_seqs=64)
SLO = SloSection(ttft_ms=1500, tpot_ms=50)


def pools_of(prefill: int, decode: int, spec: ControllerSpec) -> TurningPools:
    cluster = ClusterSpec.of_ratio(prefill, decode, WORKER, slo=SLO)
    config = config_of(spec, cluster.workers, cluster.router, cluster.transfer, SLO)
    return TurningPools(WORKER, COST, config, spec.make_policy, 4096)


def kept_of(pools: TurningPools, shapes: list[RequestShape]) -> float:
    return sum(map(pools.is_kept, pools.run(shapes))) / len(shapes)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 3), (2, 2), (3, 1)])
def test_queues_keep_about_as_many_requests_in_time_as_whole_workers_do(prefill: int, decode: int) -> None:
    lengths = lognormal((800, 1600), (30, 60), 4000)
    shapes = at_rate(random_shapes(150, lengths, seed=1), 5.0, 1.0, seed=1)
    whole = RunReport.of(Cluster(ClusterSpec.of_ratio(prefill, decode, WORKER, slo=SLO), seed=1).run(shapes), SLO)
    assert kept_of(pools_of(prefill, decode, ControllerSpec("fixed")), shapes) == pytest.approx(
        whole.kept_share, abs=0.1
    )


def test_every_request_ends_with_the_pool_full_and_workers_that_turn() -> None:
    day = DayShape(12.0, 60.0, ratio_swing=9.0, ratio_period_s=30.0)
    shapes = over_a_day(day, lognormal((600, 1200), (100, 200), 4000), seed=1)
    auto = AutoSection(confirm_s=1, cooldown_s=1, dwell_s=2)
    first, again = (pools_of(2, 2, ControllerSpec(auto=auto)) for _ in range(2))
    runs = [pools.run(shapes) for pools in (first, again)]
    assert runs[0] == runs[1] and first.splits == again.splits, "the same load gives the same run"
    assert len(first.splits) > 2
    for request in runs[0]:
        assert request.shape.at < request.first_token_s <= request.last_token_s < float("inf")


def test_auto_leaves_a_split_that_is_far_from_the_best() -> None:
    shapes = at_rate(random_shapes(400, uniform(1000, 8, 0.5), seed=1), 7.5, 1.0, seed=1)
    stays = kept_of(pools_of(1, 3, ControllerSpec("fixed")), shapes)
    pools = pools_of(1, 3, ControllerSpec())
    assert kept_of(pools, shapes) > stays + 0.1 and pools.splits[-1].num_prefill == 3, pools.splits
