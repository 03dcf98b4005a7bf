"""The router's metrics under the names that vLLM gives the same things, for dashboards and autoscalers made for it.

Baton's own names stay beside them. Only what means the same has an alias; a histogram keeps Baton's buckets.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from router import metrics

ALIASES = {
    metrics.RUNNING.name: "vllm:num_requests_running",
    metrics.QUEUED.name: "vllm:num_requests_waiting",
    metrics.FIRST_TOKEN.name: "vllm:time_to_first_token_seconds",
    metrics.INTER_TOKEN.name: "vllm:inter_token_latency_seconds",
    metrics.LATENCY.name: "vllm:e2e_request_latency_seconds",
    metrics.PROMPT_TOKENS.name: "vllm:prompt_tokens_total",
    metrics.CACHED_TOKENS.name: "vllm:prefix_cache_hits_total",
    metrics.OUTPUT_TOKENS.name: "vllm:generation_tokens_total",
}
"""Baton's name and vLLM's."""
_BY_FAMILY = {ours.removesuffix("_total"): theirs.removesuffix("_total") for ours, theirs in ALIASES.items()}


class VllmNames(Collector):
    """Reads `source` whenever it is read itself; each series has the label `model_name`, as vLLM's have."""

    def __init__(self, source: CollectorRegistry, model_name: str) -> None:
        self._source = source
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[MetricFamily]:
        for family in self._source.collect():
            alias = _BY_FAMILY.get(family.name)
            if alias is None:
                continue
            renamed = MetricFamily(alias, family.documentation, family.type)
            for sample in family.samples:
                name = alias + sample.name.removeprefix(family.name)
                renamed.add_sample(name, {**sample.labels, "model_name": self._model_name}, sample.value)
            yield renamed
