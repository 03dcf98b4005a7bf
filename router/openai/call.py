"""One HTTP request in the role of a gRPC call: what `GenerationService` asks of its caller, and nothing more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from google.protobuf.message import Message


class HttpCall:
    """`headers` as the client sent them; `on_message` gets what a streaming method writes, and returns when there may
    be more."""

    def __init__(
        self, headers: Iterable[tuple[str, str]], on_message: Callable[[Any], Awaitable[None]] | None = None
    ) -> None:
        self._headers = tuple(headers)
        self._on_message = on_message

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._headers

    def time_remaining(self) -> float | None:
        """HTTP has no deadlines: a client that waits no longer hangs up."""
        return None

    async def write(self, message: Message) -> None:
        assert self._on_message is not None, "a unary method writes nothing"
        await self._on_message(message)
