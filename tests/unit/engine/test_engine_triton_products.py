"""Products in Triton with weights in fewer bits, interpreted (or on a GPU, if there is one), against unpacked ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import make_runner, run_in_chunks
from fake_cuda import DEVICE as FAKE_DEVICE
from fake_cuda import Launches, fake_cuda
from interpreted_kernels import DEVICE
from packed_checkpoints import Format, make_packed

from engine.layers.ops import TorchOps
from engine.model_cost import weight_bytes
from engine.quantization.fp8 import round_to_fp8
from engine.quantization.integers import Quantized, keep, make_quantized, quantize
from engine.quantization.interface import Matrix, TritonMatrix, TritonProducts, make_matrix
from engine.triton.products import TUNING
from engine.triton.target import compiling_for

KERNELS = TritonProducts()
FORMS = ["none", "int8", "int4", "fp8"]
KINDS = ["int8", "int4", "kept 32", "kept 64", "kept 96"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: str, num_outputs: int, num_inputs: int) -> Quantized:
    """`kept`: codes of a checkpoint with zero points and groups of their own."""
    if not kind.startswith("kept"):
        return quantize(randn(num_outputs, num_inputs, seed=1), kind)
    group = int(kind.split()[1])
    generator = torch.Generator().manual_seed(1)
    codes, zeros = (
        torch.randint(16, (num_outputs, size), dtype=torch.uint8, generator=generator)
        for size in (num_inputs, num_inputs // group)
    )
    return keep(codes, zeros, (0.1 * randn(num_outputs, num_inputs // group, seed=2)).half(), group)


def on_device(weight: Quantized) -> Quantized:
    return replace(weight, data=weight.data.to(DEVICE), scales=weight.scales.to(DEVICE))


def product_of(weight: Quantized, x: torch.Tensor, order: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    matrix = make_quantized(on_device(weight), KERNELS, None if order is None else order.to(DEVICE))
    return multiplied(matrix, x, **options)


def multiplied(matrix: Matrix, x: torch.Tensor, **options: Any) -> torch.Tensor:
    assert isinstance(matrix, TritonMatrix)
    options = {name: value.to(DEVICE) if name == "bias" else value for name, value in options.items()}
    return matrix(x.to(DEVICE), **options).cpu()


def check(weight: Quantized, x: torch.Tensor, **options: Any) -> None:
    exact = x.double() @ weight.dequantize(torch.float64).T + options.get("bias", torch.zeros(1)).double()
    tolerance = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.06}[x.dtype]
    scale = exact.abs().mean().item()
    found = product_of(weight, x, **options)
    assert found.dtype == options.get("dtype", x.dtype)
    torch.testing.assert_close(found.double(), exact, atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_that_of_the_unpacked_weight(kind: str, dtype: torch.dtype) -> None:
    """No number of outputs, inputs or rows fills whole tiles."""
    check(weight_of(kind, 70, 384), randn(3, 384).to(dtype))


@pytest.mark.parametrize("kind", ["int8", "int4", "kept 64"])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 64, 65, 130])
def test_any_number_of_rows_is_multiplied(kind: str, num_rows: int) -> None:
    check(weight_of(kind, 130, 192), randn(num_rows, 192).bfloat16())


def test_no_rows_give_no_rows() -> None:
    assert product_of(weight_of("int8", 70, 96), randn(0, 96).bfloat16()).shape == (0, 70)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_bias_is_added_and_logits_keep_the_sum_in_float32(kind: str) -> None:
    x, weight = randn(5, 128).bfloat16(), weight_of(kind, 40, 128)
    check(weight, x, bias=3 * randn(40, seed=5).bfloat16(), dtype=torch.float32)
    exact = x.double() @ weight.dequantize(torch.float64).T
    error = (product_of(weight, x, dtype=torch.float32).double() - exact).abs().max()
    assert error < 0.02 * exact.abs().max()


def test_rows_may_be_a_part_of_wider_ones() -> None:
    wide, weight = randn(4, 300).bfloat16(), weight_of("int4", 40, 128)
    assert torch.equal(product_of(weight, wide[:, 20:148]), product_of(weight, wide[:, 20:148].contiguous()))


def test_inputs_in_an_order_of_their_own_are_brought_into_it() -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    x, weight = randn(4, 128).bfloat16(), weight_of("kept 32", 40, 128)
    assert torch.equal(product_of(weight, x, order), product_of(weight, x[:, order]))


@pytest.mark.parametrize("kind", ["int8", "int4", "kept 96"])
def test_a_row_has_the_same_bits_alone_and_among_as_many_as_share_its_tiles(kind: str) -> None:
    weight = weight_of(kind, 40, 384)
    for fewest, most in ((1, 16), (17, 32), (65, 200)):
        x = randn(most, 384).bfloat16()
        assert torch.equal(product_of(weight, x)[:fewest], product_of(weight, x[:fewest]))


@pytest.mark.parametrize("is_wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize(("dtype", "form"), [(torch.bfloat16, f) for f in (*FORMS, "kept")] + [(torch.float32, "none")])
def test_a_row_of_a_fixed_product_has_the_same_bits_in_any_place_among_any_others(
    form: str, dtype: torch.dtype, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they are those of the product with the unpacked weight."""
    monkeypatch.setattr("engine.triton.products._WIDE_OUTPUTS", 1 if is_wide else 1000)
    fixed, weight, x = TritonProducts(is_fixed=True), randn(70, 192, seed=1).to(dtype), randn(130, 192).to(dtype)
    if form == "kept":
        codes = weight_of("kept 64", 70, 192)
        matrix, unpacked = make_quantized(on_device(codes), fixed), make_quantized(codes, None)
    else:
        matrix, unpacked = (make_matrix(weight.to(d), k, form) for d, k in ((DEVICE, fixed), ("cpu", None)))
    whole = multiplied(matrix, x)

    for row in (0, 63, 64, 129):
        assert torch.equal(multiplied(matrix, x[row : row + 1]), whole[row : row + 1])
    assert torch.equal(multiplied(matrix, x[40:90]), whole[40:90])
    stored = unpacked(torch.eye(192, dtype=dtype)).double()
    exact, sizes = x.double() @ stored, x.double().abs() @ stored.abs()
    assert bool(((whole.double() - exact).abs() <= {torch.float32: 1e-5}.get(dtype, 0.01) * sizes).all())


@pytest.mark.parametrize("arch", [80, 90], ids=["by bits", "by an instruction"])
@pytest.mark.parametrize("num_rows", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_in_fp8_are_multiplied_as_on_the_cpu_where_no_product_is_in_fp8(
    dtype: torch.dtype, num_rows: int, arch: int
) -> None:
    """Rows stay as they are, and large and small outputs are as good as others."""
    weight, x = randn(70, 384, seed=1) * torch.logspace(-3, 3, 70)[:, None], randn(num_rows, 384).to(dtype)
    weight = weight.to(dtype)
    codes, scales = round_to_fp8(weight)
    stored = codes.double() * scales
    exact, sizes = x.double() @ stored.T, x.double().abs() @ stored.abs().T
    if arch != 80 and DEVICE.type == "cuda":
        pytest.skip("the GPU's own capability counts")
    with compiling_for(arch):
        found = multiplied(make_matrix(weight.to(DEVICE), KERNELS, "fp8"), x)
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 0.002, torch.bfloat16: 0.01}[dtype]
    assert bool(((found.double() - exact).abs() <= tolerance * sizes).all())


@pytest.mark.parametrize("kind", ["int8", "int4", "kept 64"])
def test_no_weight_is_unpacked_in_memory(kind: str) -> None:
    """A product is one launch, and the largest tensor that it makes is its result."""
    weight, shape = weight_of(kind, 256, 1024), (max(TUNING) + 1, 1024)
    with fake_cuda():
        place = torch.device(FAKE_DEVICE)
        there = [torch.empty(part.shape, dtype=part.dtype, device=place) for part in (weight.data, weight.scales)]
        matrix = make_quantized(replace(weight, data=there[0], scales=there[1]), KERNELS)
        x = torch.empty(shape, dtype=torch.bfloat16, device=place)
        with Launches() as launches:
            out = matrix(x)
    assert launches.names == {"triton::quantized_product": 1}
    assert out.shape == (shape[0], 256) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.battery)])
def test_codes_of_a_checkpoint_stay_in_four_bits_where_kernels_multiply_them(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being asked for, since nothing is lost by it: the logits are those of the decoded weights."""
    packed, _ = make_packed(Format("awq", 64), tmp_path)
    ids, logits, nbytes = list(range(5, 17)), [], []
    for kernels in (None, KERNELS):
        monkeypatch.setattr("engine.model_runner.choose_ops", lambda *_, of=kernels: (TorchOps(), of, "a test's"))
        runner = make_runner(packed, device=str(DEVICE), dtype=dtype, attention="cpu")
        logits.append(run_in_chunks(runner, ids, [10, 1, 1]).float().cpu())
        nbytes.append(weight_bytes(runner.config, 1, runner.weight_form))
        assert runner.weight_form.keeps_codes == (kernels is not None) and not runner.weight_form.is_unpacked

    tolerance = {"bfloat16": 0.03, "float32": 1e-5}[dtype]
    assert (logits[1] - logits[0]).pow(2).mean().sqrt() <= tolerance * logits[0].pow(2).mean().sqrt()
    assert nbytes[1] < 0.6 * nbytes[0]
