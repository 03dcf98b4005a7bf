"""The errors of moving KV. After either, trying again elsewhere may work.

BatonError
└── TransferFailed   the peer is gone, silent for too long, or the pair was closed
    └── Corrupted    something arrived, but it is not what was sent or not what was expected
"""

from __future__ import annotations

from cluster.errors import BatonError


class TransferFailed(BatonError):
    """KV could not be moved: the peer is gone, silent for too long, or the pair was closed. Another path may work."""

    grpc_code = "UNAVAILABLE"
    reason = "TRANSFER_FAILED"


class Corrupted(TransferFailed):
    """A slot does not hold the expected chunk, or not as it was sent. No page was written."""

    reason = "TRANSFER_CORRUPTED"
