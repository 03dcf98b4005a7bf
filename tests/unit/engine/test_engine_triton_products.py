"""Products in Triton with int8 and int4 weights, interpreted (or on a GPU, if there is one), against unpacked ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import DEVICE as FAKE_DEVICE
from fake_cuda import Launches, fake_cuda
from interpreted_kernels import DEVICE

from engine.quantization.integers import Quantized, TritonMatrix, keep, make_quantized, quantize
from engine.triton.products import TUNING

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


def product_of(weight: Quantized, x: torch.Tensor, order: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    matrix = TritonMatrix(weight.to(DEVICE), None if order is None else order.to(DEVICE))
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


@pytest.mark.parametrize("kind", ["int8", "int4", "kept 64"])
def test_no_weight_is_unpacked_in_memory(kind: str) -> None:
    """A product is one launch, and the largest tensor that it makes is its result."""
    weight, shape = weight_of(kind, 256, 1024), (max(TUNING) + 1, 1024)
    with fake_cuda():
        place = torch.device(FAKE_DEVICE)
        there = [torch.empty(part.shape, dtype=part.dtype, device=place) for part in (weight.data, weight.scales)]
        matrix = make_quantized(replace(weight, data=there[0], scales=there[1]), None)
        x = torch.empty(shape, dtype=torch.bfloat16, device=place)
        with Launches() as launches:
            out = matrix(x)
    assert launches.names == {"triton::quantized_product": 1}
    assert out.shape == (shape[0], 256) and out.dtype == torch.bfloat16
