"""A little OpenTelemetry collector: takes OTLP over HTTP on loopback, and can be told to refuse, or not to answer."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 20.0


@dataclass(frozen=True)
class Received:
    """One span, as it came over the wire. Ids are in hex; `parent_id` empty: it is a root."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[str, ...]
    is_error: bool
    message: str
    trace_state: str
    resource: Mapping[str, Any]


class Receiver:
    """`status`: what requests are answered with; None: they are not, until the receiver ends."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status: int | None = 200
        self.num_requests = 0
        self.headers: list[Mapping[str, str]] = []
        self.spans: list[Received] = []
        self.ended = threading.Event()
        self._changed = threading.Condition()

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        assert path == "/v1/traces", path
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.headers.append(headers)
            self.spans += [
                _read(span, _values(each.resource.attributes))
                for each in request.resource_spans
                for scope in each.scope_spans
                for span in scope.spans
            ]
            self._changed.notify_all()

    def asked(self) -> None:
        with self._changed:
            self.num_requests += 1
            self._changed.notify_all()

    def wait_for(self, condition: Any) -> None:
        """`condition()` of what has come; fails when it does not come about."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), [span.name for span in self.spans]

    def roots(self, count: int) -> list[Received]:
        """So many requests' outermost spans, once they are here."""

        def found() -> list[Received]:
            ids = {span.span_id for span in self.spans}
            return [span for span in self.spans if span.parent_id not in ids]

        self.wait_for(lambda: len(found()) >= count)
        return found()

    def children(self, parent: Received) -> list[Received]:
        """In the order of their beginnings."""
        own = [s for s in self.spans if (s.trace_id, s.parent_id) == (parent.trace_id, parent.span_id)]
        return sorted(own, key=lambda span: (span.begin_ns, span.end_ns))


@contextmanager
def receiver(port: int = 0) -> Iterator[Receiver]:
    """Serves until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.asked()
            if found.status is None:
                found.ended.wait(WAIT_S)
                self.close_connection = True
                return
            if found.status == 200:
                found.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(found.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the console."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    found = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _read(span: trace_pb2.Span, resource: Mapping[str, Any]) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=tuple(event.name for event in span.events),
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        message=span.status.message,
        trace_state=span.trace_state,
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(each) for each in any_value.array_value.values]
        return getattr(any_value, kind)

    return {each.key: value(each.value) for each in attributes}
