"""What a live request tells of itself as it goes: when its tokens come, and that it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from router.stream.request import LiveRequest


class Latencies(Protocol):
    """Told what a client waits for; `router.observe.metrics.RouterMetrics`."""

    def first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """Of a request, so long after its arrival."""
        ...

    def next_tokens(self, seconds: float | None, count: int) -> None:
        """So many of a sequence, so long after those before; None: its first."""
        ...

    def over(self, live: LiveRequest) -> None:
        """It has reached its terminal state."""
        ...


class Trace(Protocol):
    """Told once how a request went; `router.observe.tracing`."""

    @property
    def traceparent(self) -> str:
        """Of the request's own span, as the W3C writes it."""
        ...

    def over(self, live: LiveRequest) -> None:
        """Never raises."""
        ...
