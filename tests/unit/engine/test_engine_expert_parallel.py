"""Experts divided whole among groups of ranks: each form of them against transformers and against a single rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import held_bytes, make_runner, on_each_rank, run_in_chunks

from cluster.errors import ConfigError
from engine.checkpoint import Checkpoint
from engine.layers.experts import RoutedExperts, StackedExperts
from engine.layers.linear import Loader
from engine.layers.ops import TorchOps, choose_ops
from engine.model_cost import weight_bytes
from engine.models.experts import ExpertsConfig
from engine.models.folder import read_model
from engine.native import native
from engine.tp import ExpertSlices, SingleGroup, TPGroup

KERNELS, WHY_NOT = native()
IDS = [(7 * i) % 250 + 3 for i in range(40)]
CHUNKS = [25, 7, *[1] * 8]
SEVEN = {
    "mixtral": {"num_local_experts": 7},
    "qwen2-moe": {"num_experts": 7},
    "qwen3-moe": {"num_experts": 7},
    "gpt-oss": {"num_local_experts": 7},
}
SPLITS = [(2, 2), (4, 4), (4, 2)]
"""Ranks, and the groups of them."""


def reference(folder: Path) -> torch.Tensor:
    """Logits of transformers, float32 [T, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits.float()


@pytest.mark.parametrize("kind", SEVEN)
def test_experts_that_ranks_do_not_divide_give_what_transformers_give(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path, **SEVEN[kind])
    expected = reference(folder)
    for size, groups in SPLITS:

        def logits(tp: TPGroup, groups: int = groups) -> torch.Tensor:
            return run_in_chunks(make_runner(folder, tp=tp, expert_parallel=groups), IDS, CHUNKS)

        ranks = on_each_rank(size, logits)
        assert all(torch.equal(each, ranks[0]) for each in ranks), "ranks disagree"
        assert (ranks[0] - expected).abs().max() < 1e-4, (size, groups)


def experts_of(folder: Path, tp: TPGroup, groups: int, **how: Any) -> RoutedExperts:
    """Those of the last layer, which are experts in every kind."""
    device, dtype = torch.device("cpu"), how.get("dtype", torch.bfloat16)
    config = read_model(folder).with_expert_parallel(groups, tp.size)
    assert config.experts is not None
    ops, products, _ = choose_ops(how.get("kernels", "auto"), device, dtype, config.head_dim)
    with Checkpoint(folder) as checkpoint:
        quantization = how.get("quantization", "none")
        loader = Loader(checkpoint, tp, device, dtype, products, quantization, None, False, ops)
        return RoutedExperts(config.experts, config.hidden_size, config.num_hidden_layers - 1, loader)


@pytest.mark.skipif(KERNELS is None or not KERNELS.has_bf16_products, reason=f"no products in bfloat16: {WHY_NOT}")
@pytest.mark.parametrize("kind", SEVEN)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_grouped_product_of_each_rank_adds_up_to_that_of_one(kind: str, quantization: str, tmp_path: Path) -> None:
    """Of one token most ranks have nothing to do."""
    sizes = {} if kind in ("mixtral", "gpt-oss") else {"moe_intermediate_size": 64}
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16", hidden_size=128, **SEVEN[kind], **sizes)
    alone = experts_of(folder, SingleGroup(), 1, quantization=quantization)
    assert alone.experts.native is not None
    for num_tokens in (1, 3, 70):
        x = torch.randn((num_tokens, 128), generator=torch.Generator().manual_seed(num_tokens)).bfloat16()
        expected = alone(x).float()
        for size, groups in SPLITS:

            def out(tp: TPGroup, groups: int = groups, x: torch.Tensor = x) -> torch.Tensor:
                return experts_of(folder, tp, groups, quantization=quantization)(x)

            for found in on_each_rank(size, out):
                error = (found.float() - expected).abs().mean()
                assert error <= 0.02 * expected.abs().mean(), (num_tokens, size, groups)


@pytest.mark.parametrize("kind", SEVEN)
def test_experts_of_a_gpu_leave_those_of_other_ranks_out(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16", **SEVEN[kind])
    one_by_one = experts_of(folder, SingleGroup(), 1, kernels="torch")
    x = torch.randn((33, read_model(folder).hidden_size), generator=torch.Generator().manual_seed(1)).bfloat16()
    choice = one_by_one._choose(one_by_one.router(x, torch.float32))
    expected = one_by_one.experts(x, *choice)

    def part(tp: TPGroup) -> torch.Tensor:
        config = read_model(folder).with_expert_parallel(4, 4)
        assert config.experts is not None
        name = f"model.layers.{config.num_hidden_layers - 1}.{config.experts.names.block}.experts"
        held = config.experts.first_placement[tp.rank]
        with Checkpoint(folder) as checkpoint:
            device = torch.device("cpu")
            loader = Loader(checkpoint, tp, device, torch.bfloat16, None, "none", None, False, TorchOps())
            loader = replace(loader, tp=ExpertSlices(tp, 4))
            sizes = config.hidden_size, config.experts.intermediate_size
            return StackedExperts(name, held, sizes, config.experts, loader)(x, *choice)

    found = sum(on_each_rank(4, part))
    assert (found - expected).abs().mean() <= 0.01 * expected.abs().mean()


def test_every_expert_is_held_once_and_groups_differ_by_one_at_most() -> None:
    for count in (4, 7, 128):
        whole = ExpertsConfig((True,), count, 2, 64, True)
        for size, groups in ((1, 1), (2, 2), (4, 2), (4, 4), (8, 4)):
            config = whole.in_groups(groups, size)
            held = [config.first_placement[config.group_of(rank, size)] for rank in range(size)]
            for rank in range(size):
                assert held[rank] == held[rank * groups // size * (size // groups)], "the ranks of a group differ"
            of_groups = held[:: size // groups]
            assert sorted(expert for each in of_groups for expert in each) == list(range(count))
            assert {len(each) for each in of_groups} <= {config.most_held, count // groups}


@pytest.mark.parametrize(
    ("kind", "size", "groups", "why"),
    [
        (
            "mixtral",
            4,
            3,
            r"expert_parallel: 3 groups of 4 ranks \(tensor_parallel\) cannot share \d experts; use 1 or 2 or 4",
        ),
        ("mixtral", 1, 2, r"cannot share \d experts; use 1$"),
        ("llama", 2, 2, "expert_parallel: 2, and LlamaForCausalLM has no experts; use 1"),
    ],
)
def test_groups_that_cannot_be_are_refused_with_those_that_can(
    kind: str, size: int, groups: int, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        read_model(make_checkpoint(kind, tmp_path)).with_expert_parallel(groups, size)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_rank_with_most_experts_has_the_weights_that_memory_is_planned_for(groups: int, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3-moe", tmp_path, dtype="bfloat16", num_experts=7, moe_intermediate_size=64)

    def sizes(tp: TPGroup) -> tuple[int, int]:
        runner = make_runner(folder, tp=tp, dtype="bfloat16", kernels="torch", expert_parallel=groups)
        return held_bytes(runner), weight_bytes(runner.config, tp.size, runner.weight_form)

    found = on_each_rank(4, sizes)
    assert max(held for held, _ in found) == found[0][0] == found[0][1]
    assert (len({held for held, _ in found}) > 1) == (groups > 1), "7 experts are not divided by 2 or 4"
