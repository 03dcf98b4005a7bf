"""How fast room is made, measured and guessed, and what is an overload."""

from __future__ import annotations

import pytest

from router.queue.pressure import CALM_S, DrainRate, InFlight, Overload
from router.routing.demand import FIRST_GUESS_TOKENS, OutputLengths
from router.routing.load_tracker import RequestLoad

WORK = RequestLoad(num_prompt_tokens=20, num_sequences=1, num_output_tokens=100)


def test_nothing_is_known_before_some_have_ended_under_pressure() -> None:
    drain = DrainRate()
    for second in range(100):
        drain.add_end(float(second), 10, 1)
    assert drain.tokens_per_s(1) is None, "nothing waited"
    drain.set_pressure(100.0, is_pressed=True)
    for second in range(3):
        drain.add_end(101.0 + second, 10, 1)
    assert drain.tokens_per_s(1) is None, "too few"
    drain.add_end(104.0, 10, 1)
    assert drain.tokens_per_s(1) is not None


def test_a_rate_is_what_ends_while_something_waits_and_grows_with_the_workers() -> None:
    drain = DrainRate()
    drain.set_pressure(0.0, is_pressed=True)
    for tenth in range(1, 101):
        drain.add_end(tenth / 10, 25, 2)
    rate = drain.tokens_per_s(2)
    assert rate is not None and rate == pytest.approx(250, rel=0.05)
    assert drain.tokens_per_s(4) == pytest.approx(2 * rate) and drain.tokens_per_s(0) is None
    drain.set_pressure(10.0, is_pressed=False)
    drain.set_pressure(1000.0, is_pressed=True)
    assert drain.tokens_per_s(2) == pytest.approx(rate), "time without pressure says nothing"


def test_a_new_rate_replaces_the_old_one() -> None:
    drain = DrainRate()
    drain.set_pressure(0.0, is_pressed=True)
    for second in range(1, 100):
        drain.add_end(float(second), 1000 if second < 50 else 100, 1)
    assert drain.tokens_per_s(1) == pytest.approx(100, rel=0.2)


def play(overload: Overload, *, seconds: float, arrivals_per_s: float, ends_per_s: float, since: float = 0.0) -> float:
    """As many requests of 10 tokens; returns the time."""
    steps = round(seconds * 100)
    for step in range(1, steps + 1):
        now = since + step / 100
        for _ in range(int(step * arrivals_per_s / 100) - int((step - 1) * arrivals_per_s / 100)):
            overload.add_arrival(now, 10)
        for _ in range(int(step * ends_per_s / 100) - int((step - 1) * ends_per_s / 100)):
            overload.add_end(now, 10)
    return since + seconds


def test_an_overload_is_a_queue_that_stands_while_more_comes_than_leaves() -> None:
    overload = Overload()
    overload.set_queue(0.0, is_empty=False)
    now = play(overload, seconds=0.9, arrivals_per_s=200, ends_per_s=20)
    assert not overload.may_begin(now)
    now = play(overload, seconds=0.3, arrivals_per_s=200, ends_per_s=20, since=now)
    assert overload.may_begin(now) and overload.excess == pytest.approx(10, rel=0.2)
    overload.add_refusal(now)
    overload.set_queue(now, is_empty=True)
    assert overload.is_on(now + CALM_S - 0.01) and not overload.is_on(now + CALM_S)
    overload.set_queue(now + CALM_S, is_empty=True)
    overload.set_queue(now + CALM_S, is_empty=False)
    assert not overload.may_begin(now + CALM_S + 0.1) and overload.excess == 1.0


def test_a_burst_is_none_however_large_nor_are_clients_that_wait_for_their_answers() -> None:
    overload = Overload()
    overload.set_queue(0.0, is_empty=False)
    for _ in range(1000):
        overload.add_arrival(0.1, 10)
    now = play(overload, seconds=60, arrivals_per_s=20, ends_per_s=20)
    assert not overload.may_begin(now)


def test_a_little_more_than_leaves_may_be_chance() -> None:
    overload = Overload()
    overload.set_queue(0.0, is_empty=False)
    now = play(overload, seconds=6, arrivals_per_s=10, ends_per_s=9)
    assert overload.excess > 1 and not overload.may_begin(now)
    now = play(overload, seconds=60, arrivals_per_s=10, ends_per_s=8, since=now)
    assert overload.may_begin(now)


def test_without_a_measured_rate_it_is_what_is_held_over_how_long_requests_stayed() -> None:
    held = InFlight(OutputLengths())
    for number in range(10):
        held.add(f"{number}", WORK, 0.0)
        held.remove(f"{number}", 2.0, 1, 0.5, is_complete=True)
    assert held.first_token_s == pytest.approx(0.5)
    for number in range(20):
        held.add(f"{number}", WORK, 10.0)
    held.set_pressure(10.0, is_pressed=True)
    assert held.tokens_per_s(1) == pytest.approx(20 * 100 / 2)
    for number in range(20):
        held.remove(f"{number}", 10.0 + 0.2 * (number + 1), 1, 10.5, is_complete=True)
    assert held.tokens_per_s(1) == pytest.approx(500, rel=0.2), "measured"
    assert len(held) == held.num_tokens == held.num_sequences == held.num_expected_tokens == 0


def test_a_request_should_take_its_prompt_and_outputs_like_those_of_others_like_it() -> None:
    lengths = OutputLengths()
    held, large = InFlight(lengths), RequestLoad(20, 2, 20 + 2 * 1000)
    assert held.expected(large) == 20 + 2 * FIRST_GUESS_TOKENS and held.expected(WORK) == 100
    lengths.add(30, 1000)
    assert held.expected(large) == pytest.approx(20 + 2 * 30)


def test_what_is_paused_counts_as_held_no_more_and_not_as_room_that_was_made() -> None:
    held, moving = InFlight(OutputLengths()), InFlight(OutputLengths())
    for both in (held, moving):
        for number in range(10):
            both.add(f"{number}", WORK, 0.0)
        both.set_pressure(0.0, is_pressed=True)
        for number in range(4):
            both.remove(f"{number}", 1.0 + number, 1, 0.5, is_complete=True)
    for number in range(4, 10):
        moving.pause(f"{number}")
    assert (len(moving), moving.num_tokens, moving.num_sequences, moving.num_expected_tokens) == (0, 0, 0, 0)
    for number in range(4, 10):
        moving.add(f"{number}", WORK, 4.0)
    assert moving.num_tokens == held.num_tokens
    assert moving.tokens_per_s(1) == held.tokens_per_s(1) is not None
