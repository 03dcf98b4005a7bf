"""The client's error when a worker cannot go on with a request, or the router does not accept it.

One table from a worker's reason to an error of the public contract, and the text of each refusal. Knows no connection
and no state.
"""

from __future__ import annotations

from cluster.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    InternalError,
    InvalidRequest,
    OutOfRange,
    Overloaded,
    Unavailable,
)
from cluster.pb import worker_pb2

RETRY_AFTER_S = 1.0
"""Time in which a lost worker is usually replaced, or a queue moves."""


class WeightsLost(FailedPrecondition):
    """The output began with weights that no worker serves any more."""

    reason = "WEIGHTS_LOST"


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
    """The error for a worker's report. An unknown reason is an internal error, whose text discloses nothing."""
    kind = _KINDS.get(failed.reason, InternalError)
    if kind is InternalError:
        return InternalError(f"worker {worker_id} failed on this request; its log says why")
    retry_after_s = RETRY_AFTER_S if kind in _RETRYABLE else None
    return kind(f"worker {worker_id}: {failed.message}", retry_after_s=retry_after_s)


def router_failed() -> InternalError:
    """After a fault of the router's own, which is logged where it is caught."""
    return InternalError("the router failed on this request; its log says why")


def worker_lost(worker_id: str) -> Unavailable:
    return Unavailable(f"worker {worker_id} was lost while it ran this request", retry_after_s=RETRY_AFTER_S)


def ends_workers(num_workers: int) -> FailedPrecondition:
    what = f"{num_workers} workers ended by themselves while they computed this request, which may be the cause"
    return FailedPrecondition(f"{what}; it is not tried again: change it, or have the workers' logs looked at")


def weights_lost(revision: str) -> WeightsLost:
    what = f"its output began with weights of revision {revision}, and no worker serves these any more"
    return WeightsLost(f"{what}: other weights would go on differently; ask anew")


def worker_stalled(worker_id: str) -> Unavailable:
    return Unavailable(f"worker {worker_id} stalled while it ran this request", retry_after_s=RETRY_AFTER_S)


def given_up(error: BatonError, num_tokens: int) -> BatonError:
    """Adds to an error how many tokens the client has received already."""
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


def queue_full(most: int, retry_after_s: float) -> Overloaded:
    return Overloaded(f"{most} requests are waiting already; try again later", retry_after_s=retry_after_s)


def queue_full_of_tokens(most: int, retry_after_s: float) -> Overloaded:
    what = f"with this request, prompts and outputs of those that wait would be more than {most} tokens"
    return Overloaded(f"{what}; try again later, or lower max_output_tokens", retry_after_s=retry_after_s)


def share_used(retry_after_s: float) -> Overloaded:
    what = "as many requests of this tenant wait as its share of the queue holds"
    return Overloaded(f"{what}; try again later", retry_after_s=retry_after_s)


def larger_than(num_tokens: int, bound: str, most: int) -> OutOfRange:
    what = f"prompt and outputs may take {num_tokens} tokens, and {bound} allows {most}"
    remedy = "shorten the prompt, or lower max_output_tokens or n"
    violation = FieldViolation("spec.stopping.max_output_tokens", f"{what}; {remedy}")
    return OutOfRange(f"{what}; {remedy}", violations=(violation,))


def deadline_too_near(wait_s: float, time_left_s: float, retry_after_s: float) -> DeadlineExceeded:
    what = f"the request would wait {wait_s:.1f} s for a worker, and its deadline is in {time_left_s:.1f} s"
    return DeadlineExceeded(f"{what}; allow more time, or try again later", retry_after_s=retry_after_s)


def would_wait_too_long(wait_s: float, timeout_s: float, retry_after_s: float) -> Overloaded:
    what = f"the request would wait {wait_s:.1f} s for a worker, and may wait {timeout_s:g} s"
    remedy = "try again later, or allow a longer spec.scheduling.queue_timeout"
    return Overloaded(f"{what}; {remedy}", retry_after_s=retry_after_s)


def overloaded(wait_s: float, most_s: float, retry_after_s: float) -> Overloaded:
    what = f"more comes than can be served: the request would wait {wait_s:.1f} s for a worker, more than {most_s:g} s"
    remedy = "try again later, or say with spec.scheduling.queue_timeout how long it may wait"
    return Overloaded(f"{what}; {remedy}", retry_after_s=retry_after_s)


def waited_in_vain(most_s: float, retry_after_s: float) -> Overloaded:
    what = f"more comes than can be served, and the request has waited longer than {most_s:g} s"
    return Overloaded(f"{what}; try again later", retry_after_s=retry_after_s)


def waited_too_long(timeout_s: float, retry_after_s: float) -> Overloaded:
    return Overloaded(
        f"no worker was free within {timeout_s:g} s; try again, or allow a longer spec.scheduling.queue_timeout",
        retry_after_s=retry_after_s,
    )


def no_worker_to_itself(timeout_s: float) -> Unavailable:
    what = "a worker ended while it computed this request, which may be the cause and has to run apart from others"
    return Unavailable(
        f"{what}; no decode worker was free for that within {timeout_s:g} s", retry_after_s=RETRY_AFTER_S
    )


def waited_again_too_long(timeout_s: float) -> Unavailable:
    """Returns the error of a request that has run: it may be resumed."""
    return Unavailable(
        f"the request cannot go on: no worker was free again within {timeout_s:g} s; try again",
        retry_after_s=RETRY_AFTER_S,
    )
