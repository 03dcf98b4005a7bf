"""Two pools as queues, worked out by hand, and the searches over them."""

from __future__ import annotations

import random

import pytest

from cluster.step_cost import StepCost, StepSize
from simulate.curves import LinearCurve
from simulate.placement import (
    GroupShape,
    LatencyGoal,
    ParallelPlacement,
    fewest,
    goodputs,
    highest_rate,
    kept_share,
    placements,
)
from simulate.pools import PoolSpec, RequestTimes, run_pools
from simulate.published import DistServeCurve, PiecewiseLine, Plane, Quadratic, SplitwiseCurve
from simulate.workload import RequestShape, at_rate, lognormal, random_shapes, uniform

SECOND_A_STEP = LinearCurve(StepCost(1.0, 0.0, 0.0, 0.0, 0.0))
EACH_A_SECOND = LinearCurve(StepCost(0.0, 1.0, 0.0, 1.0, 0.0))
BY_KV = LinearCurve(StepCost(0.0, 0.0, 0.0, 0.0, 1.0))


def times(
    shapes: list[RequestShape], prefill: PoolSpec, decode: PoolSpec, transfer_s: float = 0.0
) -> list[tuple[float, float]]:
    found = run_pools(shapes, prefill, decode, lambda num_tokens: transfer_s)
    return [(round(one.ttft_s, 9), round(one.e2e_s, 9)) for one in found]


def test_the_example_of_splitwise_sim_is_reproduced_to_six_digits() -> None:
    """BLOOM-176B and the requests of test_trace.csv of Mutinifni/splitwise-sim, 8f99e7d. Points of its perf_model.csv
    (medians, in seconds) that the requests come to."""
    prompt = PiecewiseLine((2048, 4096), (0.25196400948334485, 0.6495982770284172))
    h100 = SplitwiseCurve(prompt, PiecewiseLine((128, 256), (0.035739242111142055, 0.03615448040398219)))
    a100 = SplitwiseCurve(prompt, PiecewiseLine((128, 256), (0.04761210048761894, 0.04770669789515495)))
    shapes = [RequestShape(0, 4096, 32), RequestShape(2, 2048, 8), RequestShape(3, 2048, 16)]
    one_machine = run_pools(shapes, PoolSpec(h100), PoolSpec(h100))
    assert [t.ttft_s for t in one_machine] == pytest.approx([0.649598, 0.251964, 0.251964], abs=6e-7)
    assert [t.e2e_s for t in one_machine] == pytest.approx([1.744743, 0.499255, 0.781873], abs=6e-7)
    two = run_pools(shapes, PoolSpec(h100), PoolSpec(a100), lambda num: num * 4_014_080 / (200 * 2**30))
    assert [t.e2e_s for t in two] == pytest.approx([2.199226, 0.622873, 1.003019], abs=6e-7)


def test_prompts_that_wait_are_one_step_up_to_its_tokens_and_a_longer_one_is_alone() -> None:
    shapes = [RequestShape(0.0, 10, 1), RequestShape(0.2, 4, 1), RequestShape(0.3, 5, 1), RequestShape(0.4, 50, 1)]
    found = times(shapes, PoolSpec(SECOND_A_STEP, max_num_batched_tokens=9), PoolSpec(SECOND_A_STEP))
    assert found == [(1.0, 1.0), (1.8, 1.8), (1.7, 1.7), (2.6, 2.6)]


def test_a_prompt_goes_to_the_machine_with_the_fewest_tokens() -> None:
    shapes = [RequestShape(0.0, 5, 1), RequestShape(0.1, 2, 1), RequestShape(0.2, 2, 1)]
    found = times(shapes, PoolSpec(EACH_A_SECOND, 2), PoolSpec(SECOND_A_STEP))
    assert found == [(5.0, 5.0), (2.0, 2.0), (3.9, 3.9)]


def test_outputs_step_together_and_a_transfer_delays_the_second_token() -> None:
    shapes = [RequestShape(0.0, 1, 3), RequestShape(0.0, 1, 2)]
    assert times(shapes, PoolSpec(EACH_A_SECOND), PoolSpec(SECOND_A_STEP), 0.25) == [(2.0, 4.25), (2.0, 3.25)]
    shapes = [RequestShape(0.0, 1, 3), RequestShape(1.5, 1, 2)]
    assert times(shapes, PoolSpec(EACH_A_SECOND), PoolSpec(SECOND_A_STEP)) == [(1.0, 3.0), (1.0, 2.5)], (
        "waits for a step"
    )


def test_a_step_reads_the_kv_that_its_sequences_hold_by_then() -> None:
    shapes = [RequestShape(0.0, 10, 3)]
    assert times(shapes, PoolSpec(SECOND_A_STEP), PoolSpec(BY_KV)) == [(1.0, 1.0 + 11 + 12)]


def test_what_does_not_fit_waits_and_what_never_fits_is_refused() -> None:
    shapes = [RequestShape(0.0, 5, 3), RequestShape(0.0, 5, 3)]
    prefill = PoolSpec(SECOND_A_STEP)
    assert times(shapes, prefill, PoolSpec(SECOND_A_STEP, kv_tokens=15)) == [(1.0, 3.0), (1.0, 5.0)]
    assert times(shapes, prefill, PoolSpec(SECOND_A_STEP, max_num_seqs=1)) == [(1.0, 3.0), (1.0, 5.0)]
    with pytest.raises(ValueError, match="needs 8 KV tokens and a machine holds 7"):
        times(shapes, prefill, PoolSpec(SECOND_A_STEP, kv_tokens=7))


def test_a_pipeline_has_as_many_batches_under_way_as_stages() -> None:
    shapes = [RequestShape(0.1 * i, 1, 1) for i in range(3)]
    pool = PoolSpec(SECOND_A_STEP, num_stages=2, max_num_batched_tokens=1)
    assert [first for first, _ in times(shapes, pool, pool)] == pytest.approx([1.0, 1.4, 1.8])
    shapes = [RequestShape(0.0, 1, 3), RequestShape(0.5, 1, 3), RequestShape(0.6, 1, 3)]
    found = times(shapes, PoolSpec(LinearCurve(StepCost(1e-9, 0, 0, 0, 0))), PoolSpec(SECOND_A_STEP, num_stages=2))
    assert [end for _, end in found] == pytest.approx([2.0, 2.0, 2.4]), "the third waits until the first stage is free"


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_kv_is_counted_up_and_down_to_nothing(stages: int) -> None:
    """The last request runs alone, after a crowd: its steps must read its own KV only."""
    draw = random.Random(stages)
    crowd = [
        RequestShape(at, draw.randint(1, 9), draw.randint(1, 9)) for at in sorted(draw.random() * 50 for _ in range(80))
    ]
    pool = PoolSpec(LinearCurve(StepCost(0.1, 0, 0, 0, 0.01)), 2, stages, kv_tokens=60)
    *_, last = times([*crowd, RequestShape(1e6, 10, 3)], PoolSpec(SECOND_A_STEP), pool)
    assert last[1] == pytest.approx(1.0 + 0.2 + 0.01 * (11 + 12))


def test_halving_finds_the_fewest_and_the_highest() -> None:
    assert [fewest(lambda n, least=least: n >= least, 40) for least in (1, 17, 40, 41)] == [1, 17, 40, None]
    assert highest_rate(lambda rate: rate <= 12.34, 100.0, 1e-4) == pytest.approx(12.34, rel=1e-4)
    assert highest_rate(lambda rate: True, 5.0) == 5.0 and highest_rate(lambda rate: False, 5.0) == 0.0


def test_a_request_counts_where_it_keeps_both_objectives() -> None:
    found = [RequestTimes(1.0, 0.1, 9), RequestTimes(1.1, 0.0, 9), RequestTimes(0.0, 0.2, 9), RequestTimes(0, 0, 0)]
    assert kept_share(found, LatencyGoal(1.0, 0.1)) == 0.5


def test_stages_are_spread_equally_over_nodes() -> None:
    one, long = GroupShape(4, 1), GroupShape(3, 3)
    assert set(placements([one], 8)) == {ParallelPlacement(one, one)}
    assert set(placements([one, long], 7)) == set()
    assert set(placements([one, long, GroupShape(4, 3)], 7, (1, 3))) >= {ParallelPlacement(long, GroupShape(4, 3))}
    assert ParallelPlacement(one, long) not in set(placements([one, long], 8, (1, 3))), "one stage on three nodes"


def test_distserves_coefficients_of_opt_13b_place_two_devices_for_prompts_and_one_for_outputs() -> None:
    """Its README's example: TTFT 200 ms, TPOT 100 ms, 90 %, ShareGPT on four A100s: TP 2 and TP 1. Coefficients of its
    profile (LLMServe/DistServe, 82831f1), rounded."""
    curves = {
        1: DistServeCurve(
            Quadratic(18.1e-3, 1.019e-4, 7.12e-9), Plane(19.9e-3, 6.27e-7, 3.85e-5), Plane(7.2e-3, 5.8e-7, 1.58e-4), 95
        ),
        2: DistServeCurve(
            Quadratic(14.7e-3, 6.86e-5, 2.45e-9), Plane(13.3e-3, 3.41e-7, 6.3e-5), Plane(10.6e-3, 3.1e-7, 8.6e-5), 95
        ),
    }
    pools = {GroupShape(tp, 1): PoolSpec(curve, kv_tokens=66_144) for tp, curve in curves.items()}
    shapes = random_shapes(400, lognormal((755, 1600), (200, 420), 2048), 0)
    found = goodputs(placements(pools, 4), pools, lambda r: at_rate(shapes, r, 1.0, 0), LatencyGoal(0.2, 0.1), 8.0)
    assert found[0].placement == ParallelPlacement(GroupShape(2, 1), GroupShape(1, 1))
    assert 1.4 < found[0].rate_per_device < 2.3, "1.56 there"


def test_more_machines_never_keep_fewer_in_time() -> None:
    shapes = at_rate(random_shapes(300, uniform(500, 50, 0.5), 0), 10.0, 1.0, 0)
    curve = LinearCurve(StepCost(0.01, 2e-4, 0, 1e-4, 0))
    means = []
    for num in (1, 2, 4):
        found = run_pools(shapes, PoolSpec(curve, num), PoolSpec(curve, num))
        means.append(sum(t.e2e_s for t in found))
    assert means == sorted(means, reverse=True)
    assert curve.seconds(StepSize.of_prompt(500)) < min(t.ttft_s for t in found) + 0.1
