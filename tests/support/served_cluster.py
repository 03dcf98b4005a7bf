"""A router over one simulated decode worker that serves what it is given at a known rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fake_worker import DECODE, LENGTH, PREFILL, phase
from wired_router import Client, ManualClock, WiredRouter, logged

from cluster.errors import BatonError
from cluster.lifecycle import RequestState

SERVICE_S = 0.4
SLOTS = 4
"""So ten requests are served in a second, each of 5 prompt tokens and 16 of output."""
TOKENS = 21


def limits(**given: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_running_requests": SLOTS, "max_queued_requests": 1000, "queue_timeout_s": 60.0}
    return fields | {"needs_prefill": False} | given


@dataclass
class Cluster:
    """One decode worker that serves what it is given in SERVICE_S each."""

    clock: ManualClock
    limits: dict[str, Any] = field(default_factory=limits)
    service_s: float = SERVICE_S

    def __post_init__(self) -> None:
        self.router = WiredRouter(self.clock, ["d0"], **self.limits)
        self.began: dict[str, float] = {}
        self.clients: list[Client] = []

    def submit(self, **request: Any) -> Client:
        self.clients.append(self.router.submit(**request))
        return self.clients[-1]

    async def pass_time(self, seconds: float) -> list[Client]:
        """Who ended, in hundredths of a second."""
        ended = []
        for _ in range(round(seconds * 100)):
            self.router.workers["d0"].take()
            await self.clock.advance(0.01)
            for live in self.router.dispatcher.running:
                generation_id = live.key.request_id
                key, d0 = live.key.to_proto(), self.router.workers["d0"]
                if generation_id not in self.began:
                    self.began[generation_id] = self.clock()
                    d0.emit(phase(key, PREFILL), phase(key, DECODE), logged(key, 0, "a"))
                elif self.clock() - self.began[generation_id] >= self.service_s - 1e-9:
                    d0.emit(logged(key, 1, "b", finish_reason=LENGTH))
                    ended += [c for c in self.clients if c.request_id == generation_id]
        return ended

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.router.dispatcher.counters.refused)

    def error_of(self, client: Client) -> BatonError:
        assert client.live.lifecycle.state is RequestState.REJECTED and client.live.error is not None
        return client.live.error

    def wait_of(self, client: Client) -> float:
        """From its arrival to its worker."""
        return self.began[client.request_id] - client.live.arrived_at

    async def learn(self) -> None:
        """Twenty requests at a time: the rate is known afterwards, and nothing waits."""
        for _ in range(20):
            self.submit()
        await self.pass_time(3.0)
        assert not self.router.dispatcher.num_queued and not self.router.dispatcher.num_running
