"""Counts of what became of requests, kept by whoever decides it and read by status, activity and metrics.

A new count is a field of Counters, and its metric's declaration and line in `collect`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily

from cluster.metrics import OTHER, Metric, counter_family
from router.routing.load_tracker import PlacementKind

OUTCOMES = ("finished", "cancelled", "failed", "rejected")
REFUSAL_REASONS = (
    "too_large",
    "quota_requests_per_min",
    "quota_prompt_tokens_per_min",
    "quota_output_tokens_per_min",
    "quota_max_concurrent",
    "quota_grammars",
    "queue_requests",
    "queue_tokens",
    "tenant_share",
    "deadline",
    "queue_timeout",
    "overload",
    "waited",
    "shed",
    "draining",
    "client_stalled",
)
REQUESTS = Metric(
    "baton_requests_total",
    "counter",
    "Requests that ended. rejected: without having run; failed: with an error after they had.",
    (("outcome", OUTCOMES),),
)
RETRIES = Metric(
    "baton_retries_total",
    "counter",
    "Attempts that failed and were followed by another one, by what ended them; no client saw more than a pause.",
    (
        (
            "reason",
            ("worker_lost", "stalled", "peer_lost", "transfer_failed", "capacity", "corrupt", "incompatible", OTHER),
        ),
    ),
)
REFUSALS = Metric(
    "baton_refusals_total",
    "counter",
    "Requests that were turned away, by why: larger than a bound (too_large); a limit of the API key, or of its tenant "
    "for compiling grammars (quota); a full queue, in requests or in tokens, or a tenant's share of it; a wait that "
    "would not keep the deadline, the queue timeout or, in an overload, the objective of the first token; at the end "
    "of such a wait (waited, shed); while the router shuts down (draining). client_stalled: ended while they ran, as "
    "their client did not read.",
    (("reason", REFUSAL_REASONS),),
)
ORPHANS = Metric(
    "baton_orphans_total",
    "counter",
    "Generations that were cancelled because their client had left and nobody resumed them in time.",
)
BATCH_LINES = Metric(
    "baton_batch_lines_total",
    "counter",
    "Lines of batches that were answered well or with an error, and tries that gave no answer and are followed by "
    "another one (retried). Each try is a request as well, and is counted as such.",
    (("outcome", ("completed", "failed", "retried")),),
)
PLACEMENTS = Metric(
    "baton_placements_total",
    "counter",
    "Placements on workers, each attempt one, by why: a hand-off; a prompt computed by its decode worker because there "
    "was little to compute (short, cached), because prefill was busy (where nothing decodes: idle, else beside what "
    "does), or for want of prefill workers (no_prefill); on a prefill worker for want of decode workers (no_decode); "
    "by the session's last turn, which decided between near equals; after a failure (retried); from another decode "
    "worker (moved).",
    (("kind", tuple(PlacementKind)),),
)
EJECTIONS = Metric(
    "baton_worker_ejections_total",
    "counter",
    "Times that a worker got no new requests for a while, because it was far slower than predicted and than its peers, "
    "by its role.",
    (("role", ("prefill", "decode")),),
)
FETCHES = Metric(
    "baton_prefix_fetches_total",
    "counter",
    "Prefixes that a worker was to have from another one before a prompt, by what became of it. late: it took too "
    "long; no_room: the worker had no blocks to spare; evicted: the other one did not have it any more; worker_lost; "
    "failed: the transfer; cancelled: the requests for it had ended. But for done, the prompt was computed.",
    (("result", ("done", "late", "no_room", "evicted", "worker_lost", "failed", "cancelled")),),
)
FETCHED_TOKENS = Metric(
    "baton_prefix_fetched_tokens_total", "counter", "Tokens of prefixes that workers have fetched from others."
)
COPIES_AHEAD = Metric(
    "baton_prefix_copies_ahead_total",
    "counter",
    "Prefixes that many prompts begin with and that one more prefill worker was to have before a prompt needs it, by "
    "why: the next one would have waited for those that have it (queue), or such prompts take more than half of their "
    "time (share). Each is a fetch, or waits for one under way (baton_prefix_fetches_total).",
    (("why", ("queue", "share")),),
)
COUNTER_METRICS = (
    *(REQUESTS, RETRIES, REFUSALS, ORPHANS, PLACEMENTS, BATCH_LINES, EJECTIONS),
    *(FETCHES, FETCHED_TOKENS, COPIES_AHEAD),
)


@dataclass
class Counters:
    """Counts since the router's start."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    """Failed attempts that were followed by another one, by reason."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused requests, by one of REFUSAL_REASONS."""
    placements: Counter[str] = field(default_factory=Counter)
    """Placements on workers, by PlacementKind."""
    local_prefills: int = 0
    moved: int = 0
    """Moves from one decode worker to another; a request may move several times."""
    batch_lines: Counter[str] = field(default_factory=Counter)
    """Lines of batches, by an outcome of BATCH_LINES."""
    ejected: Counter[str] = field(default_factory=Counter)
    """Ejections of slow workers, by role."""
    fetches: Counter[str] = field(default_factory=Counter)
    """Fetches of prefixes that are over, by a result of FETCHES."""
    fetched_tokens: int = 0
    copies_ahead: Counter[str] = field(default_factory=Counter)
    """Prefixes that were fetched ahead of requests, by why."""
    orphaned: int = 0
    """Requests cancelled because their client had left and nobody resumed them."""

    def by_outcome(self) -> dict[str, int]:
        """Ended requests; its keys are OUTCOMES."""
        return {outcome: getattr(self, outcome) for outcome in OUTCOMES}

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Reads COUNTER_METRICS; may be called on another thread."""
        yield counter_family(REQUESTS, self.by_outcome())
        yield counter_family(RETRIES, {reason.lower(): number for reason, number in self.retried.copy().items()})
        yield counter_family(REFUSALS, self.refused.copy())
        yield counter_family(PLACEMENTS, self.placements.copy())
        yield counter_family(BATCH_LINES, self.batch_lines.copy())
        yield counter_family(EJECTIONS, self.ejected.copy())
        yield counter_family(FETCHES, self.fetches.copy())
        yield CounterMetricFamily(FETCHED_TOKENS.name, FETCHED_TOKENS.doc, value=self.fetched_tokens)
        yield counter_family(COPIES_AHEAD, self.copies_ahead.copy())
        yield CounterMetricFamily(ORPHANS.name, ORPHANS.doc, value=self.orphaned)
