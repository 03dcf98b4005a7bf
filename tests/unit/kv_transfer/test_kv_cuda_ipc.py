"""The GPU ring without a GPU: how memory is made, shared and given back, on a driver of this test's own."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA driver here")
def test_a_machine_without_a_driver_is_told_so() -> None:
    with pytest.raises(TransferFailed, match="the CUDA driver cannot be loaded"):
        CudaDriver()
