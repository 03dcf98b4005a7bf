"""What a service asks of whoever calls it: gRPC's own context has it, and so has a request over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Call(Protocol):
    """One call of a method, unary or streaming."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it has none."""
        ...

    async def write(self, message: Any) -> None:
        """Of a stream; returns when the next message may follow."""
        ...
