"""Every family that is served, on small random checkpoints: what it generates is what transformers does, in float32.

A family is a line of `FAMILY_CASES` in tests/support/checkpoints.py, and one more for each odd configuration; those
beyond a family's first are the battery that `make families` runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILY_CASES, VOCAB_SIZE, make_checkpoint
from engine_steps import held_bytes, make_runner, on_each_rank, run_in_chunks, scattered_table, step_of

from engine.model_cost import WeightForm, weight_bytes
from engine.model_runner import ModelRunner
from engine.models.folder import read_model
from engine.models.registry import FAMILIES
from engine.step_input import SequenceSlice
from engine.tp import TPGroup

PROMPT_LENGTHS = (1, 15, 16, 17, 100, 1000)
SHORT = (1, 17, 100)
"""`make test` takes one configuration of each family through these, `make families` every one through all."""
NUM_GENERATED = 64
NEAR = 1e-4
"""Logits may differ by so much; of two tokens that are closer, either may be chosen."""
NUM_BLOCKS = 112
TP_TOKENS = 40


def _cases() -> list[object]:
    """Names of `FAMILY_CASES` and lengths of prompts."""
    first_of_kinds = {kind: name for name, (kind, _) in reversed(FAMILY_CASES.items())}
    short = [pytest.param((name, SHORT), id=f"{name}, short prompts") for name in first_of_kinds.values()]
    whole = [pytest.param((name, PROMPT_LENGTHS), id=name, marks=pytest.mark.battery) for name in FAMILY_CASES]
    return [*short, *whole]


@dataclass(frozen=True)
class Model:
    folder: Path
    sequences: list[list[int]]
    """Prompts, and what Baton has generated from each."""
    logits: list[torch.Tensor]
    """Of Baton, those that each generated token was chosen from: [NUM_GENERATED, VOCAB_SIZE]."""


@pytest.fixture(scope="module", params=_cases())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, lengths = request.param
    kind, overrides = FAMILY_CASES[name]
    folder = make_checkpoint(kind, tmp_path_factory.mktemp("family"), **overrides)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return Model(folder, *_generate(make_runner(folder, num_blocks=NUM_BLOCKS), prompts))


def _generate(runner: ModelRunner, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens behind all prompts, which are computed in one step and then together, token by token."""
    blocks, tables = list(scattered_table(runner, NUM_BLOCKS * runner.block_size)), []
    for prompt in prompts:
        count = -(-(len(prompt) + NUM_GENERATED) // runner.block_size)
        tables.append(tuple(blocks[:count]))
        del blocks[:count]
    sequences = [list(prompt) for prompt in prompts]
    starts, rows = [0] * len(prompts), []
    for _ in range(NUM_GENERATED):
        slices = [
            SequenceSlice(tuple(tokens[start:]), start, table, wants_logits=True)
            for tokens, start, table in zip(sequences, starts, tables, strict=True)
        ]
        rows.append(runner.forward(step_of(runner, slices)).clone())
        starts = [len(tokens) for tokens in sequences]
        for tokens, token in zip(sequences, rows[-1].argmax(dim=1).tolist(), strict=True):
            tokens.append(token)
    return sequences, list(torch.stack(rows, dim=1))


def test_greedy_tokens_and_logits_are_those_of_transformers(model: Model) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="eager")
    for sequence, logits in zip(model.sequences, model.logits, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence[:-1]])).logits[0, -NUM_GENERATED:].float()
        chosen = torch.tensor(sequence[-NUM_GENERATED:])[:, None]
        length = len(sequence) - NUM_GENERATED
        assert (logits - expected).abs().max() < NEAR, f"logits behind a prompt of {length} tokens"
        behind = expected.max(dim=1).values - expected.gather(1, chosen)[:, 0]
        assert behind.max() < NEAR, f"tokens behind a prompt of {length} tokens"


def test_ranks_compute_together_what_one_does(model: Model) -> None:
    """Two and four of them; KV heads are held by several where there are fewer. Bytes are as foretold."""
    tokens, config = model.sequences[-1][:TP_TOKENS], read_model(model.folder)
    expected = run_in_chunks(make_runner(model.folder), tokens, [TP_TOKENS])
    for size in (2, 4):
        config.check_tp_size(size)

        def run(tp: TPGroup) -> tuple[torch.Tensor, int]:
            runner = make_runner(model.folder, tp=tp)
            return run_in_chunks(runner, tokens, [TP_TOKENS - 7, *[1] * 7]), held_bytes(runner)

        results = on_each_rank(size, run)
        assert max(held for _, held in results) == weight_bytes(config, size, WeightForm("float32"))
        for logits, _ in results:
            assert (logits - expected).abs().max() < NEAR, f"{size} ranks"


@pytest.mark.parametrize(
    ("quantization", "within"), [("int8", 0.1), pytest.param("int4", 0.8, marks=pytest.mark.battery)]
)
def test_weights_in_fewer_bits_stay_near(model: Model, quantization: str, within: float) -> None:
    """Less near where a little less of a score leaves out a whole group of experts."""
    experts = read_model(model.folder).experts
    within *= 1.5 if experts is not None and experts.routing is not None else 1.0
    tokens = model.sequences[-1][:TP_TOKENS]
    exact = run_in_chunks(make_runner(model.folder), tokens, [TP_TOKENS])
    for dtype in ("float32", "bfloat16"):
        runner = make_runner(model.folder, quantization=quantization, dtype=dtype)
        logits = run_in_chunks(runner, tokens, [TP_TOKENS - 7, *[1] * 7])
        error = (logits - exact).pow(2).mean(dim=1).sqrt().median()
        assert 0 < error < within * exact.pow(2).mean().sqrt(), dtype
        assert weight_bytes(runner.config, 1, runner.weight_form) == held_bytes(runner)


def test_every_family_that_is_served_is_compared(tmp_path: Path) -> None:
    kinds = {kind for kind, _ in FAMILY_CASES.values()}
    assert {read_model(make_checkpoint(kind, tmp_path / kind)).architecture for kind in kinds} == set(FAMILIES)
