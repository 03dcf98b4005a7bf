"""The GPU ring without a GPU: how memory is made, shared and given back, on a driver of this test's own."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_driver import HostDriver
from pair_harness import make_meeting, put, read

from cluster.errors import TransferFailed
from kv_transfer.transports import cuda_ipc
from kv_transfer.transports.cuda_ipc import AccessDescription, AllocationProperties, CudaDriver, DeviceMemory
from kv_transfer.transports.ring import RingPair


@pytest.fixture(autouse=True)
def device_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "device_index", lambda device: 0)


def make_both(address: str, sender: HostDriver, receiver: HostDriver) -> tuple[RingPair, RingPair]:
    def make(is_sender: bool, driver: HostDriver) -> RingPair:
        return RingPair(make_meeting(address, "e1/0-0", is_sender), DeviceMemory(driver))

    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(make, True, sender), pool.submit(make, False, receiver)]
        return sides[0].result(20), sides[1].result(20)


def test_what_is_gathered_on_one_side_is_seen_on_the_other(store_address: str) -> None:
    drivers = HostDriver(), HostDriver()
    sender, receiver = make_both(store_address, *drivers)
    receive = receiver.receive(2, 11)
    put(sender, 2, b"hello there")
    send = sender.send(2, 11)
    receive.wait(5)
    assert read(receiver, 2, 11) == b"hello there"
    receiver.release(2)
    send.wait(5)
    assert repr(sender) == "cuda_ipc pair e1/0-0"
    assert not drivers[0].handles and not drivers[1].handles  # the mappings alone keep the memory
    sender.close()
    assert not drivers[0].mappings
    slot = receiver.slots[0]
    receiver.close()
    gc.collect()
    assert drivers[1].mappings  # somebody still reads
    del slot
    gc.collect()
    assert not drivers[1].mappings


@pytest.mark.parametrize("name", ["create", "map", "tensor_at", "export"])
def test_a_sender_whose_driver_fails_keeps_nothing(store_address: str, name: str) -> None:
    driver = HostDriver(fails_at=name)
    with pytest.raises(TransferFailed, match=f"cuda_ipc pair e1/0-0 was not made: {name} failed"):
        RingPair(make_meeting(store_address, "e1/0-0", True), DeviceMemory(driver))
    gc.collect()
    assert not driver.handles and not driver.mappings


@pytest.mark.parametrize("name", ["find", "map", "tensor_at"])
def test_a_receiver_whose_driver_fails_keeps_nothing_and_lets_the_sender_know(store_address: str, name: str) -> None:
    sender, receiver = HostDriver(), HostDriver(fails_at=name)
    with pytest.raises(TransferFailed, match="the other side went away while the pair was made"):
        make_both(store_address, sender, receiver)
    gc.collect()
    assert not receiver.handles and not receiver.mappings
    assert not sender.handles and not sender.mappings


def test_what_is_told_to_the_driver_is_laid_out_as_it_expects() -> None:
    assert ctypes.sizeof(AllocationProperties) == 32
    assert (AllocationProperties.location.offset, AllocationProperties.win32_metadata.offset) == (8, 16)
    assert (AllocationProperties.compression.offset, AllocationProperties.usage.offset) == (24, 26)
    assert ctypes.sizeof(AccessDescription) == 12
    assert AccessDescription.flags.offset == 8


class FakeLibrary:
    """A driver that maps what it is asked for at one address, and notes who may use it."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self.allowed: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0

    def cuMemAddressReserve(self, address: Any, *rest: object) -> int:
        address._obj.value = ADDRESS
        return 0

    def cuMemGetAllocationPropertiesFromHandle(self, found: Any, handle: object) -> int:
        found._obj.location.id = self._owner
        return 0

    def cuMemSetAccess(self, address: object, size: object, access: Any, count: object) -> int:
        self.allowed = [each.location.id for each in access]
        return 0


ADDRESS = 0x7F0000000000


@pytest.mark.parametrize("owner", [0, 1])
def test_torch_is_told_which_gpu_has_the_memory_or_it_would_copy_it(
    owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's is 1."""
    driver, told = CudaDriver.__new__(CudaDriver), []
    driver._library = FakeLibrary(owner)
    monkeypatch.setattr(CudaDriver, "unmap", lambda *arguments: None)

    def as_tensor(array: Any, device: torch.device | None = None) -> SimpleNamespace:
        told.append(device)
        shape, (address, _) = (array.__cuda_array_interface__[name] for name in ("shape", "data"))
        return SimpleNamespace(shape=shape, data_ptr=lambda: address)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    assert driver.tensor_of(7, 1 << 21, device=1).shape == (1 << 21,)
    assert told == [torch.device("cuda", owner)]
    assert driver._library.allowed == sorted({1, owner})


def test_memory_that_torch_refuses_is_a_transfer_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(array: object, device: torch.device) -> None:
        raise RuntimeError("The specified pointer resides on host memory")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    with pytest.raises(TransferFailed, match="torch cannot use shared GPU memory: The specified pointer"):
        CudaDriver.__new__(CudaDriver).tensor_at(ADDRESS, 512, 0, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA driver here")
def test_a_machine_without_a_driver_is_told_so() -> None:
    with pytest.raises(TransferFailed, match="the CUDA driver cannot be loaded"):
        CudaDriver()
