"""Slots in memory that two processes of one host share: an anonymous file, mapped by both, that has no name anywhere.

It lives as long as somebody holds its descriptor or a mapping of it, so it is gone when both processes are, whatever
ended them. It is sealed against being cut short, so that reading it can never fault. All its pages exist before the
pair is made: the first chunk is as fast as the next.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch
from torch import Tensor

from cluster.errors import TransferFailed
from kv_transfer.transports.interface import Meeting
from kv_transfer.transports.ring import RingPair, platform_obstacle

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostMemory:
    """Memory of the host, by memfd."""

    kind = "shm"

    def make(self, meeting: Meeting) -> tuple[list[Tensor], int]:
        """Raises TransferFailed when the host has not so much memory."""
        size = meeting.num_slots * _stride(meeting)
        if size > (free := _available_bytes()):  # the kernel would end processes to find it
            raise TransferFailed(f"{size} bytes of shared memory are wanted, but the host has {free} left")
        descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)  # makes every page, with the GIL released
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return _map(meeting, descriptor), descriptor
        except OSError as error:
            os.close(descriptor)
            raise TransferFailed(f"{size} bytes of memory cannot be shared: {error.strerror}") from error

    def attach(self, meeting: Meeting, descriptor: int) -> list[Tensor]:
        """Raises TransferFailed for a descriptor that is not sealed memory of the right size."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise TransferFailed(f"what the other side shares is no memory: {error.strerror}") from error
        size, expected = os.fstat(descriptor).st_size, meeting.num_slots * _stride(meeting)
        if seals & _SEALS != _SEALS or size != expected:
            raise TransferFailed(f"the other side shares {size} bytes with seals {seals}, expected {expected} sealed")
        return _map(meeting, descriptor)


def make_pair(meeting: Meeting) -> RingPair:
    """Blocks until the other side is there. Raises TransferFailed."""
    return RingPair(meeting, HostMemory())


def obstacle() -> str | None:
    """Why this machine cannot use it, or None."""
    return platform_obstacle()


def _map(meeting: Meeting, descriptor: int) -> list[Tensor]:
    stride = _stride(meeting)
    # The mapping ends with the last tensor that refers to it.
    whole = torch.frombuffer(mmap.mmap(descriptor, meeting.num_slots * stride), dtype=torch.uint8)
    whole[:: mmap.PAGESIZE].sum()  # maps every page, with the GIL released, which MAP_POPULATE would hold
    return [whole[i * stride : i * stride + meeting.slot_bytes] for i in range(meeting.num_slots)]


def _available_bytes() -> int:
    with open("/proc/meminfo") as meminfo:
        return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))


def _stride(meeting: Meeting) -> int:
    return -(-meeting.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
