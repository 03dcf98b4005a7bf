"""Metrics of every Baton process: how one is declared, and the reference in docs/. `cluster.metrics_page` serves them.

A metric is declared with every value that its labels can have: nothing unbounded (a request, a peer) can become a
label, and each series exists from the start. Knows no single metric.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

OTHER = "other"
"""Replaces the value of a label that was not declared."""
DURATION_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Buckets for seconds: from a message on one machine to a transfer that has timed out everywhere."""
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Buckets for counts of tokens: from a single one to the longest contexts."""


@dataclass(frozen=True)
class Metric:
    """The declaration of one metric. `labels`: each with all its values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    aliases: tuple[str, ...] = ()
    """Names that other systems give the same metric."""
    buckets: tuple[float, ...] = DURATION_BUCKETS_S
    """Upper bounds of a histogram's buckets."""

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.labels)


class LabelledCounter:
    """A counter whose label values are declared. A label that may get other values declares `other` as well."""

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        counter = Counter(metric.name, metric.doc, metric.label_names, registry=registry)
        values = itertools.product(*(known for _, known in metric.labels))
        self._series = {each: counter.labels(*each) if each else counter for each in values}
        self._known = tuple(frozenset(known) for _, known in metric.labels)

    def add(self, amount: float, *labels: str) -> None:
        """`labels` in the order of the declaration. An amount of 0 or less adds nothing."""
        if amount > 0:
            pairs = zip(labels, self._known, strict=True)
            self._series[tuple(label if label in known else OTHER for label, known in pairs)].inc(amount)


def counter_family(metric: Metric, counts: Mapping[str, float]) -> CounterMetricFamily:
    """A counter with one label that is counted elsewhere, for a collector to yield. Every declared value gets a series;
    a value that is not declared counts as `other`, where that is declared."""
    family = CounterMetricFamily(metric.name, metric.doc, labels=metric.label_names)
    ((_, values),) = metric.labels
    totals: dict[str, float] = dict.fromkeys(values, 0)
    for label, number in counts.items():
        known = label if label in totals else OTHER
        if known in totals:
            totals[known] += number
    for label, total in totals.items():
        family.add_metric((label,), total)
    return family


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(metric.name, metric.doc, registry=registry, buckets=metric.buckets)


class TokenHistogram:
    """A histogram for values that come with every token, for a collector to yield. prometheus_client's own takes two
    locks for each value, and tries one bucket after another. Values are added by one thread, and read by any."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._bounds = metric.buckets
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> HistogramMetricFamily:
        names = (*map(floatToGoString, self._bounds), "+Inf")
        up_to = list(zip(names, itertools.accumulate(map(float, self._counts)), strict=True))
        return HistogramMetricFamily(self._metric.name, self._metric.doc, up_to, self._sum)


def render_reference(introduction: str, metrics: Sequence[Metric]) -> str:
    """Renders a page of docs/: every metric with its type, labels and meaning."""
    rows = [f"| `{m.name}` | {m.kind} | {_labels_text(m.labels)} | {m.doc} |" for m in metrics]
    return "\n".join([introduction, "| metric | type | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _labels_text(labels: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    return "; ".join(f"`{name}`: {', '.join(values)}" for name, values in labels) or "–"
