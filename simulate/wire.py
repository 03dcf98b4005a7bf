"""The wires that KV travels on: how long transfers take that share the workers' network interfaces.

Each worker has one interface, which sends and receives at the same time. Transfers that leave one interface share what
it sends, those that enter one share what it receives, and each goes at the smaller of its two shares; what a transfer
cannot use of a share, others do not get. Whenever one begins or ends, those beside it are timed anew.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Nic:
    """A worker's interface."""

    def __init__(self, spec: WireSpec) -> None:
        self.spec = spec
        self.sending: dict[KvTransfer, None] = {}
        self.receiving: dict[KvTransfer, None] = {}


class KvTransfer:
    """Bytes under way from one interface to another; `done` is called when the last has arrived."""

    def __init__(self, source: Nic, target: Nic, size_bytes: float, done: Callable[[], None]) -> None:
        self.source = source
        self.target = target
        self.done = done
        self.bytes_left = size_bytes
        self.bytes_per_s = 0.0
        self.timed_at = 0.0
        self.timer: ScheduledCall | None = None


class Wires:
    """All transfers of one cluster."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def begin(self, source: Nic, target: Nic, size_bytes: float, done: Callable[[], None]) -> KvTransfer:
        """Sets a transfer off: it takes its share of both interfaces once its latency has passed."""
        transfer = KvTransfer(source, target, size_bytes, done)
        latency_s = max(source.spec.latency_s, target.spec.latency_s)
        transfer.timer = self._loop.call_later(latency_s, self._join, transfer)
        return transfer

    def cancel(self, transfer: KvTransfer) -> None:
        """It is not done any more."""
        if transfer.timer is not None:
            transfer.timer.cancel()
        self._leave(transfer)

    def _join(self, transfer: KvTransfer) -> None:
        transfer.timed_at = self._loop.time()
        transfer.source.sending[transfer] = None
        transfer.target.receiving[transfer] = None
        self._share(transfer)

    def _end(self, transfer: KvTransfer) -> None:
        self._leave(transfer)
        transfer.done()

    def _leave(self, transfer: KvTransfer) -> None:
        if transfer.source.sending.pop(transfer, False) is None:
            del transfer.target.receiving[transfer]
            self._share(transfer)

    def _share(self, changed: KvTransfer) -> None:
        """Times everything anew that shares an interface with a transfer that came or went."""
        for transfer in dict.fromkeys([*changed.source.sending, *changed.target.receiving]):
            self._time(transfer)

    def _time(self, transfer: KvTransfer) -> None:
        source, target = transfer.source, transfer.target
        rate = min(source.spec.bytes_per_s / len(source.sending), target.spec.bytes_per_s / len(target.receiving))
        if rate == transfer.bytes_per_s:
            return
        now = self._loop.time()
        transfer.bytes_left -= (now - transfer.timed_at) * transfer.bytes_per_s
        transfer.timed_at, transfer.bytes_per_s = now, rate
        if transfer.timer is not None:
            transfer.timer.cancel()
        transfer.timer = self._loop.call_later(max(0.0, transfer.bytes_left) / rate, self._end, transfer)
