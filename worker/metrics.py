"""What is measured of hand-offs on one worker: how long each part takes, what moves, what fails, what is held.

The engine thread tells of each event with its time; nothing here reads a clock, waits or raises. A hand-off is followed
from its Open until it ends in any way, and then forgotten. What is held is asked of the engine thread when the page is
read. `python -m worker.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.metrics import OTHER, LabelledCounter, Metric, histogram, render_reference
from cluster.request_key import RequestKey
from cluster.transports import TRANSPORT_NAMES
from kv_transfer.actions import Chunk
from worker import step_meter

logger = logging.getLogger(__name__)

T = TypeVar("T")
V = TypeVar("V")

MAX_HANDOFFS = 4096
"""Hand-offs followed at a time in each direction; beyond it the oldest is forgotten, in case its end was never told."""
ANSWER_TIMEOUT_S = 1.0
"""A page is served without what the engine thread holds when that thread does not answer for so long."""

_SENDING, _RECEIVING = "send", "receive"
_TRANSPORTS = (*TRANSPORT_NAMES, OTHER)
PAIR_STATES = ("opening", "open", "suspect", "closing")
SEND_SLOTS = ("free", "gathering", "offered", "sending", "quarantined")
LANDING_SLOTS = ("free", "posted", "landed", "quarantined")
BLOCK_STATES = ("free", "held", "cached")
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
    (("direction", ("sent", "received")), ("transport", _TRANSPORTS)),
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
    "Pairs closed, with their link. idle: unused, and more than `max_pairs` were open; the other worker counts such a "
    "pair as peer_lost.",
    (("reason", (*_REASONS, "idle", OTHER)),),
)
HANDOFFS = Metric(
    "baton_kv_handoffs",
    "gauge",
    "Hand-offs under way, from their opening on.",
    (("side", (_SENDING, _RECEIVING)),),
)
PAIRS = Metric(
    "baton_kv_pairs",
    "gauge",
    "Pairs with other workers. suspect: the peer is silent; closing: retired, and its slots not yet let go.",
    (("state", PAIR_STATES),),
)
SLOTS = Metric(
    "baton_kv_slots",
    "gauge",
    "Slots of the pairs by what is in them. A sender's: free, gathering, offered, sending; a receiver's: free, posted, "
    "landed (arrived, being written to the pages). quarantined: of a pair that is retired and not yet closed.",
    (("side", (_SENDING, _RECEIVING)), ("state", tuple(dict.fromkeys(SEND_SLOTS + LANDING_SLOTS)))),
)
QUARANTINED = Metric(
    "baton_kv_quarantined_bytes",
    "gauge",
    "Bytes of slots on rank 0 that a retired pair may still touch; more than 0 for long: a pair that cannot be closed.",
)
BLOCKS = Metric(
    "baton_kv_blocks",
    "gauge",
    "KV blocks of this worker's pool; cached ones hold prefixes and are free to take.",
    (("state", BLOCK_STATES),),
)
PREEMPTIONS = Metric(
    "baton_preemptions_total",
    "counter",
    "Sequences that gave up their KV blocks to others, to be computed again: with many of them the pool is too small.",
)
_OF_HANDOFFS = (TRANSFER, EXPOSED, GRANT, COMMIT, BYTES, FAILURES, RETIRED, HANDOFFS, PAIRS, SLOTS, QUARANTINED)
METRICS = (*_OF_HANDOFFS, BLOCKS, PREEMPTIONS)


@dataclass(frozen=True)
class HeldResources:
    """What a worker holds at one moment, each by state."""

    pairs: Mapping[str, int]
    send_slots: Mapping[str, int]
    landing_slots: Mapping[str, int]
    blocks: Mapping[str, int]
    num_preemptions: int
    """Since the worker's start."""


class Slots(Protocol):
    """What only the transport knows of rank 0's slots; `kv_transfer.transfer_engine.KvMover`."""

    @property
    def num_landed_slots(self) -> int: ...

    @property
    def quarantined_bytes(self) -> int: ...


@dataclass
class _Outgoing:
    """Instants of one hand-off that is sent; None: not yet."""

    epoch: str
    first_gather: float | None = None
    first_tokens: float | None = None
    commit_told: float | None = None
    offered: dict[int, float] = field(default_factory=dict)
    """By chunk, those not granted yet."""


class HandoffMetrics:
    """Of one worker. Every method but `watch` is called on the engine thread, costs microseconds and never raises.

    An event of a hand-off that is not followed (any more) is passed over.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._transfer, self._exposed = histogram(TRANSFER, registry), histogram(EXPOSED, registry)
        self._grant, self._commit = histogram(GRANT, registry), histogram(COMMIT, registry)
        self._bytes = LabelledCounter(BYTES, registry)
        self._failures, self._retired = LabelledCounter(FAILURES, registry), LabelledCounter(RETIRED, registry)
        self._outgoing: dict[RequestKey, _Outgoing] = {}
        self._incoming: dict[RequestKey, str] = {}
        """Epochs of the hand-offs that are received."""

    @property
    def num_outgoing(self) -> int:
        return len(self._outgoing)

    @property
    def num_incoming(self) -> int:
        return len(self._incoming)

    def watch(self, held: Callable[[], HeldResources | None], slots: Slots) -> None:
        """Shows what is held, too: both are asked at every reading of the page, on that page's thread."""
        self.registry.register(_HeldCollector(self, held, slots))

    # A hand-off that this worker sends

    def opened(self, key: RequestKey, epoch: str) -> None:
        """Open is told."""
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

    def commit_told(self, key: RequestKey, now: float) -> None:
        out = self._outgoing.get(key)
        if out is not None:
            out.commit_told = now

    def committed(self, key: RequestKey, now: float) -> None:
        """The receiver has everything: the hand-off is over, and well."""
        out = self._outgoing.pop(key, None)
        if out is None:
            return
        instants = ((self._transfer, out.first_gather), (self._exposed, out.first_tokens))
        for observed, then in (*instants, (self._commit, out.commit_told)):
            if then is not None:
                observed.observe(max(0.0, now - then))

    # A hand-off that this worker receives

    def called(self, key: RequestKey, epoch: str) -> None:
        """Open is heard."""
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
        """A link and its pair are closed: every hand-off that is still on it fails with it."""
        self._retired.add(1, _label(reason))
        outgoing = [key for key, out in self._outgoing.items() if out.epoch == epoch]
        for key in outgoing + [key for key, of in self._incoming.items() if of == epoch]:
            self.failed(key, reason)

    def moved(self, direction: Literal["sent", "received"], transport: str, num_bytes: int) -> None:
        """KV has left or arrived; what was not a single byte adds nothing."""
        self._bytes.add(num_bytes, direction, transport)


class _HeldCollector(Collector):
    """Turns what is held into gauges while a page is read."""

    def __init__(self, metrics: HandoffMetrics, held: Callable[[], HeldResources | None], slots: Slots) -> None:
        self._metrics = metrics
        self._held = held
        self._slots = slots

    def collect(self) -> Iterator[MetricFamily]:
        sides = (_SENDING, self._metrics.num_outgoing), (_RECEIVING, self._metrics.num_incoming)
        yield _gauge(HANDOFFS, [((side,), number) for side, number in sides])
        yield _gauge(QUARANTINED, [((), self._slots.quarantined_bytes)])
        held = self._held()
        if held is None:
            return
        posted = held.landing_slots.get("posted", 0)
        landed = min(posted, self._slots.num_landed_slots)  # the engine thread knows of them as posted
        landing_slots = {**held.landing_slots, "posted": posted - landed, "landed": landed}
        yield _gauge(PAIRS, [((state,), held.pairs.get(state, 0)) for state in PAIR_STATES])
        sending = [((_SENDING, state), held.send_slots.get(state, 0)) for state in SEND_SLOTS]
        receiving = [((_RECEIVING, state), landing_slots.get(state, 0)) for state in LANDING_SLOTS]
        yield _gauge(SLOTS, sending + receiving)
        yield _gauge(BLOCKS, [((state,), held.blocks.get(state, 0)) for state in BLOCK_STATES])
        yield CounterMetricFamily(PREEMPTIONS.name, PREEMPTIONS.doc, value=held.num_preemptions)


def ask(post: Callable[[Callable[[], None]], None], question: Callable[[], T]) -> T | None:
    """The answer of the engine thread, to which `post` hands what it is to run; None when it has none in time."""
    answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(question())
        except Exception:  # it must not end the engine thread
            logger.exception("a question of the metrics page failed")
            answers.put(None)

    post(answer)
    try:
        return answers.get(timeout=ANSWER_TIMEOUT_S)
    except queue.Empty:
        return None


def _gauge(metric: Metric, series: Iterable[tuple[tuple[str, ...], int]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.doc, labels=metric.label_names)
    for labels, value in series:
        family.add_metric(labels, value)
    return family


def _remember(entries: dict[RequestKey, V], key: RequestKey, entry: V) -> None:
    entries[key] = entry
    if len(entries) > MAX_HANDOFFS:
        del entries[next(iter(entries))]


def _label(reason: str) -> str:
    """The label of a reason; a link that is closed without one was idle."""
    name = reason.removeprefix("REASON_").lower()
    return "idle" if name == "unspecified" else name


_INTRODUCTION = """\
# Metrics

Each worker serves its metrics for Prometheus at `http://ADDRESS/metrics`; `baton status --json` names the address
(`metrics_address`), and `metrics.workers: false` in [cluster.yaml](../cluster.yaml) turns the pages off. Counters start
at zero with the process and have every series from the start; no label ever names a request or a worker. Times are in
seconds. What the router measures of requests is in [router-metrics.md](router-metrics.md).

This page is made from the code: `python -m worker.metrics > docs/metrics.md`.
"""


def reference() -> str:
    """docs/metrics.md."""
    return render_reference(_INTRODUCTION, (*METRICS, *step_meter.METRICS))


if __name__ == "__main__":
    print(reference(), end="")
