"""A weight in either of its forms gives the same product."""

from __future__ import annotations

import pytest
import torch

from engine.matmul import Matrix


@pytest.mark.parametrize("num_rows", [0, 1, 5, 6, 33])
@pytest.mark.parametrize("shape", [(24, 40), (2100, 2048)], ids=["both forms", "packed only"])
def test_the_product_is_the_same_at_any_number_of_rows(num_rows: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    x = torch.randn(num_rows, shape[1], generator=generator)
    matrix = Matrix(weight.clone())
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(matrix(x).double(), exact, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(matrix(x, bias).double(), exact + bias.double(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_stay_as_they_are(dtype: torch.dtype) -> None:
    weight, x = torch.ones(8, 16, dtype=dtype), torch.ones(7, 16, dtype=dtype)
    assert torch.equal(Matrix(weight)(x), torch.full((7, 8), 16, dtype=dtype))
