"""Steps that take the time that a cost says and compute nothing."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint
from torch import Tensor

from cluster.step_cost import StepCost, StepSize
from engine.models.folder import read_model
from engine.sampling.params import SampleRow, SamplingParams
from engine.step_input import SequenceSlice, StepInput, build_step, size_of
from engine.timed_runner import HOST_S, STALL_S, HashChooser, TimedRunner, timed_config
from engine.token_hash import TokenHash

MODEL = Path(__file__).parents[3] / "models" / "tiny-shakespeare"
BLOCK_SIZE = 4
COST = StepCost(fixed_s=0.010, prompt_token_s=0.001, attended_s=0.0, sequence_s=0.002, kv_token_s=0.0)
PROMPT = (7, 1, 90, 4, 4, 20, 3, 3, 8)


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runner(clock: Clock) -> TimedRunner:
    config = timed_config(read_model(MODEL))
    made = TimedRunner(config, COST, BLOCK_SIZE, clock, clock.sleep)
    made.make_pool(8)
    return made


def step_of(*slices: SequenceSlice, copies: list[tuple[int, int]] | None = None) -> StepInput:
    return build_step(list(slices), BLOCK_SIZE, copies)


def tokens_of(states: Tensor, *indices: int) -> list[int]:
    rows = [SampleRow(SamplingParams(), index, PROMPT, ()) for index in indices or (0,) * len(states)]
    return [token.token_id for token in HashChooser(1000).launch(states, rows).read()]


def test_a_prompt_in_two_steps_leads_to_the_hash_of_the_whole(runner: TimedRunner) -> None:
    runner.run(step_of(SequenceSlice(PROMPT[:6], 0, (5, 2, 7), False)))
    states = runner.run(step_of(SequenceSlice(PROMPT[6:], 6, (5, 2, 7), True))).logits
    assert tokens_of(states) == [TokenHash(PROMPT).next_token(1000)]


def test_decoding_goes_on_from_what_lies_in_the_pool(runner: TimedRunner) -> None:
    runner.run(step_of(SequenceSlice(PROMPT, 0, (5, 2, 7), True)))
    runner.run(step_of(SequenceSlice(PROMPT[::-1], 0, (1, 0, 3), True)))
    pair = step_of(SequenceSlice((11,), 9, (5, 2, 7), True), SequenceSlice((12,), 9, (1, 0, 3), True))
    expected = [TokenHash([*PROMPT, 11]), TokenHash([*PROMPT[::-1], 12])]
    assert tokens_of(runner.run(pair).logits) == [state.next_token(1000) for state in expected]


@pytest.mark.parametrize("kind", ["deepseek-v3", "qwen3-next", "gemma2"])
def test_the_pool_is_what_the_timed_config_of_any_kind_of_kv_says(kind: str, tmp_path: Path) -> None:
    config = timed_config(read_model(make_checkpoint(kind, tmp_path)))
    made = TimedRunner(config, COST, BLOCK_SIZE)
    made.make_pool(8)
    assert made.kv.shape == (config.num_hidden_layers, config.num_kv_planes, 8, BLOCK_SIZE, 1, 1)


def test_copied_blocks_are_the_same_prefix(runner: TimedRunner) -> None:
    runner.run(step_of(SequenceSlice(PROMPT, 0, (5, 2, 7), True)))
    branch = step_of(SequenceSlice((11,), 9, (5, 2, 0), True), copies=[(7, 0)])
    assert tokens_of(runner.run(branch).logits) == [TokenHash([*PROMPT, 11]).next_token(1000)]


def test_a_damaged_layer_leads_to_another_token(runner: TimedRunner) -> None:
    runner.run(step_of(SequenceSlice(PROMPT, 0, (5, 2, 7), True)))
    runner.kv[8 % len(runner.kv), 1, 7, 0] += 1
    states = runner.run(step_of(SequenceSlice((11,), 9, (5, 2, 7), True))).logits
    assert tokens_of(states) != [TokenHash([*PROMPT, 11]).next_token(1000)]


def test_a_token_that_is_not_read_yet_is_taken_from_the_step_before(runner: TimedRunner) -> None:
    states = runner.run(step_of(SequenceSlice(PROMPT, 0, (5, 2, 7), True))).logits
    sampled = HashChooser(1000).launch(states, [SampleRow(SamplingParams(), 0, PROMPT, ())])
    after = runner.run(step_of(SequenceSlice((-1,), 9, (5, 2, 7), True)), sampled=sampled.token_ids).logits
    first = TokenHash(PROMPT).next_token(1000)
    assert tokens_of(after) == [TokenHash([*PROMPT, first]).next_token(1000)]


def test_a_step_takes_what_its_cost_says(runner: TimedRunner, clock: Clock) -> None:
    runner.run(step_of(SequenceSlice(PROMPT, 0, (5, 2, 7), True)))
    assert clock.now == pytest.approx(100.019)


def test_layers_are_reported_as_they_would_be_written(runner: TimedRunner, clock: Clock) -> None:
    seen: list[tuple[int, float]] = []
    runner.run(step_of(SequenceSlice(PROMPT, 0, (5, 2, 7), True)), lambda layer: seen.append((layer, clock.now)))
    num_layers = len(runner.kv)
    assert [layer for layer, _ in seen] == list(range(1, num_layers + 1))
    assert [now for _, now in seen] == pytest.approx([100 + 0.019 * n / num_layers for n in range(1, num_layers + 1)])


def test_what_the_host_takes_between_two_steps_does_not_add_up(runner: TimedRunner, clock: Clock) -> None:
    decode = step_of(SequenceSlice((3,), 0, (5,), True))
    for _ in range(10):
        runner.run(decode)
        clock.now += 0.8 * HOST_S
    assert clock.now == pytest.approx(100 + 10 * 0.012 + 0.8 * HOST_S)


def test_a_sequence_that_goes_on_was_queued_though_the_machine_was_busy(runner: TimedRunner, clock: Clock) -> None:
    for at in range(3, 8):
        runner.run(step_of(SequenceSlice((9,), at, (5, 2), True)))
        clock.now += 2 * HOST_S
    assert clock.now == pytest.approx(100 + 5 * 0.012 + 2 * HOST_S)


def test_another_sequence_begins_when_it_is_launched(runner: TimedRunner, clock: Clock) -> None:
    runner.run(step_of(SequenceSlice((9,), 3, (5, 2), True)))
    clock.now += 0.8 * STALL_S
    runner.run(step_of(SequenceSlice((9,), 3, (6, 7), True)))
    assert clock.now == pytest.approx(100 + 2 * 0.012 + 0.8 * STALL_S)


def test_a_step_after_a_rest_takes_its_whole_time(runner: TimedRunner, clock: Clock) -> None:
    runner.run(step_of(SequenceSlice((3,), 0, (5,), True)))
    clock.now = 200.0
    runner.run(step_of(SequenceSlice((3,), 0, (5,), True)))
    assert clock.now == pytest.approx(200.012)


def test_a_step_without_tokens_takes_no_time(runner: TimedRunner, clock: Clock) -> None:
    assert len(runner.run(step_of(copies=[(1, 2)])).logits) == 0
    assert clock.now == 100.0


def test_the_size_of_a_step_counts_single_tokens_as_next_ones() -> None:
    mixed = step_of(SequenceSlice((3,), 5, (5, 6), True), SequenceSlice(PROMPT[:3], 4, (1, 2), False))
    assert size_of(mixed) == StepSize(3, 5 + 6 + 7, 1, 6)


def test_sequences_of_one_request_get_tokens_of_their_own(runner: TimedRunner) -> None:
    states = runner.run(step_of(SequenceSlice(PROMPT, 0, (5, 2, 7), True))).logits
    assert len(set(tokens_of(states.repeat(3), 0, 1, 2))) == 3


def test_a_stop_token_is_never_chosen() -> None:
    row = SampleRow(SamplingParams(stop_token_ids=frozenset({0, 2})), 0, PROMPT, ())
    states = Tensor(np.zeros(1)).long()
    assert HashChooser(3).launch(states, [row]).read()[0].token_id == 1
