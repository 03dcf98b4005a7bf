"""The peak rates of a worker's device: MFU and MBU are shares of them.

For GPUs the table of `worker.gpu_peaks`, by the name that torch gives them; for a CPU a short measurement; and both
give way to what the configuration says. Where no peak is known there is none: a wrong peak makes a wrong share.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.quantization.interface import Kernels, make_matrix
from worker.gpu_peaks import GPUS

_TERA, _GIGA = 1e12, 1e9
_ROUNDS_S = 0.04
"""A measurement takes the best of what it does in this time."""
_ROWS, _SIZE = 256, 768
_COPIED_BYTES = 64 << 20
"""More than the caches of most processors."""


@dataclass(frozen=True)
class Peak:
    """Peak rates of one device. None: not known."""

    flops: float | None
    """A second, of dense products in the type that the model is multiplied in."""
    bytes_per_s: float | None
    """Bytes a second of the device's memory."""
    why: str
    """The source of the numbers, or why there are none."""


def peak_of_gpu(name: str, dtype: str, *, in_fp8: bool) -> Peak:
    """`name` as torch.cuda.get_device_name gives it; `in_fp8`: what is multiplied is rounded to fp8 first."""
    words = f" {name} "
    known = next((gpu for gpu in GPUS if f" {gpu.name} " in words or f" {gpu.name}-" in words), None)
    if known is None or " MIG " in words:  # a part of a GPU has a part of its peak
        remedy = "set metrics.peak_tflops and metrics.peak_gb_per_s for MFU and MBU"
        return Peak(None, None, f"the peak of {name} is not known; {remedy}")
    tflops = known.single if dtype == "float32" else known.half
    if in_fp8 and known.fp8 is not None:
        tflops = known.fp8
    return Peak(tflops * _TERA, known.bandwidth * _GIGA, f"the datasheet of the NVIDIA {known.name}")


def measure_cpu(dtype: torch.dtype, quantization: str, kernels: Kernels | None) -> Peak:
    """The rates that the calling thread attains with the threads it has: the best of a few products, in the form in
    which the model is multiplied, and of a few copies. Takes a tenth of a second, and 140 MB until it returns."""
    matrix = make_matrix(torch.randn(_SIZE, _SIZE, dtype=dtype), kernels, quantization)
    rows = torch.randn(_ROWS, _SIZE, dtype=dtype)
    source, target = (_mapped(_COPIED_BYTES) for _ in range(2))
    with torch.inference_mode():
        product_s = _best(lambda: matrix(rows))
        copy_s = _best(lambda: target.copy_(source))
    return Peak(2 * _ROWS * _SIZE * _SIZE / product_s, 2 * _COPIED_BYTES / copy_s, "measured once by this worker")


def _mapped(size_bytes: int) -> torch.Tensor:
    """Memory that goes back to the system at once: a worker's heap keeps what it is given back."""
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8).fill_(1)


def overridden(peak: Peak, peak_tflops: float | None, peak_gb_per_s: float | None) -> Peak:
    """The configured peaks, and `peak` for the rest."""
    if peak_tflops is None and peak_gb_per_s is None:
        return peak
    flops = peak.flops if peak_tflops is None else peak_tflops * _TERA
    bytes_per_s = peak.bytes_per_s if peak_gb_per_s is None else peak_gb_per_s * _GIGA
    return Peak(flops, bytes_per_s, f"the configuration; else: {peak.why}")


class PeakOnDemand:
    """Measured once it is asked for. `run` has `measure` run where and when it may be, which can be not now, or later;
    until then there is none."""

    def __init__(self, measure: Callable[[], Peak], run: Callable[[Callable[[], None]], object]) -> None:
        self._measure = measure
        self._run = run
        self._peak: Peak | None = None

    def __call__(self) -> Peak | None:
        if self._peak is None:
            self._run(self._find)
        return self._peak

    def _find(self) -> None:
        if self._peak is None:
            self._peak = self._measure()


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of at least three, after one that counts for nothing."""
    work()
    taken: list[float] = []
    end = time.perf_counter() + _ROUNDS_S
    while len(taken) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return min(taken)
