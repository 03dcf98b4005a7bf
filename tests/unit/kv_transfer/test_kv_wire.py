"""int8 and fp8: how far a value may be off, and what becomes of zeros, extremes and values that are no numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_transfer import codec

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
formats = pytest.mark.parametrize("name", list(CODES))


def round_trip(values: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    codes = torch.empty(values.shape, dtype=CODES[name])
    scales = torch.empty(values.shape[:-1])
    codec.quantize(values, codes, scales)
    back = torch.empty(values.shape, dtype=dtype)
    codec.dequantize(codes, scales, back)
    return back


def bound(values: torch.Tensor, name: str) -> torch.Tensor:
    """What `wire` promises, and float32's rounding: of the scale and of 127 times it, 1.5e-5 of half a step each."""
    exact = values.double().abs()
    largest = exact.amax(dim=-1, keepdim=True)
    if name == "int8":
        off = (largest / 254).expand_as(exact)
    else:
        off = torch.maximum(exact / 16, (largest / 448 / 1024).expand_as(exact))
    return off * (1 + 4e-5) + 2.0**-119


rows = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9)


@given(rows, st.sampled_from(list(CODES)))
@example([torch.finfo(torch.float32).max], "int8")
@example([torch.finfo(torch.float32).max], "fp8")
@settings(max_examples=300)
def test_no_value_is_further_off_than_promised(row: list[float], name: str) -> None:
    values = torch.tensor([row])
    off = (round_trip(values, name).double() - values.double()).abs()
    assert (off <= bound(values, name)).all(), (values, off)


@formats
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1e-4, 1.0, 100.0])
def test_values_like_those_of_a_model_stay_within_the_bound(name: str, dtype: torch.dtype, spread: float) -> None:
    values = (torch.randn(2, 2, 33, 4, 64) * spread).to(dtype)
    off = (round_trip(values, name).double() - values.double()).abs()
    assert (off <= bound(values, name)).all()
    relative = float(off.pow(2).mean().sqrt() / values.double().pow(2).mean().sqrt())
    assert relative < (0.01 if name == "int8" else 0.04)


@formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_receivers_dtype_adds_its_own_rounding_and_no_more(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(5, 64)
    assert torch.equal(round_trip(values, name, dtype), round_trip(values, name).to(dtype))


@formats
def test_zeros_stay_zeros(name: str) -> None:
    assert torch.equal(round_trip(torch.zeros(3, 8), name), torch.zeros(3, 8))


@formats
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40])
def test_rows_too_small_for_a_scale_of_their_own_become_codes_of_zero(name: str, size: float) -> None:
    codes, scales = torch.ones(2, 8).to(CODES[name]), torch.empty(2)
    codec.quantize(torch.full((2, 8), size), codes, scales)
    assert codes.float().eq(0).all()
    assert scales.gt(0).all() and scales.isfinite().all()


@formats
@pytest.mark.parametrize("size", [torch.finfo(torch.float32).max, 3.3e38, 1e-38, 1e-45])
def test_extremes_neither_overflow_nor_turn_into_nan(name: str, size: float) -> None:
    values = torch.tensor([[size, -size, size / 3, 0.0]])
    back = round_trip(values, name)
    assert back.isfinite().all()
    assert ((back.double() - values.double()).abs() <= bound(values, name)).all()


@formats
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_something_broken_comes_back_as_nan_and_its_neighbours_do_not(
    name: str, broken: float, dtype: torch.dtype
) -> None:
    values = torch.randn(3, 8).to(dtype)
    values[1, 5] = broken
    back = round_trip(values, name)
    assert back[1].isnan().all()
    assert back[::2].isfinite().all()


@formats
def test_the_largest_magnitude_comes_back_as_it_was(name: str) -> None:
    values = torch.randn(50, 64)
    values[:, 7] = torch.linspace(-9, 9, 50)
    at = values.abs().argmax(dim=-1, keepdim=True)
    largest = values.gather(1, at)
    torch.testing.assert_close(round_trip(values, name).gather(1, at), largest, rtol=1e-6, atol=0)


def test_every_fp8_code_is_decoded_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()].unsqueeze(0)
    assert codes.numel() == 254
    back = torch.empty(codes.shape)
    codec.dequantize(codes, torch.ones(1), back)
    assert torch.equal(back, codes.float())
