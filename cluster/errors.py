"""The exception tree of Baton and what each one means to a caller.

    BatonError
    ├── InvalidRequest        INVALID_ARGUMENT     the client's mistake, field by field
    ├── OutOfRange            OUT_OF_RANGE         well-formed, but larger than the model allows
    ├── NotServed             UNIMPLEMENTED        a field of the contract that is not served yet
    ├── Unauthenticated       UNAUTHENTICATED      no API key came, or none that is known here
    ├── PermissionDenied      PERMISSION_DENIED    the API key does not have the scope
    ├── NotFound              NOT_FOUND            no such model or generation
    ├── FailedPrecondition    FAILED_PRECONDITION  the model cannot do this (no chat template, say)
    │   └── IncompatibleProtocol                   two processes of a cluster speak no common version of its protocol
    ├── Overloaded            RESOURCE_EXHAUSTED   the queue is full; retry after `retry_after_s`
    ├── QuotaExceeded         RESOURCE_EXHAUSTED   the API key has used what it may; violations name the limit
    ├── Unavailable           UNAVAILABLE          a worker was lost or none is ready; retry after `retry_after_s`
    │   └── NotReachable      (clients)            nobody answered at the address: exit code 4
    ├── DeadlineExceeded      DEADLINE_EXCEEDED    the client's deadline passed
    ├── Cancelled             CANCELLED            the client cancelled
    ├── Aborted               ABORTED              another call has resumed the generation
    ├── InternalError         INTERNAL             a fault of ours; carries no detail of the request
    ├── TransferFailed        UNAVAILABLE          KV did not arrive: the peer is gone or silent, or the pair was closed
    │   └── Corrupted         UNAVAILABLE          something arrived, but not what was sent or expected
    ├── ConfigError           (start-up)           cluster.yaml or flags are wrong: exit code 3
    └── CheckpointError       (start-up)           the model folder cannot be served: exit code 3

Messages name the value and the remedy; they never carry a prompt, a path of the server or a stack trace
(start-up errors may name files: the operator reads those). How an error becomes a gRPC status is in `cluster.rpc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.pb.generation_pb2 import Timing


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field of a request: `field` is its path in the .proto, such as `spec.sampling.top_p`."""

    field: str
    description: str


class BatonError(Exception):
    """Base of everything Baton raises on purpose."""

    grpc_code = "INTERNAL"
    reason = "INTERNAL"

    def __init__(
        self, message: str, *, violations: tuple[FieldViolation, ...] = (), retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.timing: Timing | None = None
        """Where the request ran up to here and for how long, if its client asks for that."""


class InvalidRequest(BatonError):
    grpc_code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class OutOfRange(BatonError):
    grpc_code = "OUT_OF_RANGE"
    reason = "OUT_OF_RANGE"


class NotServed(BatonError):
    grpc_code = "UNIMPLEMENTED"
    reason = "NOT_SERVED"


class Unauthenticated(BatonError):
    grpc_code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    grpc_code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class NotFound(BatonError):
    grpc_code = "NOT_FOUND"
    reason = "NOT_FOUND"


class FailedPrecondition(BatonError):
    grpc_code = "FAILED_PRECONDITION"
    reason = "FAILED_PRECONDITION"


class IncompatibleProtocol(FailedPrecondition):
    reason = "INCOMPATIBLE_PROTOCOL"


class Overloaded(BatonError):
    grpc_code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class QuotaExceeded(BatonError):
    """Its violations' fields are `key:ID/LIMIT`."""

    grpc_code = "RESOURCE_EXHAUSTED"
    reason = "QUOTA_EXCEEDED"


class Unavailable(BatonError):
    grpc_code = "UNAVAILABLE"
    reason = "WORKER_LOST"


class NotReachable(Unavailable):
    reason = "NOT_REACHABLE"


class DeadlineExceeded(BatonError):
    grpc_code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    grpc_code = "CANCELLED"
    reason = "CANCELLED"


class Aborted(BatonError):
    grpc_code = "ABORTED"
    reason = "TAKEN_OVER"


class InternalError(BatonError):
    pass


class ConfigError(BatonError):
    reason = "BAD_CONFIG"


class CheckpointError(BatonError):
    reason = "BAD_CHECKPOINT"


class TransferFailed(BatonError):
    """KV could not be moved: the peer is gone, silent for too long, or the pair was closed. Another path may work."""

    grpc_code = "UNAVAILABLE"
    reason = "TRANSFER_FAILED"


class Corrupted(TransferFailed):
    """A slot does not hold the expected chunk, or not as it was sent. No page was written."""

    reason = "TRANSFER_CORRUPTED"
