"""A constraint allows what its grammar allows next, for any way in which the tokens so far came to be known."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cluster_fixture import BUNDLED_MODEL, WAIT_S
from llguidance import grammar_from
from tokenizers import Tokenizer

from cluster.grammar import GrammarLimits
from engine.sampling.constraint import MAX_GRAMMARS, MOST_FAULTS, Constrainer, Constraint, ConstraintFailed, Words
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.rules import LogitRules, mask_rows
from engine.sampling.sampler import Sampler

VOCAB, EOS = 1024, 0
TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
WORD = grammar_from("regex", "[a-c]{2,4}")


@pytest.fixture(scope="module")
def constrainer() -> Iterator[Constrainer]:
    made = Constrainer.from_folder(BUNDLED_MODEL, VOCAB)
    assert made is not None
    yield made
    made.close()


def ids(text: str) -> list[int]:
    return [TOKENIZER.token_to_id(character) for character in text]


def allowed(
    constraint: Constraint, index: int, output: list[int], ends: Sequence[int] = (EOS,)
) -> npt.NDArray[np.bool_]:
    """Which tokens may follow, [V]."""
    words = constraint.allowed(index, output, ends)
    return np.unpackbits(words.view(np.uint8), count=VOCAB, bitorder="little").view(np.bool_)


def row(params: SamplingParams, output: list[int], index: int = 0) -> SampleRow:
    return SampleRow(params, index, (1,), output)


def sample_all(params: SamplingParams, seed: int) -> list[int]:
    """A sequence of random logits, to its stop token."""
    sampler, output = Sampler(VOCAB), list[int]()
    noise = torch.Generator().manual_seed(seed)
    while not output or output[-1] not in params.stop_token_ids:
        logits = torch.randn(1, VOCAB, generator=noise) * 4
        output.append(sampler.sample(logits, [row(params, output)])[0].token_id)
        assert len(output) < 500
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", ["[a-c]{2,4}", "(yes|no), (my|your) (lord|lady)!?", r"\d{1,3}(\.\d{2})?"])
def test_whatever_the_model_prefers_the_output_fits(constrainer: Constrainer, pattern: str, temperature: float) -> None:
    for seed in range(5):
        params = SamplingParams(
            temperature=temperature,
            seed=seed,
            top_p=0.9,
            stop_token_ids=frozenset({EOS}),
            constraint=constrainer.new(grammar_from("regex", pattern)),
        )
        *text, end = sample_all(params, seed)
        assert end == EOS
        assert re.fullmatch(pattern, TOKENIZER.decode(text))


def test_json_of_a_schema(constrainer: Constrainer) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = grammar_from("json_schema", json.dumps(schema))
    for seed in range(3):
        params = SamplingParams(seed=seed, stop_token_ids=frozenset({EOS}), constraint=constrainer.new(grammar))
        found = json.loads(TOKENIZER.decode(sample_all(params, seed)[:-1]))
        assert isinstance(found["name"], str) and isinstance(found["age"], int) and len(found) == 2


def test_what_may_follow_depends_on_the_tokens_alone(constrainer: Constrainer) -> None:
    step_by_step = constrainer.new(WORD)
    output = ids("abca")
    for length in range(5):
        one = allowed(step_by_step, 0, output[:length])
        other = allowed(constrainer.new(WORD), 0, output[:length])
        assert (one == other).all()
        assert one[EOS] == (length >= 2)
        assert one[ids("b")[0]] == (length < 4)
        assert not one[ids("d")[0]]
    assert (allowed(step_by_step, 0, output[:1]) == allowed(constrainer.new(WORD), 0, output[:1])).all()


def test_sequences_of_one_request_go_apart(constrainer: Constrainer) -> None:
    constraint = constrainer.new(WORD)
    assert not allowed(constraint, 0, ids("a"))[EOS]
    assert allowed(constraint, 1, ids("bb"))[EOS]
    assert allowed(constraint, 0, ids("ab"))[EOS]
    assert allowed(constraint, 1, ids("bbcc")).nonzero()[0].tolist() == [EOS]


def test_only_a_stop_token_of_the_request_ends_an_output(constrainer: Constrainer) -> None:
    other = ids("z")[0]
    found = allowed(constrainer.new(WORD), 0, ids("aaaa"), [other])
    assert found.nonzero()[0].tolist() == [other]


def test_a_minimum_holds_until_nothing_else_may_follow(constrainer: Constrainer) -> None:
    params = SamplingParams(
        temperature=0.0,
        min_output_tokens=10,
        logit_bias={EOS: 100.0},
        stop_token_ids=frozenset({EOS}),
        constraint=constrainer.new(WORD),
    )
    *text, end = sample_all(params, 1)
    assert (len(TOKENIZER.decode(text)), end) == (4, EOS)


def test_rows_without_a_constraint_are_as_if_alone(constrainer: Constrainer) -> None:
    free = SamplingParams(temperature=0.0)
    held = SamplingParams(temperature=0.0, stop_token_ids=frozenset({EOS}), constraint=constrainer.new(WORD))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7))
    before = logits.clone()
    sampled = Sampler(VOCAB).sample(logits, [row(free, []), row(held, []), row(free, [3])])
    assert (logits == before).all()
    assert [s.token_id for s in (sampled[0], sampled[2])] == [int(logits[0].argmax()), int(logits[2].argmax())]
    assert set(TOKENIZER.decode([sampled[1].token_id])) <= set("abc")


def test_tokens_that_do_not_fit_are_a_problem_of_their_row_alone(constrainer: Constrainer) -> None:
    held = SamplingParams(temperature=0.0, stop_token_ids=frozenset({EOS}), constraint=constrainer.new(WORD))
    logits = torch.zeros(2, VOCAB)
    wrong, right = Sampler(VOCAB).sample(logits, [row(held, ids("xyz")), row(held, ids("ab"), 1)])
    assert wrong.token_id == -1 and "doesn't satisfy the grammar" in wrong.problem
    assert not right.problem and right.token_id >= 0
    with pytest.raises(ConstraintFailed):
        allowed(constrainer.new(WORD), 0, ids("xyz"))


def test_grammars_that_cannot_be_followed_are_refused(constrainer: Constrainer) -> None:
    for grammar in (grammar_from("regex", "a(?=b)"), grammar_from("lark", "start: nothing"), "{", ""):
        with pytest.raises(ValueError):
            constrainer.new(grammar)


def test_many_grammars_do_not_push_one_another_out_of_use(constrainer: Constrainer) -> None:
    first = constrainer.new(WORD)
    for number in range(MAX_GRAMMARS + 5):
        constrainer.new(grammar_from("regex", f"x{{{number + 1}}}"))
    assert allowed(first, 0, ids("ab"))[EOS]
    assert allowed(constrainer.new(WORD), 0, ids("ab"))[EOS]


def test_a_folder_without_a_tokenizer_has_no_constrainer(tmp_path: Path) -> None:

    folder = tmp_path
    assert Constrainer.from_folder(folder, VOCAB) is None


def process_of(constraint: Constraint) -> int:
    """The process that follows it, once it was asked anything."""
    return constraint._sequences[0].process.pid


def test_a_process_ended_from_outside_is_replaced_and_its_sequences_go_on_as_they_were(
    constrainer: Constrainer,
) -> None:
    constraint, other = constrainer.new(WORD), constrainer.new(WORD)
    output = ids("abca")
    expected = [allowed(constrainer.new(WORD), 0, output[:length]) for length in range(5)]
    for length in range(5):
        os.kill(process_of(constraint), signal.SIGKILL) if length else None
        assert (allowed(constraint, 0, output[:length]) == expected[length]).all()
        assert (allowed(other, 0, output[:length]) == expected[length]).all()


@pytest.mark.parametrize("end", [signal.SIGSEGV, None], ids=["crash", "too slow"])
def test_the_row_that_ended_a_process_fails_and_the_others_go_on(end: signal.Signals | None) -> None:
    limits = GrammarLimits(follow_s=0.3 if end is None else 60.0)
    made = Constrainer.from_folder(BUNDLED_MODEL, VOCAB, limits)
    assert made is not None
    with contextlib.closing(made):
        guilty, innocent = made.new(WORD), made.new(WORD)
        expected = allowed(guilty, 0, [])
        pid = process_of(guilty)
        os.kill(pid, signal.SIGSTOP)
        guilty.ask(0, ids("a"), [EOS])
        innocent.ask(0, [], [EOS])
        guilty.flush()
        if end is not None:
            os.kill(pid, end)
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(ConstraintFailed, match="SIGSEGV" if end is not None else r"more than 0\.3 s to follow"):
            allowed(guilty, 0, ids("a"))
        assert (allowed(innocent, 0, []) == expected).all()


def test_a_grammar_that_ends_every_process_is_given_up() -> None:
    made = Constrainer.from_folder(BUNDLED_MODEL, VOCAB)
    assert made is not None
    with contextlib.closing(made):
        constraint = made.new(WORD)
        allowed(constraint, 0, [])
        for _ in range(MOST_FAULTS):
            allowed(constraint, 0, [])
            pid = process_of(constraint)
            os.kill(pid, signal.SIGSTOP)
            constraint.ask(0, ids("a"), [EOS])
            constraint.flush()
            os.kill(pid, signal.SIGSEGV)
            os.kill(pid, signal.SIGCONT)
            with pytest.raises(ConstraintFailed, match="SIGSEGV"):
                allowed(constraint, 0, ids("a"))
        with pytest.raises(ConstraintFailed, match="ended 2 times by its fault"):
            allowed(constraint, 0, [])


def test_masks_asked_for_ahead_are_those_asked_for_at_once(constrainer: Constrainer) -> None:
    ahead, at_once = constrainer.new(WORD), constrainer.new(WORD)
    output = ids("abca")
    for length in range(5):
        for index in range(3):
            ahead.ask(index, output[:length], [EOS])
        ahead.flush()
        for index in range(3):
            assert (allowed(ahead, index, output[:length]) == allowed(at_once, index, output[:length])).all()


@pytest.mark.parametrize("vocab_size", [64, 1000, 32_769])
def test_masks_by_the_kernel_are_those_by_torch(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    words = random.integers(-(1 << 31), 1 << 31, (3, -(-vocab_size // 32))).astype(np.int32)
    words[0], words[1, : len(words[1]) // 2] = -1, 0
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1))

    class Fixed:
        def allowed(self, index: int, *_: object) -> Words:
            return words[index]

    fixed: Any = Fixed()
    free, held = SamplingParams(), SamplingParams(constraint=fixed)
    rows = [row(free, []), *(row(held, [], index) for index in range(3)), row(free, [])]
    by_kernel = logits.clone()
    mask_rows(by_kernel, dict(enumerate(words, start=1)))
    monkeypatch.setattr("engine.sampling.rules.native", lambda: (None, "not wanted"))
    by_torch, left = LogitRules([each.params for each in rows], vocab_size, logits.device).apply(logits, rows)
    assert torch.equal(by_kernel, by_torch) and not left
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    assert torch.equal(by_torch[1:4] == -torch.inf, ~torch.from_numpy(bits))
    assert torch.equal(by_torch[[0, 4]], logits[[0, 4]]) and torch.equal(by_torch[1], logits[1])


@pytest.mark.parametrize("vocab_size", [64, 1000, 32_769])
@pytest.mark.parametrize("temperatures", [(0.0,) * 6, (1.0,) * 6, (0.0, 0.7, 0.0, 1.5, 1e-6, 0.0)])
def test_tokens_are_the_same_whether_or_not_kernels_read_the_masks(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, temperatures: tuple[float, ...]
) -> None:
    """With ties, masks that keep everything, few tokens or the last one alone, and a row without; logits stay as they
    are."""
    random = np.random.default_rng(vocab_size)
    words = random.integers(-(1 << 31), 1 << 31, (5, -(-vocab_size // 32))).astype(np.int32)
    words[0], words[1] = -1, 0
    words.view(np.uint8)[1, (vocab_size - 1) // 8] = 1 << (vocab_size - 1) % 8
    words[2, : len(words[2]) // 2] = 0
    words[4] &= 1 << random.integers(0, 31, len(words[4]))
    logits = torch.randint(-3, 4, (6, vocab_size), generator=torch.Generator().manual_seed(1)).float()
    logits[3] = -torch.inf
    logits[3, vocab_size // 2] = 0
    words[3, vocab_size // 2 // 32] = -1
    raw = logits.clone()

    class Fixed:
        def allowed(self, index: int, *_: object) -> Words:
            return words[index]

    fixed: Any = Fixed()
    params = [
        SamplingParams(temperature=t, seed=r, top_p=0.9 if r == 4 else 1.0, constraint=fixed if r < 5 else None)
        for r, t in enumerate(temperatures)
    ]
    rows = [row(each, [], index) for index, each in enumerate(params)]
    by_kernel = [token.token_id for token in Sampler(vocab_size).sample(logits, rows)]
    assert torch.equal(logits, raw)
    monkeypatch.setattr("engine.sampling.rules.native", lambda: (None, "not wanted"))
    assert by_kernel == [token.token_id for token in Sampler(vocab_size).sample(logits, rows)]
    assert by_kernel[1] == vocab_size - 1


def test_one_grammar_that_compiles_long_holds_up_no_other() -> None:
    made = Constrainer.from_folder(BUNDLED_MODEL, VOCAB, GrammarLimits(compile_s=60))
    assert made is not None
    with contextlib.closing(made):
        compiled: SimpleQueue[Constraint | Exception] = SimpleQueue()
        made.begin(grammar_from("regex", "a?" * 30_000), compiled.put)
        made.begin(WORD, compiled.put)
        assert isinstance(first := compiled.get(timeout=WAIT_S), Constraint)
        assert allowed(first, 0, ids("ab"))[EOS]
        assert compiled.empty()
