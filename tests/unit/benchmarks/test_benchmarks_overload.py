"""What the overload benchmark makes of outcomes: what counts as lost, as in time, as normal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.overload import WARM_UP_S, Objectives, normal_after_s, problems_of, spec_of, summary
from benchmarks.overload_load import Outcome, Phase

KEEP = Objectives(ttft_s=0.5, tpot_s=0.05)
SERVED = Outcome(sent_at=5.0, took_s=1.0, ttft_s=0.1, tpot_s=0.01, tokens=[1, 2, 3], number=0)
REFUSED = Outcome(sent_at=5.0, took_s=0.01, code="RESOURCE_EXHAUSTED", reason="OVERLOADED", has_retry=True)


@pytest.mark.parametrize(
    ("outcome", "is_problem"),
    [
        (SERVED, False),
        (REFUSED, False),
        (replace(SERVED, tokens=[1, 2]), True),
        (replace(SERVED, problem="token 3 came, 2 was next"), True),
        (replace(REFUSED, code="UNAVAILABLE"), True),
        (replace(REFUSED, tokens=[1]), True),
    ],
)
def test_a_request_is_served_as_it_should_be_or_refused_before_it_ran(outcome: Outcome, is_problem: bool) -> None:
    assert bool(problems_of([replace(outcome)], {0: [1, 2, 3]})) is is_problem


def test_goodput_is_what_keeps_both_objectives_after_the_beginning() -> None:
    outcomes = [
        SERVED,
        replace(SERVED, ttft_s=0.6),
        replace(SERVED, tpot_s=0.06),
        replace(SERVED, sent_at=WARM_UP_S - 0.1),
        REFUSED,
        replace(REFUSED, took_s=0.2, has_retry=False),
        replace(REFUSED, sent_at=0.5, took_s=1.0),
    ]
    found = summary(Phase(outcomes, cpu_s=1.0, wall_s=10.0), WARM_UP_S + 2, KEEP)
    assert (found["offered_per_s"], found["served_per_s"], found["goodput_per_s"]) == (2.5, 1.5, 0.5)
    assert found["refused"] == 3 and found["with_retry_info"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["refused_within_50_ms"] == 0.5


def test_it_is_normal_from_when_on_all_but_one_in_twenty_are_in_time() -> None:
    outcomes = [replace(SERVED, sent_at=second / 2) for second in range(30)]
    outcomes += [replace(REFUSED, sent_at=at) for at in (0.2, 0.7, 2.1, 2.3)]
    assert normal_after_s(Phase(outcomes, 0.0, 15.0), KEEP) == 3.0
    assert normal_after_s(Phase([replace(REFUSED, sent_at=14.0)], 0.0, 15.0), KEEP) is None


def test_requests_differ_and_are_always_the_same() -> None:
    specs = [spec_of(number, 64, 192) for number in range(8)]
    assert specs == [spec_of(number, 64, 192) for number in range(8)] and len(set(specs)) == 8
