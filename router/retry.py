"""Where a request goes when an attempt at it has failed before its tokens flowed. Pure: who is ready in, where to out.

    another prefill worker, to the same decode worker, which keeps what has landed
    -> no prefill worker is left, or it is the last attempt: the decode worker computes what is missing itself
    the decode worker is lost -> another one; none is ready -> back to the head of the queue

Knows no connection and no clock; `Ledger` says who has least to do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from cluster.errors import BatonError
from cluster.pb import worker_pb2
from router.policy import Ledger, Placement

MAX_ATTEMPTS = 3

_Failed = worker_pb2.Failed
RETRYABLE = frozenset(
    {
        _Failed.REASON_PEER_LOST,
        _Failed.REASON_TRANSFER_FAILED,
        _Failed.REASON_CORRUPT,
        _Failed.REASON_INCOMPATIBLE,
    }
)
"""What another path may spare: the others would happen again anywhere."""


@dataclass(frozen=True)
class Setback:
    """What ended an attempt."""

    reason: str
    """In a word, for counters: that of Failed.Reason, or WORKER_LOST."""
    error: BatonError
    """What the client is told when no attempt is left."""
    lost_id: str | None = None
    """The worker that is gone; None when all are there, and only the way between two failed."""


@dataclass
class Trail:
    """What has been tried for one request."""

    tried_prefill_ids: set[str] = field(default_factory=set)
    """Prefill workers from which the KV did not arrive."""
    num_attempts: int = 1

    def note(self, placement: Placement, setback: Setback) -> None:
        """An attempt has failed. A lost decode worker says nothing against the prefill worker."""
        self.num_attempts += 1
        if placement.prefill_id is not None and setback.lost_id != placement.decode_id:
            self.tried_prefill_ids.add(placement.prefill_id)


def next_placement(
    trail: Trail,
    last: Placement,
    setback: Setback,
    prefill_ids: Collection[str],
    decode_ids: Collection[str],
    ledger: Ledger,
) -> Placement | None:
    """`*_ids` are those that are ready. None: no decode worker is, so the request has to wait."""
    decode_ids = [d for d in decode_ids if d != setback.lost_id]
    if not decode_ids:
        return None
    stays = last.decode_id in decode_ids
    untried = [p for p in prefill_ids if p not in trail.tried_prefill_ids and p != setback.lost_id]
    after = f"after {setback.reason} on {last.prefill_id or last.decode_id}"
    chosen = ledger.choose(untried or ["-"], [last.decode_id] if stays else decode_ids)
    if untried and trail.num_attempts < MAX_ATTEMPTS:
        return Placement(
            chosen.prefill_id, chosen.decode_id, f"retried {after}: {chosen.prefill_id} -> {chosen.decode_id}"
        )
    why = "no other prefill worker" if not untried else "the last attempt"
    return Placement(None, chosen.decode_id, f"local prefill on {chosen.decode_id} {after}: {why}")
