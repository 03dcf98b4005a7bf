"""Slots in the memory of one GPU that two processes of its host share: the sender's, which the receiver maps.

The memory is made by the driver itself (its virtual memory management) and shared by a file descriptor, so that the
driver counts who still uses it: it is given back when both processes have unmapped it or are gone, in any order, and
neither can find it taken away under a copy. What torch offers for this keeps counts in named files instead, which
outlive a killed process and pin the memory of the other one.

Between two GPUs the receiver reads over NVLink or PCIe; both must be visible to it. The transfer engine orders copies:
a slot is announced when the copy into it has ended, and released when the copy out of it has.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cluster.errors import TransferFailed
from kv_transfer.transports.interface import Meeting, reason_of
from kv_transfer.transports.ring import RingPair, platform_obstacle

logger = logging.getLogger(__name__)

SLOT_ALIGNMENT = 512
_PINNED, _ON_DEVICE, _BY_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class CudaDriver:
    """libcuda, by ctypes. Every method but `unmap` raises TransferFailed.

    torch must have a context of the device current in the calling thread.
    """

    def __init__(self) -> None:
        """Raises TransferFailed where there is no driver."""
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransferFailed(f"the CUDA driver cannot be loaded: {error}") from error

    def granularity(self, device: int) -> int:
        """Sizes of memory are multiples of it."""
        found = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(_properties(device)), 0)
        return found.value

    def create(self, size: int, device: int) -> int:
        """Allocates memory of a GPU; returns its handle."""
        handle = ctypes.c_ulonglong()
        properties = _properties(device)
        size_, flags = ctypes.c_size_t(size), ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), size_, ctypes.byref(properties), flags)
        return handle.value

    def release(self, handle: int) -> None:
        """Frees a handle; the memory stays while it is mapped or another handle refers to it."""
        self._call("cuMemRelease", ctypes.c_ulonglong(handle))

    def export(self, handle: int) -> int:
        """Returns a file descriptor by which another process finds the memory."""
        descriptor = ctypes.c_int(-1)
        what, flags = ctypes.c_ulonglong(handle), ctypes.c_ulonglong(0)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), what, _BY_DESCRIPTOR, flags)
        return descriptor.value

    def find(self, descriptor: int) -> int:
        """Returns a handle of the memory that a descriptor stands for."""
        handle = ctypes.c_ulonglong()
        where = ctypes.c_void_p(descriptor)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), where, _BY_DESCRIPTOR)
        return handle.value

    def map(self, handle: int, size: int, device: int) -> int:
        """Returns the address at which a GPU sees the memory."""
        address, size_ = ctypes.c_ulonglong(), ctypes.c_size_t(size)
        nowhere, at_start, flags = ctypes.c_ulonglong(0), ctypes.c_size_t(0), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size_, at_start, nowhere, flags)
        try:
            self._call("cuMemMap", address, size_, at_start, ctypes.c_ulonglong(handle), flags)
            try:
                access = self._access(handle, device)
                self._call("cuMemSetAccess", address, size_, access, ctypes.c_size_t(len(access)))
            except TransferFailed:
                self._call("cuMemUnmap", address, size_)
                raise
        except TransferFailed:
            self._call("cuMemAddressFree", address, size_)
            raise
        return address.value

    def unmap(self, address: int, size: int, device: int) -> None:
        """Unmaps once the GPU has nothing more to do; failures are logged."""
        try:
            torch.cuda.synchronize(device)
            where, size_ = ctypes.c_ulonglong(address), ctypes.c_size_t(size)
            self._call("cuMemUnmap", where, size_)
            self._call("cuMemAddressFree", where, size_)
        except (TransferFailed, RuntimeError) as error:
            logger.error("%d bytes of shared GPU memory stay mapped: %s", size, reason_of(error))

    def tensor_of(self, handle: int, size: int, device: int) -> Tensor:
        """Returns uint8 [size] that a GPU maps until nothing refers to it any more."""
        mapping = _Mapping(self, self.map(handle, size, device), size, device)
        return self.tensor_at(mapping.address, size, self.owner_of(handle), mapping)

    def tensor_at(self, address: int, size: int, device: int, owner: object) -> Tensor:
        """Returns uint8 [size] at an address of that GPU's memory; it keeps its owner alive.

        Without the device, torch may copy all of it to memory of the host (github.com/pytorch/pytorch/issues/54139).
        """
        try:
            tensor = torch.as_tensor(_Array(address, size, owner), device=torch.device("cuda", device))
        except RuntimeError as error:
            raise TransferFailed(f"torch cannot use shared GPU memory: {reason_of(error)}") from error
        if tensor.data_ptr() != address:
            raise TransferFailed("torch does not see shared GPU memory where it is")
        return tensor

    def owner_of(self, handle: int) -> int:
        """The GPU whose memory it is."""
        found = AllocationProperties()
        self._call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(found), ctypes.c_ulonglong(handle))
        return int(found.location.id)

    def _access(self, handle: int, device: int) -> ctypes.Array[AccessDescription]:
        """Describes access for the GPU that uses the memory and the one that has it: a copy may run on either."""
        users = sorted({device, self.owner_of(handle)})
        descriptions = [AccessDescription(_Location(_ON_DEVICE, user), _READ_WRITE) for user in users]
        return (AccessDescription * len(users))(*descriptions)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise TransferFailed(f"{name} failed: {(text.value or b'error').decode()} ({code})")


class DeviceMemory:
    """Memory of a GPU that another process can map."""

    kind = "cuda_ipc"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def make(self, meeting: Meeting) -> tuple[list[Tensor], int]:
        """Raises TransferFailed."""
        device = device_index(meeting.device)
        handle = self._driver.create(self._size(meeting, device), device)
        try:
            slots = self._map(meeting, handle, device)
            return slots, self._driver.export(handle)
        finally:
            self._driver.release(handle)

    def attach(self, meeting: Meeting, descriptor: int) -> list[Tensor]:
        """Raises TransferFailed."""
        device = device_index(meeting.device)
        handle = self._driver.find(descriptor)
        try:
            return self._map(meeting, handle, device)
        finally:
            self._driver.release(handle)

    def _map(self, meeting: Meeting, handle: int, device: int) -> list[Tensor]:
        size, stride = self._size(meeting, device), _stride(meeting)
        whole = self._driver.tensor_of(handle, size, device)
        return [whole[i * stride : i * stride + meeting.slot_bytes] for i in range(meeting.num_slots)]

    def _size(self, meeting: Meeting, device: int) -> int:
        unit = self._driver.granularity(device)
        return -(-meeting.num_slots * _stride(meeting) // unit) * unit


class _Mapping:
    """Unmaps when nothing refers to it any more; the end of the process needs no help."""

    def __init__(self, driver: CudaDriver, address: int, size: int, device: int) -> None:
        self.address = address
        weakref.finalize(self, driver.unmap, address, size, device).atexit = False


class _Array:
    """Tells torch of memory that it did not make."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def make_pair(meeting: Meeting) -> RingPair:
    """Blocks until the other side is there. Raises TransferFailed."""
    driver = cuda_driver()
    with torch.cuda.device(meeting.device):
        torch.cuda.synchronize()  # makes the device's context current in this thread
        return RingPair(meeting, DeviceMemory(driver))


def obstacle() -> str | None:
    """Why this machine cannot use it, or None."""
    return platform_obstacle()


@cache
def cuda_driver() -> CudaDriver:
    return CudaDriver()


def _properties(device: int) -> AllocationProperties:
    location = _Location(_ON_DEVICE, device)
    return AllocationProperties(type=_PINNED, handle_types=_BY_DESCRIPTOR, location=location)


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _stride(meeting: Meeting) -> int:
    return -(-meeting.slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
