"""Records the router's metrics and reads what the router counts anyway while a page is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.lifecycle import RequestState
from cluster.metrics import OTHER, LabelledCounter, counter_family, histogram
from cluster.pb import generation_pb2
from router.observe import metrics
from router.observe.counters import LINE_OUTCOMES, OUTCOMES, REFUSAL_REASONS, RETRY_REASONS, Counters
from router.routing.fleet import DECODE, PREFILL, Fleet
from router.routing.load_tracker import PlacementKind
from router.stream.request import LiveRequest, RequestObserver

_FINISH_REASONS = {
    number: name.removeprefix("FINISH_REASON_").lower() for name, number in generation_pb2.FinishReason.items()
}


class RouterMetrics(RequestObserver):
    """The metrics of one router. `counters`, `fleet` and the numbers of requests are read whenever the page is, on the
    page's thread."""

    def __init__(
        self, counters: Counters, fleet: Fleet, num_queued: Callable[[], int], num_running: Callable[[], int]
    ) -> None:
        registry = self.registry = CollectorRegistry()
        registry.register(_RouterCollector(counters, fleet, num_queued, num_running))
        self._placements = LabelledCounter(metrics.PLACEMENTS, registry)
        self._decision = histogram(metrics.DECISION, registry)
        self._first_token = histogram(metrics.FIRST_TOKEN, registry)
        self._inter_token = histogram(metrics.INTER_TOKEN, registry)
        self._sequences = LabelledCounter(metrics.SEQUENCES, registry)
        self.trace_spans = LabelledCounter(metrics.TRACE_SPANS, registry)
        self._of_finished = [
            (
                metric.measure,
                histogram(metric, registry).observe
                if metric.kind == "histogram"
                else LabelledCounter(metric, registry).add,
            )
            for metric in metrics.METRICS_OF_FINISHED
        ]

    def decided(self, seconds: float) -> None:
        self._decision.observe(seconds)

    def placed(self, kind: PlacementKind) -> None:
        self._placements.add(1, kind)

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        self._first_token.observe(seconds)

    def on_tokens(self, count: int, interval_s: float | None) -> None:
        if interval_s is not None:
            self._inter_token.observe(interval_s / count)

    def on_end(self, live: LiveRequest) -> None:
        if live.lifecycle.state is not RequestState.FINISHED:
            return
        for measure, record in self._of_finished:
            value = measure(live)
            if value is not None:
                record(value)
        for sequence in live.sequences:
            if sequence.end is not None:
                self._sequences.add(1, _FINISH_REASONS.get(sequence.end.finish_reason, OTHER))


class _RouterCollector(Collector):
    """Reads the router's state while the page is read."""

    def __init__(
        self, counters: Counters, fleet: Fleet, num_queued: Callable[[], int], num_running: Callable[[], int]
    ) -> None:
        self._counters = counters
        self._fleet = fleet
        self._gauges = ((metrics.QUEUED, num_queued), (metrics.RUNNING, num_running))

    def collect(self) -> Iterator[MetricFamily]:
        counters = self._counters
        yield counter_family(metrics.REQUESTS, {outcome: getattr(counters, outcome) for outcome in OUTCOMES})
        retried = dict.fromkeys(RETRY_REASONS, 0)
        for reason, number in counters.retried.copy().items():
            name = reason.lower()
            retried[name if name in retried else OTHER] += number
        yield counter_family(metrics.RETRIES, retried)
        refused, lines = counters.refused.copy(), counters.batch_lines.copy()
        yield counter_family(metrics.REFUSALS, {reason: refused[reason] for reason in REFUSAL_REASONS})
        yield counter_family(metrics.BATCH_LINES, {outcome: lines[outcome] for outcome in LINE_OUTCOMES})
        yield CounterMetricFamily(metrics.ORPHANS.name, metrics.ORPHANS.doc, value=counters.orphaned)
        for metric, count in self._gauges:
            yield GaugeMetricFamily(metric.name, metric.doc, value=count())
        yield self._kv_usage()

    def _kv_usage(self) -> MetricFamily:
        """From the newest statistics of each worker."""
        family = GaugeMetricFamily(metrics.KV_USAGE.name, metrics.KV_USAGE.doc, labels=metrics.KV_USAGE.label_names)
        all_stats = [(worker.role, stats) for worker in tuple(self._fleet) if (stats := worker.stats) is not None]
        for role, name in ((PREFILL, "prefill"), (DECODE, "decode")):
            total = sum(stats.blocks_total for of, stats in all_stats if of == role)
            if total:
                family.add_metric((name,), sum(stats.blocks_held for of, stats in all_stats if of == role) / total)
        return family


class VllmNames(Collector):
    """Shows the metrics of `source` that vLLM has too, under vLLM's names and with its label `model_name`."""

    def __init__(self, source: CollectorRegistry, model_name: str) -> None:
        self._source = source
        self._model_name = model_name
        self._aliases = {metric.name.removesuffix("_total"): metric.aliases for metric in metrics.METRICS}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[MetricFamily]:
        for family in self._source.collect():
            for full_name in self._aliases.get(family.name, ()):
                alias = full_name.removesuffix("_total")
                renamed = MetricFamily(alias, family.documentation, family.type)
                for sample in family.samples:
                    name = alias + sample.name.removeprefix(family.name)
                    renamed.add_sample(name, {**sample.labels, "model_name": self._model_name}, sample.value)
                yield renamed
