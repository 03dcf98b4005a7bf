"""What a client is told when a worker cannot go on with a request.

One table from the worker's reason to an error of the public contract. Knows no connection and no state.
"""

from __future__ import annotations

from cluster.errors import (
    BatonError,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from cluster.pb import worker_pb2

RETRY_AFTER_S = 1.0
"""By then a lost worker has been replaced, or a queue has moved."""

_Failed = worker_pb2.Failed
_KINDS: dict[worker_pb2.Failed.Reason, type[BatonError]] = {
    _Failed.REASON_PEER_LOST: Unavailable,
    _Failed.REASON_TRANSFER_FAILED: Unavailable,
    _Failed.REASON_CORRUPT: Unavailable,
    _Failed.REASON_CAPACITY: Overloaded,
    _Failed.REASON_INCOMPATIBLE: FailedPrecondition,
    _Failed.REASON_INVALID: InvalidRequest,
}
_RETRYABLE = (Unavailable, Overloaded)


def error_of(failed: worker_pb2.Failed, worker_id: str) -> BatonError:
    """An unknown reason is an internal error, and an internal error says nothing of the inside."""
    kind = _KINDS.get(failed.reason, InternalError)
    if kind is InternalError:
        return InternalError(f"worker {worker_id} failed on this request; its log says why")
    retry_after_s = RETRY_AFTER_S if kind in _RETRYABLE else None
    return kind(f"worker {worker_id}: {failed.message}", retry_after_s=retry_after_s)


def worker_lost(worker_id: str) -> Unavailable:
    return Unavailable(f"worker {worker_id} was lost while it ran this request", retry_after_s=RETRY_AFTER_S)


def worker_stalled(worker_id: str) -> Unavailable:
    return Unavailable(f"worker {worker_id} stalled while it ran this request", retry_after_s=RETRY_AFTER_S)


def given_up(error: BatonError, num_tokens: int) -> BatonError:
    """The same error for a client that has so many tokens already."""
    if not num_tokens:
        return error
    delivered = f"{num_tokens} output token{'s' if num_tokens > 1 else ''} had been delivered"
    message = f"{error.message}; {delivered}"
    return type(error)(message, violations=error.violations, retry_after_s=error.retry_after_s)


def no_worker() -> Unavailable:
    return Unavailable(
        "no prefill worker and decode worker were ready in time; they may be loading or restarting",
        retry_after_s=RETRY_AFTER_S,
    )


def shutting_down() -> Unavailable:
    return Unavailable("the router is shutting down; try again", retry_after_s=RETRY_AFTER_S)


def queue_full(most: int) -> Overloaded:
    return Overloaded(f"{most} requests are waiting already; try again later", retry_after_s=RETRY_AFTER_S)


def waited_too_long(timeout_s: float) -> Overloaded:
    return Overloaded(
        f"no worker was free within {timeout_s:g} s; try again, or allow a longer spec.scheduling.queue_timeout",
        retry_after_s=RETRY_AFTER_S,
    )
