"""Makes pairs: which module stands behind which transport."""

from __future__ import annotations

from kv_transfer.failures import TransferFailed
from kv_transfer.transports.cuda_ipc import make_cuda_ipc_pair
from kv_transfer.transports.gloo import GlooPair
from kv_transfer.transports.interface import Meeting, Pair
from kv_transfer.transports.nccl import NcclPair
from kv_transfer.transports.shm import make_shm_pair


def make_pair(transport: str, meeting: Meeting) -> Pair:
    """One side of a pair; returns once the other side is there. Raises TransferFailed."""
    match transport:
        case "shm":
            return make_shm_pair(meeting)
        case "gloo":
            return GlooPair(meeting)
        case "cuda_ipc":
            return make_cuda_ipc_pair(meeting)
        case "nccl":
            return NcclPair(meeting)
    raise TransferFailed(f"transport {transport!r} is none of shm, gloo, cuda_ipc, nccl")
