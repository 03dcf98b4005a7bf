"""On a GPU: captured decode steps against the same steps launched one by one, and against transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import generate, make_runner, run_in_chunks
from reference_engine import Engine

from cluster.errors import ConfigError
from engine.attention.registry import choose_attention
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from engine.step_input import SequenceSlice, StepInput, build_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

DEVICE, DTYPE = "cuda", "bfloat16"
BLOCK_SIZE, NUM_BLOCKS, MOST, NUM_TOKENS = 256, 42, 20, 280
ALL_SIZES = "6 sizes of decode steps, up to 20 sequences, with the choice of their tokens"


@dataclass(frozen=True)
class Case:
    graphs: ModelRunner
    eager: ModelRunner
    token_ids: list[int]
    exact: torch.Tensor  # [NUM_TOKENS, VOCAB_SIZE], of transformers in float32
    theirs: torch.Tensor  # in bfloat16
    kv: torch.Tensor  # [L, 2, 2 * BLOCK_SIZE, H, D] of these tokens


def _runner(folder: Path, attention: str, graphs_up_to: int = 0, **wanted: str) -> ModelRunner:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "graphs_up_to": graphs_up_to}
    sampler = Sampler(VOCAB_SIZE) if graphs_up_to else None
    return make_runner(folder, device=DEVICE, dtype="auto", attention=attention, sampler=sampler, **sizes, **wanted)


def _reference(folder: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(DEVICE)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids], device=DEVICE)).logits[0]
    return logits.float()


@pytest.fixture(
    scope="module",
    params=[(k, a) for k in ("llama3-rope", "mistral", "qwen3") for a in ("triton", "varlen", "flash_attn")],
    ids=" ".join,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, attention = request.param
    try:
        backend, _ = choose_attention(attention, torch.device(DEVICE), getattr(torch, DTYPE))
    except ConfigError as error:
        pytest.skip(str(error))
    if obstacle := backend.static_obstacle(BLOCK_SIZE, getattr(torch, DTYPE)):
        pytest.skip(obstacle)
    folder = make_checkpoint(kind, tmp_path_factory.mktemp(kind), dtype=DTYPE)
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    graphs, eager = (_runner(folder, attention, most) for most in (MOST, 0))
    run_in_chunks(eager, ids, [NUM_TOKENS], (0, 1))
    kv = eager.kv[:, :, :2].flatten(2, 3).clone()
    exact, theirs = (_reference(folder, ids, dtype) for dtype in (torch.float32, getattr(torch, DTYPE)))
    return Case(graphs, eager, ids, exact, theirs, kv)


def test_graphs_are_captured_for_every_size(case: Case) -> None:
    assert case.graphs.graphs_reason == ALL_SIZES
    assert case.eager.graphs_reason == "not wanted"


@pytest.mark.parametrize("seed", range(12))
def test_a_replayed_step_is_as_near_as_transformers_and_writes_nothing_but_its_own_tokens(
    case: Case, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    starts = draw.integers(0, NUM_TOKENS, int(draw.integers(1, MOST + 1))).tolist()
    blocks = draw.permutation(NUM_BLOCKS).tolist()
    slices, own = [], []
    for runner in (case.graphs, case.eager):
        runner.kv.fill_(50.0)
    for start in starts:
        table = tuple(blocks.pop() for _ in range(start // BLOCK_SIZE + 1))
        for i, block in enumerate(table):
            there = case.kv[:, :, :start][:, :, i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            for runner in (case.graphs, case.eager):
                runner.kv[:, :, block, : there.shape[2]] = there
        slices.append(SequenceSlice((case.token_ids[start],), start, table, wants_logits=True))
        own.append((table[-1], start % BLOCK_SIZE))
    step, kv = build_step(slices, BLOCK_SIZE), case.graphs.kv
    before = kv.clone()

    replayed = case.graphs.forward(step)
    launched = case.eager.forward(step)

    error, allowed = ((logits - case.exact[starts]).abs() for logits in (replayed, case.theirs[starts]))
    assert (replayed - launched).abs().max() <= 2 * allowed.max()
    assert error.mean() <= 1.5 * allowed.mean() and error.max() <= 2 * allowed.max()
    for block, offset in own:
        assert (kv[:, :, block, offset] != 50.0).any()
        before[:, :, block, offset] = kv[:, :, block, offset]
    assert torch.equal(kv[:, :, :NUM_BLOCKS], before[:, :, :NUM_BLOCKS])


def test_replayed_steps_take_no_memory(case: Case) -> None:
    """As rows join, go on into their second block and leave."""

    def step(position: int, rows: range) -> StepInput:
        tables = [(2 * row, 2 * row + 1)[: position // BLOCK_SIZE + 1] for row in rows]
        return build_step([SequenceSlice((5,), position, table, wants_logits=True) for table in tables], BLOCK_SIZE)

    steps = [step(254, range(9)), step(255, range(9)), step(256, range(MOST)), step(257, range(3, MOST))]
    for each in steps:
        case.graphs.forward(each)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for each in steps:
        case.graphs.forward(each)
    assert torch.cuda.max_memory_allocated() == before


def test_generation_ends_the_same_way_with_graphs_as_without(case: Case) -> None:
    """Greedy, with logprobs: where two choices are as good as equal, rounding may tip them."""
    ids = case.token_ids
    prompts = [ids[:5], ids[:250], ids[30:43]]
    params = [SamplingParams(max_output_tokens=n, temperature=0.0, top_logprobs=0) for n in (9, 30, 3)]
    results = [
        Engine(runner, BlockManager(NUM_BLOCKS, BLOCK_SIZE), VOCAB_SIZE).generate(prompts, params)
        for runner in (case.graphs, case.eager)
    ]
    for (replayed,), (launched,) in zip(*results, strict=True):
        assert replayed.token_ids[0] == launched.token_ids[0]
        for ours, theirs in zip(replayed.sampled, launched.sampled, strict=True):
            assert ours.logprob is not None and theirs.logprob is not None
            assert abs(ours.logprob - theirs.logprob) < 0.2
            if ours.token_id != theirs.token_id:
                break


def test_steps_that_overlap_lead_to_the_tokens_of_steps_one_by_one(case: Case) -> None:
    """Across the end of a block; tokens are chosen in the graphs."""
    prompts = [case.token_ids[: 250 - i] for i in range(5)]
    one_by_one, overlapping = (generate(case.graphs, prompts, 24, overlaps) for overlaps in (False, True))
    assert one_by_one == overlapping and len({tuple(output) for output in overlapping}) == 5


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_products_in_fewer_bits_can_be_captured(tmp_path: Path, quantization: str) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype=DTYPE)
    runners = [_runner(folder, "auto", most, quantization=quantization) for most in (MOST, 0)]
    assert runners[0].graphs_reason == ALL_SIZES
    ids = list(range(1, 41))
    replayed, launched = (run_in_chunks(runner, ids, [30] + [1] * 10, (3,)) for runner in runners)
    assert (replayed - launched).abs().max() < 0.05 * launched.abs().max()


def test_attention_in_plain_torch_is_not_captured_and_says_so(tmp_path: Path) -> None:
    runner = _runner(make_checkpoint("llama", tmp_path), "cpu", MOST)
    assert runner.graphs_reason == "attention in plain torch is laid out anew for each step"


def test_steps_in_float32_are_captured(tmp_path: Path) -> None:
    runner = _runner(make_checkpoint("llama", tmp_path), "auto", MOST)
    assert runner.graphs_reason == ALL_SIZES
