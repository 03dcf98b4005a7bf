"""The router's metrics under the names that vLLM gives the same things, for dashboards and autoscalers made for it.

Baton's own names stay beside them. Only what means the same has an alias; a histogram keeps Baton's buckets. vLLM's
usage of the KV cache is of one engine, here it is of the workers of a role, which is a label.

Not there: what Baton has not (LoRA, sleep, speculative decoding, multi-modal and external caches, NaNs); what a worker
tells on its own page under Baton's names (preemptions, steps, operations and bytes for MFU, transfers); and histograms
of the parameters that clients send.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from router.observe import metrics, request_metrics

ALIASES: dict[str, tuple[str, ...]] = {
    metrics.RUNNING.name: ("vllm:num_requests_running",),
    metrics.QUEUED.name: ("vllm:num_requests_waiting",),
    metrics.KV_USAGE.name: ("vllm:kv_cache_usage_perc",),
    metrics.FIRST_TOKEN.name: ("vllm:time_to_first_token_seconds",),
    metrics.INTER_TOKEN.name: ("vllm:inter_token_latency_seconds",),
    metrics.LATENCY.name: ("vllm:e2e_request_latency_seconds",),
    metrics.PROMPT_TOKENS.name: ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    metrics.CACHED_TOKENS.name: ("vllm:prefix_cache_hits_total", "vllm:prompt_tokens_cached_total"),
    metrics.OUTPUT_TOKENS.name: ("vllm:generation_tokens_total",),
    request_metrics.QUEUE.name: ("vllm:request_queue_time_seconds",),
    request_metrics.PREFILL.name: ("vllm:request_prefill_time_seconds",),
    request_metrics.DECODE.name: ("vllm:request_decode_time_seconds",),
    request_metrics.PER_TOKEN.name: ("vllm:request_time_per_output_token_seconds",),
    request_metrics.PROMPT_SIZE.name: ("vllm:request_prompt_tokens",),
    request_metrics.OUTPUT_SIZE.name: ("vllm:request_generation_tokens",),
    request_metrics.SEQUENCES.name: ("vllm:request_success_total",),
}
"""Baton's name and vLLM's; what vLLM counts twice has two."""
_BY_FAMILY = {
    ours.removesuffix("_total"): [name.removesuffix("_total") for name in theirs] for ours, theirs in ALIASES.items()
}


class VllmNames(Collector):
    """Reads `source` whenever it is read itself; each series has the label `model_name`, as vLLM's have."""

    def __init__(self, source: CollectorRegistry, model_name: str) -> None:
        self._source = source
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[MetricFamily]:
        for family in self._source.collect():
            for alias in _BY_FAMILY.get(family.name, ()):
                renamed = MetricFamily(alias, family.documentation, family.type)
                for sample in family.samples:
                    name = alias + sample.name.removeprefix(family.name)
                    renamed.add_sample(name, {**sample.labels, "model_name": self._model_name}, sample.value)
                yield renamed
