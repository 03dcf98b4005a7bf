"""What a step may compute of prompts: tokens, and beside sequences that decode, time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lifecycle import RequestKey
from cluster.step_cost import PACE_SHARE, StepCost, StepSize
from engine.sampling.params import SamplingParams
from engine.sequence import Request, Sequence
from engine.step_budget import LEAST_PROMPT_TOKENS, StepBudget

COST = StepCost(fixed_s=0.01, prompt_token_s=0.001, attended_s=0.0, sequence_s=0.001, kv_token_s=0.0)
TPOT_S = 0.1


def prompt(num_tokens: int, num_computed_tokens: int = 0) -> Sequence:
    request = Request(RequestKey("r", 1), tuple(range(num_tokens)), SamplingParams(), use_prefix_cache=False)
    return Sequence(request, 0, 0, num_computed_tokens=num_computed_tokens)


def decoding(num_computed_tokens: int = 8) -> Sequence:
    return prompt(num_computed_tokens + 1, num_computed_tokens)


def test_without_sequences_that_decode_only_tokens_count() -> None:
    budget = StepBudget(300, TPOT_S, lambda: COST)
    assert [budget.prompt(prompt(200)), budget.prompt(prompt(200)), budget.prompt(prompt(200))] == [200, 100, 0]


def test_while_nothing_is_known_time_bounds_nothing() -> None:
    budget = StepBudget(300, TPOT_S)
    budget.decode([decoding()])
    assert budget.prompt(prompt(500)) == 299


def test_beside_others_a_prompt_gets_what_their_pace_leaves() -> None:
    budget = StepBudget(300, TPOT_S, lambda: COST)
    budget.decode([decoding()] * 9)
    # 75 ms, less 10 for the step and 9 for the sequences in it
    assert [budget.prompt(prompt(30)), budget.prompt(prompt(500)), budget.prompt(prompt(500))] == [30, 26, 0]


def test_prompts_move_on_however_late_the_others_are() -> None:
    budget = StepBudget(300, TPOT_S, lambda: COST)
    budget.decode([decoding()] * 100)
    assert [budget.prompt(prompt(10)), budget.prompt(prompt(500)), budget.prompt(prompt(500))] == [10, 6, 0]


def begun(num_tokens: int, *, told: bool) -> Sequence:
    """One whose client has tokens: as this worker gave them and then preempted it, or as another attempt told them."""
    known = {} if told else {0: (1,), 1: (2, 3)}
    request = Request(RequestKey("r", 1), tuple(range(num_tokens)), SamplingParams(n=2), known_tokens=known)
    return Sequence(request, 0, 0, output_token_ids=[1] if told else [])


@pytest.mark.parametrize("told", [True, False])
def test_an_output_that_was_begun_is_computed_again_in_longer_steps(told: bool) -> None:
    budget = StepBudget(1000, TPOT_S, lambda: COST)
    budget.decode([decoding()] * 100)
    # 4 * 75 ms, less 10 for the step and 100 for the sequences in it
    assert [budget.prompt(prompt(500)), budget.prompt(begun(500, told=told))] == [16, 174]
    assert budget.prompt(prompt(500)) == 0, "others do not get more by it"


def test_a_step_that_is_planned_again_begins_afresh() -> None:
    budget = StepBudget(20, TPOT_S, lambda: COST)
    for _ in range(2):
        assert len(budget.decode([decoding()] * 30)) == 20
        assert budget.prompt(prompt(5)) == 0
    budget.decode([])
    assert budget.prompt(prompt(50)) == 20


@given(
    num_decoding=st.integers(1, 50),
    held=st.integers(1, 5000),
    prompts=st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 4000)), min_size=1, max_size=4),
    parts=st.tuples(*[st.floats(0, 1e-3)] * 2, st.floats(0, 1e-6), st.floats(0, 1e-3), st.floats(0, 1e-7)),
)
def test_a_step_ends_in_time_but_for_the_least_and_wastes_none(
    num_decoding: int, held: int, prompts: list[tuple[int, int]], parts: tuple[float, ...]
) -> None:
    cost = StepCost(*parts)
    budget = StepBudget(4096, TPOT_S, lambda: cost)
    budget.decode([decoding(held)] * num_decoding)
    size = StepSize(num_sequences=num_decoding, num_kv_tokens=num_decoding * (held + 1))
    shares = []
    for num_tokens, num_before in prompts:
        shares.append(budget.prompt(prompt(num_tokens + num_before, num_before)))
        size += StepSize.of_prompt(shares[-1], num_before)
    most_s = PACE_SHARE * TPOT_S
    assert sum(shares) <= LEAST_PROMPT_TOKENS or cost.of(size) <= most_s * (1 + 1e-9)
    is_whole = all(share == num_tokens for share, (num_tokens, _) in zip(shares, prompts, strict=True))
    longest = max(num_before for _, num_before in prompts) + max(shares)
    next_s = cost.prompt_token_s + cost.attended_s * (longest + 1)
    assert is_whole or sum(shares) + num_decoding == 4096 or cost.of(size) + 2 * len(prompts) * next_s >= most_s
