"""The largest step is measured, near what its shapes say, and where nothing can be measured the estimate stands in."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner, on_each_rank, run_in_chunks

from engine import profiling
from engine.memory import MemoryDemand, StepLimits, estimate_activations, estimate_bytes
from engine.model_cost import WeightForm
from engine.model_runner import ModelRunner
from engine.models.folder import read_model
from engine.profiling import make_step, measure_activations, step_to_try, untried_bytes
from engine.sampling.prompt_logprobs import SLICE_BYTES
from engine.tp import SingleGroup, TPGroup

needs_meter = pytest.mark.skipif(bool(profiling._reset_peak()), reason=profiling._reset_peak())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for its activations to stand out."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 1000}
    return make_checkpoint("llama", tmp_path_factory.mktemp("wide"), head_dim=64, **sizes)


def demand_of(folder: Path, dtype: str = "float32", **changes: Any) -> MemoryDemand:
    sizes: dict[str, Any] = {
        "tp_size": 1,
        "kv_dtype": dtype,
        "block_size": 16,
        "kv_cache_tokens": None,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "memory_utilization": 0.9,
    }
    config = read_model(folder)
    return MemoryDemand(config=config, form=WeightForm(dtype), **{**sizes, **changes})


def runner_of(folder: Path, demand: MemoryDemand, tp: TPGroup | None = None) -> ModelRunner:
    return ModelRunner(
        folder, tp=tp or SingleGroup(), device="cpu", dtype=demand.form.dtype, block_size=demand.block_size
    )


@needs_meter
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_measured_is_near_the_estimate(dtype: str, wide: Path) -> None:
    demand = demand_of(wide, dtype=dtype, kv_dtype=dtype)

    found = measure_activations(runner_of(wide, demand), demand)

    assert found.is_measured, found.why
    assert 0.4 < found.size_bytes / estimate_activations(demand, "").size_bytes < 2.5


@needs_meter
def test_twice_the_tokens_take_more(wide: Path) -> None:
    demand = demand_of(wide)
    runner = runner_of(wide, demand)

    few, many = (measure_activations(runner, replace(demand, max_num_batched_tokens=n)).size_bytes for n in (512, 2048))

    assert many > 1.5 * few


@needs_meter
def test_prompt_tokens_are_scored_in_the_step(tmp_path: Path) -> None:
    """Of a model that has little but a vocabulary, whose logits to sample from are a tenth of a slice."""
    demand = demand_of(make_checkpoint("llama", tmp_path, vocab_size=20_000), max_num_seqs=2)

    found = measure_activations(runner_of(tmp_path, demand), demand)

    assert demand.largest_step.num_scored == SLICE_BYTES // 80_000
    assert SLICE_BYTES < found.size_bytes < 8 * SLICE_BYTES


@needs_meter
def test_a_part_of_the_step_tells_of_the_whole(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demand = demand_of(wide)
    runner = runner_of(wide, demand)
    whole = measure_activations(runner, demand)
    monkeypatch.setattr(profiling, "_MAX_WORK_ON_CPU", 3_000_000_000)

    part = measure_activations(runner, demand)

    assert step_to_try(demand, 2048).num_tokens < 0.4 * demand.largest_step.num_tokens
    assert 0.6 < part.size_bytes / whole.size_bytes < 2
    assert part.why.startswith(whole.why) and "in a step of" in part.why


def test_a_large_model_runs_a_part_and_a_small_one_all(wide: Path) -> None:
    small = demand_of(wide)
    sizes = {"hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32, "head_dim": 128}
    large = replace(small, config=replace(small.config, **sizes, num_key_value_heads=32, vocab_size=32_000))

    assert step_to_try(small, 2048) == small.largest_step == StepLimits(1024, 16, 1024)
    tried = step_to_try(large, 2048)
    assert (large.largest_step.num_tokens, large.largest_step.num_scored) == (1024, 131)
    assert 64 < tried.num_tokens < 128 and tried.num_seqs == 16 and 64 < tried.num_scored < 131
    assert step_to_try(replace(large, max_num_seqs=1, max_model_len=20), 20) == StepLimits(20, 1, 20)


def test_what_was_not_tried_counts_as_its_shapes_say_or_as_much_more_as_the_peak_was(wide: Path) -> None:
    demand = demand_of(wide)
    tried = StepLimits(256, 16, 256)
    said = estimate_bytes(demand, tried)
    rest = estimate_bytes(demand, demand.largest_step) - said

    assert untried_bytes(demand, demand.largest_step, said) == 0
    assert [untried_bytes(demand, tried, peak) for peak in (said // 2, said, 2 * said)] == [rest, rest, 2 * rest]


def test_every_rank_of_a_group_takes_part(wide: Path) -> None:
    demand = demand_of(wide, tp_size=2)

    found = on_each_rank(2, lambda tp: measure_activations(runner_of(wide, demand, tp), demand))

    assert all(one.size_bytes > 0 for one in found)


def test_a_context_too_long_to_try_counts_in_proportion(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demand = demand_of(wide)
    runner = runner_of(wide, demand)
    monkeypatch.setattr(profiling, "_peak_on_cpu", lambda work: (1000, "so it was"))
    assert measure_activations(runner, demand).size_bytes == 1000

    monkeypatch.setattr(profiling, "_MAX_CONTEXT_ON_CPU", 512)

    assert measure_activations(runner, demand).size_bytes == 4000


def test_where_the_peak_cannot_be_reset_the_estimate_stands_in_and_says_why(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = demand_of(wide)
    monkeypatch.setattr(profiling, "_reset_peak", lambda: "this system does not")

    found = measure_activations(runner_of(wide, demand), demand)

    assert found == estimate_activations(demand, "this system does not")


@needs_meter
def test_the_meter_sees_memory_that_is_given_back_at_once() -> None:
    def work() -> None:
        torch.ones(50_000_000, dtype=torch.uint8)

    size, why = profiling._peak_on_cpu(work)

    assert size is not None, why
    assert size == pytest.approx(50_000_000, rel=0.1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > size


def test_measuring_leaves_what_a_model_says_as_it_was(wide: Path) -> None:
    demand = demand_of(wide)
    expected = run_in_chunks(make_runner(wide), list(range(40)), [30, 10])
    runner = runner_of(wide, demand)

    measure_activations(runner, demand)
    runner.make_pool(32)

    assert torch.equal(run_in_chunks(runner, list(range(40)), [30, 10]), expected)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_rehearsal_has_one_layer_of_each_kind(kind: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if kind == "qwen2":
        more = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
    demand = demand_of(make_checkpoint(kind, tmp_path, **more))
    runner = runner_of(tmp_path, demand)

    assert len(runner.rehearsal(64, 2048)._model.layers) == (2 if kind == "qwen2" else 1)
    assert len(runner._model.layers) == 4
    assert measure_activations(runner, demand).size_bytes > 0


def lengths(step: Any) -> list[tuple[int, int]]:
    """New tokens and all tokens of each sequence."""
    return list(zip(np.diff(step.cu_seqlens_q).tolist(), step.seqlens_k.tolist(), strict=True))


@pytest.mark.parametrize(
    ("size", "context", "expected"),
    [
        (StepLimits(10, 4, 3), 20, [(7, 20), (1, 1), (1, 1), (1, 1)]),
        (StepLimits(10, 4, 10), 5, [(5, 5), (3, 3), (1, 1), (1, 1)]),
        (StepLimits(3, 3, 7), 5, [(1, 5), (1, 1), (1, 1)]),
        (StepLimits(10, 2, 1), 5, [(5, 5), (5, 5)]),
        (StepLimits(1, 1, 1), 1, [(1, 1)]),
    ],
)
def test_a_step_has_all_tokens_sequences_scored_rows_and_a_whole_context(
    size: StepLimits, context: int, expected: list[tuple[int, int]]
) -> None:
    num_blocks = -(-size.num_tokens // 4)

    step = make_step(size, context, block_size=4, num_blocks=num_blocks)

    assert lengths(step) == expected
    assert len(step.logits_indices) == size.num_seqs and len(step.scored) == size.num_scored
    assert step.scored[:, 0].max() < size.num_tokens
    assert step.block_tables.shape == (len(expected), -(-context // 4))
    assert step.positions.max() == context - 1
    assert len(set(step.slot_mapping.tolist())) == size.num_tokens, "no two tokens are written to one slot"
    assert max(step.block_tables.max() * 4, step.slot_mapping.max()) < num_blocks * 4


def test_the_largest_step_is_what_sequences_may_hold_at_most(wide: Path) -> None:
    assert demand_of(wide, max_num_seqs=4, max_model_len=20).largest_step == StepLimits(80, 4, 80)
    assert demand_of(wide, max_num_batched_tokens=3).largest_step == StepLimits(3, 3, 3)
