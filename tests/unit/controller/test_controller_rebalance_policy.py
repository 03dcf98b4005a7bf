"""Which split Baton wants by itself, and when it moves: by what a request and a step cost, without a cluster."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.schema import AutoSection, SloSection
from cluster.demand import Demand
from cluster.step_cost import RoleCosts, StepCost
from controller.goodput_model import SplitBounds, TypicalRequest, WorkerModel, scores_of, service_of, usual_request
from controller.rebalance_policy import AutoRatio

COST = StepCost(fixed_s=0.005, prompt_token_s=0.0005, attended_s=0.0, sequence_s=0.001, kv_token_s=0.0)
"""2,000 prompt tokens a second; 45 sequences take 50 ms a step."""
COSTS = RoleCosts(COST, replace(COST, prompt_token_s=0.0015))
"""A decode worker computes prompts in small pieces, which takes longer."""
WORKER = WorkerModel(COSTS, max_num_seqs=64, kv_tokens=0)
SLO = SloSection(ttft_ms=1000, tpot_ms=50)
FOUR = SplitBounds(num_workers=4)
WINDOW_S = 10.0


def worker_of(cost: StepCost) -> WorkerModel:
    return WorkerModel(RoleCosts(cost, cost), max_num_seqs=64, kv_tokens=0)


def load(rate: float, num_prompt_tokens: int, num_output_tokens: int) -> Demand:
    """Requests of one kind that came over the window."""
    num = rate * WINDOW_S
    return Demand(
        num_arrived=num,
        num_placed=num,
        num_prompt_tokens=num * num_prompt_tokens,
        num_sequences=num,
        num_output_tokens=num * num_output_tokens,
        num_kv_tokens=num * (num_prompt_tokens + num_output_tokens / 2),
    )


PROMPTS, OUTPUTS = load(20, 800, 20), load(20, 40, 300)


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


@settings(deadline=None)
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


@settings(deadline=None)
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


class Clock:
    """Decides once a second, as a controller does, and follows each verdict."""

    def __init__(self, num_prefill: int = 2, patience: AutoSection | None = None, bounds: SplitBounds = FOUR) -> None:
        self.auto = AutoRatio(SLO, patience or AutoSection())
        self.num_prefill = num_prefill
        self.bounds = bounds
        self.sizes: list[tuple[float, int]] = []
        self.now = 0.0
        self.moves: list[tuple[float, int]] = []
        self.why = ""

    def run(self, seconds: int, demand: Demand) -> None:
        for _ in range(seconds):
            self.now += 1
            verdict = self.auto.decide(self.now, demand, WINDOW_S, WORKER, self.bounds, self.num_prefill)
            self.why = verdict.why
            if verdict.moves:
                before, after = self.bounds.num_workers, verdict.num_workers
                self.auto.moved(self.now, (self.num_prefill, before), (verdict.num_prefill, after))
                self.num_prefill, self.bounds = verdict.num_prefill, replace(self.bounds, num_workers=after)
                if after == before:
                    self.moves.append((self.now, verdict.num_prefill))
                else:
                    self.sizes.append((self.now, after))


def test_a_gain_moves_the_ratio_once_it_has_lasted() -> None:
    clock = Clock()
    clock.run(5, PROMPTS)
    assert not clock.moves and "the gain is to last for 5 s" in clock.why
    clock.run(60, PROMPTS)
    assert clock.moves == [(6.0, 3)]
    assert clock.why.startswith("stays: 3:1 serves") and "the most of all" in clock.why


def test_a_gain_that_goes_away_moves_nothing() -> None:
    clock = Clock()
    for _ in range(10):
        clock.run(4, PROMPTS)
        clock.run(1, load(0.1, 10, 10))
    assert not clock.moves


def test_a_load_that_every_split_serves_moves_nothing() -> None:
    clock = Clock()
    clock.run(100, load(1.5, 800, 20))
    assert not clock.moves


def test_who_moved_stays_for_a_while() -> None:
    clock = Clock()
    clock.run(10, PROMPTS)
    clock.run(20, OUTPUTS)
    assert len(clock.moves) == 1 and "stays for 30 s" in clock.why
    clock.run(20, OUTPUTS)
    assert [split for _, split in clock.moves] == [3, 1] and clock.moves[1][0] - clock.moves[0][0] >= 30


def test_what_comes_too_rarely_tells_nothing() -> None:
    clock = Clock()
    clock.run(60, load(0.5, 800, 20))
    assert not clock.moves and "too little" in clock.why
    verdict = clock.auto.decide(clock.now, PROMPTS, WINDOW_S, None, FOUR, 2)
    assert not verdict.moves and "too little" in verdict.why


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([PROMPTS, OUTPUTS, load(3, 300, 100)]), st.integers(1, 40)), max_size=6),
    st.integers(1, 3),
)
def test_moves_keep_their_distance_whatever_comes(loads: list[tuple[Demand, int]], num_prefill: int) -> None:
    patience = AutoSection()
    clock = Clock(num_prefill, patience)
    before = num_prefill
    for demand, seconds in loads:
        clock.run(seconds, demand)
    directions = []
    for _, split in clock.moves:
        directions.append(split > before)
        before = split
    for (one, two), ((at, _), (then, _)) in zip(pairwise(directions), pairwise(clock.moves), strict=True):
        assert then - at >= (patience.cooldown_s if one == two else patience.dwell_s)


def served(demand: Demand, share: float) -> Demand:
    """All that came has ended, so many within the objectives."""
    return replace(demand, num_ended=demand.num_arrived, num_kept=share * demand.num_arrived)


EASY = load(1.5, 800, 20)
"""By prediction, every split serves it."""


def test_a_split_that_is_seen_to_serve_less_than_predicted_is_left() -> None:
    clock = Clock(num_prefill=2)
    clock.run(25, served(EASY, 0.3))
    [(moved_at, split)] = clock.moves
    assert split != 2 and moved_at > WINDOW_S
    clock.run(200, served(EASY, 1.0))
    assert len(clock.moves) == 1, "it is not gone back to, whatever is predicted of it"


def test_why_says_what_was_seen() -> None:
    clock = Clock(num_prefill=2)
    clock.run(19, served(EASY, 0.3))
    assert "2:2 serves 0.5 as was seen (predicted" in clock.why


def test_a_split_that_keeps_nearly_all_is_not_left() -> None:
    clock = Clock(num_prefill=2)
    clock.run(100, served(EASY, 0.9))
    assert not clock.moves


def test_what_ends_late_just_after_a_move_says_nothing_of_the_new_split() -> None:
    clock = Clock(num_prefill=2)
    clock.run(25, served(EASY, 0.3))
    clock.run(9, served(EASY, 0.3))
    clock.run(100, served(EASY, 1.0))
    assert len(clock.moves) == 1


def test_what_waited_from_before_a_move_says_nothing_of_the_split_while_it_is_on_its_way_out() -> None:
    clock = Clock(num_prefill=2)
    late = served(EASY, 0.3)
    clock.run(60, replace(late, num_ended=1.2 * late.num_arrived))
    assert not clock.moves
    clock.run(20, late)
    assert clock.moves


def test_what_is_late_because_far_more_comes_than_is_predicted_says_nothing_of_the_split() -> None:
    clock = Clock(num_prefill=3)
    clock.run(100, served(PROMPTS, 0.1))
    assert not clock.moves and "3:1 serves 2.0 as was seen" in clock.why


def test_a_split_is_not_left_for_one_of_which_less_is_predicted_than_it_was_seen_to_lack() -> None:
    clock = Clock(num_prefill=3)
    clock.run(100, served(load(5, 800, 20), 0.6))
    assert not clock.moves and "3:1 serves 3.0 as was seen" in clock.why, "2:2 would serve 3.7, if at all"
    clock.run(100, served(load(5, 800, 20), 0.1))
    assert clock.moves


def test_a_split_that_serves_nothing_in_time_is_left() -> None:
    clock = Clock(num_prefill=2)
    clock.run(100, served(EASY, 0.0))
    assert clock.moves


def test_what_was_seen_of_one_kind_of_load_says_nothing_of_another() -> None:
    clock = Clock(num_prefill=3)
    clock.run(25, served(load(3, 400, 20), 0.3))
    assert [split for _, split in clock.moves] != [] and clock.num_prefill != 3
    clock.run(60, PROMPTS)
    assert clock.num_prefill == 3


SIX = replace(FOUR, least_workers=4, most_workers=6)


def test_workers_come_where_no_split_is_enough_and_go_when_the_others_have_been_for_long() -> None:
    clock = Clock(num_prefill=3, bounds=SIX)
    clock.run(60, PROMPTS)
    assert clock.sizes == [(6.0, 5), (16.0, 6)], "once it has lasted, and not two within the cooldown"
    assert clock.num_prefill == 5
    clock.run(299, EASY)
    assert len(clock.sizes) == 2
    clock.run(10, EASY)
    assert [size for _, size in clock.sizes] == [5, 6, 5]
    clock.run(1000, EASY)
    assert [size for _, size in clock.sizes] == [5, 6, 5, 4], "and no fewer than were named"


def test_workers_that_were_added_go_when_nothing_comes() -> None:
    clock = Clock(num_prefill=3, bounds=SIX)
    clock.run(20, PROMPTS)
    clock.run(700, load(0.1, 800, 20))
    assert [size for _, size in clock.sizes] == [5, 6, 5, 4] and clock.num_prefill == 3


def test_another_split_is_tried_before_another_worker() -> None:
    clock = Clock(num_prefill=1, bounds=SIX)
    clock.run(10, PROMPTS)
    assert clock.moves == [(6.0, 3)] and not clock.sizes
    clock.run(20, PROMPTS)
    assert clock.sizes and clock.sizes[0][0] >= 16


def test_a_load_that_these_workers_serve_brings_no_others() -> None:
    clock = Clock(bounds=SIX)
    clock.run(100, EASY)
    assert not clock.sizes


def test_without_a_larger_number_no_worker_is_added() -> None:
    clock = Clock(num_prefill=3)
    clock.run(100, PROMPTS)
    assert not clock.sizes and "the most of all" in clock.why
