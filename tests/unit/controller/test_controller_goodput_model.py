"""Goodput that is predicted of each split, by what a request and a step cost."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_loads import COSTS, FOUR, OUTPUTS, PROMPTS, SLO, WORKER, load

from cluster.config.schema import SloSection
from cluster.demand import Demand
from cluster.step_cost import RoleCosts, StepCost
from controller.goodput_model import (
    SplitBounds,
    SplitService,
    TypicalRequest,
    WorkerModel,
    best_split,
    score_of,
    service_of,
    usual_request,
)


def worker_of(cost: StepCost) -> WorkerModel:
    return WorkerModel(RoleCosts(cost, cost), max_num_seqs=64, kv_tokens=0)


def best_of(demand: Demand, bounds: SplitBounds = FOUR) -> int:
    usual = usual_request(demand, COSTS)
    assert usual is not None
    return best_at(service_of(usual, WORKER, SLO), bounds, 1e9)


def best_at(service: SplitService, bounds: SplitBounds, rate: float) -> int:
    return best_split(lambda p: score_of(service, p, bounds, rate), bounds, bounds.splits[0])


def test_long_prompts_want_prefill_workers_and_long_outputs_decode_workers() -> None:
    assert best_of(PROMPTS) == 3
    assert best_of(OUTPUTS) == 1


def test_each_does_both_where_that_serves_more_and_it_is_allowed() -> None:
    short = load(20, 20, 100)
    assert best_of(short, SplitBounds(num_workers=2, min_prefill=0)) == 0
    assert best_of(short, SplitBounds(num_workers=2, min_prefill=1)) == 1


def usual_of(
    prompt_s: float, num_output_tokens: float, local_prompt_s: float = math.inf, n: float = 1, spread: float = 0.0
) -> TypicalRequest:
    return TypicalRequest(prompt_s, local_prompt_s, n, num_output_tokens, num_kv_tokens=100.0, spread=spread)


def test_decode_workers_that_have_time_left_compute_prompts_too() -> None:
    alone, helped = (service_of(usual_of(0.1, 20, local_s), WORKER, SLO) for local_s in (math.inf, 0.2))
    assert 0.8 * 1 / 0.1 < alone.of(1, 4) < 1.2 * 1 / 0.1
    assert 1.5 * alone.of(1, 4) < helped.of(1, 4) < 4 * alone.of(1, 4)
    assert alone.of(0, 4) == pytest.approx(0, abs=0.05) and helped.of(0, 4) > 0


def test_where_each_computes_both_more_prompts_than_they_compute_wait_for_good() -> None:
    both = service_of(usual_of(0.2, 2, 0.2), WORKER, SLO)
    most = 4 * both.idle_share / 0.2
    assert both.of(0, 4) < most
    assert both.kept(0, 4, 1.05 * most) < 0.05, "nobody leaves the only queue that there is"


def test_a_prompt_beside_sequences_takes_what_it_adds_to_their_steps() -> None:
    cost = StepCost(0.02, 1e-4, 0.0, 1e-4, 1e-7)
    usual = usual_request(PROMPTS, RoleCosts(cost, cost))
    assert usual is not None
    assert usual.local_prompt_s == pytest.approx(usual.prompt_s - cost.fixed_s)


def test_their_outputs_leave_them_less_of_it() -> None:
    short, long = (service_of(usual_of(0.1, num_tokens, 0.1), WORKER, SLO) for num_tokens in (10, 100))
    assert long.of(1, 4) < short.of(1, 4)


def test_a_prompt_that_would_be_late_there_is_not_theirs() -> None:
    alone, late = (service_of(usual_of(0.5, 20, local_s), WORKER, SLO) for local_s in (math.inf, 1.1))
    assert late.of(1, 4) == pytest.approx(alone.of(1, 4), rel=0.01)


def test_prompts_that_vary_wait_longer_and_the_longest_are_late_in_any_case() -> None:
    even, uneven = (service_of(usual_of(0.4, 20, spread=spread), WORKER, SLO) for spread in (0.0, 1.0))
    assert even.can_keep == 1.0 and 0.9 <= uneven.can_keep < 1.0
    assert uneven.kept(2, 4, 0.1) == pytest.approx(uneven.can_keep, abs=0.01)
    assert uneven.kept(2, 4, 3.0) < even.kept(2, 4, 3.0) - 0.05
    assert uneven.prompt_s == pytest.approx(0.4)


def test_the_spread_of_prompts_is_read_off_what_they_attend_to() -> None:
    def request(num_tokens: int, num_cached: int) -> Demand:
        new = num_tokens - num_cached
        attended = new * num_cached + new * (new + 1) // 2
        return Demand(1, 1, new, attended, num_cached, 1, 10, num_tokens)

    for num_cached in (0, 100):
        draw, demand = random.Random(1), Demand()
        for _ in range(2000):
            demand += request(num_cached + 1 + round(draw.expovariate(1 / 1000)), num_cached)
        usual = usual_request(demand, RoleCosts(*[StepCost(0, 1e-3, 0, 1e-3, 0)] * 2))
        assert usual is not None and usual.spread == pytest.approx(1.0, abs=0.15)


def simulated_in_time(rate: float, num_workers: int, draw: random.Random) -> float:
    """Of prompts of exponential lengths, 0.3 s on the mean, those that are computed within 1 s."""
    free, now, kept = [0.0] * num_workers, 0.0, 0
    for _ in range(4000):
        now += draw.expovariate(rate)
        prompt_s, first = draw.expovariate(1 / 0.3), min(range(num_workers), key=lambda i: free[i])
        free[first] = max(now, free[first]) + prompt_s
        kept += free[first] - now <= 1.0
    return kept / 4000


@pytest.mark.parametrize(("num_workers", "rate"), [(1, 1.5), (2, 4.5), (4, 10.0), (8, 23.0)])
def test_as_many_prompts_are_in_time_as_a_queue_of_them_says(num_workers: int, rate: float) -> None:
    service = service_of(usual_of(0.3, 1, spread=1.0), WORKER, SLO)
    found = simulated_in_time(rate, num_workers, random.Random(1))
    assert service.kept(num_workers, num_workers + 4, rate) == pytest.approx(found, abs=0.08)


@given(
    prompt_s=st.floats(1e-3, 2.0),
    local=st.floats(0.5, 5.0),
    num_output_tokens=st.floats(1, 1000),
    num_workers=st.integers(2, 6),
)
@settings(max_examples=30)
def test_a_worker_more_never_serves_less(
    prompt_s: float, local: float, num_output_tokens: float, num_workers: int
) -> None:
    service = service_of(usual_of(prompt_s, num_output_tokens, local * prompt_s), WORKER, SLO)
    for p in range(num_workers):
        nearly = service.of(p, num_workers) * 0.99
        assert service.of(p, num_workers + 1) >= nearly and service.of(p + 1, num_workers + 1) >= nearly


@given(
    prompt_s=st.floats(1e-3, 1.0),
    num_output_tokens=st.floats(1, 1000),
    num_workers=st.integers(12, 40),
    rate=st.floats(0.1, 2.0),
)
@settings(max_examples=10)
def test_of_many_splits_the_best_is_climbed_to_from_wherever_the_cluster_is(
    prompt_s: float, num_output_tokens: float, num_workers: int, rate: float
) -> None:
    service, bounds = service_of(usual_of(prompt_s, num_output_tokens), WORKER, SLO), SplitBounds(num_workers)
    asked = rate * num_workers / (prompt_s + 1 / service.mu_decode)

    @cache
    def score(split: int) -> float:
        return score_of(service, split, bounds, asked)

    best = max(map(score, bounds.splits))
    assert all(score(best_split(score, bounds, at)) >= 0.98 * best for at in (1, num_workers // 2, num_workers - 1))


def test_no_time_for_a_second_sequence_still_leaves_one() -> None:
    slow = worker_of(StepCost(0.2, 0.001, 0, 0.01, 0))
    service = service_of(usual_of(2.0, 10, 2.0), slow, SLO)
    assert service.mu_decode == pytest.approx(1 / (0.21 * 10)) and 0 < service.of(2, 4) < 1.0
    assert service.of(0, 4) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("cost", [StepCost(0, 0.001, 0, 0, 0), StepCost(0, 0, 0, 0.001, 0)])
def test_a_cost_that_nobody_has_seen_tells_nothing(cost: StepCost) -> None:
    assert usual_request(PROMPTS, RoleCosts(cost, cost)) is None


def test_a_step_that_costs_the_same_however_much_is_in_it_is_known() -> None:
    even = StepCost(0.01, 0, 0, 0, 0)
    usual = usual_request(PROMPTS, RoleCosts(even, even))
    assert usual is not None
    quick, late = (service_of(usual, worker_of(even), SloSection(1000, tpot_ms)) for tpot_ms in (50, 5))
    assert 0.9 * 64 / (0.01 * 20) < quick.mu_decode < 64 / (0.01 * 20)
    assert late.mu_decode == pytest.approx(1 / (0.01 * 20))


def test_prompts_that_caches_hold_cost_something_all_the_same() -> None:
    cost = StepCost(0, 0, attended_s=1e-6, sequence_s=0, kv_token_s=1e-6)
    cached = replace(PROMPTS, num_prompt_tokens=0, num_cached_tokens=PROMPTS.num_prompt_tokens)
    usual = usual_request(cached, RoleCosts(cost, cost))
    assert usual is not None and service_of(usual, worker_of(cost), SLO).of(1, 4) > 0


def test_the_pool_bounds_the_batch() -> None:
    usual = usual_of(0.01, 10)
    wide, narrow = (service_of(usual, WorkerModel(COSTS, 64, kv_tokens), SLO) for kv_tokens in (10_000, 400))
    all_the_time = 4 / (0.009 * 10)
    assert 0.9 * all_the_time < narrow.mu_decode < all_the_time and wide.mu_decode > 1.8 * narrow.mu_decode


def simulated_late_share(rate: float, cost: StepCost, num_tokens: int, in_time: int, seed: int) -> float:
    """Of sequences that come to one worker at any moment, those whose tokens take longer than a step of `in_time`."""
    draw, now, comes, late, ended = random.Random(seed), 0.0, 0.0, 0, 0
    running: list[list[float]] = []  # when it began, and tokens to come
    while ended < 3000:
        if not running:
            now = max(now, comes)
        while comes <= now:
            running.append([now, num_tokens])
            comes += draw.expovariate(rate)
        now += cost.fixed_s + len(running) * cost.sequence_s
        for one in running:
            one[1] -= 1
        late += sum(not left and now - began > num_tokens * cost.of_sequences(in_time, 0) for began, left in running)
        ended += sum(not left for _, left in running)
        running = [one for one in running if one[1]]
    return late / ended


def test_thousands_of_sequences_at_a_time_are_counted_too() -> None:
    cost = StepCost(0.001, 0.0001, 0, 1e-6, 0)
    many = WorkerModel(RoleCosts(cost, cost), max_num_seqs=4096, kv_tokens=0)
    rate = service_of(usual_of(0.01, 100), many, SLO).mu_decode
    all_the_time = 4096 / (cost.of_sequences(4096, 0) * 100)
    assert 0.9 * all_the_time < rate < all_the_time


def test_nearly_all_sequences_are_in_time_at_the_rate_of_a_decode_worker() -> None:
    """In a simulation of its steps; at one that fills the largest batch on the mean, most are late."""
    cost, num_tokens = StepCost(0.02, 0.001, 0, 0.005, 0), 24
    slo = SloSection(ttft_ms=2000, tpot_ms=80)
    rate = service_of(usual_of(0.5, num_tokens), worker_of(cost), slo).mu_decode
    fits = int((0.9 * slo.tpot_s - cost.fixed_s) / cost.sequence_s)
    assert simulated_late_share(rate, cost, num_tokens, fits, 1) < 0.2
    of_the_mean = fits / (cost.of_sequences(fits, 0) * num_tokens)
    assert simulated_late_share(of_the_mean, cost, num_tokens, fits, 1) > 0.4
