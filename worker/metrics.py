"""The metrics page of one worker: what it holds, its hand-offs and its steps.

What is held is asked of the engine thread while a page is read. `python -m worker.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.metrics import Metric, render_reference
from cluster.metrics_page import MetricsPage, serve_beside
from cluster.tls import InternalTls
from engine.kv.kv_tier import KvTierName, MoveKind, TierCounts
from engine.models.experts import ExpertLoad
from kv_transfer.transfer_engine import TransferEngine
from worker import step_meter
from worker.core import Core
from worker.expert_metrics import EXPERT_METRICS, ExpertCollector
from worker.handoff_metrics import HANDOFF_METRICS, HandoffMetrics
from worker.peaks import Peak, PeakOnDemand, measure_cpu, overridden, peak_of_gpu
from worker.resolved import Resolved
from worker.step_meter import StepMeter
from worker.store_lookups import LookUpCounts
from worker.tier_moves import TierMoves

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_TIMEOUT_S = 1.0
"""A page is served without what the engine thread holds when that thread does not answer for so long."""


_SENDING, _RECEIVING = "send", "receive"
PAIR_STATES = ("opening", "open", "suspect", "closing")
SEND_SLOTS = ("free", "gathering", "offered", "sending", "quarantined")
LANDING_SLOTS = ("free", "posted", "landed", "quarantined")
BLOCK_STATES = ("free", "held", "cached")

HANDOFFS = Metric(
    "baton_kv_handoffs",
    "gauge",
    "Hand-offs under way, from their opening on.",
    (("side", (_SENDING, _RECEIVING)),),
)
PAIRS = Metric(
    "baton_kv_pairs",
    "gauge",
    "Pairs with other workers. suspect: the peer is silent; closing: retired, and its slots not yet released.",
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
TIERS, TIER_STATES = ("host", "disk", "store"), ("free", "moving", "kept")
TIER_BLOCKS = Metric(
    "baton_kv_tier_blocks",
    "gauge",
    "Blocks in the tiers below the KV pool, host memory and disk: free, on their way there, and kept. store: of all "
    "workers that share it, as when this one looked last, in blocks of this worker's size.",
    (("tier", TIERS), ("state", TIER_STATES)),
)
TIER_EVENTS = tuple(field.name for field in fields(TierCounts))
TIER_EVENTS_TOTAL = Metric(
    "baton_kv_tier_events_total",
    "counter",
    "Blocks by what became of them. saved: copied to host memory; spilled: copied from there to the disk; loaded and "
    "read: copied back from host memory and from the disk, so that nobody computed their tokens; pushed: copied from "
    "host memory to the store; fetched: copied from there to the pool; given_up: left the "
    "last tier that had them; unsaved: evicted from the pool before they were copied; failed: whose copy failed; "
    "declined: found in a tier, and computed because that was quicker.",
    (("event", TIER_EVENTS),),
)
_MOVES = tuple(kind.value for kind in MoveKind)
TIER_BYTES = Metric(
    "baton_kv_tier_bytes_total",
    "counter",
    "Bytes of all ranks that were copied. save: to host memory; load: back; spill: from host memory to the disk; "
    "read: from the disk to the pool; push: from host memory to the store; fetch: from there to the pool.",
    (("move", _MOVES),),
)
TIER_SECONDS = Metric(
    "baton_kv_tier_seconds_total",
    "counter",
    "Seconds that such copies took, from when each was set off; several may be under way at a time.",
    (("move", _MOVES),),
)
HIT_TIERS: tuple[KvTierName, ...] = ("device", "host", "disk", "store")
HIT_TOKENS = Metric(
    "baton_kv_hit_tokens_total",
    "counter",
    "Tokens of prompts that were there when they were to be computed or received: in the pool (device), or in a tier "
    "below it, from which they were loaded. A preempted sequence counts again.",
    (("tier", HIT_TIERS),),
)
RESUMED_FROM = (*HIT_TIERS, "computed")
RESUMED_TOKENS = Metric(
    "baton_resumed_tokens_total",
    "counter",
    "Tokens that preempted sequences had computed, once they have blocks again, by where their KV was found: still in "
    "the pool (device), or in a tier below it, from which it is loaded; computed: nowhere, or that is quicker.",
    (("found", RESUMED_FROM),),
)
STORE_LOOKUPS = Metric(
    "baton_kv_store_lookups_total",
    "counter",
    "Look-ups of prompts in the store by what came of them. failed: an error, or no answer in time; the prompt is "
    "computed.",
    (("result", ("found", "nothing", "failed")),),
)
STORE_LOOKUP_SECONDS = Metric(
    "baton_kv_store_lookup_seconds_total",
    "counter",
    "Seconds that those took, while their requests waited and others ran on.",
)
METRICS = (
    *(*HANDOFF_METRICS, HANDOFFS, PAIRS, SLOTS, QUARANTINED, BLOCKS, PREEMPTIONS, RESUMED_TOKENS),
    *(HIT_TOKENS, TIER_BLOCKS, TIER_EVENTS_TOTAL, TIER_BYTES, TIER_SECONDS, STORE_LOOKUPS, STORE_LOOKUP_SECONDS),
)


@dataclass(frozen=True)
class HeldResources:
    """Resources that a worker holds at one moment, each by state."""

    pairs: Mapping[str, int]
    send_slots: Mapping[str, int]
    landing_slots: Mapping[str, int]
    blocks: Mapping[str, int]
    num_preemptions: int
    """Since the worker's start."""
    resumed_tokens: Mapping[str, int]
    """Of preempted sequences, by where they were found, since then."""
    hit_tokens: Mapping[str, int]
    """By tier, since then."""
    tier: TierUse | None = None
    """None without host memory below the pool."""
    lookups: LookUpCounts | None = None
    """None without a store."""


@dataclass(frozen=True)
class TierUse:
    """The tiers below a pool, and what has gone to and fro since the start."""

    blocks: Mapping[tuple[str, str], int]
    """By tier and state."""
    counts: TierCounts
    size_bytes: Mapping[MoveKind, int]
    seconds: Mapping[MoveKind, float]

    @classmethod
    def of(cls, moves: TierMoves | None) -> TierUse | None:
        if moves is None:
            return None
        states: dict[tuple[str, str], int] = {}
        numbers_of = {name: (tier.num_free, tier.num_moving, len(tier)) for name, tier in moves.blocks.tiers.items()}
        if (stored := moves.stored) is not None:
            num_kept, num_total = stored
            numbers_of["store"] = max(0, num_total - num_kept), 0, num_kept
        for name, numbers in numbers_of.items():
            states.update({(name, state): number for state, number in zip(TIER_STATES, numbers, strict=True)})
        return cls(states, replace(moves.blocks.counts), dict(moves.size_bytes), dict(moves.seconds))


def held_by(core: Core) -> HeldResources:
    """On the engine thread."""
    blocks, quarantined = core.blocks, core.handoffs.count_quarantined
    return HeldResources(
        pairs=core.handoffs.count_by_state(),
        send_slots=core.prefill.count_slots() | {"quarantined": quarantined(is_sender=True)},
        landing_slots=core.decode.count_slots() | {"quarantined": quarantined(is_sender=False)},
        blocks={"free": blocks.num_free, "held": blocks.num_held, "cached": blocks.num_cached},
        num_preemptions=core.decode.num_preemptions,
        resumed_tokens={found: core.decode.resumed_tokens[found] for found in RESUMED_FROM},
        hit_tokens={tier: blocks.hit_tokens[tier] for tier in HIT_TIERS},
        tier=TierUse.of(core.tier),
        lookups=None if core.lookups is None else replace(core.lookups.counts),
    )


class HeldCollector(Collector):
    """Turns what a worker holds into gauges while a page is read, on that page's thread."""

    def __init__(
        self,
        metrics: HandoffMetrics,
        held: Callable[[], HeldResources | None],
        transfer_engine: TransferEngine,
    ) -> None:
        """`held`: None when the engine thread did not answer in time. `transfer_engine`: rank 0's."""
        self._metrics = metrics
        self._held = held
        self._engine = transfer_engine

    def collect(self) -> Iterator[MetricFamily]:
        sides = (_SENDING, self._metrics.num_outgoing), (_RECEIVING, self._metrics.num_incoming)
        yield _gauge(HANDOFFS, [((side,), number) for side, number in sides])
        yield _gauge(QUARANTINED, [((), self._engine.quarantined_bytes)])
        held = self._held()
        if held is None:
            return
        posted = held.landing_slots.get("posted", 0)
        landed = min(posted, self._engine.num_landed_slots)  # the engine thread knows of them as posted
        landing_slots = {**held.landing_slots, "posted": posted - landed, "landed": landed}
        yield _gauge(PAIRS, [((state,), held.pairs.get(state, 0)) for state in PAIR_STATES])
        sending = [((_SENDING, state), held.send_slots.get(state, 0)) for state in SEND_SLOTS]
        receiving = [((_RECEIVING, state), landing_slots.get(state, 0)) for state in LANDING_SLOTS]
        yield _gauge(SLOTS, sending + receiving)
        yield _gauge(BLOCKS, [((state,), held.blocks.get(state, 0)) for state in BLOCK_STATES])
        yield CounterMetricFamily(PREEMPTIONS.name, PREEMPTIONS.doc, value=held.num_preemptions)
        yield _counter(RESUMED_TOKENS, [((found,), number) for found, number in held.resumed_tokens.items()])
        yield _counter(HIT_TOKENS, [((tier,), number) for tier, number in held.hit_tokens.items()])
        if held.tier is not None:
            yield from _tier_families(held.tier)
        if (counts := held.lookups) is not None:
            results = [(result, getattr(counts, result)) for result in ("found", "nothing", "failed")]
            yield _counter(STORE_LOOKUPS, [((result,), number) for result, number in results])
            yield _counter(STORE_LOOKUP_SECONDS, [((), counts.seconds)])


def _tier_families(use: TierUse) -> Iterator[MetricFamily]:
    yield _gauge(TIER_BLOCKS, use.blocks.items())
    yield _counter(TIER_EVENTS_TOTAL, [((event,), getattr(use.counts, event)) for event in TIER_EVENTS])
    yield _counter(TIER_BYTES, [((kind.value,), size_bytes) for kind, size_bytes in use.size_bytes.items()])
    yield _counter(TIER_SECONDS, [((kind.value,), seconds) for kind, seconds in use.seconds.items()])


def serve_metrics(
    resolved: Resolved,
    core: Core,
    metrics: HandoffMetrics,
    transfer_engine: TransferEngine,
    meter: StepMeter | None,
    tls: InternalTls | None,
    expert_load: Callable[[], ExpertLoad],
) -> MetricsPage | None:
    """Serves the page where the settings ask for one. `transfer_engine`: rank 0's; `expert_load`: called on the
    engine thread."""
    settings = resolved.settings
    if settings.metrics_port is None:
        return None
    held = HeldCollector(metrics, lambda: ask(core.inbox.post, lambda: held_by(core)), transfer_engine)
    metrics.registry.register(held)
    is_counted = not resolved.is_timed and resolved.config.foreign is None
    if resolved.config.experts is not None and is_counted:
        metrics.registry.register(ExpertCollector(partial(ask, core.inbox.post, expert_load)))
    if meter is not None:
        meter.watch(metrics.registry, _peak_of(resolved, core), time.monotonic)
    return serve_beside(
        metrics.registry,
        settings.host,
        settings.metrics_port,
        insecure=settings.insecure and not settings.has_keys,
        tls=None if tls is None else tls.page,
        allowed_hosts=settings.allowed_hosts,
    )


def _peak_of(resolved: Resolved, core: Core) -> Callable[[], Peak | None]:
    """The configured peak; else a GPU's is looked up, a CPU's measured by the engine thread between steps."""
    settings, device = resolved.settings, torch.device(resolved.device)
    given = settings.metrics.peak_tflops, settings.metrics.peak_gb_per_s
    known: Peak | None = None
    if None not in given:
        known = Peak(None, None, "")
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = peak_of_gpu(name, resolved.dtype, in_fp8=settings.model.quantization == "fp8")
        logger.info("MFU and MBU by %s", known.why)
    if known is not None:
        peak = overridden(known, *given)
        return lambda: peak

    return PeakOnDemand(
        lambda: overridden(measure_cpu(*resolved.product_form), *given),
        lambda work: ask(core.inbox.post, lambda: core.between_steps(work)),
    )


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


def _counter(metric: Metric, series: Iterable[tuple[tuple[str, ...], float]]) -> CounterMetricFamily:
    family = CounterMetricFamily(metric.name, metric.doc, labels=metric.label_names)
    for labels, value in series:
        family.add_metric(labels, value)
    return family


_INTRODUCTION = """\
# Metrics

Each worker serves its metrics for Prometheus at `http://ADDRESS/metrics`; `baton status --json` names the address
(`metrics_address`), and `metrics.workers: false` in [cluster.yaml](../cluster.yaml) turns the pages off. A page is on
the worker's own host; where the cluster has API keys and no `internal_tls`, on 127.0.0.1, since workers do not know the
keys. Counters start at zero with the process and have every series from the start; no label ever names a request or a
worker. Times are in seconds. What the router measures of requests is in [router-metrics.md](router-metrics.md).

This page is made from the code: `python -m worker.metrics > docs/metrics.md`.
"""


def reference() -> str:
    """docs/metrics.md."""
    return render_reference(_INTRODUCTION, (*METRICS, *EXPERT_METRICS, *step_meter.METRICS))


if __name__ == "__main__":
    print(reference(), end="")
