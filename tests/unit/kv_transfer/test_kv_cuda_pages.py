"""Pools in memory of a GPU that another process maps, by a driver that does the same with memory of the host."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from host_driver import UNIT, HostDriver
from pair_harness import make_meeting

from cluster.errors import TransferFailed
from kv_transfer.transports import cuda_pages
from kv_transfer.transports.cuda_pages import DevicePool, make_pair
from kv_transfer.transports.interface import PoolMemory
from kv_transfer.transports.ring import RingPair

DEVICE = torch.device("cuda:0")
SHAPE = (2, 2, 5, 4, 1, 3)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pages, "device_index", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


@pytest.fixture
def drivers() -> Iterator[tuple[HostDriver, HostDriver]]:
    """The sender's and the receiver's."""
    yield HostDriver(), HostDriver()


def pool_of(driver: HostDriver, num_blocks: int) -> tuple[torch.Tensor, DevicePool]:
    shape, memory = (*SHAPE[:2], num_blocks, *SHAPE[3:]), DevicePool(driver, DEVICE)
    raw = memory.allocate(torch.Size(shape).numel() * 4)
    return raw.view(torch.float32).view(shape), memory


def make_both(
    address: str, sender: tuple[torch.Tensor, PoolMemory], receiver: tuple[torch.Tensor, PoolMemory]
) -> tuple[RingPair, RingPair]:
    def make(is_sender: bool, side: tuple[torch.Tensor, PoolMemory]) -> RingPair:
        meeting = replace(make_meeting(address, "e1/0-0", is_sender, slot_bytes=128), pages=side[0], memory=side[1])
        return make_pair(meeting)

    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(make, True, sender), pool.submit(make, False, receiver)]
        return sides[0].result(20), sides[1].result(20)


def test_the_receiver_sees_the_senders_pool_with_its_own_number_of_blocks(
    store_address: str, drivers: tuple[HostDriver, HostDriver]
) -> None:
    theirs, ours = pool_of(drivers[0], 7), pool_of(drivers[1], 5)
    sender, receiver = make_both(store_address, theirs, ours)
    assert repr(receiver) == "cuda_pages pair e1/0-0"
    assert sender.pages is None and receiver.pages is not None
    assert receiver.pages.shape == theirs[0].shape and not receiver.pages.any()
    theirs[0][1, 1, 6] = 3.0
    assert torch.equal(receiver.pages, theirs[0])
    assert not receiver.slots[0].is_cuda and len(receiver.slots) == 3
    pages = receiver.pages
    sender.close()
    receiver.close()
    gc.collect()
    assert len(drivers[1].mappings) == 2  # the pool, and what somebody still reads
    del pages
    gc.collect()
    assert len(drivers[1].mappings) == 1


def test_a_pool_is_rounded_up_to_what_the_driver_gives_and_shared_as_often_as_it_is_asked_for(
    drivers: tuple[HostDriver, HostDriver],
) -> None:
    pool, memory = pool_of(drivers[0], 5)
    assert pool.numel() * 4 < UNIT and not pool.any()
    descriptors = [memory.export() for _ in range(2)]
    seen = DevicePool(drivers[1], DEVICE).attach(descriptors[1], pool.nbytes)
    assert len(seen) == pool.nbytes
    assert not drivers[1].handles and len(drivers[0].handles) == 1  # the sender's own keeps what is exported
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_pool_that_was_not_made_to_be_shared_cannot_be(drivers: tuple[HostDriver, HostDriver]) -> None:
    with pytest.raises(TransferFailed, match="not in memory that can be shared"):
        DevicePool(drivers[0], DEVICE).export()


@pytest.mark.parametrize("name", ["create", "map", "tensor_at"])
def test_a_pool_that_cannot_be_made_leaves_nothing(name: str) -> None:
    driver = HostDriver(fails_at=name)
    with pytest.raises(TransferFailed, match=f"{name} failed"):
        pool_of(driver, 5)
    gc.collect()
    assert not driver.handles and not driver.mappings


@pytest.mark.parametrize("name", ["find", "map", "tensor_at"])
def test_a_pool_that_cannot_be_mapped_fails_the_pair_on_both_sides(store_address: str, name: str) -> None:
    theirs = pool_of(HostDriver(), 7)
    driver = HostDriver(fails_at=name)
    own = torch.zeros(SHAPE), DevicePool(driver, DEVICE)
    with pytest.raises(TransferFailed, match=f"cuda_pages pair e1/0-0 was not made: {name} failed|went away"):
        make_both(store_address, theirs, own)
    gc.collect()
    assert not driver.handles and not driver.mappings
