"""What this machine can do at best: how fast it reads memory, and how fast it multiplies matrices.

Both by plain torch with torch's own threads, over as much memory as a model takes, so that what is measured comes from
memory where a model's weights do, and from a cache where they fit in one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

_LEAST_S = 0.2


def read_rate(num_bytes: int) -> float:
    """Bytes a second: the best of several ways to read `num_bytes` of memory once."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    ways: dict[Callable[[], object], int] = {
        source.sum: source.nbytes,
        source.amax: source.nbytes,
        lambda: torch.dot(source, source): source.nbytes,
        lambda: target.copy_(source): 2 * source.nbytes,
    }
    return max(count / _median_s(way) for way, count in ways.items())


def gemm_rate(shapes: Sequence[tuple[int, int]], num_rows: int, dtype: torch.dtype) -> float:
    """Floating-point operations a second of [num_rows, I] times weights [O, I], over all of (O, I)."""
    flops, took_s = 0.0, 0.0
    for num_outputs, num_inputs in shapes:
        x, weight = torch.randn(num_rows, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)
        flops += 2.0 * num_rows * num_outputs * num_inputs
        took_s += min(_median_s(multiply) for multiply in _products(x, weight))
    return flops / took_s


def _products(x: torch.Tensor, weight: torch.Tensor) -> list[Callable[[], object]]:
    """The same product by torch's own choice and by oneDNN with a weight that was packed for it."""
    ways: list[Callable[[], object]] = [lambda: F.linear(x, weight)]
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return ways


def _median_s(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    ends = time.perf_counter() + _LEAST_S
    while len(times) < 3 or time.perf_counter() < ends:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
