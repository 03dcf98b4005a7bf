"""What several workers have learned of their steps, as one."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.step_cost import StepCost, StepSize, usual, usual_by_role

PART = st.floats(1e-9, 1.0)
WHOLE = st.builds(StepCost, PART, PART, PART, PART, PART)
STEP = StepSize(100, 5050, 3, 300)


@given(st.lists(WHOLE, min_size=1, max_size=5))
def test_of_workers_that_have_seen_everything_a_step_takes_the_mean(costs: list[StepCost]) -> None:
    assert usual(costs).of(STEP) == pytest.approx(fmean(cost.of(STEP) for cost in costs))


def test_prompts_that_two_explain_by_different_parts_are_not_counted_twice() -> None:
    by_tokens, by_attention = StepCost(0, 0.01, 0, 0.1, 0), StepCost(0, 0, 1 / 5050, 0.1, 0)
    prompt = StepSize.of_prompt(100)
    assert by_tokens.of(prompt) == pytest.approx(by_attention.of(prompt)) == pytest.approx(1.0)
    assert usual([by_tokens, by_attention]).of(prompt) == pytest.approx(1.0)


def test_the_least_that_a_step_costs_is_known_to_those_that_decode() -> None:
    prefill, decode = StepCost(0.5, 0.01, 0, 0, 0), StepCost(0.004, 0, 0, 0.001, 0)
    assert usual([prefill, decode]) == StepCost(0.004, 0.01, 0, 0.001, 0)
    assert usual([prefill]).fixed_s == 0.5


def test_each_role_has_its_own_and_takes_from_the_other_what_it_has_not_seen() -> None:
    prefill, decode = StepCost(0.004, 0.01, 0, 0, 0), StepCost(0.002, 0, 0, 0.001, 0)
    costs = usual_by_role([(True, prefill), (False, decode), (False, None)])
    assert costs is not None
    assert costs.prefill == StepCost(0.004, 0.01, 0, 0.001, 0) and costs.decode == StepCost(0.002, 0.01, 0, 0.001, 0)
    alone = usual_by_role([(False, decode)])
    assert alone is not None and alone.prefill == alone.decode == decode
    assert usual_by_role([(True, None)]) is None
