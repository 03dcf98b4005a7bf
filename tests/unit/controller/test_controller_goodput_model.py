"""Goodput that is predicted of each split, by what a request and a step cost."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from split_loads import COSTS, FOUR, OUTPUTS, PROMPTS, SLO, WORKER, load

from cluster.config.schema import SloSection
from cluster.demand import Demand
from cluster.step_cost import RoleCosts, StepCost
from controller.goodput_model import SplitBounds, TypicalRequest, WorkerModel, scores_of, service_of, usual_request


def worker_of(cost: StepCost) -> WorkerModel:
    return WorkerModel(RoleCosts(cost, cost), max_num_seqs=64, kv_tokens=0)


def best_of(demand: Demand, bounds: SplitBounds = FOUR) -> int:
    usual = usual_request(demand, COSTS)
    assert usual is not None
    scores = scores_of(service_of(usual, WORKER, SLO), bounds, 1e9)
    return max(scores, key=lambda p: scores[p])


def test_long_prompts_want_prefill_workers_and_long_outputs_decode_workers() -> None:
    assert best_of(PROMPTS) == 3
    assert best_of(OUTPUTS) == 1


def test_each_does_both_where_that_serves_more_and_it_is_allowed() -> None:
    short = load(20, 20, 100)
    assert best_of(short, SplitBounds(num_workers=2, min_prefill=0)) == 0
    assert best_of(short, SplitBounds(num_workers=2, min_prefill=1)) == 1


def usual_of(
    prompt_s: float, num_output_tokens: float, local_prompt_s: float = math.inf, n: float = 1
) -> TypicalRequest:
    return TypicalRequest(prompt_s, local_prompt_s, n, num_output_tokens, num_kv_tokens=100.0)


def test_decode_workers_that_have_time_left_compute_prompts_too() -> None:
    alone, helped = (service_of(usual_of(0.1, 20, local_s), WORKER, SLO) for local_s in (math.inf, 0.2))
    assert alone.of(1, 4) == pytest.approx(alone.mu_prefill)
    assert 1.9 * alone.of(1, 4) < helped.of(1, 4) < 4 * alone.of(1, 4)
    assert alone.of(0, 4) == pytest.approx(0, abs=1e-6) and helped.of(0, 4) > 0


def test_their_outputs_leave_them_less_of_it() -> None:
    short, long = (service_of(usual_of(0.1, num_tokens, 0.1), WORKER, SLO) for num_tokens in (10, 100))
    assert long.of(1, 4) < short.of(1, 4)


def test_a_prompt_that_would_be_late_there_is_not_theirs() -> None:
    service = service_of(usual_of(0.5, 20, 1.1), WORKER, SLO)
    assert service.of(1, 4) == pytest.approx(service.mu_prefill)


@given(
    prompt_s=st.floats(1e-3, 2.0),
    num_output_tokens=st.floats(1, 1000),
    num_workers=st.integers(2, 64),
    n=st.floats(1, 8),
)
def test_the_best_split_is_next_to_the_ratio_of_both_rates(
    prompt_s: float, num_output_tokens: float, num_workers: int, n: float
) -> None:
    service = service_of(usual_of(prompt_s, num_output_tokens, n=n), WORKER, SLO)
    scores = scores_of(service, SplitBounds(num_workers), math.inf)
    best = max(scores, key=lambda p: scores[p])
    exact = num_workers * service.mu_decode / (service.mu_prefill + service.mu_decode)
    assert abs(best - min(max(exact, 1), num_workers - 1)) <= 1


@given(
    prompt_s=st.floats(1e-3, 2.0),
    local=st.floats(0.5, 5.0),
    num_output_tokens=st.floats(1, 1000),
    num_workers=st.integers(2, 16),
)
def test_a_worker_more_never_serves_less(
    prompt_s: float, local: float, num_output_tokens: float, num_workers: int
) -> None:
    service = service_of(usual_of(prompt_s, num_output_tokens, local * prompt_s), WORKER, SLO)
    for p in range(num_workers):
        served = service.of(p, num_workers)
        nearly = served * (1 - 1e-6)
        assert served >= (1 - 1e-6) * min(p * service.mu_prefill, (num_workers - p) * service.mu_decode)
        assert service.of(p, num_workers + 1) >= nearly and service.of(p + 1, num_workers + 1) >= nearly


def test_no_time_for_a_second_sequence_still_leaves_one() -> None:
    slow = worker_of(StepCost(0.2, 0.001, 0, 0.01, 0))
    service = service_of(usual_of(2.0, 10, 2.0), slow, SLO)
    assert service.mu_decode == pytest.approx(1 / (0.21 * 10)) and service.mu_prefill == pytest.approx(0.5)
    assert service.of(0, 4) == pytest.approx(0, abs=1e-6)


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
