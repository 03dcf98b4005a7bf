"""MFU and MBU: right for steps of known size and time, over the last half minute, and absent where no peak is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_spans import FakeDevice
from prometheus_client import CollectorRegistry

from engine.model_cost import ModelFlops
from engine.native import native
from engine.step_input import SequenceSlice, StepInput, build_step
from worker import peaks
from worker.peaks import Peak, PeakOnDemand, measure_cpu, overridden, peak_of_gpu
from worker.step_meter import KINDS, METRICS, WINDOW_S, StepMeter

MODEL = ModelFlops(
    layers_flops=1000,
    head_flops=100,
    layers_bytes=5000,
    head_bytes=500,
    pair_flops=0,
    generated_pair_flops=0,
    kv_layer_bytes=0,
    windows=(),
)
"""A prompt of 8 tokens: 8100 operations. Any step: 5500 bytes."""
PEAK = Peak(1e6, 1e5, "a test")


def step(*lengths: int) -> StepInput:
    return build_step([SequenceSlice((1,) * length, 0, (0, 1), True) for length in lengths], 16)


class Watched:
    """A meter whose page is read at `now`."""

    def __init__(self, peak: Peak | None = PEAK) -> None:
        self.meter, self.registry, self.peak, self.now = StepMeter(MODEL), CollectorRegistry(), peak, 0.0
        self.meter.watch(self.registry, lambda: self.peak, lambda: self.now)

    def run(self, begun: float, seconds: float, *lengths: int) -> None:
        self.meter.launched(step(*lengths), begun)
        self.meter.ended(begun + seconds)
        self.now = begun + seconds

    def value(self, name: str, kind: str | None = None) -> float | None:
        return self.registry.get_sample_value(name, {} if kind is None else {"step": kind})


def test_the_shares_are_those_of_the_steps_by_their_own_seconds() -> None:
    watched = Watched()
    watched.run(100.0, 0.010, 8)
    watched.run(105.0, 0.030, 8)
    watched.run(106.0, 0.100, 1, 1, 1)
    assert watched.value("baton_mfu_ratio", "prefill") == pytest.approx(2 * 8100 / 0.040 / 1e6)
    assert watched.value("baton_mbu_ratio", "decode") == pytest.approx(5500 / 0.100 / 1e5)
    assert watched.value("baton_mfu_ratio", "mixed") is None, "there was no such step"


def test_counters_tell_the_same_by_their_rates() -> None:
    watched = Watched()
    watched.run(100.0, 0.010, 8)
    watched.run(101.0, 0.020, 8, 1)
    found = {name: [watched.value(f"baton_step_{name}_total", k) for k in KINDS] for name in ("flops", "bytes")}
    assert found == {"flops": [8100, 0, 9200], "bytes": [5500, 0, 5500]}
    assert [watched.value("baton_steps_total", kind) for kind in KINDS] == [1, 0, 1]
    assert [watched.value("baton_step_tokens_total", kind) for kind in KINDS] == [8, 0, 9]
    assert watched.value("baton_step_seconds_total", "mixed") == pytest.approx(0.020)
    assert watched.value("baton_device_peak_flops") == 1e6
    assert watched.value("baton_device_peak_bytes_per_second") == 1e5


def test_a_step_that_a_device_computes_later_counts_with_its_time_there() -> None:
    """What a step that sampled nothing took was the time of its launch, a hundred times too short."""
    watched, device = Watched(), FakeDevice([0.100, 0.050])
    for moment in (0.0, 0.1):
        watched.meter.launched(step(8), 100.0 + moment)
        watched.meter.ended(100.001 + moment, device.begin())
        assert watched.value("baton_steps_total", "prefill") == 10 * moment
        device.now += 0.100
    watched.now = 100.2
    assert watched.value("baton_step_seconds_total", "prefill") == pytest.approx(0.100)
    assert watched.value("baton_mfu_ratio", "prefill") == pytest.approx(8100 / 0.100 / 1e6)


def test_what_is_older_than_the_window_counts_no_more() -> None:
    watched = Watched()
    watched.run(100.0, 0.010, 8)
    watched.run(100.0 + WINDOW_S, 0.020, 8)
    assert watched.value("baton_mfu_ratio", "prefill") == pytest.approx(8100 / 0.020 / 1e6)
    watched.now += 10 * WINDOW_S
    assert watched.value("baton_mfu_ratio", "prefill") is None
    assert watched.value("baton_step_flops_total", "prefill") == 2 * 8100


def test_a_long_run_keeps_no_more_than_the_window() -> None:
    watched = Watched()
    for second in range(200):
        watched.run(second, 0.5, 1)
    assert len(watched.meter._seconds) == WINDOW_S + 1
    assert watched.value("baton_mbu_ratio", "decode") == pytest.approx(5500 / 0.5 / 1e5)


def test_without_a_peak_there_are_counters_and_no_shares() -> None:
    for peak in (None, Peak(None, None, "unknown")):
        watched = Watched(peak)
        watched.run(100.0, 0.010, 8)
        assert watched.value("baton_step_flops_total", "prefill") == 8100
        names = {sample.name for family in watched.registry.collect() for sample in family.samples}
        assert not names & {
            "baton_mfu_ratio",
            "baton_mbu_ratio",
            "baton_device_peak_flops",
            "baton_device_peak_bytes_per_second",
        }


def test_one_known_peak_is_enough_for_its_share() -> None:
    watched = Watched(overridden(Peak(None, None, "unknown"), None, 0.0001))
    watched.run(100.0, 0.010, 1)
    assert watched.value("baton_mfu_ratio", "decode") is None
    assert watched.value("baton_mbu_ratio", "decode") == pytest.approx(5500 / 0.010 / 1e5)


def test_a_step_that_only_copies_blocks_is_none() -> None:
    watched = Watched()
    watched.meter.launched(build_step([], 16, [(0, 1)]), 1.0)
    watched.meter.ended(2.0)
    assert [watched.value("baton_steps_total", kind) for kind in KINDS] == [0, 0, 0]


def test_every_family_of_the_page_is_in_its_reference() -> None:
    watched = Watched()
    watched.run(1.0, 0.1, 8)
    told = {(family.name, family.type, family.documentation) for family in watched.registry.collect()}
    assert told == {(metric.name.removesuffix("_total"), metric.kind, metric.doc) for metric in METRICS}


@pytest.mark.parametrize(
    ("name", "dtype", "in_fp8", "tflops", "gb_per_s"),
    [
        ("NVIDIA H200", "bfloat16", False, 989.4, 4800),
        ("NVIDIA H100 80GB HBM3", "bfloat16", True, 1978.9, 3350),
        ("NVIDIA H100 80GB HBM3", "float32", False, 66.9, 3350),
        ("NVIDIA H100 PCIe", "float16", False, 756, 2000),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", True, 312, 2039),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", False, 312, 1555),
        ("NVIDIA A100-PCIE-40GB", "bfloat16", False, 312, 1555),
        ("NVIDIA A100 80GB PCIe", "bfloat16", False, 312, 1935),
        ("NVIDIA L40S", "bfloat16", False, 362.05, 864),
        ("NVIDIA L4", "bfloat16", False, 121, 300),
    ],
)
def test_the_table_knows_a_gpu_by_torchs_name(
    name: str, dtype: str, in_fp8: bool, tflops: float, gb_per_s: float
) -> None:
    peak = peak_of_gpu(name, dtype, in_fp8=in_fp8)
    assert (peak.flops, peak.bytes_per_s) == (pytest.approx(tflops * 1e12), pytest.approx(gb_per_s * 1e9))


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""])
def test_a_gpu_that_is_not_in_the_table_has_no_peak_and_says_what_to_set(name: str) -> None:
    peak = peak_of_gpu(name, "bfloat16", in_fp8=False)
    assert peak.flops is None and peak.bytes_per_s is None
    assert "metrics.peak_tflops" in peak.why
    assert overridden(peak, 10.0, None).flops == 10e12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_cpu_is_measured_in_the_form_it_multiplies_in(dtype: torch.dtype, quantization: str) -> None:
    kernels, _ = native()
    peak = measure_cpu(dtype, quantization, kernels)
    assert peak.flops is not None and peak.bytes_per_s is not None
    assert 1e8 < peak.flops < 1e15 and 1e8 < peak.bytes_per_s < 1e13


def test_the_fastest_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 0.5, 1.0, 1.1, 2.0, 2.3, 99.0])
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: next(times))
    assert peaks._best(lambda: None) == pytest.approx(0.1)


def test_a_peak_is_asked_for_until_it_is_known_and_never_again() -> None:
    measured: list[Peak] = []
    runs = iter([False, True])

    def measure() -> Peak:
        measured.append(PEAK)
        return PEAK

    on_demand = PeakOnDemand(measure, lambda work: work() if next(runs) else None)
    assert [on_demand(), on_demand(), on_demand()] == [None, PEAK, PEAK]
    assert len(measured) == 1


def test_a_measurement_that_ends_after_its_page_was_served_counts_for_the_next() -> None:
    late: list[Callable[[], None]] = []
    on_demand = PeakOnDemand(lambda: PEAK, late.append)
    assert [on_demand(), on_demand()] == [None, None]
    for work in late:
        work()
    assert on_demand() is PEAK
