"""What a service asks of whoever calls it: gRPC's own context has it, and so has a request over HTTP."""

from __future__ import annotations

from typing import Any, Protocol

from cluster.auth import HasMetadata


class CallContext(HasMetadata, Protocol):
    """One call of a method, unary or streaming."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it has none."""
        ...

    async def write(self, message: Any) -> None:
        """Of a stream; returns when the next message may follow."""
        ...
