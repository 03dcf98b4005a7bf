"""Whether and whereto requests are traced. Here is what the router asks of it; `router.observe.otel` does it.

    begin (a call came: is it sampled?) -> Trace.over (the request has ended) | refused (it led to none)

OpenTelemetry is imported only where it is configured: it is an extra.
"""

from __future__ import annotations

from typing import Protocol

from cluster.auth import Metadata
from cluster.errors import BatonError, ConfigError
from cluster.metrics import LabelledCounter
from cluster.settings import RouterSettings
from router.observe.latencies import Trace
from router.observe.spans import Origin


class CallTrace(Trace, Protocol):
    """Of one call that is sampled."""

    def refused(self, error: BatonError, now: float) -> None:
        """It led to no request."""
        ...


class Traces(Protocol):
    """Of one router, used from its event loop; nothing of it waits or raises."""

    def begin(self, metadata: Metadata, origin: Origin) -> CallTrace | None:
        """None: the call is not sampled."""
        ...

    def close(self) -> None:
        """Sends what is left within about a second; the one that blocks, called from another thread."""
        ...


class NoTraces:
    """Nothing is traced."""

    def begin(self, metadata: Metadata, origin: Origin) -> None:
        return None

    def close(self) -> None:
        return None


def open_traces(settings: RouterSettings, counter: LabelledCounter) -> Traces:
    """What the settings say. `counter` gets the outcome of each span. Raises ConfigError without the extra."""
    if settings.router.trace_endpoint is None:
        return NoTraces()
    try:
        from router.observe.otel import OtelTraces, exporter_to
    except ImportError as error:
        raise ConfigError(
            f"router.trace_endpoint: traces need OpenTelemetry's SDK, and {error.name} is not installed; install Baton "
            "with the extra otel (make setup EXTRAS=dev,otel), or set router.trace_endpoint: null"
        ) from error
    return OtelTraces(exporter_to(settings.router.trace_endpoint), counter, sample=settings.router.trace_sample)
