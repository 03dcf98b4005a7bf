"""Decode steps that are captured and replayed, against the same steps computed anew and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import plain_kernels
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import generate, make_runner, run_in_chunks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorder import record
from reference_engine import Engine

from engine.attention.cpu import CpuAttention
from engine.attention.flash import FlashAttention, VarlenAttention
from engine.attention.interface import Attention
from engine.cuda_graphs import bucket_sizes, choose_capture
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.step_input import ScoredSpan, SequenceSlice, StepInput, build_step, is_decode

CPU = torch.device("cpu")
BLOCK_SIZE = 256  # that GPU kernels read in place
NUM_TOKENS, MOST, NUM_BLOCKS = 280, 20, 42


@torch.library.custom_op("baton_tests::varlen_attn", mutates_args=())
def _one_operation(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: list[int],
    lengths: torch.Tensor,
    table: torch.Tensor,
    num_splits: int | None,
) -> torch.Tensor:
    """A kernel: what it looks up in tensors, it looks up each time it runs."""
    options = {"scale": scale, "window_size": (window[0], window[1]), "enable_gqa": True, "num_splits": num_splits}
    sizes = (cu_q, cu_k, max_q, max_k)
    return plain_kernels.varlen_attn_with_splits(q, k, v, *sizes, seqused_k=lengths, block_table=table, **options)


def _varlen_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    if block_table is None or seqused_k is None:
        sizes, options = (cu_q, cu_k, max_q, max_k), {"scale": scale, "window_size": window_size}
        return plain_kernels.varlen_attn_with_pages(q, k, v, *sizes, enable_gqa=enable_gqa, **options)  # type: ignore[arg-type]
    arguments = (max_q, max_k, scale, list(window_size), seqused_k, block_table, num_splits)
    out: torch.Tensor = _one_operation(q, k, v, cu_q, cu_k, *arguments)
    return out


def test_sizes_cover_every_batch_with_little_padding() -> None:
    assert bucket_sizes(1) == (1,) and bucket_sizes(8) == (1, 2, 4, 8) and bucket_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    for most in range(1, 600):
        sizes = bucket_sizes(most)
        assert list(sizes) == sorted(set(sizes)) and sizes[-1] == min(most, 512) and len(sizes) <= 36
        for count in range(1, sizes[-1] + 1):
            assert min(size for size in sizes if size >= count) - count <= max(7, count // 8)


def test_only_steps_of_one_token_each_with_logits_are_decode_steps() -> None:
    def step(*slices: tuple[int, bool]) -> StepInput:
        return build_step([SequenceSlice((1,) * n, 7, (0,), wants) for n, wants in slices], 16)

    assert is_decode(step((1, True))) and is_decode(step((1, True), (1, True)))
    assert not is_decode(step()) and not is_decode(step((2, True))) and not is_decode(step((1, True), (3, True)))
    assert not is_decode(step((1, False))) and not is_decode(step((1, True), (1, False)))
    assert not is_decode(step((2, False), (1, True)))
    scored = SequenceSlice((1,), 3, (0,), True, ScoredSpan(0, (7,), 1))
    assert not is_decode(build_step([scored], BLOCK_SIZE))


@dataclass(frozen=True)
class Case:
    graphs: ModelRunner
    eager: ModelRunner
    token_ids: list[int]
    expected: torch.Tensor  # [NUM_TOKENS, VOCAB_SIZE], of transformers
    kv: torch.Tensor  # [L, 2, 2 * BLOCK_SIZE, H, D] of these tokens
    replayed: list[int]  # a 1 for each replay


def _runner(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: Attention, capture: Callable | None, up_to: int = MOST
) -> ModelRunner:
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "graphs_up_to": up_to}
    return make_runner(folder, kernels="torch", capture=capture, **sizes)


@pytest.fixture(scope="module", params=["llama3-rope", "mistral", "qwen3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    replayed: list[int] = []

    def counted(work: Callable[[], None]) -> Callable[[], None]:
        replay = record(work)
        return lambda: (replay(), replayed.append(1))[0]

    with pytest.MonkeyPatch.context() as monkeypatch:
        graphs = _runner(folder, monkeypatch, VarlenAttention(_varlen_attn, CPU), counted)
        eager = _runner(folder, monkeypatch, VarlenAttention(_varlen_attn, CPU), None)
    run_in_chunks(eager, token_ids, [NUM_TOKENS], (0, 1))
    kv = eager.kv[:, :, :2].flatten(2, 3).clone()
    return Case(graphs, eager, token_ids, expected, kv, replayed)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_replayed_step_equals_transformers_and_writes_nothing_but_its_own_tokens(
    case: Case, data: st.DataObject
) -> None:
    """Steps of any sizes, one after another through the same recordings; what is nobody's is large, to show."""
    starts = data.draw(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=MOST))
    blocks = data.draw(st.permutations(range(NUM_BLOCKS)))
    kv, slices, own = case.graphs.kv, [], []
    kv.fill_(50.0)
    for start in starts:
        table = tuple(blocks.pop() for _ in range(start // BLOCK_SIZE + 1))
        for i, block in enumerate(table):
            there = case.kv[:, :, :start][:, :, i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            kv[:, :, block, : there.shape[2]] = there
        slices.append(SequenceSlice((case.token_ids[start],), start, table, wants_logits=True))
        own.append((table[-1], start % BLOCK_SIZE))
    before, replays = kv.clone(), len(case.replayed)

    logits = case.graphs.forward(build_step(slices, BLOCK_SIZE))

    assert len(case.replayed) == replays + 1
    assert logits.shape == (len(starts), VOCAB_SIZE) and logits.dtype == torch.float32
    assert (logits - case.expected[starts]).abs().max() < 1e-4
    for (block, offset), start in zip(own, starts, strict=True):
        assert (kv[:, :, block, offset] - case.kv[:, :, start]).abs().max() < 1e-4
        before[:, :, block, offset] = kv[:, :, block, offset]
    assert torch.equal(kv[:, :, :NUM_BLOCKS], before[:, :, :NUM_BLOCKS])


def test_layers_with_a_window_and_those_without_are_replayed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are in tables of their own."""
    folder = make_checkpoint("gemma3", tmp_path, sliding_window=300)
    prompts = [list(range(1, 1 + length)) for length in (3, 254, 300)]
    params, results, replayed = SamplingParams(max_output_tokens=12, temperature=0.0), [], []
    for capture in (lambda work: lambda: replayed.append(work()), None):
        runner = _runner(folder, monkeypatch, VarlenAttention(_varlen_attn, CPU), capture)
        blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, groups=runner.config.kv_groups)
        results.append(Engine(runner, blocks, VOCAB_SIZE).generate(prompts, [params] * len(prompts)))

    assert len(runner.config.kv_groups) == 4 and len(replayed) == 11
    assert results[0] == results[1]


def test_generation_with_replays_gives_the_same_tokens_as_without(case: Case) -> None:
    """Batches that shrink as sequences end, shared prompts with copied blocks, and a sequence into its second block."""
    ids = case.token_ids
    prompts = [ids[:5], ids[:250], ids[30:43], ids[:1]]
    params = [
        SamplingParams(max_output_tokens=n, temperature=0.7, seed=n, n=k) for n, k in [(9, 3), (12, 1), (3, 2), (20, 1)]
    ]
    replays = len(case.replayed)

    results = [
        Engine(runner, BlockManager(NUM_BLOCKS, BLOCK_SIZE), VOCAB_SIZE).generate(prompts, params)
        for runner in (case.graphs, case.eager)
    ]

    assert [[c.token_ids for c in group] for group in results[0]] == [
        [c.token_ids for c in group] for group in results[1]
    ]
    assert len(case.replayed) - replays == 20  # the prompt of one token is such a step too


def test_what_is_no_decode_step_is_computed_as_ever(case: Case) -> None:
    ids, replays, layers = case.token_ids, len(case.replayed), []

    prompt = run_in_chunks(case.graphs, ids, [200, 80], (3, 5))
    together = [SequenceSlice((ids[279],), 279, (3, 5), True), SequenceSlice(tuple(ids[:9]), 0, (6,), True)]
    mixed = case.graphs.forward(build_step(together, BLOCK_SIZE))
    silent = case.graphs.forward(build_step([SequenceSlice((ids[9],), 9, (6,), wants_logits=False)], BLOCK_SIZE))
    one = build_step([SequenceSlice((ids[10],), 10, (6,), wants_logits=True)], BLOCK_SIZE)
    told = case.graphs.forward(one, on_layer=layers.append)
    many = [SequenceSlice((ids[0],), 0, (block,), wants_logits=True) for block in range(7, 8 + MOST)]
    crowd = case.graphs.forward(build_step(many, BLOCK_SIZE))

    assert len(case.replayed) == replays
    assert (prompt - case.expected).abs().max() < 1e-4 and (mixed - case.expected[[279, 8]]).abs().max() < 1e-4
    assert silent.shape == (0, VOCAB_SIZE) and (told - case.expected[10]).abs().max() < 1e-4
    assert layers == [1, 2, 3, 4] and (crowd - case.expected[0]).abs().max() < 1e-4


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_are_taken_from_the_step_before_without_being_read(case: Case, data: st.DataObject) -> None:
    """By replays and by steps that are computed as ever; a step of more rows than any recording has comes before."""
    num_rows = data.draw(st.sampled_from([1, 3, MOST, MOST + 3]))
    sampled = torch.tensor(data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=num_rows, max_size=num_rows)))
    ahead = data.draw(st.lists(st.integers(-num_rows, VOCAB_SIZE - 1), min_size=1, max_size=MOST))
    known = [token if token >= 0 else int(sampled[-1 - token]) for token in ahead]
    replays = len(case.replayed)
    prompt = [SequenceSlice((1, 2, 3), 0, (40,), wants_logits=True)] if data.draw(st.booleans()) else []

    given, expected = (
        build_step([SequenceSlice((t,), 0, (i,), True) for i, t in enumerate(tokens)] + prompt, BLOCK_SIZE)
        for tokens in (ahead, known)
    )
    logits = case.graphs.run(given, sampled=sampled).logits.clone()

    assert len(case.replayed) - replays == (not prompt and num_rows <= MOST)
    assert torch.allclose(logits, case.eager.forward(expected), atol=1e-4)


def test_steps_that_overlap_lead_to_the_tokens_of_steps_one_by_one(case: Case) -> None:
    """Across the end of a block."""
    prompts = [case.token_ids[: 250 - i] for i in range(5)]
    one_by_one, overlapping = (generate(case.graphs, prompts, 24, overlaps) for overlaps in (False, True))
    assert one_by_one == overlapping and len({tuple(output) for output in overlapping}) == 5


def test_logits_of_one_step_do_not_depend_on_the_one_before(case: Case) -> None:
    steps = [build_step([SequenceSlice((ids,), 0, (2,), wants_logits=True)], BLOCK_SIZE) for ids in (5, 6)]

    for step in steps:
        assert torch.allclose(case.graphs.forward(step), case.eager.forward(step), atol=1e-4)


def test_no_step_may_name_the_scratch_block(case: Case) -> None:
    step = build_step([SequenceSlice((3,), 20, (0,), wants_logits=True)], BLOCK_SIZE)
    scratch = case.graphs.kv.shape[2] - 1

    assert scratch == NUM_BLOCKS and case.eager.kv.shape[2] == NUM_BLOCKS
    for wrong in ({"block_tables": step.block_tables + scratch}, {"slot_mapping": step.slot_mapping + scratch * 256}):
        with pytest.raises(IndexError, match="there are"):
            case.graphs.forward(replace(step, **wrong))


def test_where_capturing_fails_steps_are_computed_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    folder = make_checkpoint("llama", tmp_path)
    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    broken, eager = (_runner(folder, monkeypatch, backend, capture) for capture in (fails, None))

    assert broken.graphs_reason == "capturing them failed: CUDA out of memory"
    assert torch.equal(*(run_in_chunks(runner, [5, 6, 7, 8], [3, 1], (2,)) for runner in (broken, eager)))


def test_the_reason_for_no_graphs_names_what_stands_in_the_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    flash = FlashAttention(plain_kernels.flash_attn_varlen_func)

    assert case.graphs.graphs_reason == "6 sizes of decode steps, up to 20 sequences"
    assert case.eager.graphs_reason == choose_capture(MOST, CPU, 1, "")[1] == "they need a CUDA device, this is cpu"
    assert choose_capture(0, cuda, 1, "") == (None, "not wanted")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 8, 3))
    assert choose_capture(8, cuda, 2, "") == (None, "NCCL 2.8.3 cannot be captured; 2.9.6 and newer can")
    assert choose_capture(8, cuda, 1, "attention cannot") == (None, "attention cannot")
    assert CpuAttention().static_obstacle(256, torch.float32).endswith("laid out anew for each step")
    assert flash.static_obstacle(256, torch.bfloat16) == ""
    assert flash.static_obstacle(16, torch.bfloat16).endswith("set block_size to 256")
    for rounded in (torch.int8, torch.uint8):
        assert flash.static_obstacle(256, rounded).endswith("set kv_cache_dtype to auto")
