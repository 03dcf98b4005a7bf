"""Counts what the steps of one worker compute and move, and their time, and shows MFU and MBU to Prometheus.

    launched (the step's work, known from its shape) -> ended (its seconds) -> sums by kind of step

The engine thread adds, a page reads: plain sums that only grow, and the last half minute in pieces of a second. A page
may catch a step half added, which is made good at the next reading. Counted is rank 0's share; the other ranks' is the
same. Knows no clock and no device: what the device can do at most is asked when a page is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.metrics import Metric, counter_family
from engine.model_cost import ModelFlops, StepFlops
from engine.step_input import StepInput
from worker.peaks import Peak
from worker.steps import DeviceSpan

KINDS = ("prefill", "decode", "mixed")
WINDOW_S = 30
_LABELS = (("step", KINDS),)
_OF_STEPS = "prefill: of prompts alone; decode: a token of each sequence; mixed: both."

STEPS = Metric("baton_steps_total", "counter", f"Steps that ended, by what was in them. {_OF_STEPS}", _LABELS)
TOKENS = Metric("baton_step_tokens_total", "counter", "Tokens that those steps computed.", _LABELS)
SECONDS = Metric(
    "baton_step_seconds_total",
    "counter",
    "Time that those steps took, from their launch to their tokens being sampled, on a GPU by its own clock. The rest "
    "of the time the worker had nothing to compute.",
    _LABELS,
)
FLOPS = Metric(
    "baton_step_flops_total",
    "counter",
    "Floating point operations that the model needs for those steps, on each rank: products with weights (the head's "
    "for sampled rows alone), and attention over what each token sees.",
    _LABELS,
)
BYTES = Metric(
    "baton_step_bytes_total",
    "counter",
    "Bytes that those steps read and write at least, on each rank: each weight once, as it is stored, and keys and "
    "values.",
    _LABELS,
)
PEAK_FLOPS = Metric(
    "baton_device_peak_flops",
    "gauge",
    "Operations a second that one device can do at most, in the type that weights are multiplied in: from the table of "
    "GPUs, measured once on a CPU (at the first reading of this page that finds no step under way), or "
    "`metrics.peak_tflops`. No series where it is not known.",
)
PEAK_BYTES = Metric(
    "baton_device_peak_bytes_per_second",
    "gauge",
    "Bytes a second of the device's memory, from where the peak of operations comes from, or `metrics.peak_gb_per_s`. "
    "Weights that fit in a CPU's caches are read faster.",
)
MFU = Metric(
    "baton_mfu_ratio",
    "gauge",
    f"Model FLOPs utilization: operations of the steps of the last {WINDOW_S} s, by their seconds and the device's "
    "peak; no series without steps. Over another time: `rate(baton_step_flops_total[5m]) / "
    "rate(baton_step_seconds_total[5m]) / on (instance) group_left () baton_device_peak_flops`.",
    _LABELS,
)
MBU = Metric("baton_mbu_ratio", "gauge", "Memory bandwidth utilization: the same of bytes.", _LABELS)
METRICS = (STEPS, TOKENS, SECONDS, FLOPS, BYTES, PEAK_FLOPS, PEAK_BYTES, MFU, MBU)


@dataclass
class Sums:
    """Totals over the steps of one kind."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    size_bytes: float = 0.0

    def add(self, work: StepFlops, seconds: float) -> None:
        self.steps += 1
        self.tokens += work.num_tokens
        self.seconds += seconds
        self.flops += work.flops
        self.size_bytes += work.size_bytes


def _nothing() -> dict[str, Sums]:
    return {kind: Sums() for kind in KINDS}


@dataclass
class _Second:
    """The steps that ended in one second."""

    number: int
    sums: dict[str, Sums] = field(default_factory=_nothing)


class StepMeter:
    """Meters the steps of one worker. `launched` and `ended` are called in turn, on the engine thread.

    Steps that a device computes behind the process count once the device has ended them, at the next `ended`.
    """

    def __init__(self, model: ModelFlops) -> None:
        self.totals = _nothing()
        self._model = model
        self._work: StepFlops | None = None
        self._begun_at = 0.0
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S + 1)
        self._behind: deque[tuple[StepFlops, DeviceSpan]] = deque()

    def launched(self, step: StepInput, now: float) -> None:
        self._work, self._begun_at = self._model.of_step(step), now

    def ended(self, now: float, span: DeviceSpan | None = None) -> None:
        work, self._work = self._work, None
        if work is not None and work.num_tokens:
            if span is None:
                self._add(work, max(0.0, now - self._begun_at), now)
            else:
                self._behind.append((work, span))
        while self._behind and (taken := self._behind[0][1].seconds()) is not None:
            self._add(self._behind.popleft()[0], taken, now)

    def _add(self, work: StepFlops, taken: float, now: float) -> None:
        kind = "mixed" if work.has_prompt and work.has_decode else "prefill" if work.has_prompt else "decode"
        self.totals[kind].add(work, taken)
        if not self._seconds or self._seconds[-1].number != int(now):
            self._seconds.append(_Second(int(now)))
        self._seconds[-1].sums[kind].add(work, taken)

    def lately(self, kind: str, now: float) -> tuple[float, float] | None:
        """Operations and bytes a second of the steps of a kind in the last WINDOW_S; None: there were none."""
        recent = [each.sums[kind] for each in tuple(self._seconds) if each.number > now - WINDOW_S]
        seconds = sum(each.seconds for each in recent)
        if not seconds:
            return None
        return sum(each.flops for each in recent) / seconds, sum(each.size_bytes for each in recent) / seconds

    def watch(self, registry: CollectorRegistry, peak: Callable[[], Peak | None], clock: Callable[[], float]) -> None:
        """Shows all of it. `peak` is asked at every reading, on the page's thread; None: it is not known yet."""
        registry.register(_MeterCollector(self, peak, clock))


class _MeterCollector(Collector):
    def __init__(self, meter: StepMeter, peak: Callable[[], Peak | None], clock: Callable[[], float]) -> None:
        self._meter = meter
        self._peak = peak
        self._clock = clock

    def collect(self) -> Iterator[MetricFamily]:
        totals = self._meter.totals
        yield counter_family(STEPS, {kind: sums.steps for kind, sums in totals.items()})
        yield counter_family(TOKENS, {kind: sums.tokens for kind, sums in totals.items()})
        yield counter_family(SECONDS, {kind: sums.seconds for kind, sums in totals.items()})
        yield counter_family(FLOPS, {kind: sums.flops for kind, sums in totals.items()})
        yield counter_family(BYTES, {kind: sums.size_bytes for kind, sums in totals.items()})
        peak = self._peak()
        if peak is not None:
            yield from self._shares(peak)

    def _shares(self, peak: Peak) -> Iterator[MetricFamily]:
        now = self._clock()
        rates = {kind: rate for kind in KINDS if (rate := self._meter.lately(kind, now)) is not None}
        both = ((PEAK_FLOPS, MFU, peak.flops, 0), (PEAK_BYTES, MBU, peak.bytes_per_s, 1))
        for of_device, of_steps, most, index in both:
            if most is None:
                continue
            yield GaugeMetricFamily(of_device.name, of_device.doc, value=most)
            shares = GaugeMetricFamily(of_steps.name, of_steps.doc, labels=of_steps.label_names)
            for kind, rate in rates.items():
                shares.add_metric((kind,), rate[index] / most)
            yield shares
