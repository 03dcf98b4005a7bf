"""Sends spans over OTLP with OpenTelemetry's SDK: its batch processor queues them and exports from its own thread.

    CallTrace.on_end -> the SDK's spans -> [queue, bounded] -> one export a batch -> sent | failed
                                        -> dropped, when too many wait

A collector that is slow or away costs spans, which are counted, and nothing else.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    format_span_id,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.auth import Metadata
from cluster.metrics import LabelledCounter
from router.observe.tracing import CallTrace, Origin, Span, Traces

log = logging.getLogger(__name__)

MOST_WAITING = 16384
"""Spans that wait to be sent; a trace that would exceed it is dropped."""
BATCH = 2048
"""Spans sent together."""
BATCH_WAIT_S = 0.5
"""Time between two batches that are not full."""
EXPORT_TIMEOUT_S = 5.0
"""Limit for one batch, with every try that the exporter makes."""
CLOSE_S = 1.0
_LONGEST_HEADER = 512
_TRACES_PATH = "/v1/traces"
_QUIET_S = 60.0
_PROPAGATOR = TraceContextTextMapPropagator()
_IDS = RandomIdGenerator()
_ABOUT_CLIENTS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")
"""Loggers that warn of what a client sent in its headers, word for word: anybody could fill the log."""
SENT, DROPPED, FAILED = "sent", "dropped", "failed"


def exporter_to(endpoint: str) -> SpanExporter:
    """OTLP over HTTP to a collector's base URL, or to its address for traces. Headers, certificates and compression are
    those of OpenTelemetry's environment variables (OTEL_EXPORTER_OTLP_HEADERS and the like)."""
    base = endpoint.rstrip("/")
    url = base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_SELDOM)
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)


class OtelTraces(Traces):
    """Owns the exporter, and closes it."""

    def __init__(self, exporter: SpanExporter, counter: LabelledCounter, *, sample: float = 1.0) -> None:
        """`sample`: the share of calls that are traced, of those without a traceparent; else its flag decides."""
        for name in _ABOUT_CLIENTS:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._counter = counter
        self._sample = sample
        self._resource = _resource()
        self._scope = InstrumentationScope("baton.router", version("baton"))
        self._exporter = _CountingExporter(exporter, counter)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MOST_WAITING,
            schedule_delay_millis=1000 * BATCH_WAIT_S,
            max_export_batch_size=min(BATCH, MOST_WAITING),
        )

    def begin(self, metadata: Metadata, origin: Origin) -> CallTrace | None:
        caller = _caller_of(metadata)
        is_sampled = caller.trace_flags.sampled if caller.is_valid else random.random() < self._sample
        if not is_sampled:
            return None
        trace_id = caller.trace_id if caller.is_valid else _IDS.generate_trace_id()
        own = _new_span(trace_id, caller.trace_state)
        traceparent = f"00-{format_trace_id(trace_id)}-{format_span_id(own.span_id)}-01"
        return CallTrace(traceparent, origin, lambda root: self._send(root, own, caller if caller.is_valid else None))

    def close(self) -> None:
        # The processor's own shutdown waits up to 30 s for an export that hangs.
        closing = threading.Thread(target=self._processor.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # ends the pauses between its tries
            closing.join(CLOSE_S / 2)

    def _send(self, root: Span, own: SpanContext, parent: SpanContext | None) -> None:
        if not self._exporter.reserve(root.count, MOST_WAITING):
            self._counter.add(root.count, DROPPED)
            return
        for span in self._sdk_spans(root, own, parent, SpanKind.SERVER):
            self._processor.on_end(span)

    def _sdk_spans(
        self, span: Span, own: SpanContext, parent: SpanContext | None, kind: SpanKind
    ) -> Iterator[ReadableSpan]:
        """`span` and all below it."""
        yield ReadableSpan(
            span.name,
            own,
            parent,
            self._resource,
            span.attributes,
            [Event(event.name, timestamp=event.time_ns) for event in span.events],
            kind=kind,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.begin_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )
        for child in span.children:
            yield from self._sdk_spans(child, _new_span(own.trace_id, own.trace_state), own, SpanKind.INTERNAL)


class _CountingExporter(SpanExporter):
    """Counts what an exporter sends, and the spans that wait for it: the processor drops without saying how many."""

    def __init__(self, exporter: SpanExporter, counter: LabelledCounter) -> None:
        self._exporter = exporter
        self._counter = counter
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._is_shut_down = False

    def reserve(self, num_spans: int, most: int) -> bool:
        """Counts spans as waiting; False where more than `most` would wait."""
        with self._lock:
            fits = self._num_waiting + num_spans <= most
            self._num_waiting += num_spans if fits else 0
        return fits

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            self._num_waiting -= len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:
            log.exception("%d spans could not be sent", len(spans))
            result = SpanExportResult.FAILURE
        self._counter.add(len(spans), SENT if result is SpanExportResult.SUCCESS else FAILED)
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()


class _Seldom(logging.Filter):
    """Passes one line a minute: an exporter complains at each try while its collector is away."""

    def __init__(self) -> None:
        super().__init__()
        self._last_at = -_QUIET_S

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._last_at < _QUIET_S:
            return False
        self._last_at = now
        return True


_SELDOM = _Seldom()


def _new_span(trace_id: int, trace_state: TraceState) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, _IDS.generate_span_id(), is_remote=False, trace_flags=flags, trace_state=trace_state)


def _caller_of(metadata: Metadata) -> SpanContext:
    """The span that the caller says it is in; invalid where that is missing, doubled or malformed."""
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in metadata:
        values = found.get(name.lower())
        if values is not None and isinstance(value, str):
            values.append(value)
    parents, states = found["traceparent"], ",".join(found["tracestate"])
    if len(parents) != 1 or len(parents[0]) > _LONGEST_HEADER:
        return INVALID_SPAN_CONTEXT
    carrier = {"traceparent": parents[0]}
    if states and len(states) <= _LONGEST_HEADER:
        carrier["tracestate"] = states
    return get_current_span(_PROPAGATOR.extract(carrier, Context())).get_span_context()


def _resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count; without them the service is called `baton`."""
    own = {"service.version": version("baton")}
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        own["service.name"] = "baton"
    return Resource.create(own)
