"""Checkpoints in eight bits with scales, fp8 and int8: what they stand for, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_steps import held_bytes, make_runner, run_in_chunks
from packed_checkpoints import Format, edit_config, make_packed
from test_engine_packed import IDS, logits_of, reference_logits

from cluster.errors import CheckpointError
from engine.model_cost import weight_bytes
from engine.models.folder import read_model
from engine.native import native
from engine.native.structures import INT8 as INT8_TILES
from engine.quantization.interface import TiledMatrix

KERNELS, WHY_NOT = native()
_EIGHT_BITS: dict[str, Any] = {"bits": 8, "is_symmetric": True}
SCALED = [
    Format("fp8"),
    Format("fp8", block=(128, 128)),
    Format("fp8", block=(48, 80)),
    Format("fbgemm_fp8"),
    *(
        Format("compressed-tensors", strategy=strategy, kind="float", layout="float-quantized", **_EIGHT_BITS)
        for strategy in ("tensor", "channel")
    ),
    Format(
        "compressed-tensors", strategy="block", block=(128, 128), kind="float", layout="float-quantized", **_EIGHT_BITS
    ),
    Format("compressed-tensors", strategy="channel", layout="int-quantized", **_EIGHT_BITS),
    Format("compressed-tensors", strategy="tensor", layout="naive-quantized", **_EIGHT_BITS),
]


@pytest.mark.parametrize(
    "fmt", SCALED, ids=lambda fmt: f"{fmt.layout or fmt.method} {fmt.kind} {fmt.strategy} {fmt.block}"
)
def test_logits_are_those_of_transformers_on_one_rank_and_on_two(fmt: Format, tmp_path: Path) -> None:
    packed, plain = make_packed(fmt, tmp_path)
    expected = reference_logits(plain)
    for tp_size in (1, 2):
        assert (logits_of(packed, tp_size) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_experts_in_fewer_bits(kind: str, tmp_path: Path) -> None:
    """Of Qwen's names; Mixtral's experts have names of their own and stay plain here, beside attention that is not."""
    for number, fmt in enumerate((Format("awq", 32), Format("fp8", block=(48, 80)))):
        sizes = {"moe_intermediate_size": 64} if kind == "qwen3-moe" else {}
        packed, plain = make_packed(fmt, tmp_path / str(number), kind, **sizes)
        assert (logits_of(packed) - reference_logits(plain)).abs().max() < 1e-4


INT8 = Format("compressed-tensors", strategy="channel", layout="int-quantized", **_EIGHT_BITS)
FP8 = Format("fp8", block=(128, 128))


@pytest.mark.parametrize(
    ("fmt", "changes", "message"),
    [
        (FP8, {"weight_block_size": [128]}, "weight_block_size must be two positive integers (got [128])"),
        (FP8, {"weight_block_size": [0, 128]}, "weight_block_size must be two positive integers (got [0, 128])"),
        (FP8, {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; Baton reads awq, gptq"),
        (INT8, {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported; Baton reads pack"),
        (INT8, {"config_groups": {}}, "config_groups must quantize weights, and all in one way (got {})"),
        (INT8, {"config_groups": {"a": {"weights": None}}}, "config_groups must quantize weights"),
        (INT8, {"format": "pack-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config {"),
    ],
    ids=str,
)
def test_eight_bits_that_cannot_be_read_are_refused_by_name(
    fmt: Format, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    packed, _ = make_packed(fmt, tmp_path)
    edit_config(packed, quantization_config={**fmt.config(), **changes})
    with pytest.raises(CheckpointError) as caught:
        read_model(packed)
    assert f"config.json: quantization_config: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 3}, "num_bits 3 is not supported for compressed-tensors; Baton reads 4 or 8"),
        ({"strategy": "attn_head"}, "strategy 'attn_head' is not supported; Baton reads tensor, channel, group, block"),
        ({"symmetric": False}, "8 bits of int by channel, not symmetric is not supported; Baton reads pack-quantized"),
        ({"type": "uint"}, "type 'uint' is not supported; Baton reads int, float"),
        ({"strategy": "group", "group_size": 32}, "8 bits of int by group, symmetric is not supported"),
    ],
    ids=str,
)
def test_a_scheme_that_cannot_be_read_is_refused_by_name(weights: dict[str, Any], message: str, tmp_path: Path) -> None:
    packed, _ = make_packed(INT8, tmp_path)
    config = INT8.config()
    config["config_groups"]["group_0"]["weights"] |= weights
    edit_config(packed, quantization_config=config)
    with pytest.raises(CheckpointError) as caught:
        read_model(packed)
    assert message in str(caught.value)


def test_scales_that_do_not_fit_the_blocks_are_refused_with_what_would(tmp_path: Path) -> None:
    packed, _ = make_packed(FP8, tmp_path)
    edit_config(packed, quantization_config={**FP8.config(), "weight_block_size": [64, 64]})
    with pytest.raises(CheckpointError, match=r"weight_scale_inv has shape \[1\]; .* has scales \[2, 2\]"):
        make_runner(packed)


def test_codes_without_a_word_of_them_in_the_config_are_refused(tmp_path: Path) -> None:
    packed, _ = make_packed(FP8, tmp_path)
    edit_config(packed, quantization_config=None)
    with pytest.raises(CheckpointError, match="has type F8_E4M3; Baton reads F32, BF16, F16"):
        make_runner(packed)


@pytest.mark.skipif(KERNELS is None or not KERNELS.has_products, reason=f"no kernels for products here: {WHY_NOT}")
def test_int8_of_a_checkpoint_is_multiplied_as_it_is(tmp_path: Path) -> None:
    """Its codes are those in the file; with another quantization it is made numbers of, and rounded anew."""
    packed, plain = make_packed(INT8, tmp_path)
    kept = make_runner(packed, dtype="bfloat16")
    matrix = kept._model.layers[0].attention.out.matrix
    assert isinstance(matrix, TiledMatrix) and matrix.tiles.kind == INT8_TILES
    assert not isinstance(make_runner(packed, dtype="float32")._model.layers[0].attention.out.matrix, TiledMatrix)
    logits = run_in_chunks(kept, IDS, [len(IDS)])
    exact, error = reference_logits(plain), logits_of(plain, dtype="bfloat16")
    assert (logits - exact).abs().mean() < 2 * (error - exact).abs().mean() + 0.02 * exact.abs().mean()
    assert weight_bytes(kept.config, 1, kept.weight_form) == held_bytes(kept)
