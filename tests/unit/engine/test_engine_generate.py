"""The plain generator: over a model that knows only what its pages hold, and over a real one beside transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_engine import Completion, Engine

from engine.kv.block_manager import BlockManager
from engine.kv.errors import NoFreeBlocks
from engine.model_runner import ModelRunner
from engine.sampling.params import Finish, SampleRow, SamplingParams, check_finish
from engine.sampling.sampler import Sampler
from engine.step_input import StepInput
from engine.tp import SingleGroup

FAKE_VOCAB = 29


def logits_after(token_ids: Sequence[int]) -> torch.Tensor:
    """Arbitrary, but decided by every token and its place: [V]."""
    folded = 0
    for token_id in token_ids:
        folded = (folded * 31 + token_id + 1) % (2**61 - 1)
    return torch.randn(FAKE_VOCAB, generator=torch.Generator().manual_seed(folded)) * 2


class PageModel:
    """Its "KV" of a token is the token id, so that a wrong block, slot, copy or length gives other tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pages = np.full((num_blocks, block_size), -1)
        self.num_tokens_of_steps: list[int] = []
        self.num_copied = 0

    def forward(self, step: StepInput) -> torch.Tensor:
        self.num_copied += len(step.block_copies)
        if len(step.block_copies):
            self.pages[step.block_copies[:, 1]] = self.pages[step.block_copies[:, 0]]
        self.pages.reshape(-1)[step.slot_mapping] = step.token_ids
        self.num_tokens_of_steps.append(len(step.token_ids))
        ends = (step.cu_seqlens_q[1:] - 1).tolist()
        rows = [self.seen_by(step, ends.index(last)) for last in step.logits_indices]
        return torch.stack([logits_after(tokens) for tokens in rows]) if rows else torch.empty(0, FAKE_VOCAB)

    def seen_by(self, step: StepInput, sequence: int) -> list[int]:
        seen: list[int] = self.pages[step.block_tables[sequence]].reshape(-1)[: step.seqlens_k[sequence]].tolist()
        return seen


def make_engine(
    num_blocks: int = 64, block_size: int = 4, max_num_batched_tokens: int = 2048, enable_prefix_cache: bool = True
) -> tuple[Engine, PageModel, BlockManager]:
    blocks = BlockManager(num_blocks, block_size, enable_prefix_cache)
    model = PageModel(num_blocks, block_size)
    return Engine(model, blocks, FAKE_VOCAB, max_num_batched_tokens), model, blocks


def without_pages(prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
    """The same tokens from whole sequences, one at a time."""
    completions = []
    for index in range(params.n):
        output: list[int] = []
        sampled = []
        while (finish := check_finish(params, output)) is None:
            logits = logits_after([*prompt, *output]).unsqueeze(0)
            (token,) = Sampler(FAKE_VOCAB).sample(logits, [SampleRow(params, index, prompt, output)])
            output.append(token.token_id)
            sampled.append(token)
        completions.append(Completion(tuple(output), tuple(sampled), finish))
    return completions


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # few ids, so that prompts share their beginnings
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    n=st.integers(1, 3),
    max_output_tokens=st.integers(1, 9),
    stop_token_ids=st.just(frozenset({0, 1, 2})),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    top_logprobs=st.sampled_from([None, 2]),
)


@settings(max_examples=60, derandomize=True, database=None)
@given(
    requests=st.lists(st.tuples(PROMPTS, PARAMS), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_batched_tokens=st.sampled_from([1, 5, 100]),
    enable_prefix_cache=st.booleans(),
)
def test_paged_generation_equals_generation_from_whole_sequences(
    requests: list[tuple[list[int], SamplingParams]],
    block_size: int,
    max_num_batched_tokens: int,
    enable_prefix_cache: bool,
) -> None:
    engine, _, blocks = make_engine(300, block_size, max_num_batched_tokens, enable_prefix_cache)
    prompts, params = [p for p, _ in requests], [p for _, p in requests]
    for _ in range(2):  # the second time over a filled prefix cache
        completions = engine.generate(prompts, params)
        for prompt, p, got in zip(prompts, params, completions, strict=True):
            assert got == without_pages(prompt, p)
        assert blocks.num_held == 0
        blocks.check()


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine, model, _ = make_engine(max_num_batched_tokens=6)
    engine.generate([list(range(20))], [SamplingParams(max_output_tokens=1)])
    assert model.num_tokens_of_steps == [6, 6, 6, 2]


def test_sequences_of_different_lengths_decode_in_one_batch_and_leave_as_they_end() -> None:
    engine, model, _ = make_engine()
    params = [SamplingParams(max_output_tokens=n) for n in (2, 5)]
    completions = engine.generate([[1, 2, 3], [4, 5]], params)
    assert model.num_tokens_of_steps == [3, 2, 2, 1, 1, 1]
    assert [len(c.token_ids) for (c,) in completions] == [2, 5]
    assert {c.finish for (c,) in completions} == {Finish("length")}


def test_sequences_of_one_prompt_share_its_full_blocks_and_compute_it_once() -> None:
    engine, model, blocks = make_engine(num_blocks=2 + 4, block_size=4)
    params = SamplingParams(n=4, max_output_tokens=3, seed=5)
    (completions,) = engine.generate([list(range(10))], [params])  # 2 full blocks, and one of two tokens for each
    assert model.num_tokens_of_steps == [10, 4, 4]
    assert len({c.token_ids for c in completions}) == 4
    assert completions == without_pages(range(10), params)
    assert blocks.num_held == 0


def test_an_ended_sequence_gives_its_blocks_to_one_that_goes_on() -> None:
    engine, _, _ = make_engine(num_blocks=4, block_size=2)
    short, long = SamplingParams(max_output_tokens=2), SamplingParams(max_output_tokens=7)
    assert engine.generate([[1, 2], [3, 4]], [short, long]) == [
        without_pages([1, 2], short),
        without_pages([3, 4], long),
    ]


def test_blocks_of_a_sequence_that_ends_at_its_first_token_are_free_at_once() -> None:
    engine, _, _ = make_engine(num_blocks=4, block_size=2)
    short, long = SamplingParams(max_output_tokens=1), SamplingParams(max_output_tokens=2)
    prompts_of_four_blocks = [[1] * 7, [2] * 7]
    for completions in engine.generate(prompts_of_four_blocks, [short, long]):
        assert completions[0].finish == Finish("length")


def test_a_block_copy_that_was_never_made_is_forgotten_with_its_request() -> None:
    engine, model, _ = make_engine(num_blocks=4, block_size=4)
    with pytest.raises(NoFreeBlocks):
        engine.generate([list(range(10))], [SamplingParams(n=3)])
    engine.generate([[1]], [SamplingParams(max_output_tokens=1)])
    assert model.num_copied == 0


def test_a_cached_prefix_is_not_computed_again() -> None:
    engine, model, _ = make_engine()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    first = engine.generate([prompt], [SamplingParams(max_output_tokens=1)])
    second = engine.generate([prompt], [SamplingParams(max_output_tokens=1)])
    assert model.num_tokens_of_steps == [10, 2]
    assert first == second


def test_an_output_is_found_by_the_prompt_that_continues_it() -> None:
    engine, model, _ = make_engine()
    ((completion,),) = engine.generate([[1, 2, 3]], [SamplingParams(max_output_tokens=6)])
    engine.generate([[1, 2, 3, *completion.token_ids, 7]], [SamplingParams(max_output_tokens=1)])
    assert model.num_tokens_of_steps[-1] == 2  # of 10 tokens the KV of 8 is in full blocks


def test_a_pool_that_is_too_small_is_said_so_and_left_whole() -> None:
    engine, _, blocks = make_engine(num_blocks=4, block_size=4)
    for prompt, params in (
        (range(17), SamplingParams()),
        (range(10), SamplingParams(n=3)),
        (range(16), SamplingParams()),
    ):
        with pytest.raises(NoFreeBlocks):
            engine.generate([list(prompt)], [params])
        assert blocks.num_held == 0
    fitting = SamplingParams(n=2, max_output_tokens=2)
    assert engine.generate([[1, 2, 3, 4, 5]], [fitting]) == [without_pages([1, 2, 3, 4, 5], fitting)]


def test_a_prompt_without_tokens_is_refused() -> None:
    engine, _, blocks = make_engine()
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        engine.generate([[1], []], [SamplingParams(), SamplingParams()])
    assert blocks.num_held == 0
    with pytest.raises(ValueError, match="max_num_batched_tokens: must be at least 1"):
        make_engine(max_num_batched_tokens=0)


# --- A real model -----------------------------------------------------------------------------------------------------

BLOCK_SIZE = 16
LENGTHS = (1, 15, 16, 17, 70)
NUM_BLOCKS = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("generate") / "llama")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return ModelRunner(
        folder, tp=SingleGroup(), device="cpu", dtype="float32", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )


def real_engine(runner: ModelRunner, max_num_batched_tokens: int = 2048, enable_prefix_cache: bool = False) -> Engine:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_cache)
    return Engine(runner, blocks, runner.config.vocab_size, max_num_batched_tokens)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens_of(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in group] for group in completions]


def generate(engine: Engine, **fields: Any) -> list[list[Completion]]:
    params = SamplingParams(**{"max_output_tokens": 20, "top_logprobs": 3, **fields})
    return engine.generate(prompts(), [params] * len(LENGTHS))


def test_greedy_tokens_equal_those_of_transformers(folder: Path, runner: ModelRunner) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for prompt, (completion,) in zip(prompts(), generate(real_engine(runner), temperature=0), strict=True):
        with torch.inference_mode():
            whole = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()
        logprobs = whole.log_softmax(-1).gather(1, torch.tensor(completion.token_ids).unsqueeze(1))[:, 0]
        assert [s.logprob for s in completion.sampled] == pytest.approx(logprobs.tolist(), abs=1e-4)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 7, "temperature": 0.8, "top_p": 0.9}], ids=str)
def test_chunked_prefill_gives_the_tokens_of_unchunked(runner: ModelRunner, fields: dict[str, Any]) -> None:
    whole = generate(real_engine(runner), **fields)
    for max_num_batched_tokens in (7, 16):
        chunked = generate(real_engine(runner, max_num_batched_tokens), **fields)
        assert tokens_of(chunked) == tokens_of(whole)


def test_a_filled_prefix_cache_changes_no_token(runner: ModelRunner) -> None:
    plain = generate(real_engine(runner), seed=3)
    engine = real_engine(runner, enable_prefix_cache=True)
    assert tokens_of(generate(engine, seed=3)) == tokens_of(generate(engine, seed=3)) == tokens_of(plain)


def test_sequences_of_one_prompt_equal_those_of_a_prompt_each(runner: ModelRunner) -> None:
    """Sequence 0 of n is the sequence of n = 1; the others draw other noise, each the same however many there are."""
    one, two, four = (tokens_of(generate(real_engine(runner), n=n, seed=11, max_output_tokens=8)) for n in (1, 2, 4))
    for single, pair, group in zip(one, two, four, strict=True):
        assert group[:1] == single
        assert group[:2] == pair
        assert len(set(group)) == 4
