"""The logprobs of a prompt's tokens against transformers, however the prompt is cut, and with bounded logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner, on_each_rank, scattered_table

from cluster.lifecycle import RequestKey
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling import prompt_logprobs
from engine.sampling.params import SampledToken, SamplingParams
from engine.sampling.prompt_logprobs import score_rows
from engine.sequence import Request, claim_blocks, publish_blocks, release_blocks
from engine.sequence import Sequence as EngineSequence
from engine.step_input import ScoredSpan, SequenceSlice, StepInput, build_step, table_of
from engine.tp import TPGroup

NUM_TOKENS = 60
NUM_TOP = 4
PROMPT = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """[NUM_TOKENS, VOCAB_SIZE], of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return logprobs


def a_sequence(prompt: Sequence[int] = PROMPT, *, prompt_logprobs: int | None = NUM_TOP) -> EngineSequence:
    request = Request(RequestKey("r", 1), tuple(prompt), SamplingParams(), prompt_logprobs=prompt_logprobs)
    return EngineSequence(request, 0, 0)


def score_in_chunks(runner: ModelRunner, chunks: Sequence[int]) -> list[SampledToken]:
    """What a worker does with a prompt."""
    sequence, told = a_sequence(), []
    sequence.block_table = table_of(scattered_table(runner, NUM_TOKENS))
    for size in chunks:
        output = runner.run(build_step([sequence.slice(size)], runner.block_size))
        sequence.num_computed_tokens += size
        told += sequence.take_scores(output.scores.tokens() if output.scores is not None else [])
    assert not sequence.must_score
    return told


def assert_equal(told: Sequence[SampledToken], expected: torch.Tensor) -> None:
    assert [token.token_id for token in told] == PROMPT
    assert told[0] == SampledToken(PROMPT[0])
    for position, token in enumerate(told[1:], start=1):
        before = expected[position - 1]
        assert token.logprob == pytest.approx(float(before[token.token_id]), abs=1e-4)
        assert token.rank == int((before > before[token.token_id]).sum()) + 1
        best = before.topk(NUM_TOP)
        assert [token_id for token_id, _ in token.top] == best.indices.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("chunks", [[60], [25, 25, 10], [1] * 60, [59, 1]], ids=str)
def test_they_are_those_of_transformers(
    tp_size: int, chunks: list[int], folder: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 7 * 4 * VOCAB_SIZE)

    def work(group: TPGroup) -> list[SampledToken]:
        return score_in_chunks(make_runner(folder, tp=group), chunks)

    for told in on_each_rank(tp_size, work):
        assert_equal(told, expected)


def test_prompts_that_are_scored_and_those_that_are_not_share_a_step(folder: Path, expected: torch.Tensor) -> None:
    runner = make_runner(folder)
    tables = [scattered_table(runner, 8 * 64)[i * 4 : i * 4 + 4] for i in range(3)]
    ids = tuple(PROMPT)
    slices = [
        SequenceSlice(ids[:40], 0, tables[0], True, ScoredSpan(0, ids[1:40], 0)),
        SequenceSlice(ids[:50], 0, tables[1], True),
        SequenceSlice(ids[:30], 0, tables[2], False, ScoredSpan(20, ids[21:31], 2)),
    ]

    output = runner.run(build_step(slices, runner.block_size))

    assert (output.logits.log_softmax(-1) - expected[[39, 49]]).abs().max() < 1e-4
    assert output.scores is not None
    told = output.scores.tokens()
    assert [token.token_id for token in told] == [*ids[1:40], *ids[21:31]]
    assert [len(token.top) for token in told] == [0] * 39 + [2] * 10
    own = [float(expected[p - 1, ids[p]]) for p in (*range(1, 40), *range(21, 31))]
    assert [token.logprob for token in told] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 9])
def test_no_more_logits_are_made_at_once_than_a_slice_holds(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    rows = list(range(5, 5 + num_rows))
    asked: list[list[int]] = []

    def logits_of(wanted: torch.Tensor) -> torch.Tensor:
        asked.append(wanted.tolist())
        return logits[wanted]

    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 3 * 4 * 50 + 7)
    scored = np.array([(row, 2 * row, 99) for row in rows], dtype=np.int32)
    told = score_rows(scored, logits_of, 50, torch.device("cpu")).tokens()

    assert [row for slice_ in asked for row in slice_] == rows and max(map(len, asked)) <= 3
    logprobs = logits.log_softmax(-1)
    assert [t.logprob for t in told] == pytest.approx([float(logprobs[row, 2 * row]) for row in rows], abs=1e-6)
    assert all(len(t.top) == 50 for t in told), "more alternatives than tokens are as many as there are"


def test_one_row_is_made_even_where_the_vocabulary_is_larger_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 1)
    scored = np.array([(0, 1, 0), (1, 0, 0)], dtype=np.int32)
    told = score_rows(scored, lambda rows: torch.zeros(len(rows), 2), 2, torch.device("cpu")).tokens()
    assert [t.logprob for t in told] == pytest.approx([-np.log(2)] * 2)


def test_scored_rows_survive_the_way_to_another_rank() -> None:
    slices = [SequenceSlice((1, 2), 0, (0,), True), SequenceSlice((3, 4, 5), 0, (1,), False, ScoredSpan(1, (5, 6), 7))]
    step = StepInput.from_bytes(build_step(slices, 4).to_bytes())
    assert step.scored.tolist() == [[3, 5, 7], [4, 6, 7]]


def test_a_prompt_of_one_token_has_no_logprob_and_needs_no_row() -> None:
    sequence = a_sequence([9])
    assert sequence.slice(1).scored is None and sequence.must_score
    assert sequence.take_scores([]) == [SampledToken(9)]
    assert not sequence.must_score


def test_a_prompt_that_must_be_scored_takes_nothing_from_the_cache_but_leaves_its_blocks_there() -> None:
    blocks = BlockManager(32, 4)
    for asks, finds in ((NUM_TOP, 0), (NUM_TOP, 0), (None, 56)):
        sequence = a_sequence(prompt_logprobs=asks)
        assert claim_blocks(sequence, blocks)
        assert sequence.num_cached_tokens == finds
        sequence.num_computed_tokens = NUM_TOKENS
        publish_blocks(sequence, blocks, finds)
        release_blocks(sequence, blocks)


def test_what_was_told_before_a_preemption_is_neither_told_nor_computed_again() -> None:
    sequence = a_sequence(range(10))
    scores = [SampledToken(token_id, -1.0, 1) for token_id in range(10)]
    assert sequence.take_scores(scores[1:5]) == [SampledToken(0), *scores[1:5]]
    sequence.num_computed_tokens = 0  # as release_blocks leaves it
    wanted: list[int] = []
    for start, end in pairwise((0, 3, 6, 10)):
        sequence.num_computed_tokens = start
        span = sequence.slice(end - start).scored
        following = list(span.next_token_ids) if span is not None else []
        assert span is None or sequence.tokens(start + span.offset + 1, 10)[0] == following[0]
        wanted += following
        sequence.take_scores([scores[token_id] for token_id in following])
    assert wanted == [5, 6, 7, 8, 9] and not sequence.must_score


def test_a_sequence_that_is_computed_again_after_its_prompt_was_done_is_not_scored() -> None:
    """A child of another, or one that came from a prefill worker: its prompt's logprobs are told."""
    sequence = EngineSequence(a_sequence().request, 1, 0, output_token_ids=[5])
    assert not sequence.must_score and sequence.slice(NUM_TOKENS).scored is None
