"""Sends traces by OpenTelemetry's SDK over OTLP, from a thread of its own.

    over -> [waiting, bounded] -> the thread: spans of the SDK -> one export a batch -> sent | failed
                               -> dropped, when too much waits

The event loop only decides whether a call is sampled, and makes a tree of plain values at the end. A collector that is
slow or away costs spans, which are counted, and nothing else.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
import time
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.auth import Metadata
from cluster.metrics import LabelledCounter
from router.observe.tracing import CallTrace, Origin, Span, Traces

log = logging.getLogger(__name__)

MOST_WAITING = 2048
"""Requests whose spans wait to be sent; one more is dropped."""
BATCH = 256
"""Requests sent together."""
BATCH_WAIT_S = 0.5
"""The first of a batch waits for others so long."""
EXPORT_TIMEOUT_S = 5.0
"""Of one batch, with every try that the exporter makes."""
CLOSE_S = 1.0
_LONGEST_HEADER = 512
_TRACES_PATH = "/v1/traces"
_QUIET_S = 60.0
_PROPAGATOR = TraceContextTextMapPropagator()
_ABOUT_CLIENTS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")
"""Loggers that warn of what a client sent in its headers, word for word: anybody could fill the log."""
SENT, DROPPED, FAILED = "sent", "dropped", "failed"


def exporter_to(endpoint: str) -> SpanExporter:
    """OTLP over HTTP to a collector's base URL, or to its address of traces. Headers, certificates and compression are
    those of OpenTelemetry's environment variables (OTEL_EXPORTER_OTLP_HEADERS and the like)."""
    base = endpoint.rstrip("/")
    url = base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_SELDOM)
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)


_Ended = tuple[Span, Context, SpanContext]
"""A root, what it is in, and what it is itself."""


class OtelTraces(Traces):
    """Owns the exporter, and closes it."""

    def __init__(self, exporter: SpanExporter, counter: LabelledCounter, *, sample: float = 1.0) -> None:
        """`sample`: the share of calls that are traced, of those that bring no traceparent; else its flag decides."""
        self._exporter = exporter
        self._counter = counter
        self._sample = sample
        for name in _ABOUT_CLIENTS:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._ended: list[ReadableSpan] = []
        self._ids = _Ids()
        self._provider = TracerProvider(ALWAYS_ON, _resource(), shutdown_on_exit=False, id_generator=self._ids)
        self._provider.add_span_processor(_Collect(self._ended))
        self._tracer = self._provider.get_tracer("baton.router", version("baton"))
        self._waiting: queue.Queue[_Ended | None] = queue.Queue(MOST_WAITING)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, metadata: Metadata, origin: Origin) -> CallTrace | None:
        parent = _parent_of(metadata)
        caller = get_current_span(parent).get_span_context()
        is_sampled = caller.trace_flags.sampled if caller.is_valid else random.random() < self._sample
        if not is_sampled:
            return None
        own = _within(caller)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(NonRecordingSpan(own), Context()))
        return CallTrace(carrier["traceparent"], origin, lambda root: self._put(root, parent, own))

    def _put(self, root: Span, parent: Context, own: SpanContext) -> None:
        try:
            self._waiting.put_nowait((root, parent, own))
        except queue.Full:
            self._counter.add(root.count, DROPPED)

    def close(self) -> None:
        self._is_closing.set()
        if not self._waiting.full():
            self._waiting.put(None)  # wakes the thread; nobody puts beside the event loop, which has ended its requests
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()
        self._thread.join(CLOSE_S / 2)

    def _run(self) -> None:
        has_ended = False
        while not has_ended:
            batch, has_ended = self._next_batch()
            if batch:
                self._send(batch)

    def _next_batch(self) -> tuple[list[_Ended], bool]:
        """At least one, unless nothing will follow; and whether nothing will follow."""
        batch: list[_Ended] = []
        until: float | None = None
        while len(batch) < BATCH:
            try:
                if self._is_closing.is_set():
                    entry = self._waiting.get_nowait()
                else:
                    entry = self._waiting.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                return batch, self._is_closing.is_set()
            if entry is not None:
                batch.append(entry)
                until = until or time.monotonic() + BATCH_WAIT_S
        return batch, False

    def _send(self, batch: list[_Ended]) -> None:
        num_spans = sum(root.count for root, _, _ in batch)
        try:
            for root, parent, own in batch:
                self._ids.next = own
                self._emit(root, parent, SpanKind.SERVER)
            is_sent = self._exporter.export(tuple(self._ended)) is SpanExportResult.SUCCESS
        except Exception:
            log.exception("%d spans could not be sent", num_spans)
            is_sent = False
        finally:
            self._ended.clear()
        self._counter.add(num_spans, SENT if is_sent else FAILED)

    def _emit(self, record: Span, parent: Context, kind: SpanKind) -> None:
        span = self._tracer.start_span(record.name, parent, kind, record.attributes, start_time=record.begin_ns)
        for event in record.events:
            span.add_event(event.name, timestamp=event.time_ns)
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        inside = set_span_in_context(span, parent)
        for child in record.children:
            self._emit(child, inside, SpanKind.INTERNAL)
        span.end(record.end_ns)


class _Ids(RandomIdGenerator):
    """At random, but for a root: its ids were made when its call came, so that others could name it before it ended."""

    def __init__(self) -> None:
        self.next: SpanContext | None = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.next is None else self.next.trace_id

    def generate_span_id(self) -> int:
        own, self.next = self.next, None
        return super().generate_span_id() if own is None else own.span_id


class _Collect(SpanProcessor):
    """Hands spans over as they end, on the thread that ends them."""

    def __init__(self, ended: list[ReadableSpan]) -> None:
        self._ended = ended

    def on_end(self, span: ReadableSpan) -> None:
        self._ended.append(span)


class _Seldom(logging.Filter):
    """An exporter complains of a collector that is away at each try: one line a minute is enough."""

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


def _within(caller: SpanContext) -> SpanContext:
    """A new span of the caller's trace, or of its own."""
    ids = RandomIdGenerator()
    trace_id = caller.trace_id if caller.is_valid else ids.generate_trace_id()
    return SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _parent_of(metadata: Metadata) -> Context:
    """The span that the caller says it is in; none where that is missing, doubled or malformed."""
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in metadata:
        values = found.get(name.lower())
        if values is not None and isinstance(value, str):
            values.append(value)
    parents, states = found["traceparent"], ",".join(found["tracestate"])
    if len(parents) != 1 or len(parents[0]) > _LONGEST_HEADER:
        return Context()
    carrier = {"traceparent": parents[0]}
    if states and len(states) <= _LONGEST_HEADER:
        carrier["tracestate"] = states
    return _PROPAGATOR.extract(carrier, Context())


def _resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count; without them the service is called `baton`."""
    own = {"service.version": version("baton")}
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        own["service.name"] = "baton"
    return Resource.create(own)
