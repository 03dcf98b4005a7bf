"""Layers that choose among experts: Baton's kernels against one expert after another, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from torch._C._distributed_c10d import FakeProcessGroup

from cluster.errors import CheckpointError, ConfigError
from engine.checkpoint import Checkpoint
from engine.layers.experts import RoutedExperts, StackedExperts
from engine.layers.linear import Loader
from engine.layers.ops import TorchOps, choose_ops
from engine.models.folder import read_model
from engine.native import native
from engine.quantization.interface import TritonProducts
from engine.tp import ProcessGroupTP, SingleGroup

KERNELS, WHY_NOT = native()
KINDS = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
needs_kernels = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_bf16_products, reason=f"no products in bfloat16 here: {WHY_NOT}"
)


def load(folder: Path, kernels: str = "auto", quantization: str = "none", dtype: str = "bfloat16") -> RoutedExperts:
    """The experts of the last layer, which has them in every kind."""
    config, device, kind = read_model(folder), torch.device("cpu"), getattr(torch, dtype)
    assert config.experts is not None
    ops, products, _ = choose_ops(kernels, device, kind, config.head_dim)
    with Checkpoint(folder) as checkpoint:
        loader = Loader(checkpoint, SingleGroup(), device, kind, products, quantization, None, False, ops)
        return RoutedExperts(config.experts, config.hidden_size, config.num_hidden_layers - 1, loader)


def tokens(num_tokens: int, folder: Path) -> torch.Tensor:
    width = read_model(folder).hidden_size
    return torch.randn((num_tokens, width), generator=torch.Generator().manual_seed(num_tokens)).bfloat16()


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("quantization", "within"), [("none", 0.01), ("int8", 0.03), ("int4", 0.25)])
def test_a_grouped_product_is_what_the_experts_give_one_by_one(
    kind: str, quantization: str, within: float, tmp_path: Path
) -> None:
    """In float32, which nothing rounds; of one token most experts get nothing, of 300 some get more than 100."""
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16", hidden_size=256)
    grouped, exact = load(folder, quantization=quantization), load(folder, dtype="float32")
    assert grouped.experts.native is not None and exact.experts.native is None
    for num_tokens in (1, 2, 7, 64, 300):
        x = tokens(num_tokens, folder)
        expected = exact(x.float())
        error = (grouped(x).float() - expected).abs().mean(dim=1)
        assert error.median() <= within * expected.abs().mean(), (
            num_tokens
        )  # of tokens whose choice is a close one, more


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_token_has_the_same_bits_beside_any_others(kind: str, quantization: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16")
    experts, x = load(folder, quantization=quantization), tokens(150, folder)
    together = experts(x)
    assert torch.equal(together, torch.cat([experts(row.unsqueeze(0)) for row in x]))
    assert torch.equal(together[3:40], experts(x[3:40]))
    assert experts(x[:0]).shape == (0, x.shape[1])


def test_equal_logits_choose_as_many_experts_as_any_others(tmp_path: Path) -> None:
    """Of a router that says the same of all, in Baton's kernels and in torch."""
    folder = make_checkpoint("qwen3-moe", tmp_path, dtype="bfloat16")
    for kernels in ("auto", "torch"):
        experts, x = load(folder, kernels), tokens(5, folder)
        alike = experts(torch.zeros_like(x))
        assert torch.equal(alike, torch.zeros_like(x))
        assert experts(x).abs().sum() > 0


def stacked(folder: Path, **options: Any) -> StackedExperts:
    """Those of the last layer as they are on a GPU, in the machine's memory."""
    config, device = read_model(folder), torch.device("cpu")
    assert config.experts is not None
    name, held = f"model.layers.3.{config.experts.names.block}.experts", range(config.experts.num_experts)
    with Checkpoint(folder) as checkpoint:
        loader = Loader(checkpoint, SingleGroup(), device, torch.bfloat16, None, "none", None, False, TorchOps())
        sizes = config.hidden_size, config.experts.intermediate_size
        return StackedExperts(name, held, sizes, config.experts, replace(loader, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_a_gpu_give_in_groups_what_they_do_one_by_one(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16")
    one_by_one, grouped = load(folder, kernels="torch"), stacked(folder)
    for num_tokens in (1, 17, 130):
        x = tokens(num_tokens, folder)
        choice = one_by_one._choose(one_by_one.router(x, torch.float32))
        found, expected = grouped(x, *choice), one_by_one.experts(x, *choice)
        assert found.dtype == torch.float32 and (found - expected).abs().mean() <= 0.01 * expected.abs().mean()


def test_a_share_of_an_expert_that_torch_does_not_multiply_on_a_gpu_is_refused(tmp_path: Path) -> None:
    tp = FakeProcessGroup._create_internal(0, 2)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel: 2 leaves each rank 20 columns of an expert, over 64 inputs"
    ):
        stacked(make_checkpoint("qwen3-moe", tmp_path), tp=ProcessGroupTP(tp))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"quantization": "int8"}, "set model.quantization: int8 to none"),
        ({"dtype": torch.float32}, "set model.dtype to bfloat16"),
        ({"kernels": TritonProducts(is_fixed=True)}, "set engine.deterministic to false"),
    ],
    ids=str,
)
def test_what_torch_does_not_multiply_in_groups_on_a_gpu_is_refused(
    options: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        stacked(make_checkpoint("mixtral", tmp_path), **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be a positive integer (got None)"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer (got 0)"),
        ({"num_experts": None, "num_local_experts": None}, "num_experts must be a positive integer (got None)"),
        ({"mlp_only_layers": {}}, "mlp_only_layers must be a list of layers (got {})"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers (got 'all')"),
        ({"decoder_sparse_step": "2"}, "decoder_sparse_step must be a positive integer (got '2')"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false (got 1)"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_by_its_name(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = make_checkpoint("qwen3-moe", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_model(tmp_path)


def test_a_model_of_which_no_layer_has_experts_is_a_dense_one(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3-moe", tmp_path, mlp_only_layers=[0, 1, 2, 3])
    assert read_model(folder).experts is None


def test_ranks_that_do_not_divide_an_expert_are_refused(tmp_path: Path) -> None:
    config = read_model(make_checkpoint("qwen3-moe", tmp_path, moe_intermediate_size=6))
    with pytest.raises(ConfigError, match=r"4 does not divide .* MLPs of 128, 6; use 1 or 2"):
        config.check_tp_size(4)


def test_the_share_of_experts_that_tokens_choose(tmp_path: Path) -> None:
    experts = read_model(make_checkpoint("mixtral", tmp_path)).experts
    assert experts is not None and experts.num_layers == 4
    assert experts.chosen_share(0) == 0.0
    assert experts.chosen_share(1) == pytest.approx(2 / 6)
    assert experts.chosen_share(2) == pytest.approx(1 - (4 / 6) ** 2)
    assert experts.chosen_share(10_000) == pytest.approx(1.0)
