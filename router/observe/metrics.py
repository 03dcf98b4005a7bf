"""The router's metrics for Prometheus, under Baton's names and, where vLLM has the same metric, under vLLM's.

Each metric is declared once, with its meaning, labels and vLLM's name for it; the page, vLLM's names and
docs/router-metrics.md follow (`python -m router.observe.metrics` prints the latter). A metric of finished requests
needs no more than an entry in METRICS_OF_FINISHED; `router.observe.counters` declares what the router counts anyway.

vLLM's names serve dashboards and autoscalers made for it. Only what means the same has one; a histogram keeps Baton's
buckets, and the usage of the KV cache has the label `role`. vLLM's names without a counterpart are those of features
that Baton lacks, of what workers export themselves (preemptions, steps, transfers), and of clients' parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.lifecycle import RequestState
from cluster.metrics import OTHER, TOKEN_BUCKETS, LabelledCounter, Metric, TokenHistogram, histogram, render_reference
from cluster.pb import generation_pb2
from router.observe.counters import COUNTER_METRICS, Counters
from router.routing.fleet import DECODE, PREFILL, Fleet
from router.routing.worker_client import Speed
from router.stream.request import LiveRequest, RequestObserver


@dataclass(frozen=True, kw_only=True)
class FinishedMetric(Metric):
    """A counter or histogram to which each finished request adds one value."""

    measure: Callable[[LiveRequest], float | None]
    """None: this request adds nothing."""


QUEUED = Metric(
    "baton_queued_requests", "gauge", "Requests that wait for a worker.", aliases=("vllm:num_requests_waiting",)
)
RUNNING = Metric(
    "baton_running_requests", "gauge", "Requests that are on workers.", aliases=("vllm:num_requests_running",)
)
KV_USAGE = Metric(
    "baton_kv_usage_ratio",
    "gauge",
    "Share of the KV blocks of a role's workers that requests hold; those that only cache prefixes are free to take. "
    "No series while no worker of the role is ready.",
    (("role", ("prefill", "decode")),),
    aliases=("vllm:kv_cache_usage_perc",),
)
SLOW_WORKERS = Metric(
    "baton_slow_workers",
    "gauge",
    "Workers that get no new requests, or one at a time, because they were far slower than predicted.",
    (("role", ("prefill", "decode")),),
)
DECISION = Metric("baton_decision_seconds", "histogram", "Time to choose workers, including hashing the prompt.")
FETCH = Metric(
    "baton_prefix_fetch_seconds",
    "histogram",
    "From the command to fetch a prefix to its end, of those that went well. The requests for it wait meanwhile.",
)
FIRST_TOKEN = Metric(
    "baton_time_to_first_token_seconds",
    "histogram",
    "Time from a request's arrival to its first token from a worker.",
    aliases=("vllm:time_to_first_token_seconds",),
)
INTER_TOKEN = Metric(
    "baton_inter_token_seconds",
    "histogram",
    "Time between two tokens of a sequence as they come from workers. Tokens that come together count once, each with "
    "an equal share of the time.",
    aliases=("vllm:inter_token_latency_seconds",),
)
METRICS_OF_FINISHED = (
    FinishedMetric(
        "baton_request_seconds",
        "histogram",
        "Time from a request's arrival to its end, if it finished.",
        aliases=("vllm:e2e_request_latency_seconds",),
        measure=lambda live: _between(live.arrived_at, _end_of(live)),
    ),
    FinishedMetric(
        "baton_prompt_tokens_total",
        "counter",
        "Prompt tokens of requests that finished.",
        aliases=("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
        measure=lambda live: len(live.request.prompt_token_ids),
    ),
    FinishedMetric(
        "baton_cached_tokens_total",
        "counter",
        "Prompt tokens of requests that finished which a prefix cache held.",
        aliases=("vllm:prefix_cache_hits_total", "vllm:prompt_tokens_cached_total"),
        measure=lambda live: live.num_cached_tokens,
    ),
    FinishedMetric(
        "baton_output_tokens_total",
        "counter",
        "Output tokens of requests that finished.",
        aliases=("vllm:generation_tokens_total",),
        measure=lambda live: live.num_tokens,
    ),
    FinishedMetric(
        "baton_queue_seconds",
        "histogram",
        "Time from a request's arrival until a worker begins with it, if it finished.",
        aliases=("vllm:request_queue_time_seconds",),
        measure=lambda live: _between(live.arrived_at, _begin_of(live)),
    ),
    FinishedMetric(
        "baton_prefill_seconds",
        "histogram",
        "Time from when a worker begins with a request to its first token, if it finished.",
        aliases=("vllm:request_prefill_time_seconds",),
        measure=lambda live: _between(_begin_of(live), live.first_token_at),
    ),
    FinishedMetric(
        "baton_decode_seconds",
        "histogram",
        "Time from a request's first token to its last, if it finished.",
        aliases=("vllm:request_decode_time_seconds",),
        measure=lambda live: _between(live.first_token_at, _end_of(live)),
    ),
    FinishedMetric(
        "baton_time_per_output_token_seconds",
        "histogram",
        "Time from a request's first token to its last, divided by the tokens after the first of its longest output: "
        "the mean time that its client waited for each.",
        aliases=("vllm:request_time_per_output_token_seconds",),
        measure=lambda live: _time_per_token(live),
    ),
    FinishedMetric(
        "baton_request_prompt_tokens",
        "histogram",
        "Prompt tokens of each request that finished.",
        aliases=("vllm:request_prompt_tokens",),
        buckets=TOKEN_BUCKETS,
        measure=lambda live: len(live.request.prompt_token_ids),
    ),
    FinishedMetric(
        "baton_request_output_tokens",
        "histogram",
        "Output tokens of each request that finished.",
        aliases=("vllm:request_generation_tokens",),
        buckets=TOKEN_BUCKETS,
        measure=lambda live: live.num_tokens,
    ),
)
SEQUENCES = Metric(
    "baton_sequences_total",
    "counter",
    "Outputs of requests that finished, by why they ended.",
    (("finished_reason", ("stop", "length", "tool_calls", "content_filter", OTHER)),),
    aliases=("vllm:request_success_total",),
)
TRACE_SPANS = Metric(
    "baton_trace_spans_total",
    "counter",
    "Spans of traced requests, where `router.trace_endpoint` is set: sent to the collector; failed, as it did not take "
    "them; dropped, as too many waited for it.",
    (("outcome", ("sent", "failed", "dropped")),),
)
METRICS: tuple[Metric, ...] = (
    *(*COUNTER_METRICS, QUEUED, RUNNING, KV_USAGE, SLOW_WORKERS),
    *(DECISION, FETCH, FIRST_TOKEN, INTER_TOKEN, *METRICS_OF_FINISHED, SEQUENCES, TRACE_SPANS),
)
_FINISH_REASONS = {
    number: name.removeprefix("FINISH_REASON_").lower() for name, number in generation_pb2.FinishReason.items()
}


def _begin_of(live: LiveRequest) -> float | None:
    """When a worker first began with it."""
    return live.lifecycle.instant(RequestState.PREFILLING)


def _end_of(live: LiveRequest) -> float:
    return live.lifecycle.history[-1].at


def _between(begin: float | None, end: float | None) -> float | None:
    """None where an instant is unknown, or in another order: of a request that another router had begun."""
    return None if begin is None or end is None or end < begin else end - begin


def _time_per_token(live: LiveRequest) -> float | None:
    most = max(sequence.num_tokens for sequence in live.sequences)
    decode_s = _between(live.first_token_at, _end_of(live))
    return None if decode_s is None or most < 2 else decode_s / (most - 1)


class RouterMetrics(RequestObserver, Collector):
    """The metrics of one router. `counters`, `fleet` and the numbers of requests are read whenever the page is, on the
    page's thread."""

    def __init__(
        self, counters: Counters, fleet: Fleet, num_queued: Callable[[], int], num_running: Callable[[], int]
    ) -> None:
        self._inter_token = TokenHistogram(INTER_TOKEN)
        registry = self.registry = CollectorRegistry()
        registry.register(self)
        self._counters = counters
        self._fleet = fleet
        self._gauges = ((QUEUED, num_queued), (RUNNING, num_running))
        self._decision = histogram(DECISION, registry)
        self.fetched = histogram(FETCH, registry).observe
        self._first_token = histogram(FIRST_TOKEN, registry)
        self._sequences = LabelledCounter(SEQUENCES, registry)
        self.trace_spans = LabelledCounter(TRACE_SPANS, registry)
        self._of_finished = [
            (
                metric.measure,
                histogram(metric, registry).observe
                if metric.kind == "histogram"
                else LabelledCounter(metric, registry).add,
            )
            for metric in METRICS_OF_FINISHED
        ]

    def decided(self, seconds: float) -> None:
        self._decision.observe(seconds)

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

    def collect(self) -> Iterator[MetricFamily]:
        yield from self._counters.collect()
        for metric, count in self._gauges:
            yield GaugeMetricFamily(metric.name, metric.doc, value=count())
        yield self._inter_token.family()
        yield self._kv_usage()
        slow = GaugeMetricFamily(SLOW_WORKERS.name, SLOW_WORKERS.doc, labels=SLOW_WORKERS.label_names)
        for role, name in ((PREFILL, "prefill"), (DECODE, "decode")):
            slow.add_metric((name,), sum(w.role == role and w.speed is not Speed.USUAL for w in tuple(self._fleet)))
        yield slow

    def _kv_usage(self) -> MetricFamily:
        """From the newest statistics of each worker."""
        family = GaugeMetricFamily(KV_USAGE.name, KV_USAGE.doc, labels=KV_USAGE.label_names)
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
        self._aliases = {metric.name.removesuffix("_total"): metric.aliases for metric in METRICS}
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


_INTRODUCTION = """\
# Metrics of the router

Each router serves its metrics for Prometheus at `http://ADDRESS/metrics`; `baton status --json` names the address
(`router.metrics_address`), and `metrics.router: false` in [cluster.yaml](../cluster.yaml) turns the page off. It is
served on the router's own host where that is loopback or `internal_tls` or `router.insecure` allows it, else on
127.0.0.1. Beyond loopback and without TLS, a reader needs a key with the scope `admin` where the cluster has API
keys. Counters start at zero with the process and have every series from the start; no label ever names a request, a
worker or a client. Times are in seconds. What workers measure of hand-offs is in [metrics.md](metrics.md).

This page is made from the code: `python -m router.observe.metrics > docs/router-metrics.md`.
"""


def reference() -> str:
    """docs/router-metrics.md."""
    return render_reference(_INTRODUCTION, METRICS)


if __name__ == "__main__":
    print(reference(), end="")
