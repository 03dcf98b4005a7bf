"""Peak rates of NVIDIA's GPUs, from their datasheets: what a worker's utilization is a share of, and plans start from.

Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuPeak:
    """TFLOP/s without sparsity, in 16 bits (bfloat16, float16), fp8 and float32 (no TF32: torch does without it unless
    told otherwise), and GB/s."""

    name: str
    half: float
    fp8: float | None
    single: float
    bandwidth: float


GPUS = (
    GpuPeak("B200", 2250.0, 4500.0, 75.0, 8000.0),
    GpuPeak("H200 NVL", 835.5, 1670.5, 60.0, 4800.0),
    GpuPeak("H200", 989.4, 1978.9, 66.9, 4800.0),
    GpuPeak("H100 NVL", 835.5, 1670.5, 60.0, 3900.0),
    GpuPeak("H100 PCIe", 756.0, 1513.0, 51.0, 2000.0),
    GpuPeak("H100", 989.4, 1978.9, 66.9, 3350.0),
    GpuPeak("A100-PCIE-40GB", 312.0, None, 19.5, 1555.0),
    GpuPeak("A100-SXM4-40GB", 312.0, None, 19.5, 1555.0),
    GpuPeak("A100 80GB PCIe", 312.0, None, 19.5, 1935.0),
    GpuPeak("A100", 312.0, None, 19.5, 2039.0),
    GpuPeak("L40S", 362.05, 733.0, 91.6, 864.0),
    GpuPeak("L40", 181.05, 362.0, 90.5, 864.0),
    GpuPeak("L4", 121.0, 242.5, 30.3, 300.0),
    GpuPeak("A10", 125.0, None, 31.2, 600.0),
)
"""Names end at a word, the first that fits counts. From the datasheets of the NVIDIA B200 (DGX B200's, by eight), H200,
H100, A100, L40S, L40, L4 and A10 Tensor Core GPUs; where they give numbers with sparsity only, half of those."""
