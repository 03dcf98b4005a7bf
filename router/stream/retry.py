"""Where a request goes when an attempt at it has failed. Pure: who is ready in, where to out.

    another prefill worker, to the same decode worker, which keeps what has landed
    -> no prefill worker is left, or it is the last attempt: the decode worker computes what is missing itself
    the decode worker is lost -> another one; none is ready -> back to the head of the queue
    the prefill worker does not hear it any more -> another one, if there is one

The next attempt goes on from the tokens that the last one told. Whoever told any was not in vain: attempts are counted
anew, so that a long output outlives more lost workers than a short one, and one that ends each worker in the same place
does not.

Knows no connection and no clock; a policy says who is best of those that may be chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.errors import BatonError
from cluster.pb import worker_pb2
from router.routing.load_tracker import Placement, PlacementKind, RequestLoad
from router.routing.policies.interface import Candidates, RoutingRequest

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
class AttemptFailure:
    """What ended an attempt."""

    reason: str
    """In a word, for counters: that of Failed.Reason, or WORKER_LOST."""
    error: BatonError
    """What the client is told when no attempt is left."""
    lost_id: str | None = None
    """The worker that is gone; None when all are there, and only the way between two failed."""
    unheard_id: str | None = None
    """The decode worker that the prefill worker does not hear: it is lost, or the way to it."""


@dataclass
class RetryState:
    """What has been tried for one request."""

    tried: set[tuple[str, str]] = field(default_factory=set)
    """Prefill workers from which the KV did not arrive, each with the decode worker where it did not."""
    unheard_ids: set[str] = field(default_factory=set)
    """Decode workers that were not heard any more."""
    num_attempts: int = 1
    """Since the last one that told tokens, itself included."""
    num_tokens: int = 0
    """That were told when an attempt last failed."""

    def may_go_on(self, num_tokens: int) -> bool:
        """After an attempt that left so many tokens told, before it is noted: whether another one may follow."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_attempts = num_tokens, 1
            self.tried.clear()
            self.unheard_ids.clear()
        return self.num_attempts < MAX_ATTEMPTS

    def note(self, placement: Placement, setback: AttemptFailure) -> None:
        """An attempt has failed. A lost decode worker says nothing against the prefill worker."""
        self.num_attempts += 1
        if placement.prefill_id is not None and setback.lost_id != placement.decode_id:
            self.tried.add((placement.prefill_id, placement.decode_id))
        if setback.unheard_id is not None:
            self.unheard_ids.add(setback.unheard_id)


def stood_in(placement: Placement) -> Placement:
    """Of a request that a prefill worker decodes, by a local prefill: the reason says why."""
    what = placement.reason.partition(": ")[0]
    return replace(placement, reason=f"{what}: no decode worker is ready", kind=PlacementKind.LOCAL_NO_DECODE)


def moved(last: Placement, to_id: str, why: str, work: RequestLoad) -> Placement:
    """From the worker that decodes it, which has all of it, to another."""
    reason = f"moved from {last.decode_id} to {to_id}: {why}"
    return Placement(last.decode_id, to_id, reason, work.num_prompt_tokens, PlacementKind.MOVED)


def next_placement(
    trail: RetryState,
    last: Placement,
    setback: AttemptFailure,
    request: RoutingRequest,
    prefill: Candidates,
    decode: Candidates,
    choose: Callable[[RoutingRequest, Candidates, Candidates], Placement],
) -> Placement | None:
    """Among those that are ready. None: no decode worker is, so the request has to wait."""
    present = [d for d in decode if d.worker_id != setback.lost_id]
    if not present:
        return None
    heard = [d for d in present if d.worker_id not in trail.unheard_ids] or present
    by_id = {d.worker_id: d for d in heard}
    kept = by_id.get(last.decode_id) or by_id[choose(request, [], heard).decode_id]
    decode_id = kept.worker_id
    untried = [p for p in prefill if (p.worker_id, decode_id) not in trail.tried and p.worker_id != setback.lost_id]
    after = f"after {setback.reason} on {setback.lost_id or last.computing_id}"
    why = "no other prefill worker" if not untried else "the last attempt"
    if untried and trail.num_attempts < MAX_ATTEMPTS:
        chosen = choose(request, untried, [kept])
        if chosen.prefill_id is not None:
            reason = f"retried {after}: {chosen.prefill_id} -> {decode_id}"
            return replace(chosen, reason=reason, kind=PlacementKind.RETRIED)
        why = "sooner than on another worker"
    return Placement(None, decode_id, f"local prefill on {decode_id} {after}: {why}", kind=PlacementKind.RETRIED)
