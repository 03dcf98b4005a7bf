"""What is measured of a request when it has finished: how long it was in each phase, its size, how its outputs ended.

Told on the event loop; nothing here waits or raises.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from cluster.lifecycle import RequestState
from cluster.metrics import OTHER, LabelledCounter, Metric, duration_histogram, token_histogram
from cluster.pb import generation_pb2
from router.stream.request import LiveRequest

FINISHED_REASONS = ("stop", "length", "tool_calls", "content_filter", OTHER)

QUEUE = Metric(
    "baton_queue_seconds", "histogram", "Time from a request's arrival to a worker beginning with it, if it finished."
)
PREFILL = Metric(
    "baton_prefill_seconds", "histogram", "Time from a worker beginning with such a request to its first token."
)
DECODE = Metric("baton_decode_seconds", "histogram", "Time from its first token to its last.")
PER_TOKEN = Metric(
    "baton_time_per_output_token_seconds",
    "histogram",
    "The same by the tokens after the first, of its longest output: the mean of what its client waited for each.",
)
PROMPT_SIZE = Metric("baton_request_prompt_tokens", "histogram", "Prompt tokens of each request that finished.")
OUTPUT_SIZE = Metric("baton_request_output_tokens", "histogram", "Output tokens of each request that finished.")
SEQUENCES = Metric(
    "baton_sequences_total",
    "counter",
    "Outputs of requests that finished, by why they ended.",
    (("finished_reason", FINISHED_REASONS),),
)
METRICS = (QUEUE, PREFILL, DECODE, PER_TOKEN, PROMPT_SIZE, OUTPUT_SIZE, SEQUENCES)
_REASONS = {number: name.removeprefix("FINISH_REASON_").lower() for name, number in generation_pb2.FinishReason.items()}


class RequestMetrics:
    """Of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue, self._prefill = duration_histogram(QUEUE, registry), duration_histogram(PREFILL, registry)
        self._decode, self._per_token = duration_histogram(DECODE, registry), duration_histogram(PER_TOKEN, registry)
        self._prompt_size = token_histogram(PROMPT_SIZE, registry)
        self._output_size = token_histogram(OUTPUT_SIZE, registry)
        self._sequences = LabelledCounter(SEQUENCES, registry)

    def finished(self, live: LiveRequest, now: float) -> None:
        """All its outputs are here."""
        begun, first = live.lifecycle.instant(RequestState.PREFILLING), live.first_token_at
        _observe(self._queue, live.arrived_at, begun)
        _observe(self._prefill, begun, first)
        _observe(self._decode, first, now)
        most = max(sequence.num_tokens for sequence in live.sequences)
        if first is not None and most > 1:
            self._per_token.observe((now - first) / (most - 1))
        self._prompt_size.observe(len(live.request.prompt_token_ids))
        self._output_size.observe(live.num_tokens)
        for sequence in live.sequences:
            if sequence.end is not None:
                self._sequences.add(1, _REASONS.get(sequence.end.finish_reason, OTHER))


def _observe(histogram: Histogram, begin: float | None, end: float | None) -> None:
    """Nothing where it is not known, or was in another order: of a request that another router had begun."""
    if begin is not None and end is not None and end >= begin:
        histogram.observe(end - begin)
