"""Decides where a request goes when an attempt at it has failed. Pure: the ready workers in, a placement out.

    another prefill worker, to the same decode worker, which keeps the KV that has arrived
    -> no prefill worker is left, or it is the last attempt: the decode worker computes what is missing itself
    the decode worker is lost -> another one; none is ready -> back to the head of the queue
    the prefill worker has lost contact with it -> another one, if there is one
    the prefill worker has no blocks and waits for hand-offs itself -> another prefill worker, or the decode worker

The next attempt goes on from the tokens that the last one sent. An attempt that sent any made progress: the count of
attempts starts over, so that a long output survives more lost workers than a short one.

A request in whose step a worker ended by itself (a fatal signal, a failed step) may be the cause: it is a suspect, and
runs next on a worker where no other request may be the cause (`router.routing.lost_workers`). One that ends that worker
as well runs no more; one that goes on for some tokens is cleared.

Knows no connection and no clock; a policy chooses among the workers that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.errors import BatonError
from cluster.pb import worker_pb2
from router.routing.load_tracker import Placement, PlacementKind, RequestLoad

W = TypeVar("W")

MAX_ATTEMPTS = 3
MAX_CRASHES = 2
"""Workers that one request may end: the first among others, the second as the only suspect."""
MAX_CRASHES_IN_ALL = 4
"""The same with those that it was cleared of, and those that ended with several suspects."""
CLEARED_AFTER_TOKENS = 16
"""A suspect that has sent so many tokens since is cleared: what it was computing when the worker ended is behind it."""

_Failed = worker_pb2.Failed
RETRYABLE = frozenset(
    {
        _Failed.REASON_PEER_LOST,
        _Failed.REASON_TRANSFER_FAILED,
        _Failed.REASON_CORRUPT,
        _Failed.REASON_CAPACITY,
        _Failed.REASON_INCOMPATIBLE,
    }
)
"""Failures that another path may avoid: the others would happen again anywhere."""


@dataclass(frozen=True)
class AttemptFailure:
    """Why an attempt ended."""

    reason: str
    """A label for counters: the name of a Failed.Reason, or WORKER_LOST."""
    error: BatonError
    """The client's error when no attempt is left."""
    lost_id: str | None = None
    """The worker that is gone. None: all are there, and only the connection between two failed."""
    unreachable_id: str | None = None
    """The decode worker that the prefill worker cannot reach: it is lost, or the connection to it."""
    is_crash: bool = False
    """The worker ended by itself. `RetryState.on_crash` counts that for the requests which may be the cause; it is no
    failed attempt of anybody's."""


@dataclass
class RetryState:
    """Attempts made for one request."""

    tried: set[tuple[str, str]] = field(default_factory=set)
    """Prefill workers from which the KV did not arrive, each with the decode worker where it did not."""
    unreachable_ids: set[str] = field(default_factory=set)
    """Decode workers that a prefill worker could not reach."""
    num_attempts: int = 1
    """Attempts since the last one that sent tokens, itself included."""
    num_tokens: int = 0
    """Tokens that had come when an attempt last failed."""
    num_crashes: int = 0
    """Workers that ended by themselves in a step with this request, since it was last cleared."""
    num_crashes_in_all: int = 0
    num_tokens_to_clear: int = 0
    """The suspect is cleared once so many tokens have come."""
    failure: AttemptFailure | None = None
    """The last one; None: no attempt has failed here."""

    @property
    def is_suspect(self) -> bool:
        """It may be what ended a worker."""
        return self.num_crashes > 0

    def on_crash(self, num_tokens: int, *, is_only_suspect: bool) -> bool:
        """A worker ended by itself in a step with the request, which had sent `num_tokens`. False: it runs no more."""
        self.num_crashes += 1
        self.num_crashes_in_all += 1
        self.num_tokens_to_clear = num_tokens + CLEARED_AFTER_TOKENS
        is_convicted = is_only_suspect and self.num_crashes >= MAX_CRASHES
        return not is_convicted and self.num_crashes_in_all < MAX_CRASHES_IN_ALL

    def restore(self, num_crashes: int, num_tokens: int) -> None:
        """Takes over what another router knew of a request of which `num_tokens` have come."""
        if num_crashes:
            self.num_crashes, self.num_crashes_in_all = min(num_crashes, MAX_CRASHES - 1), num_crashes
            self.num_tokens_to_clear = num_tokens + CLEARED_AFTER_TOKENS

    def clears(self, num_tokens: int) -> bool:
        """Whether the suspect is cleared now that `num_tokens` have come."""
        if not self.is_suspect or num_tokens < self.num_tokens_to_clear:
            return False
        self.num_crashes = 0
        return True

    def may_retry(self, num_tokens: int) -> bool:
        """Whether another attempt may follow one that has just failed with `num_tokens` there; call it before `add`."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_attempts = num_tokens, 1
            self.tried.clear()
            self.unreachable_ids.clear()
        return self.num_attempts < MAX_ATTEMPTS

    def add(self, placement: Placement, failure: AttemptFailure) -> None:
        """Records a failed attempt. A lost decode worker says nothing against the prefill worker."""
        self.failure = failure
        self.num_attempts += not failure.is_crash
        if placement.prefill_id is not None and failure.lost_id != placement.decode_id:
            self.tried.add((placement.prefill_id, placement.decode_id))
        if failure.unreachable_id is not None:
            self.unreachable_ids.add(failure.unreachable_id)


def alone(worker_id: str) -> Placement:
    """The placement of a suspect, which computes its prompt where it is decoded: it may end one worker, not two."""
    reason = (
        f"local prefill on {worker_id}: a worker ended in a step with this request, which runs beside no unknown one"
    )
    return Placement(None, worker_id, reason, kind=PlacementKind.RETRIED)


def stood_in(placement: Placement) -> Placement:
    """The placement, relabelled as a local prefill on a prefill worker that stands in for a decode worker."""
    what = placement.reason.partition(": ")[0]
    return placement._replace(reason=f"{what}: no decode worker is ready", kind=PlacementKind.LOCAL_NO_DECODE)


def moved(last: Placement, to_id: str, why: str, work: RequestLoad) -> Placement:
    """The placement that moves a request from the worker that decodes it, which has all of its KV, to another."""
    reason = f"moved from {last.decode_id} to {to_id}: {why}"
    return Placement(last.decode_id, to_id, reason, work.num_prompt_tokens, PlacementKind.MOVED)


def next_placement(
    state: RetryState,
    last: Placement,
    failure: AttemptFailure,
    prefill: Mapping[str, W],
    decode: Mapping[str, W],
    choose: Callable[[Sequence[W], Sequence[W]], Placement],
) -> Placement | None:
    """Chooses among the ready workers of each role, given by id, with the policy's `choose(prefill, decode)`.

    None: no decode worker is ready, so the request has to wait.
    """
    present = {i: worker for i, worker in decode.items() if i != failure.lost_id}
    if not present:
        return None
    reachable = {i: worker for i, worker in present.items() if i not in state.unreachable_ids} or present
    decode_id = last.decode_id if last.decode_id in reachable else choose([], list(reachable.values())).decode_id
    untried = [w for i, w in prefill.items() if (i, decode_id) not in state.tried and i != failure.lost_id]
    after = f"after {failure.reason} on {failure.lost_id or last.computing_id}"
    why = "no other prefill worker" if not untried else "the last attempt"
    if untried and state.num_attempts < MAX_ATTEMPTS:
        chosen = choose(untried, [reachable[decode_id]])
        if chosen.prefill_id is not None:
            reason = f"retried {after}: {chosen.prefill_id} -> {decode_id}"
            return chosen._replace(reason=reason, kind=PlacementKind.RETRIED)
        why = "sooner than on another worker"
    return Placement(None, decode_id, f"local prefill on {decode_id} {after}: {why}", kind=PlacementKind.RETRIED)
