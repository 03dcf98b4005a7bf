"""A router's traces that stay in memory, or go to an exporter that a test brings."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from cluster.metrics import LabelledCounter
from router.observe.metrics import TRACE_SPANS
from router.observe.otel import OtelTraces


class Kept:
    """Traces that stay in memory."""

    def __init__(self, exporter: SpanExporter | None = None, sample: float = 1.0) -> None:
        self.registry = CollectorRegistry()
        self.memory = InMemorySpanExporter()
        counter = LabelledCounter(TRACE_SPANS, self.registry)
        self.traces = OtelTraces(exporter or self.memory, counter, sample=sample)

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.traces.close()

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value(TRACE_SPANS.name, {"outcome": outcome}) or 0.0

    def spans(self) -> tuple[ReadableSpan, ...]:
        """After the router's end: everything is there."""
        return self.memory.get_finished_spans()

    def roots(self) -> list[ReadableSpan]:
        inside = {span.context.span_id for span in self.spans()}
        return [s for s in self.spans() if s.parent is None or s.parent.span_id not in inside]
