"""When Baton moves the split or changes the number of workers, and what it says of why."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from split_loads import FOUR, OUTPUTS, PROMPTS, SLO, WINDOW_S, WORKER, load

from cluster.config.schema import AutoSection
from cluster.demand import Demand
from controller.goodput_model import SplitBounds, usual_request
from controller.rebalance_policy import AutoRatio, SplitQuestion


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

    def run(self, seconds: int, demand: Demand, window_s: float = WINDOW_S) -> None:
        for _ in range(seconds):
            self.now += 1
            verdict = self.auto.decide(SplitQuestion(self.now, demand, window_s, WORKER, self.bounds, self.num_prefill))
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
    assert clock.why.startswith("stays: 3:1 serves") and "no other one is better" in clock.why


def test_nothing_moves_before_the_longer_outputs_end_which_would_tell_another_length() -> None:
    """Of outputs that have just begun the short ones end first, and prefill workers seem to be worth too much."""
    clock = Clock()
    long = load(3.0, 10, 600)
    usual = usual_request(long, WORKER.costs)
    assert usual is not None
    ends_s = 3 * usual.output_s(WORKER.costs.decode)
    assert ends_s > 10
    clock.run(int(ends_s), long)
    assert not clock.moves and "have ended are the short ones" in clock.why
    clock.run(5, long)
    assert clock.moves


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


def test_in_a_burst_beyond_the_cluster_each_role_keeps_workers_in_hand() -> None:
    """The few decode workers that are enough for the outputs of now are a small pool, and lack more of what comes at
    random than the many that prefill. Of as many as a small cluster has, one is always left."""
    for num_workers, bursts, steady in ((64, 50, 53), (16, 10, 13), (4, 3, 3)):
        for rate, num_prefill, is_burst in ((200.0, bursts, True), (100.0, steady, False)):
            clock = Clock(num_workers // 4, bounds=SplitBounds(num_workers=num_workers))
            clock.run(60, load(rate * num_workers / 64, 800, 60))
            assert abs(clock.num_prefill - num_prefill) <= 1, (num_workers, rate)
            assert ("each role keeps workers in hand" in clock.why) is is_burst


def test_what_has_come_for_long_is_no_burst() -> None:
    """The split then is the one that serves most."""
    clock = Clock(4, bounds=SplitBounds(num_workers=16))
    clock.run(60, load(50.0, 800, 60))
    clock.run(60, load(300.0, 800, 60), window_s=6 * WINDOW_S)
    assert [num_prefill for _, num_prefill in clock.moves] == [10, 13]


def test_where_more_comes_than_any_split_serves_workers_in_hand_are_given_up_for_little_only_if_it_lasts() -> None:
    """Less than a tenth more at once moves nothing, and a tenth does; less that is there on the mean does later."""
    large = SplitBounds(num_workers=64)
    over = load(140.0, 800, 60)
    for num_prefill, seconds, moves in ((50, 10, []), (40, 10, [54]), (50, 60, [54])):
        clock = Clock(num_prefill, bounds=large)
        clock.run(seconds, over)
        assert [split for _, split in clock.moves] == moves, (num_prefill, seconds)
    between = Clock(50, bounds=large)
    for _ in range(10):
        between.run(8, over)
        between.run(2, load(30.0, 800, 60))  # all serve it
    assert [split for _, split in between.moves] == [54]


def test_bursts_whose_gain_is_lost_between_them_give_up_no_workers_in_hand() -> None:
    clock = Clock(50, bounds=SplitBounds(num_workers=64))
    for _ in range(10):
        clock.run(4, load(140.0, 800, 60))
        clock.run(8, load(120.0, 700, 75))
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
    verdict = clock.auto.decide(SplitQuestion(clock.now, PROMPTS, WINDOW_S, None, FOUR, 2))
    assert not verdict.moves and "too little" in verdict.why


@settings(max_examples=25)
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


def test_what_is_late_because_more_comes_than_is_predicted_to_be_served_says_nothing_of_the_split() -> None:
    clock = Clock(num_prefill=3)
    clock.run(100, served(PROMPTS, 0.1))
    assert not clock.moves and "as was seen" not in clock.why
    clock.run(10, served(EASY, 0.1))
    assert not clock.moves and "as was seen" not in clock.why, "what waited from before is on its way out"


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
    assert not clock.sizes and "no other one is better" in clock.why
