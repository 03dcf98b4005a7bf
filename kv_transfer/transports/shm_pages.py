"""The sender's own KV pool, in memory that the receiver maps: a chunk is one copy, from pages to pages, and no slot's.

Slots lie in shared memory too (`shm`), and say in which of the sender's blocks a chunk lies (`kv_transfer.page_lists`).
The receiver's mapping is for reading only. `auto` does not choose it: pages of a memory file are small ones, which
attention reads more slowly than the pages that a CPU worker otherwise has.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import numpy as np
import torch
from torch import Tensor

from cluster.errors import TransferFailed
from kv_transfer.transports.interface import Meeting
from kv_transfer.transports.ring import RingPair, SharedPool, platform_obstacle
from kv_transfer.transports.shm import HostMemory

KIND = "shm_pages"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostPool:
    """A KV pool in a sealed anonymous file (`kv_transfer.transports.interface.PoolMemory`)."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Pages exist once they are written, as in other memory."""
        descriptor = os.memfd_create("baton-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor)
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            raise TransferFailed(f"{num_bytes} bytes of memory cannot be shared: {error.strerror}") from error
        self._descriptor = descriptor
        return torch.frombuffer(memory, dtype=torch.uint8)

    def export(self) -> int:
        if self._descriptor is None:
            raise TransferFailed("this worker's KV pool is not in memory that can be shared")
        return os.dup(self._descriptor)

    def attach(self, descriptor: int, num_bytes: int) -> Tensor:
        """Raises TransferFailed for a descriptor that is not sealed memory of that size."""
        try:
            seals, size = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
            if seals & _SEALS != _SEALS or size != num_bytes:
                raise TransferFailed(f"the other side's pool has {size} bytes, seals {seals}; expected {num_bytes}")
            memory = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransferFailed(f"the other side's pool cannot be mapped: {error.strerror}") from error
        # torch makes no tensors of memory that it cannot write to: it is told nothing, and nobody writes.
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        whole = (ctypes.c_ubyte * num_bytes).from_address(address)
        whole.owner = memory  # type: ignore[attr-defined]
        return torch.frombuffer(whole, dtype=torch.uint8)


def make_pair(meeting: Meeting) -> RingPair:
    """Blocks until the other side is there. Raises TransferFailed."""
    assert meeting.pages is not None
    return RingPair(meeting, HostMemory(), SharedPool(KIND, meeting.pages, meeting.memory or HostPool()))


def new_memory(device: torch.device) -> HostPool:
    """Returns memory for this worker's KV pool."""
    return HostPool()


def obstacle() -> str | None:
    """Why this machine cannot use it, or None."""
    return platform_obstacle()
