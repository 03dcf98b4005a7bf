"""gpt-oss in MXFP4: the numbers that were rounded, kept in their bits where kernels multiply with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE
from engine_steps import held_bytes, make_runner, on_each_rank, run_in_chunks
from mxfp4_checkpoints import make_mxfp4, round_to_mxfp4
from safetensors.torch import load_file, save_file

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.layers.experts import RoutedExperts, SeparateExperts
from engine.model_cost import describe_weights, weight_bytes
from engine.model_runner import ModelRunner
from engine.native import native
from engine.native.structures import MXFP4
from engine.quantization.integers import Quantized
from engine.quantization.interface import Matrix, TiledMatrix
from engine.quantization.microscaled import read_expert

KERNELS, WHY_NOT = native()
IDS = torch.randint(0, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()
needs_products = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_bf16_products, reason=f"no products in bfloat16 here: {WHY_NOT}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """In MXFP4, and in plain numbers."""
    return make_mxfp4(tmp_path_factory.mktemp("mxfp4"), plain=tmp_path_factory.mktemp("plain"), dtype="bfloat16")


def logits_of(folder: Path, **options: str) -> torch.Tensor:
    return run_in_chunks(make_runner(folder, **options), IDS, [len(IDS) - 3, 1, 1, 1])


def down_of(runner: ModelRunner) -> Matrix:
    mlp = runner._model.layers[0].mlp
    assert isinstance(mlp, RoutedExperts) and isinstance(mlp.experts, SeparateExperts)
    return mlp.experts.experts[0].down.matrix


def test_numbers_and_scales_are_read_as_they_were_written() -> None:
    weight = torch.randn((5, 96), generator=torch.Generator().manual_seed(2))
    weight[0, :32] = 0.0
    blocks, scales, numbers = round_to_mxfp4(weight)

    read = Quantized(blocks.flatten(1), scales, MXFP4, 32).dequantize(torch.float32)

    assert torch.equal(read, numbers) and (read - weight).abs().max() < 0.25 * weight.abs().max()


def test_a_model_in_float32_computes_with_the_numbers(folders: tuple[Path, Path]) -> None:
    packed, plain = folders

    assert torch.equal(logits_of(packed), logits_of(plain))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_cut_groups_or_not_give_what_one_does(size: int, tmp_path: Path) -> None:
    """Of four ranks each has 48 of 192 inputs, a group and a half."""
    packed, plain = make_mxfp4(tmp_path / "mxfp4", plain=tmp_path / "plain", intermediate_size=192)
    expected = logits_of(plain)

    found = on_each_rank(size, lambda tp: run_in_chunks(make_runner(packed, tp=tp), IDS, [len(IDS) - 3, 1, 1, 1]))

    assert all((logits - expected).abs().max() < 1e-4 for logits in found)


@needs_products
def test_kernels_multiply_with_the_bits_of_the_file(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    runner, exact = make_runner(packed, dtype="bfloat16"), logits_of(plain)

    logits = run_in_chunks(runner, IDS, [len(IDS)])

    matrix = down_of(runner)
    assert isinstance(matrix, TiledMatrix) and matrix.tiles.kind == MXFP4
    assert weight_bytes(runner.config, 1, runner.weight_form) == held_bytes(runner)
    assert "MXFP4 kept as it is, " in describe_weights(runner.config, 1, runner.weight_form)
    in_bfloat16 = (logits_of(plain, dtype="bfloat16") - exact).abs().mean()
    assert (logits - exact).abs().mean() < 2 * in_bfloat16 + 0.02 * exact.abs().mean()


def test_without_kernels_the_start_says_what_the_experts_become(folders: tuple[Path, Path]) -> None:
    runner = make_runner(folders[0], dtype="bfloat16", kernels="torch")

    assert "MXFP4 decoded to bfloat16, " in describe_weights(runner.config, 1, runner.weight_form)


def test_other_formats_round_what_the_numbers_are(folders: tuple[Path, Path]) -> None:
    packed, plain = folders

    assert torch.equal(logits_of(packed, quantization="int8"), logits_of(plain, quantization="int8"))


@pytest.mark.parametrize(
    ("ending", "becomes", "message"),
    [
        ("down_proj_scales", lambda found: torch.full_like(found, 255), "has scales of 255, which are no number"),
        ("down_proj_scales", lambda found: found[:, :, 1:], "has shape .* but config.json asks for"),
        ("gate_up_proj_blocks", lambda found: found.view(torch.int8), "has type I8; Baton reads U8"),
        ("gate_up_proj_scales", None, "gate_up_proj_scales is missing"),
    ],
    ids=["no number", "misshapen", "of another type", "missing"],
)
def test_tensors_that_cannot_be_read_are_refused_by_name(
    ending: str, becomes: object, message: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    name = f"model.layers.0.mlp.experts.{ending}"
    found = tensors.pop(name)
    if callable(becomes):
        tensors[name] = becomes(found).contiguous()
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=message):
        make_runner(tmp_path)


def test_inputs_that_groups_do_not_divide_are_refused(folders: tuple[Path, Path]) -> None:
    part = TensorSlice("model.layers.0.mlp.experts.down_proj", (64, 120), stack=(0, 6))

    with (
        Checkpoint(folders[0]) as checkpoint,
        pytest.raises(CheckpointError, match="do not divide the 120 that"),
    ):
        read_expert(checkpoint, part, torch.device("cpu"))
