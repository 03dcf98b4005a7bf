"""One hand-off stream as either of its sides keeps it: what waits to be said, the numbers, and signs of life.

It is told of by `links`, which moves its messages; it knows neither gRPC nor what a message means. Lives on the
speaking loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from cluster.failure_detector import FailureDetector, FailureTimeouts, Liveness
from cluster.pb import handoff_pb2
from kv_transfer.ordered import Ordered

M = TypeVar("M", handoff_pb2.SenderMessage, handoff_pb2.ReceiverMessage)


class Stream(Generic[M]):
    """`M` is what this side says."""

    def __init__(self, epoch: str, says: type[M], timing: FailureTimeouts) -> None:
        self.epoch = epoch
        self.is_greeted = False
        self.is_suspect = False
        self.why = ""
        """Why it has ended; empty while it has not."""
        self.task: asyncio.Task[None] | None = None
        """Reads what the peer says."""
        self._says: type[M] = says
        self._timing = timing
        self._numbers = Ordered()
        self._pulse = FailureDetector(timing)
        self._queue: asyncio.Queue[M | None] = asyncio.Queue()
        self._quiet_s = 0.0

    def tell(self, message: M) -> None:
        self._queue.put_nowait(message)

    async def outbound(self) -> AsyncIterator[M]:
        """What was told, numbered, until the stream ends."""
        while (message := await self._queue.get()) is not None and not self.why:
            self._numbers.stamp(message)
            self._quiet_s = 0.0
            yield message

    def accept(self, number: int) -> bool:
        """Notes that the peer spoke; False for what it has said before. Raises StreamGap."""
        self._pulse.heard()
        return self._numbers.accept(number)

    def tick(self, elapsed_s: float) -> Liveness:
        """Says that this side is alive when nothing else was said; returns what the peer's silence means."""
        self._quiet_s += elapsed_s
        if self._quiet_s + self._timing.tick_s > self._timing.heartbeat_s:
            self._quiet_s = 0.0
            self.tell(self._says(alive=handoff_pb2.Alive()))
        return self._pulse.tick(elapsed_s)

    @property
    def silence_s(self) -> float:
        return self._pulse.silence_s

    def end(self, why: str) -> None:
        """Nothing more is said."""
        self.why = why
        self._queue.put_nowait(None)
        task, self.task = self.task, None  # a cancelled task holds its frames, and those its connection
        if task is not None:
            task.cancel()
