"""Tokens of experts on a worker's page of metrics: counted where they are chosen, by Baton's kernels and by torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engine_steps import make_runner, on_each_rank, run_in_chunks
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.models.experts import ExpertLoad
from engine.tp import TPGroup
from worker.expert_metrics import ExpertCollector

IDS = list(range(3, 43))


def page(load: ExpertLoad | None) -> dict[tuple[str, ...], float]:
    """The samples by name and label."""
    registry = CollectorRegistry()
    registry.register(ExpertCollector(lambda: load))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_tokens_of_all_layers_add_up_and_the_busiest_is_held_against_the_mean() -> None:
    found = page(ExpertLoad({0: [4, 0, 0, 0], 1: [1, 1, 1, 1]}, {0: [4, 0], 1: [2, 2]}, 3))
    tokens = {name[1]: value for name, value in found.items() if name[0] == "baton_expert_tokens_total"}
    assert tokens == {"0": 5, "1": 1, "2": 1, "3": 1}
    assert found["baton_expert_imbalance", "experts"] == pytest.approx((4 + 1) / 2)
    assert found["baton_expert_imbalance", "groups"] == pytest.approx((2 + 1) / 2)
    assert found["baton_expert_moves_total",] == 3


def test_before_the_first_token_all_experts_are_alike_and_without_an_answer_there_is_nothing() -> None:
    assert page(ExpertLoad({0: [0, 0]}, {0: [0]}))["baton_expert_imbalance", "experts"] == 1
    assert page(None) == {}


@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", "auto"), ("float32", "torch")])
def test_every_token_is_counted_once_for_each_expert_that_it_chooses(dtype: str, kernels: str, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3-moe", tmp_path)
    runner = make_runner(folder, dtype=dtype, kernels=kernels)
    config = runner.config.experts
    assert config is not None
    run_in_chunks(runner, IDS, [25, 7, *[1] * 8])
    counted = runner.expert_load().experts
    assert list(counted) == [layer for layer, has_experts in enumerate(config.layers) if has_experts]
    assert {sum(tokens) for tokens in counted.values()} == {len(IDS) * config.num_per_token}

    def of_rank(tp: TPGroup) -> dict[int, list[int]]:
        shared = make_runner(folder, tp=tp, dtype="float32", kernels="torch", expert_parallel=2)
        run_in_chunks(shared, IDS, [25, 7, *[1] * 8])
        return shared.expert_load().experts

    if dtype == "float32":
        assert on_each_rank(2, of_rank) == [counted] * 2, "each rank counts those of all"
