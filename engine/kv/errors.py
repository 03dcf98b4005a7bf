"""Errors of those that count KV blocks."""

from __future__ import annotations

from cluster.errors import BatonError, InternalError


class NoFreeBlocks(BatonError):
    """The pool cannot give that many blocks now; the scheduler waits or preempts."""

    grpc_code = "RESOURCE_EXHAUSTED"
    reason = "NO_FREE_BLOCKS"


class BlockAccountingError(InternalError):
    """An owner did what it may not (released twice, say), or an invariant is broken: a bug, never load."""
