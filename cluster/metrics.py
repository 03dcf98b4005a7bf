"""Metrics as every Baton process shows them: how one is declared, the page Prometheus reads, the reference in docs/.

A metric is declared with every value that its labels can have: nothing unbounded (a request, a peer) can become a
label, and each series is there from the start. Knows no single metric.
"""

from __future__ import annotations

import itertools
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily

from cluster.address import format_address, is_loopback
from cluster.errors import ConfigError
from cluster.tls import ServerTls, require_tls

OTHER = "other"
"""Takes the place of a label's value that was not declared."""
DURATION_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""From a message on one machine to a transfer that everybody has given up."""
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""From a single token to the longest contexts."""


@dataclass(frozen=True)
class Metric:
    """What one metric is called, what it means, and its labels with all their values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.labels)


class LabelledCounter:
    """A counter whose label values are declared; a label that may get another value declares `other`, too."""

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        counter = Counter(metric.name, metric.doc, metric.label_names, registry=registry)
        values = itertools.product(*(known for _, known in metric.labels))
        self._series = {each: counter.labels(*each) for each in values}
        self._known = tuple(frozenset(known) for _, known in metric.labels)

    def add(self, amount: float, *labels: str) -> None:
        """`labels` in the order of the declaration; what is not above zero adds nothing."""
        if amount > 0:
            pairs = zip(labels, self._known, strict=True)
            self._series[tuple(label if label in known else OTHER for label, known in pairs)].inc(amount)


def counter_family(metric: Metric, counts: Mapping[str, float]) -> CounterMetricFamily:
    """A counter of one label that is counted elsewhere, as a collector tells it."""
    family = CounterMetricFamily(metric.name, metric.doc, labels=metric.label_names)
    for label, number in counts.items():
        family.add_metric((label,), number)
    return family


def duration_histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """A histogram of seconds."""
    return Histogram(metric.name, metric.doc, registry=registry, buckets=DURATION_BUCKETS_S)


def token_histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """A histogram of counts of tokens."""
    return Histogram(metric.name, metric.doc, registry=registry, buckets=TOKEN_BUCKETS)


class MetricsPage:
    """The page of one registry, served from its own threads at `address` until `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        insecure: bool = False,
        tls: ServerTls | None = None,
    ) -> None:
        """`port` 0: any free one. Raises ConfigError for an address that is refused or cannot be had, and for files of
        `tls` that cannot be used."""
        require_tls("serve metrics", host, tls, insecure=insecure)
        if tls is not None:
            tls.context()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the time at which each series began: twice the lines, and nobody asks
        try:
            self._server, self._thread = start_http_server(
                port,
                addr=host,
                registry=registry,
                certfile=None if tls is None else tls.cert,
                keyfile=None if tls is None else tls.key,
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve metrics on {format_address(host, port)}: it is in use or not an address of this "
                "machine; choose another port (0: any free one) or host"
            ) from error
        if tls is not None:
            _shake_hands_in_threads(self._server.socket)
        self.address = format_address(host, self._server.server_port)

    def close(self) -> None:
        """Ends the listener and its thread; may be called again."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve_beside(
    registry: CollectorRegistry, host: str, port: int, *, insecure: bool, tls: ServerTls | None
) -> MetricsPage:
    """The page of whatever serves at `host`: there too where that is loopback, `insecure`, or the page has TLS; else on
    127.0.0.1. Raises ConfigError."""
    is_open = is_loopback(host) or insecure or tls is not None
    return MetricsPage(registry, host if is_open else "127.0.0.1", port, insecure=insecure, tls=tls)


def _shake_hands_in_threads(listener: socket.socket) -> None:
    """The thread that accepts does not shake hands: a reader that stalls holds up its own thread, not everybody."""
    assert isinstance(listener, ssl.SSLSocket)
    untyped: Any = listener
    untyped.do_handshake_on_connect = False


def render_reference(introduction: str, metrics: Sequence[Metric]) -> str:
    """A page of docs/: every metric with its type, labels and meaning."""
    rows = [f"| `{m.name}` | {m.kind} | {_labels_text(m.labels)} | {m.doc} |" for m in metrics]
    return "\n".join([introduction, "| metric | type | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _labels_text(labels: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    return "; ".join(f"`{name}`: {', '.join(values)}" for name, values in labels) or "–"
