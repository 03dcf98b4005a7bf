"""A weight in any of its forms gives the same product, at any number of rows."""

from __future__ import annotations

import pytest
import torch

from engine.native import native
from engine.native.structures import MXFP4
from engine.quantization.fp8 import ScaledFp8Matrix, round_to_fp8
from engine.quantization.integers import Quantized, keep, make_quantized, quantize
from engine.quantization.interface import TiledMatrix, make_matrix, weight_formats
from engine.quantization.plain import TorchMatrix, multiplies_plain

KERNELS, WHY_NOT = native()
HAS_PRODUCTS = KERNELS is not None and KERNELS.has_products
NUM_ROWS = [0, 1, 5, 6, 7, 33, 64, 65, 130]
needs_products = pytest.mark.skipif(not HAS_PRODUCTS, reason=f"no kernels for products here: {WHY_NOT}")


def problem(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    sizes = (shape, (shape[0],), (num_rows, shape[1]))
    weight, bias, x = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return weight, bias, x


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", [(24, 40), (2100, 2048)], ids=["both forms", "packed only"])
def test_in_float32(num_rows: int, shape: tuple[int, int]) -> None:
    weight, bias, x = problem(num_rows, shape, torch.float32)
    matrix = make_matrix(weight.clone(), KERNELS)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(matrix(x).double(), exact, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(matrix(x, bias).double(), exact + bias.double(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", [(24, 40), (13, 71), (130, 2048), (3, 32), (1, 1), (65, 2400)], ids=str)
@pytest.mark.parametrize("uses_kernels", [pytest.param(True, marks=needs_products), False])
def test_in_bfloat16(num_rows: int, shape: tuple[int, int], uses_kernels: bool) -> None:
    weight, bias, x = problem(num_rows, shape, torch.bfloat16)
    matrix = make_matrix(weight.clone(), KERNELS if uses_kernels else None)
    exact = x.double() @ weight.double().T
    product = matrix(x)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), exact, atol=0.05, rtol=0.01)
    torch.testing.assert_close(matrix(x, bias).double(), exact + bias.double(), atol=0.05, rtol=0.01)
    whole = matrix(x, dtype=torch.float32)
    kernels = KERNELS if uses_kernels else None
    is_tiled = multiplies_plain(kernels, torch.bfloat16)
    assert whole.dtype == torch.float32
    size_bytes = weight_formats()["none"].size_bytes
    assert matrix.nbytes == size_bytes(shape, torch.bfloat16, torch.device("cpu"), is_tiled)
    tolerance = 1e-4 if isinstance(matrix, TiledMatrix) else 0.01  # torch rounds the sum to bfloat16 first
    torch.testing.assert_close(whole.double(), exact, atol=5 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("wanted", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(24, 64), (13, 71), (192, 2048)], ids=str)
@pytest.mark.parametrize(
    ("uses_kernels", "dtype"),
    [
        pytest.param(True, torch.bfloat16, marks=needs_products),
        pytest.param(True, torch.float32, marks=needs_products),
        (False, torch.bfloat16),
        (False, torch.float32),
    ],
)
def test_in_fewer_bits(
    num_rows: int, wanted: str, shape: tuple[int, int], uses_kernels: bool, dtype: torch.dtype
) -> None:
    """The product is that of the weight as it was stored."""
    weight, bias, x = problem(num_rows, shape, dtype)
    matrix = make_matrix(weight.clone(), KERNELS if uses_kernels else None, wanted)
    stored = quantize(weight, wanted).dequantize(torch.float32)
    exact = x.double() @ stored.double().T
    largest = exact.abs().max().item() if num_rows else 0.0
    tolerance = largest * (1e-5 if dtype == torch.float32 and not uses_kernels else 0.015)
    torch.testing.assert_close(matrix(x).double(), exact, atol=tolerance, rtol=0.01)
    torch.testing.assert_close(matrix(x, bias).double(), exact + bias.double(), atol=tolerance, rtol=0.01)
    if shape == (192, 2048):  # smaller ones are mostly what pads them to whole tiles
        assert matrix.nbytes < weight.nbytes * (0.51 if dtype == torch.bfloat16 else 0.26)


def codes_that_are_kept(group: int, shape: tuple[int, int] = (130, 384)) -> Quantized:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (shape[0], shape[1] // group), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(zeros.shape, generator=generator) / 50 - 0.01).to(torch.float16)
    return keep(codes, zeros, scales, group)


def mxfp4_weight(shape: tuple[int, int] = (130, 384)) -> Quantized:
    """All sixteen numbers, by scales from zero on."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 135, (shape[0], shape[1] // 32), generator=generator, dtype=torch.uint8)
    scales[0, 0] = 0
    return Quantized(codes, scales, MXFP4, 32)


@needs_products
@pytest.mark.parametrize("shape", [(130, 384), (64, 128), (5, 96)], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", "mxfp4", 32, 96])
def test_kernels_multiply_with_each_code_as_it_is(kind: str | int, shape: tuple[int, int]) -> None:
    """One input at a time: rounding to 8 bits leaves a row that has a single value as it is."""
    generator = torch.Generator().manual_seed(2)
    if kind == "mxfp4":
        weight = mxfp4_weight(shape)
    elif isinstance(kind, str):
        weight = quantize(torch.randn(shape, generator=generator), kind)
    elif shape[1] % kind:
        return
    else:
        weight = codes_that_are_kept(kind, shape)
    matrix = make_quantized(weight, KERNELS)

    product = matrix(torch.eye(shape[1], dtype=torch.bfloat16), dtype=torch.float32)

    torch.testing.assert_close(product.T, weight.dequantize(torch.float32), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("uses_kernels", [pytest.param(True, marks=needs_products), False])
def test_in_mxfp4(num_rows: int, uses_kernels: bool) -> None:
    weight = mxfp4_weight()
    _, bias, x = problem(num_rows, weight.shape, torch.bfloat16)
    matrix = make_quantized(weight, KERNELS if uses_kernels else None)
    exact = x.double() @ weight.dequantize(torch.float32).double().T
    tolerance = 0.015 * (exact.abs().max().item() if num_rows else 0.0)
    torch.testing.assert_close(matrix(x).double(), exact, atol=tolerance, rtol=0.01)
    torch.testing.assert_close(matrix(x, bias).double(), exact + bias.double(), atol=tolerance, rtol=0.01)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("uses_kernels", [pytest.param(True, marks=needs_products), False])
@pytest.mark.parametrize("is_shuffled", [True, False])
def test_in_kept_codes(num_rows: int, group: int, uses_kernels: bool, is_shuffled: bool) -> None:
    weight = codes_that_are_kept(group)
    _, bias, x = problem(num_rows, weight.shape, torch.bfloat16)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(6)) if is_shuffled else None
    matrix = make_quantized(weight, KERNELS if uses_kernels else None, order)
    of_weight = x if order is None else x[:, order]
    exact = of_weight.double() @ weight.dequantize(torch.float32).double().T
    tolerance = 0.015 * exact.abs().max().item() if num_rows and uses_kernels else 0.02
    torch.testing.assert_close(matrix(x).double(), exact, atol=tolerance, rtol=0.01)
    torch.testing.assert_close(matrix(x, bias).double(), exact + bias.double(), atol=tolerance, rtol=0.01)
    natural = make_quantized(weight, KERNELS if uses_kernels else None)
    assert torch.equal(matrix(x), natural(of_weight.contiguous()))
    num_outputs = 192 if uses_kernels else 130
    assert matrix.nbytes == num_outputs * (384 // 2 + 384 // group * 4) + (384 * 8 if is_shuffled else 0)


@needs_products
def test_a_product_does_not_depend_on_how_many_rows_there_are() -> None:
    """What a sequence says must not depend on who decodes beside it."""
    weight, bias, x = problem(64, (130, 2048), torch.bfloat16)
    for wanted in ("int8", "int4"):
        matrix = make_matrix(weight.clone(), KERNELS, wanted)
        whole = matrix(x, bias)
        for count in (1, 2, 5, 6, 13):
            assert torch.equal(matrix(x[:count].contiguous(), bias), whole[:count])


@pytest.mark.parametrize(("wanted", "bound"), [("int8", 1 / 254), ("int4", 1 / 8)])
def test_what_is_stored_is_near_the_weight(wanted: str, bound: float) -> None:
    weight = torch.randn(50, 256, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    weight[4] *= 1e-4
    stored = quantize(weight, wanted)
    span = 256 if wanted == "int8" else 32
    largest = weight.abs().view(50, -1, span).amax(2, keepdim=True).expand(-1, -1, span).reshape(50, 256)
    error = (stored.dequantize(torch.float32) - weight).abs()
    assert bool((error <= 1.02 * bound * largest).all())
    assert bool((error[3] == 0).all())
    assert stored.nbytes == {"int8": 50 * 256 + 50 * 4, "int4": 50 * 128 + 50 * 8 * 2}[wanted]


@pytest.mark.parametrize("shape", [(32, 64), (13, 71), (144, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 33])
def test_in_fp8_without_a_device_for_it(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, x = problem(num_rows, shape, dtype)
    matrix = make_matrix(weight.clone(), KERNELS, "fp8")
    codes, scales = round_to_fp8(weight)
    exact = x.double() @ (codes.double() * scales).T
    tolerance = (exact.abs().max().item() if num_rows else 0.0) * (1e-5 if dtype == torch.float32 else 0.01)
    torch.testing.assert_close(matrix(x).double(), exact, atol=tolerance, rtol=0.01)
    torch.testing.assert_close(matrix(x, bias).double(), exact + bias.double(), atol=tolerance, rtol=0.01)
    assert matrix(x).dtype == dtype and matrix(x, dtype=torch.float32).dtype == torch.float32
    assert matrix.nbytes == shape[0] * shape[1] + 4 * shape[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 7, 33])
def test_products_in_fp8_are_those_of_rounded_rows(num_rows: int, dtype: torch.dtype) -> None:
    """By the very call that a GPU gets; torch has it on the CPU as well."""
    weight, bias, x = problem(num_rows, (144, 512), dtype)
    x *= torch.logspace(-3, 3, num_rows)[:, None].to(dtype)
    weight *= torch.logspace(-3, 3, 144)[:, None].to(dtype)
    matrix = ScaledFp8Matrix(weight.clone())
    rows, stored = ((codes.double() * scales) for codes, scales in map(round_to_fp8, (x, weight)))

    for used in (None, bias):
        exact = rows @ stored.T + (0 if used is None else used.double())
        sizes = rows.abs() @ stored.abs().T
        assert bool(((matrix(x, used).double() - exact).abs() <= 0.01 * (sizes + exact.abs())).all())
    assert matrix(x).dtype == dtype and matrix(x, dtype=torch.float32).dtype == torch.float32


def test_fp8_keeps_three_bits_behind_the_leading_one_and_every_size() -> None:
    rows = torch.randn(50, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 50)[:, None]
    rows[3] = 0
    codes, scales = round_to_fp8(rows)
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (50, 1)
    largest = rows.abs().amax(1, keepdim=True)
    error = (codes.float() * scales - rows).abs()
    assert bool((error <= 1.001 * torch.maximum(rows.abs() / 16, largest / 448 / 1024)).all())


def test_inputs_that_fill_no_group_stay_at_eight_bits() -> None:
    assert quantize(torch.ones(4, 40), "int4").data.shape == (4, 40)


def test_other_types_stay_as_they_are() -> None:
    weight, x = torch.ones(8, 16, dtype=torch.float16), torch.ones(7, 16, dtype=torch.float16)
    matrix = make_matrix(weight, KERNELS)
    assert isinstance(matrix, TorchMatrix)
    assert torch.equal(matrix(x), torch.full((7, 8), 16, dtype=torch.float16))
