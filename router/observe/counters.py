"""Counts of what became of requests, kept by whoever decides it and read by status, activity and metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cluster.metrics import OTHER

OUTCOMES = ("finished", "cancelled", "failed", "rejected")
RETRY_REASONS = ("worker_lost", "stalled", "peer_lost", "transfer_failed", "corrupt", "incompatible", OTHER)
REFUSAL_REASONS = (
    "too_large",
    "quota_requests_per_min",
    "quota_prompt_tokens_per_min",
    "quota_output_tokens_per_min",
    "quota_max_concurrent",
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
LINE_OUTCOMES = ("completed", "failed", "retried")


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
    """Refused requests by reason, one of REFUSAL_REASONS."""
    local_prefills: int = 0
    moved: int = 0
    """Moves from one decode worker to another; a request may move several times."""
    batch_lines: Counter[str] = field(default_factory=Counter)
    """Lines of batches by outcome, one of LINE_OUTCOMES."""
    orphaned: int = 0
    """Requests cancelled because their client had left and nobody resumed them."""
