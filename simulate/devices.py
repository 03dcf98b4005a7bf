"""The devices that are planned for: what their vendors say of them, and the share of it that a model's steps reach.

Peak operations are dense ones (vendors print twice as many "with sparsity"); memory is the datasheet's, in 10^9 bytes,
which is up to 7 % less than the driver reports. Prices per hour are examples of what cloud providers charge, no
quotations: a plan's costs are as good as the price that is given to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.config.source import nearest
from cluster.errors import ConfigError
from worker.gpu_peaks import GPUS

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator, or one processor socket."""

    name: str
    flops: Mapping[str, float]
    """Peak dense operations a second, by what is multiplied: bfloat16 (float16 is the same), int8, fp8."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To the devices of its own machine, in one direction."""
    nic_bytes_per_s: float
    """To other machines: this device's share of the network, in one direction."""
    devices_per_node: int
    price_per_hour: float
    """US dollars: an example."""
    source: str

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    def peak_flops(self, number_format: str) -> float:
        """Returns the peak of a format, in operations a second: that of bfloat16 where the device does not multiply in
        it."""
        return self.flops.get(number_format, self.flops["bfloat16"])


@dataclass(frozen=True)
class Efficiency:
    """The shares of a device's peaks that steps reach, and times that no peak explains."""

    flops: float
    """Share of the peak in products of many tokens."""
    memory: float
    """Share of the memory's bandwidth in reading weights and KV."""
    link: float
    """Share of a link's bandwidth in an all-reduce."""
    link_latency_s: float
    """Seconds that an all-reduce of a few bytes takes, for each time that the number of ranks is doubled."""
    layer_s: float
    """Seconds of one layer on the device whatever it computes: kernels that end and begin."""
    launch_layer_s: float
    """Seconds in which the host launches one layer; a step takes no less. 0 where steps are replayed as graphs."""
    step_s: float
    """Seconds of a step outside the layers: inputs, sampling, the host between two steps."""
    sequence_s: float
    """Seconds of the host for each sequence of a step."""


EAGER = Efficiency(
    flops=0.60,
    memory=0.65,
    link=0.20,
    link_latency_s=20e-6,
    layer_s=10e-6,
    launch_layer_s=340e-6,
    step_s=1.5e-3,
    sequence_s=330e-6,
)
"""An engine of 2023 that launches each kernel by itself: what comes nearest to splitwise-sim's measurements of
Llama-2-70B on H100 and A100 machines. docs/plan.md says how near."""
GRAPHS = replace(EAGER, link=0.50, link_latency_s=7e-6, launch_layer_s=0.0, sequence_s=5e-6)
"""The same shares of the device, and a host that costs little: decode steps are replayed as CUDA graphs, and tokens are
sampled on the device, as Baton does. The four values that differ are assumed, not measured: NCCL's own tests reach more
than three quarters of NVLink with large messages."""


def _gpu(
    name: str, memory_gb: float, link_gb_per_s: float, nic_gb_per_s: float, price: float, source: str
) -> DeviceSpec:
    """Peaks are those of `worker.gpu_peaks`; int8 is as quick as fp8, or twice as quick as 16 bits."""
    peak = next(gpu for gpu in GPUS if gpu.name == name)
    flops = {"bfloat16": peak.half * _TERA, "int8": (peak.fp8 or 2 * peak.half) * _TERA}
    return DeviceSpec(
        name=name.lower(),
        flops=flops if peak.fp8 is None else {**flops, "fp8": peak.fp8 * _TERA},
        memory_bytes=memory_gb * _GIGA,
        memory_bytes_per_s=peak.bandwidth * _GIGA,
        link_bytes_per_s=link_gb_per_s * _GIGA,
        nic_bytes_per_s=nic_gb_per_s * _GIGA,
        devices_per_node=8,
        price_per_hour=price,
        source=source,
    )


_MI300X = DeviceSpec(
    name="mi300x",
    flops={"bfloat16": 1307.4 * _TERA, "int8": 2614.9 * _TERA, "fp8": 2614.9 * _TERA},
    memory_bytes=192 * _GIGA,
    memory_bytes_per_s=5300 * _GIGA,
    link_bytes_per_s=448 * _GIGA,
    nic_bytes_per_s=50 * _GIGA,
    devices_per_node=8,
    price_per_hour=3.0,
    source="AMD Instinct MI300X datasheet: seven Infinity Fabric links of 64 GB/s; 400 Gb/s for each GPU is assumed",
)
_CPU = DeviceSpec(
    name="cpu",
    flops={"bfloat16": 109 * _TERA, "int8": 218 * _TERA},
    memory_bytes=512 * _GIGA,
    memory_bytes_per_s=307 * _GIGA,
    link_bytes_per_s=48 * _GIGA,
    nic_bytes_per_s=12.5 * _GIGA,
    devices_per_node=2,
    price_per_hour=1.5,
    source="one socket of Intel Xeon 8480+: 56 cores with AMX (1,024 operations a cycle at 1.9 GHz), eight channels of "
    "DDR5-4800, three UPI links of 16 GB/s; 512 GB and 100 Gb/s are assumed",
)
_SPECS = (
    _gpu("A100", 80, 300, 25, 2.0, "NVIDIA A100 80GB SXM datasheet; DGX A100: 200 Gb/s for each GPU"),
    _gpu("H100", 80, 450, 50, 3.0, "NVIDIA H100 SXM datasheet; DGX H100: 400 Gb/s for each GPU"),
    _gpu("H200", 141, 450, 50, 3.5, "NVIDIA H200 SXM datasheet; DGX H200: 400 Gb/s for each GPU"),
    _gpu("B200", 180, 900, 50, 5.5, "NVIDIA DGX B200 datasheet, an eighth of the system: 400 Gb/s for each GPU"),
    _gpu("L40S", 48, 32, 25, 1.2, "NVIDIA L40S datasheet: PCIe 4.0 x16, no NVLink; 200 Gb/s for each GPU is assumed"),
    _MI300X,
    _CPU,
)
DEVICES: Mapping[str, DeviceSpec] = {spec.name: spec for spec in _SPECS}
"""Devices by the names that `baton plan --device` takes."""


def find_device(name: str) -> DeviceSpec:
    """Raises ConfigError that names the devices."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    close = nearest(name, DEVICES)
    guess = f"did you mean {close}? " if close else ""
    raise ConfigError(f"--device: {name!r} is not in the table; {guess}it has {', '.join(DEVICES)}")
