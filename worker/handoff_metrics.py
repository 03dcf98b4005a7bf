"""Measures the hand-offs of one worker: how long each part takes, how many bytes move, what fails.

The engine thread reports each event with its time; nothing here reads a clock, waits or raises. A hand-off is followed
from its Open until it ends in any way, and then forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry

from cluster.lifecycle import RequestKey
from cluster.metrics import OTHER, LabelledCounter, Metric, histogram
from cluster.transports import TRANSPORT_NAMES
from kv_transfer.actions import Chunk

V = TypeVar("V")

MAX_HANDOFFS = 4096
"""Hand-offs followed at a time in each direction; beyond it the oldest is forgotten, should its end never come."""
_REASONS = ("peer_lost", "transfer_failed", "timeout", "corrupt", "incompatible")

TRANSFER = Metric(
    "baton_kv_transfer_seconds",
    "histogram",
    "Time from a hand-off's first chunk being read to the decode worker having everything, as the sender sees it.",
)
EXPOSED = Metric(
    "baton_kv_transfer_exposed_seconds",
    "histogram",
    "The part of a hand-off that computing the prompt did not hide: from the first tokens to the decode worker having "
    "everything. A client waits so much longer for its second token.",
)
GRANT = Metric(
    "baton_kv_grant_seconds",
    "histogram",
    "Time from a chunk being offered to its being granted, that is, until the decode worker had a slot for it.",
)
COMMIT = Metric(
    "baton_kv_commit_seconds", "histogram", "Time from a hand-off's commit to the decode worker's confirmation."
)
BYTES = Metric(
    "baton_kv_transfer_bytes_total",
    "counter",
    "Bytes of KV moved, over all ranks of this worker.",
    (("direction", ("sent", "received")), ("transport", (*TRANSPORT_NAMES, OTHER))),
)
FAILURES = Metric(
    "baton_kv_transfer_failures_total",
    "counter",
    "Hand-offs that failed. aborted: the other worker gave it up, also because the request was cancelled there first; "
    "the other reasons are this worker's own finding.",
    (("reason", (*_REASONS, "aborted", OTHER)),),
)
RETIRED = Metric(
    "baton_kv_pairs_retired_total",
    "counter",
    "Pairs closed, with their connection. idle: unused, and more than `max_pairs` were open; the other worker counts "
    "such a pair as peer_lost.",
    (("reason", (*_REASONS, "idle", OTHER)),),
)
UNOPENED = Metric(
    "baton_kv_pairs_unopened_total",
    "counter",
    "Pairs of this worker as the sender that did not open, by the transport that both workers had agreed on. Towards "
    "that worker it is the last one to be tried for five minutes.",
    (("transport", (*TRANSPORT_NAMES, OTHER)),),
)
HANDOFF_METRICS = (TRANSFER, EXPOSED, GRANT, COMMIT, BYTES, FAILURES, RETIRED, UNOPENED)


@dataclass
class _Outgoing:
    """Instants of one hand-off that is sent; None: not yet."""

    epoch: str
    first_gather: float | None = None
    first_tokens: float | None = None
    commit_sent: float | None = None
    offered: dict[int, float] = field(default_factory=dict)
    """Instants of the offers that are not granted yet, by chunk."""


class HandoffMetrics:
    """Histograms and counters of hand-offs. Every method runs on the engine thread, costs microseconds, never raises.

    An event of a hand-off that is not followed (any more) is passed over.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._transfer, self._exposed = histogram(TRANSFER, registry), histogram(EXPOSED, registry)
        self._grant, self._commit = histogram(GRANT, registry), histogram(COMMIT, registry)
        self._bytes = LabelledCounter(BYTES, registry)
        self._failures, self._retired = LabelledCounter(FAILURES, registry), LabelledCounter(RETIRED, registry)
        self._unopened = LabelledCounter(UNOPENED, registry)
        self._outgoing: dict[RequestKey, _Outgoing] = {}
        self._incoming: dict[RequestKey, str] = {}
        """Epochs of the hand-offs that are received."""

    @property
    def num_outgoing(self) -> int:
        return len(self._outgoing)

    @property
    def num_incoming(self) -> int:
        return len(self._incoming)

    # A hand-off that this worker sends

    def opened(self, key: RequestKey, epoch: str) -> None:
        """Open is sent."""
        _remember(self._outgoing, key, _Outgoing(epoch))

    def gather_issued(self, chunk: Chunk, now: float) -> None:
        out = self._outgoing.get(chunk.key)
        if out is not None and out.first_gather is None:
            out.first_gather = now

    def offered(self, key: RequestKey, chunk_index: int, now: float) -> None:
        out = self._outgoing.get(key)
        if out is not None:
            out.offered[chunk_index] = now

    def granted(self, key: RequestKey, chunk_index: int, now: float) -> None:
        out = self._outgoing.get(key)
        then = out.offered.pop(chunk_index, None) if out is not None else None
        if then is not None:
            self._grant.observe(max(0.0, now - then))

    def first_tokens(self, key: RequestKey, now: float) -> None:
        """The prompt is computed and its first tokens are sampled: from here on the transfer is exposed."""
        out = self._outgoing.get(key)
        if out is not None:
            out.first_tokens = now

    def commit_sent(self, key: RequestKey, now: float) -> None:
        out = self._outgoing.get(key)
        if out is not None:
            out.commit_sent = now

    def committed(self, key: RequestKey, now: float) -> None:
        """The receiver has everything: the hand-off is over, and well."""
        out = self._outgoing.pop(key, None)
        if out is None:
            return
        instants = ((self._transfer, out.first_gather), (self._exposed, out.first_tokens))
        for observed, then in (*instants, (self._commit, out.commit_sent)):
            if then is not None:
                observed.observe(max(0.0, now - then))

    # A hand-off that this worker receives

    def called(self, key: RequestKey, epoch: str) -> None:
        """Open is received."""
        _remember(self._incoming, key, epoch)

    # Either

    def ended(self, key: RequestKey) -> None:
        """Over, and not a failure: cancelled or not wanted any more; or, where it is received, complete."""
        self._outgoing.pop(key, None)
        self._incoming.pop(key, None)

    def failed(self, key: RequestKey, reason: str) -> None:
        """Over by a failure; `reason` is a label, or the name of a worker_pb2.Failed.Reason."""
        known = (self._outgoing.pop(key, None), self._incoming.pop(key, None))
        if any(each is not None for each in known):
            self._failures.add(1, _label(reason))

    def retired(self, epoch: str, reason: str) -> None:
        """A connection and its pair are closed: every hand-off that is still on it fails with it."""
        self._retired.add(1, _label(reason))
        outgoing = [key for key, out in self._outgoing.items() if out.epoch == epoch]
        for key in outgoing + [key for key, of in self._incoming.items() if of == epoch]:
            self.failed(key, reason)

    def unopened(self, transport: str) -> None:
        """A pair of a connection that this worker opened did not come to be."""
        self._unopened.add(1, transport)

    def moved(self, direction: Literal["sent", "received"], transport: str, num_bytes: int) -> None:
        """KV has left or arrived; what was not a single byte adds nothing."""
        self._bytes.add(num_bytes, direction, transport)


def _remember(entries: dict[RequestKey, V], key: RequestKey, entry: V) -> None:
    entries[key] = entry
    if len(entries) > MAX_HANDOFFS:
        del entries[next(iter(entries))]


def _label(reason: str) -> str:
    """The label of a reason; a connection that is closed without one was idle."""
    name = reason.removeprefix("REASON_").lower()
    return "idle" if name == "unspecified" else name
