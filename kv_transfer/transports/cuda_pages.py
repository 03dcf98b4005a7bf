"""The sender's own KV pool in GPU memory, which the receiver's GPU maps: a chunk is one copy, from pages to pages.

The pool is made by the driver itself and shared by a file descriptor, as the slots of `cuda_ipc` are, so that memory
which a receiver reads stays while it is mapped, whatever becomes of the sender. Slots lie in host memory (`shm`), and
say in which of the sender's blocks a chunk lies (`kv_transfer.page_lists`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.errors import TransferFailed
from kv_transfer.transports.cuda_ipc import CudaDriver, cuda_driver, device_index
from kv_transfer.transports.interface import Meeting
from kv_transfer.transports.ring import RingPair, SharedPool, platform_obstacle
from kv_transfer.transports.shm import HostMemory

KIND = "cuda_pages"


class DevicePool:
    """A KV pool in memory of a GPU (`kv_transfer.transports.interface.PoolMemory`)."""

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device_index(device)
        self._handle: int | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """The memory is given back at the end of the process."""
        size = self._size(num_bytes)
        handle = self._driver.create(size, self._device)
        try:
            pool = self._driver.tensor_of(handle, size, self._device)
            pool.zero_()
        except BaseException:
            self._driver.release(handle)
            raise
        self._handle = handle
        return pool[:num_bytes]

    def export(self) -> int:
        if self._handle is None:
            raise TransferFailed("this worker's KV pool is not in memory that can be shared")
        return self._driver.export(self._handle)

    def attach(self, descriptor: int, num_bytes: int) -> Tensor:
        handle = self._driver.find(descriptor)
        try:
            return self._driver.tensor_of(handle, self._size(num_bytes), self._device)[:num_bytes]
        finally:
            self._driver.release(handle)

    def _size(self, num_bytes: int) -> int:
        unit = self._driver.granularity(self._device)
        return -(-num_bytes // unit) * unit


def make_pair(meeting: Meeting) -> RingPair:
    """Blocks until the other side is there. Raises TransferFailed."""
    assert meeting.pages is not None
    with torch.cuda.device(meeting.device):
        torch.cuda.synchronize()  # makes the device's context current in this thread
        memory = meeting.memory or DevicePool(cuda_driver(), meeting.device)
        return RingPair(meeting, HostMemory(), SharedPool(KIND, meeting.pages, memory))


def new_memory(device: torch.device) -> DevicePool:
    """Returns memory for this worker's KV pool. Raises TransferFailed."""
    torch.cuda.synchronize(device)
    return DevicePool(cuda_driver(), device)


def obstacle() -> str | None:
    """Why this machine cannot use it, or None."""
    return platform_obstacle()
