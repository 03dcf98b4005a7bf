"""The ranks of a worker size their pools alike, from the least memory and the largest step among them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engine_steps import on_each_rank

from cluster.errors import ConfigError
from cluster.settings import WorkerSettings
from engine.memory import Activations, MemoryDemand, MemoryPlan
from engine.model_runner import ModelRunner
from engine.tp import TPGroup
from worker import loading
from worker.loading import check_memory, expect_memory, memory_line, size_pool
from worker.resolved import resolve


def demand_of(folder: Path, **settings: Any) -> MemoryDemand:
    given = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 128, "max_num_seqs": 4, **settings}
    return resolve(WorkerSettings.from_values(worker_id="w", role="decode", model_path=str(folder), **given)).demand


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("memory"))


def test_blocks_without_room_for_a_state_and_deterministic_steps_of_states_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3-next", tmp_path, num_key_value_heads=1, head_dim=64)
    settings = WorkerSettings.from_values(worker_id="p", role="prefill", model_path=str(folder))
    with pytest.raises(ConfigError, match=r"block_size: 4 tokens .* no room for the recurrent state"):
        assert resolve(settings.with_values(block_size=4)).block_size
    with pytest.raises(ConfigError, match=r"engine\.deterministic: Qwen3NextForCausalLM"):
        resolve(settings.with_values(deterministic=True))
    assert resolve(settings).block_size >= 16


def plans_of_two_ranks(demand: MemoryDemand, folder: Path) -> list[MemoryPlan]:
    def work(tp: TPGroup) -> MemoryPlan:
        runner = ModelRunner(folder, tp=tp, device="cpu", dtype="float32", block_size=demand.block_size)
        return size_pool(demand, runner, tp)

    return on_each_rank(2, work)


def test_ranks_that_find_different_memory_and_steps_come_to_one_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = demand_of(folder, tp_size=2)
    found = iter([12_000_000, 10_000_000])
    needed = iter([Activations(1_000_000, True, "measured"), Activations(2_000_000, False, "no meter")])
    monkeypatch.setattr(loading, "available_bytes", lambda device, tp_size: next(found))
    monkeypatch.setattr(loading, "measure_activations", lambda runner, demand: next(needed))

    first, second = plans_of_two_ranks(demand, folder)

    assert first == replace(second, activations_why=first.activations_why)
    assert {first.activations_why, second.activations_why} == {"no meter", "another rank could not measure"}
    assert first.free_bytes == 10_000_000 + demand.weight_bytes
    assert (first.activation_bytes, first.activations_are_measured) == (2_000_000, False)
    assert first.decided_by == "memory" and first.num_blocks > 0


def test_a_pool_that_fits_on_one_rank_only_is_refused_on_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demand = demand_of(folder, tp_size=2, kv_cache_tokens=4096)
    found = iter([50_000_000, 3_000_000])
    monkeypatch.setattr(loading, "available_bytes", lambda device, tp_size: next(found))
    refused = []

    def work(tp: TPGroup) -> None:
        runner = ModelRunner(folder, tp=tp, device="cpu", dtype="float32", block_size=demand.block_size)
        try:
            size_pool(demand, runner, tp)
        except ConfigError as error:
            refused.append(str(error))

    on_each_rank(2, work)

    assert len(refused) == 2 and refused[0] == refused[1]
    assert "kv_cache_tokens: 4096 do not fit" in refused[0]


def test_a_worker_that_starts_plans_as_was_expected_but_for_what_it_measures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = demand_of(folder, tp_size=2)
    before = 1 << 30
    monkeypatch.setattr(loading, "available_bytes", lambda device, tp_size: before)
    expected = expect_memory(demand)
    monkeypatch.setattr(loading, "available_bytes", lambda device, tp_size: before - demand.weight_bytes)

    (plan, _) = plans_of_two_ranks(demand, folder)

    def without(plan: MemoryPlan) -> MemoryPlan:
        return replace(plan, activation_bytes=0, activations_are_measured=False, activations_why="", left_bytes=0)

    assert without(plan) == without(expected)
    assert plan.left_bytes + plan.activation_bytes == expected.left_bytes + expected.activation_bytes


def test_what_could_not_fit_in_any_case_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda device, tp_size: 4_000_000)
    with pytest.raises(ConfigError, match="2048 tokens does not fit in the KV pool; memory"):
        check_memory(demand_of(folder))
    check_memory(demand_of(folder, max_model_len=32))


def test_the_ranks_of_a_machine_share_its_memory() -> None:
    whole, quarter = (loading.available_bytes("cpu", n) for n in (1, 4))
    assert quarter == pytest.approx(whole / 4, rel=0.2)
    assert whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_an_estimate_is_reported_as_one_with_its_reason(folder: Path) -> None:
    plan = expect_memory(demand_of(folder, kv_cache_tokens=4096))
    line = memory_line(plan)
    assert "(estimated: measured when a worker starts)" in line
    would_fit = f"as kv_cache_tokens says; {plan.tokens_that_fit} tokens would fit"
    assert line.endswith(f"KV pool: 256 blocks of 16 tokens, 2048 bytes a token, {would_fit}")
    assert "would fit" not in memory_line(expect_memory(demand_of(folder)))
