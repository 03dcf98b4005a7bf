"""The resources that are shared in virtual time: network interfaces by the transfers of KV that travel on them, the
cores of a machine by the steps and messages that its programs compute.

Each worker has one interface, which sends and receives at the same time. Transfers that leave one interface share what
it sends, those that enter one share what it receives, and each goes at the smaller of its two shares; what a transfer
cannot use of a share, others do not get. Threads share cores in the same way, but that none goes faster than one core
lets it. Whenever a flow begins or ends, those beside it are timed anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulate.virtual_loop import ScheduledCall, VirtualLoop


@dataclass(frozen=True)
class WireSpec:
    """One worker's link to the others."""

    bytes_per_s: float = 25e9
    """In each direction."""
    latency_s: float = 10e-6
    """Seconds before a transfer's first byte arrives."""

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            raise ValueError(
                f"a wire needs more than 0 bytes/s and at least 0 s of latency, not {self.bytes_per_s} and "
                f"{self.latency_s}"
            )


class Lane:
    """One direction of an interface, or the cores of a machine, with the flows that share it."""

    def __init__(self, capacity: float, most: float = math.inf) -> None:
        """`capacity`: bytes/s, or cores. `most`: what each part of a flow can use, whatever is left."""
        self.capacity = capacity
        self.most = most
        self.flows: dict[Flow, None] = {}
        self.num_parts = 0

    @property
    def share(self) -> float:
        """The rate that each part of a flow gets."""
        return min(self.most, self.capacity / self.num_parts)

    def add(self, flow: Flow) -> None:
        self.flows[flow] = None
        self.num_parts += flow.num_parts

    def remove(self, flow: Flow) -> None:
        del self.flows[flow]
        self.num_parts -= flow.num_parts


class Nic:
    """A worker's interface."""

    def __init__(self, spec: WireSpec) -> None:
        self.spec = spec
        self.sending = Lane(spec.bytes_per_s)
        self.receiving = Lane(spec.bytes_per_s)


class Flow:
    """Bytes under way, or seconds of threads to be computed; `done` is called at the end."""

    def __init__(self, lanes: tuple[Lane, ...], amount: float, num_parts: int, done: Callable[[], None]) -> None:
        """`amount`: of each part. All lanes are shared at a time."""
        self.lanes = lanes
        self.num_parts = num_parts
        self.done = done
        self.left = amount
        self.rate = 0.0
        self.timed_at = 0.0
        self.timer: ScheduledCall | None = None


class Flows:
    """All transfers of one cluster, and all that its programs compute on shared cores."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def transfer(self, source: Nic, target: Nic, size_bytes: float, done: Callable[[], None]) -> Flow:
        """Sets a transfer off: it takes its share of both interfaces once its latency has passed."""
        flow = Flow((source.sending, target.receiving), size_bytes, 1, done)
        latency_s = max(source.spec.latency_s, target.spec.latency_s)
        flow.timer = self._loop.call_later(latency_s, self._join, flow)
        return flow

    def begin(self, lanes: tuple[Lane, ...], amount: float, num_parts: int, done: Callable[[], None]) -> Flow:
        """Sets off what shares these lanes; `amount` is that of each part."""
        flow = Flow(lanes, amount, num_parts, done)
        self._join(flow)
        return flow

    def cancel(self, flow: Flow) -> None:
        """It is not done any more."""
        if flow.timer is not None:
            flow.timer.cancel()
        if flow in flow.lanes[0].flows:
            self._leave(flow)

    def _join(self, flow: Flow) -> None:
        flow.timed_at = self._loop.time()
        for lane in flow.lanes:
            lane.add(flow)
        self._share(flow)

    def _end(self, flow: Flow) -> None:
        self._leave(flow)
        flow.done()

    def _leave(self, flow: Flow) -> None:
        for lane in flow.lanes:
            lane.remove(flow)
        self._share(flow)

    def _share(self, changed: Flow) -> None:
        """Times everything anew that shares a lane with a flow that came or went."""
        for flow in dict.fromkeys(flow for lane in changed.lanes for flow in lane.flows):
            self._time(flow)

    def _time(self, flow: Flow) -> None:
        rate = min(lane.share for lane in flow.lanes)
        if rate == flow.rate:
            return
        now = self._loop.time()
        flow.left -= (now - flow.timed_at) * flow.rate
        flow.timed_at, flow.rate = now, rate
        if flow.timer is not None:
            flow.timer.cancel()
        flow.timer = self._loop.call_later(max(0.0, flow.left) / rate, self._end, flow)


class Cores:
    """The cores of a machine that all programs of a cluster run on."""

    def __init__(self, loop: VirtualLoop, number: int) -> None:
        self._loop = loop
        self._flows = Flows(loop)
        self._lane = Lane(number, most=1.0)

    def compute(
        self, seconds: float, ends: Sequence[Callable[[], None]], num_threads: int = 1, own: Lane | None = None
    ) -> None:
        """Begins what takes so many seconds where no other thread waits for a core, in equal parts one after another,
        each with a call at its end. `own`: what its process may use of the cores; None: all."""
        each, rest = seconds / len(ends), ends[1:]

        def end() -> None:
            if rest:
                self.compute(seconds - each, rest, num_threads, own)
            ends[0]()

        self._flows.begin((self._lane,) if own is None else (self._lane, own), each, num_threads, end)

    async def wait(self, seconds: float) -> None:
        """Returns when one thread has computed for so long."""
        over = self._loop.create_future()
        self.compute(seconds, [lambda: over.set_result(None)])
        await over
