"""A CUDA driver whose GPU is memory of the host."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from cluster.errors import TransferFailed
from kv_transfer.transports.cuda_ipc import CudaDriver

UNIT = 1 << 16


class HostDriver(CudaDriver):
    """Does with memory of the host what the CUDA driver does with that of a GPU, and counts who uses it."""

    def __init__(self, fails_at: str = "") -> None:
        self.handles: dict[int, int] = {}  # handle -> descriptor
        self.mappings: dict[int, mmap.mmap] = {}
        self._fails_at = fails_at
        self._next = 1

    def granularity(self, device: int) -> int:
        return UNIT

    def create(self, size: int, device: int) -> int:
        self._may_fail("create")
        assert size % UNIT == 0 and device == 0
        descriptor = os.memfd_create("gpu")
        os.ftruncate(descriptor, size)
        return self._new_handle(descriptor)

    def release(self, handle: int) -> None:
        os.close(self.handles.pop(handle))

    def export(self, handle: int) -> int:
        self._may_fail("export")
        return os.dup(self.handles[handle])

    def find(self, descriptor: int) -> int:
        self._may_fail("find")
        return self._new_handle(os.dup(descriptor))

    def map(self, handle: int, size: int, device: int) -> int:
        self._may_fail("map")
        mapping = mmap.mmap(self.handles[handle], size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.mappings[address] = mapping
        return address

    def unmap(self, address: int, size: int, device: int) -> None:
        del self.mappings[address]

    def owner_of(self, handle: int) -> int:
        return 0

    def tensor_at(self, address: int, size: int, device: int, owner: object) -> torch.Tensor:
        self._may_fail("tensor_at")
        memory = (ctypes.c_ubyte * size).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _new_handle(self, descriptor: int) -> int:
        self._next += 1
        self.handles[self._next] = descriptor
        return self._next

    def _may_fail(self, name: str) -> None:
        if name == self._fails_at:
            raise TransferFailed(f"{name} failed")
