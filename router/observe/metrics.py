"""What is measured of requests on one router: how they end, where they are placed and why, how long clients wait.

Told on the event loop, each with a time; nothing here waits or raises. What the dispatcher counts anyway is asked of it
when the page is read. `python -m router.observe.metrics` prints docs/router-metrics.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.metrics import OTHER, LabelledCounter, Metric, counter_family, duration_histogram, render_reference
from router.observe import request_metrics
from router.observe.activity import Activity
from router.observe.request_metrics import RequestMetrics
from router.routing.fleet import DECODE, PREFILL, Fleet
from router.routing.load_tracker import PlacementKind
from router.stream.request import LiveRequest

OUTCOMES = ("finished", "cancelled", "failed", "rejected")
REFUSAL_REASONS = (
    "too_large",
    "quota_requests_per_min",
    "quota_prompt_tokens_per_min",
    "quota_output_tokens_per_min",
    "quota_max_concurrent",
    "queue_requests",
    "queue_tokens",
    "tenant_share",
    "deadline",
    "queue_timeout",
    "overload",
    "waited",
    "shed",
    "draining",
    "client_stalled",
)
RETRY_REASONS = ("worker_lost", "stalled", "peer_lost", "transfer_failed", "corrupt", "incompatible", OTHER)

LINE_OUTCOMES = ("completed", "failed", "retried")

REQUESTS = Metric(
    "baton_requests_total",
    "counter",
    "Requests that ended. rejected: without having run; failed: with an error after they had.",
    (("outcome", OUTCOMES),),
)
RETRIES = Metric(
    "baton_retries_total",
    "counter",
    "Attempts that failed and were followed by another one, by what ended them; no client saw more than a pause.",
    (("reason", RETRY_REASONS),),
)
REFUSALS = Metric(
    "baton_refusals_total",
    "counter",
    "Requests that were turned away, by why: larger than a bound (too_large); a limit of the API key (quota); a full "
    "queue, in requests or in tokens, or a tenant's share of it; a wait that would not keep the deadline, the queue "
    "timeout or, in an overload, the objective of the first token; at the end of such a wait (waited, shed); while the "
    "router shuts down (draining). client_stalled: ended while they ran, as their client did not read.",
    (("reason", REFUSAL_REASONS),),
)
ORPHANS = Metric(
    "baton_orphans_total",
    "counter",
    "Generations that were cancelled because their client had left and nobody resumed them in time.",
)
QUEUED = Metric("baton_queued_requests", "gauge", "Requests that wait for a worker.")
RUNNING = Metric("baton_running_requests", "gauge", "Requests that are on workers.")
PLACEMENTS = Metric(
    "baton_placements_total",
    "counter",
    "Placements on workers, each attempt one, by why: a hand-off; a prompt computed by its decode worker because there "
    "was little to compute (short, cached), because prefill was busy (where nothing decodes: idle, else beside what "
    "does), or for want of prefill workers (no_prefill); on a prefill worker for want of decode workers (no_decode); "
    "by the session's last turn, which decided between near equals; after a failure (retried); from another decode "
    "worker (moved).",
    (("kind", tuple(PlacementKind)),),
)
DECISION = Metric(
    "baton_decision_seconds", "histogram", "Time that choosing workers takes, hashing of the prompt included."
)
FIRST_TOKEN = Metric(
    "baton_time_to_first_token_seconds", "histogram", "Time from a request's arrival to its first token from a worker."
)
INTER_TOKEN = Metric(
    "baton_inter_token_seconds",
    "histogram",
    "Time between two tokens of a sequence as they come from workers; of tokens that come together, their share of it, "
    "once.",
)
LATENCY = Metric("baton_request_seconds", "histogram", "Time from a request's arrival to its end, if it finished.")
PROMPT_TOKENS = Metric("baton_prompt_tokens_total", "counter", "Prompt tokens of requests that finished.")
CACHED_TOKENS = Metric("baton_cached_tokens_total", "counter", "Of these, tokens that a prefix cache held.")
OUTPUT_TOKENS = Metric("baton_output_tokens_total", "counter", "Output tokens of requests that finished.")
TRACE_SPANS = Metric(
    "baton_trace_spans_total",
    "counter",
    "Spans of traced requests, where `router.trace_endpoint` is set: sent to the collector; failed, as it did not take "
    "them; dropped, as too many waited for it.",
    (("outcome", ("sent", "failed", "dropped")),),
)
KV_USAGE = Metric(
    "baton_kv_usage_ratio",
    "gauge",
    "Share of the KV blocks of a role's workers that requests hold; those that only cache prefixes are free to take. "
    "No series while no worker of the role is ready.",
    (("role", ("prefill", "decode")),),
)
BATCH_LINES = Metric(
    "baton_batch_lines_total",
    "counter",
    "Lines of batches that were answered well or with an error, and tries that gave no answer and are followed by "
    "another one (retried). Each try is a request as well, and is counted as such.",
    (("outcome", LINE_OUTCOMES),),
)
_OF_REQUESTS = (REQUESTS, RETRIES, REFUSALS, ORPHANS, QUEUED, RUNNING, PLACEMENTS, BATCH_LINES, KV_USAGE)
_OF_TIMES = (DECISION, FIRST_TOKEN, INTER_TOKEN, LATENCY)
_OF_TOKENS = (PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS)
METRICS = (*_OF_REQUESTS, *_OF_TIMES, *_OF_TOKENS, *request_metrics.METRICS, TRACE_SPANS)


@dataclass
class Counters:
    """Requests that ended, by how, and attempts that took another way."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    """By what ended the attempt before."""
    refused: Counter[str] = field(default_factory=Counter)
    """By why: those of REFUSAL_REASONS."""
    local_prefills: int = 0
    moved: int = 0
    """Requests that went from one decode worker to another, each time."""
    batch_lines: Counter[str] = field(default_factory=Counter)
    """By what came of them: those of LINE_OUTCOMES."""
    orphaned: int = 0
    """Cancelled because their client had left and nobody resumed them."""


class RouterView(Protocol):
    """Who knows how the router stands: the dispatcher."""

    counters: Counters
    fleet: Fleet

    @property
    def num_queued(self) -> int: ...

    @property
    def num_running(self) -> int: ...


class RouterMetrics:
    """Of one router. `source` is asked at every reading of the page, on that page's thread. A `Latencies`."""

    def __init__(self, source: RouterView) -> None:
        self.activity = Activity()
        """The same, for people: the last minutes."""
        self.registry = CollectorRegistry()
        self.registry.register(_SourceCollector(source))
        self._placements = LabelledCounter(PLACEMENTS, self.registry)
        self._decision = duration_histogram(DECISION, self.registry)
        self._first_token = duration_histogram(FIRST_TOKEN, self.registry)
        self._inter_token = duration_histogram(INTER_TOKEN, self.registry)
        self._latency = duration_histogram(LATENCY, self.registry)
        self.trace_spans = LabelledCounter(TRACE_SPANS, self.registry)
        self._requests = RequestMetrics(self.registry)
        self._tokens = [CounterMetric(metric.name, metric.doc, registry=self.registry) for metric in _OF_TOKENS]

    def decided(self, seconds: float) -> None:
        self._decision.observe(seconds)

    def placed(self, kind: PlacementKind) -> None:
        self._placements.add(1, kind)

    def first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        self._first_token.observe(seconds)
        self.activity.first_token(seconds, num_prompt_tokens)

    def next_tokens(self, seconds: float | None, count: int) -> None:
        if seconds is not None:
            self._inter_token.observe(seconds / count)
        self.activity.next_tokens(seconds, count)

    def over(self, live: LiveRequest) -> None:
        self.activity.over(live)

    def finished(self, live: LiveRequest, now: float) -> None:
        """A request has all its tokens."""
        usage = live.usage()
        self._latency.observe(now - live.arrived_at)
        self._requests.finished(live, now)
        numbers = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        for counter, number in zip(self._tokens, numbers, strict=True):
            counter.inc(number)


class _SourceCollector(Collector):
    """Turns how a router stands into series while a page is read."""

    def __init__(self, source: RouterView) -> None:
        self._source = source

    def collect(self) -> Iterator[MetricFamily]:
        source, counters = self._source, self._source.counters
        yield counter_family(REQUESTS, {outcome: getattr(counters, outcome) for outcome in OUTCOMES})
        retried = dict.fromkeys(RETRY_REASONS, 0)
        for reason, number in counters.retried.copy().items():
            name = reason.lower()
            retried[name if name in retried else OTHER] += number
        yield counter_family(RETRIES, retried)
        refused = counters.refused.copy()
        yield counter_family(REFUSALS, {reason: refused[reason] for reason in REFUSAL_REASONS})
        lines = counters.batch_lines.copy()
        yield counter_family(BATCH_LINES, {outcome: lines[outcome] for outcome in LINE_OUTCOMES})
        yield CounterMetricFamily(ORPHANS.name, ORPHANS.doc, value=counters.orphaned)
        for metric, number in ((QUEUED, source.num_queued), (RUNNING, source.num_running)):
            yield GaugeMetricFamily(metric.name, metric.doc, value=number)
        yield _kv_usage(source.fleet)


def _kv_usage(fleet: Fleet) -> MetricFamily:
    """By what workers have told last."""
    family = GaugeMetricFamily(KV_USAGE.name, KV_USAGE.doc, labels=KV_USAGE.label_names)
    told = [(worker.role, stats) for worker in tuple(fleet) if (stats := worker.stats) is not None]
    for role, name in ((PREFILL, "prefill"), (DECODE, "decode")):
        total = sum(stats.blocks_total for of, stats in told if of == role)
        if total:
            family.add_metric((name,), sum(stats.blocks_held for of, stats in told if of == role) / total)
    return family


_INTRODUCTION = """\
# Metrics of the router

Each router serves its metrics for Prometheus at `http://ADDRESS/metrics`; `baton status --json` names the address
(`router.metrics_address`), and `metrics.router: false` in [cluster.yaml](../cluster.yaml) turns the page off. It is
served on the router's own host where that is loopback or `router.insecure` allows it, else on 127.0.0.1. Counters start
at zero with the process and have every series from the start; no label ever names a request, a worker or a client.
Times are in seconds. What workers measure of hand-offs is in [metrics.md](metrics.md).

This page is made from the code: `python -m router.observe.metrics > docs/router-metrics.md`.
"""


def reference() -> str:
    """docs/router-metrics.md."""
    return render_reference(_INTRODUCTION, METRICS)


if __name__ == "__main__":
    print(reference(), end="")
