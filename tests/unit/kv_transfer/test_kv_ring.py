"""Shared-memory pairs: the notes of the two sides, what they refuse, and that nothing is left of them."""

from __future__ import annotations

import array
import fcntl
import gc
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from pair_harness import SLOT_BYTES, Waiter, make_both, make_meeting, make_side, put, read, running_peer

from cluster.errors import TransferFailed
from kv_transfer.transports import ring
from kv_transfer.transports.interface import Pair
from kv_transfer.transports.ring import MAGIC, RingPair
from kv_transfer.transports.selection import make_pair
from kv_transfer.transports.shm import HostMemory

HELLO = struct.Struct("<5s11sIIQ")
NOTE = struct.Struct("<BxxxIQ")
MAPPED, FILLED, RELEASED = 1, 2, 3
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory(size: int = 3 * SLOT_BYTES, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def hello(num_slots: int = 3, slot_bytes: int = SLOT_BYTES, kind: bytes = b"shm", magic: bytes = MAGIC) -> bytes:
    return HELLO.pack(magic, kind, num_slots, 0, slot_bytes)


@contextmanager
def fake_sender(address: str, greet: Callable[[socket.socket], object]) -> Iterator[tuple[RingPair, socket.socket]]:
    """A receiver that met a sender which is this test: its socket, to say anything on it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(ring._address(make_meeting(address, "e1/0-0", True)))
        listener.listen(1)
        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(make_side, "shm", address, "e1/0-0", False)
            connection, _ = listener.accept()
            with connection:
                greet(connection)
                pair = making.result(20)
                assert isinstance(pair, RingPair)
                assert NOTE.unpack(connection.recv(100))[0] == MAPPED
                yield pair, connection
                pair.close()


def share(connection: socket.socket) -> None:
    descriptor = make_memory()
    socket.send_fds(connection, [hello()], [descriptor])
    os.close(descriptor)


@contextmanager
def calling(address: str, timeout_s: float = 10.0) -> Iterator[tuple[Future[Pair], socket.socket]]:
    """A sender that is being made, and the connection of whoever was the first to call it."""
    where = make_meeting(address, "e1/0-0", False)
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make_side, "shm", address, "e1/0-0", True, timeout_s)
        with ring._call(where, time.monotonic() + 20) as connection:
            yield making, connection


@contextmanager
def fake_receiver(address: str) -> Iterator[tuple[RingPair, socket.socket]]:
    """A sender that met a receiver which is this test."""
    with calling(address) as (making, connection):
        _, descriptors, _, _ = socket.recv_fds(connection, 100, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(NOTE.pack(MAPPED, 0, 0))
        pair = making.result(20)
        assert isinstance(pair, RingPair)
        yield pair, connection
        pair.close()


def test_a_send_ends_when_its_slot_was_released_and_not_before(store_address: str) -> None:
    sender, receiver = make_both("shm", store_address)
    receive = receiver.receive(1, 10)
    put(sender, 1, b"0123456789")
    send = sender.send(1, 10)
    receive.wait(5)
    with pytest.raises(TransferFailed, match="Timed out"):
        send.wait(0.05)
    assert read(receiver, 1, 10) == b"0123456789"
    receiver.release(1)
    send.wait(5)
    sender.close()
    receiver.close()


def test_several_threads_wait_on_one_pair_and_each_is_woken_for_its_own_slot(store_address: str) -> None:
    sender, receiver = make_both("shm", store_address)
    waiters = [Waiter(receiver.receive(slot, 4), 30) for slot in range(3)]
    for slot in (2, 0, 1):
        send = sender.send(slot, 4)
        assert waiters[slot].outcome()[0] is None
        receiver.release(slot)
        send.wait(5)
    sender.close()
    receiver.close()


def test_a_size_that_was_not_expected_fails_the_receive(store_address: str) -> None:
    sender, receiver = make_both("shm", store_address)
    receive = receiver.receive(0, 10)
    send = sender.send(0, 9)
    with pytest.raises(TransferFailed, match="9 bytes came, 10 were expected"):
        receive.wait(5)
    sender.close()
    receiver.close()
    assert send is not None


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"garbage" * 3,
        secrets.token_bytes(16),
        NOTE.pack(FILLED, 3, 10),
        NOTE.pack(FILLED, 1 << 31, 10),
        NOTE.pack(RELEASED, 0, 0),
        NOTE.pack(MAPPED, 0, 0),
        b"\0" * 5000,
    ],
    ids=["short", "long", "random", "no such slot", "no such slot at all", "not its note", "too late", "huge"],
)
def test_garbage_ends_the_pair_and_not_the_process(store_address: str, packet: bytes) -> None:
    with fake_sender(store_address, share) as (pair, connection):
        receive = pair.receive(0, 10)
        connection.send(packet)
        with pytest.raises(TransferFailed, match=r"receive on shm pair e1/0-0 failed: an? .*note"):
            receive.wait(20)
        with pytest.raises(TransferFailed, match="note"):
            pair.receive(1, 10)


def test_a_slot_that_is_filled_twice_ends_the_pair(store_address: str) -> None:
    with fake_sender(store_address, share) as (pair, connection):
        first, second = pair.receive(0, 10), pair.receive(1, 10)
        connection.send(NOTE.pack(FILLED, 0, 10))
        first.wait(20)
        connection.send(NOTE.pack(FILLED, 0, 10))
        with pytest.raises(TransferFailed, match="an unexpected note came: 2 for slot 0"):
            second.wait(20)


@pytest.mark.parametrize("packet", [NOTE.pack(RELEASED, 1, 0), NOTE.pack(FILLED, 0, 9)], ids=["not sent", "not its"])
def test_a_sender_believes_no_release_that_cannot_be(store_address: str, packet: bytes) -> None:
    with fake_receiver(store_address) as (pair, connection):
        send = pair.send(0, 10)
        assert NOTE.unpack(connection.recv(100)) == (FILLED, 0, 10)
        connection.send(packet)
        with pytest.raises(TransferFailed, match="an unexpected note came"):
            send.wait(20)


def refused(address: str, greet: Callable[[socket.socket], object]) -> str:
    """Why a receiver does not take what a sender shares."""
    with pytest.raises(TransferFailed, match="shm pair e1/0-0 was not made") as caught, fake_sender(address, greet):
        raise AssertionError("it was taken")
    assert not [name for name in open_files() if "memfd:" in name]  # what came with it was closed
    return str(caught.value)


def open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


@pytest.mark.parametrize(
    "packet",
    [hello(num_slots=2), hello(slot_bytes=SLOT_BYTES + 64), hello(kind=b"cuda_ipc"), hello(magic=b"BtRg\2"), b"", b"?"],
    ids=["slots", "size", "kind", "version", "nothing", "garbage"],
)
def test_a_hello_that_is_not_what_was_agreed_on_is_refused(store_address: str, packet: bytes) -> None:
    def greet(connection: socket.socket) -> None:
        descriptor = make_memory()
        if packet:
            socket.send_fds(connection, [packet], [descriptor])
        else:
            connection.shutdown(socket.SHUT_WR)
        os.close(descriptor)

    assert f"something else than 3 shm slots of {SLOT_BYTES} bytes" in refused(store_address, greet)


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_hello_without_its_one_descriptor_is_refused(store_address: str, count: int) -> None:
    def greet(connection: socket.socket) -> None:
        descriptors = [make_memory() for _ in range(count)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if count else []
        connection.sendmsg([hello()], rights)
        for descriptor in descriptors:
            os.close(descriptor)

    assert "something else" in refused(store_address, greet)


def test_memory_that_could_be_cut_short_is_refused(store_address: str) -> None:
    def greet(connection: socket.socket) -> None:
        descriptor = make_memory(seals=fcntl.F_SEAL_GROW)
        socket.send_fds(connection, [hello()], [descriptor])
        os.close(descriptor)

    assert "expected 196608 sealed" in refused(store_address, greet)


@pytest.mark.parametrize("size", [0, 4096, 4 * SLOT_BYTES])
def test_memory_of_another_size_is_refused(store_address: str, size: int) -> None:
    def greet(connection: socket.socket) -> None:
        descriptor = make_memory(size)
        socket.send_fds(connection, [hello()], [descriptor])
        os.close(descriptor)

    assert f"shares {size} bytes" in refused(store_address, greet)


def test_a_descriptor_that_is_no_memory_is_refused(store_address: str) -> None:
    def greet(connection: socket.socket) -> None:
        socket.send_fds(connection, [hello()], [connection.fileno()])

    assert "is no memory" in refused(store_address, greet)


def test_one_who_calls_and_says_nothing_fails_the_meeting_in_time(store_address: str) -> None:
    with (
        calling(store_address, timeout_s=0.3) as (making, _),
        pytest.raises(TransferFailed, match=r"Timed out after 0\.3 s: the other side did not come, or said nothing"),
    ):
        making.result(20)


@pytest.mark.parametrize("answer", [b"", b"?", NOTE.pack(RELEASED, 0, 0)], ids=["gone", "garbage", "not its turn"])
def test_one_who_answers_wrongly_fails_the_meeting(store_address: str, answer: bytes) -> None:
    with calling(store_address) as (making, connection):
        if answer:
            connection.send(answer)
        else:
            connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(TransferFailed, match="shm pair e1/0-0 was not made"):
            making.result(20)


@pytest.mark.parametrize("is_sender", [True, False])
def test_a_meeting_that_nobody_wants_any_more_is_given_up_at_once(store_address: str, is_sender: bool) -> None:
    asked = threading.Event()

    def is_wanted() -> bool:
        asked.set()
        return False

    where = replace(make_meeting(store_address, "e1/0-0", is_sender, 60), is_wanted=is_wanted)
    with pytest.raises(TransferFailed, match="it is not wanted any more"):
        make_pair("shm", where)
    assert asked.is_set()


def mapped_rings(pid: int | str = "self") -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:baton-kv")


def test_memory_is_given_back_when_the_last_slot_is_let_go_of(store_address: str) -> None:
    gc.collect()  # what failed in other tests
    assert mapped_rings() == 0
    sender, receiver = make_both("shm", store_address)
    assert mapped_rings() == 2
    slot = receiver.slots[1]
    sender.close()
    receiver.close()
    gc.collect()
    assert mapped_rings() == 1
    assert slot.sum() == 0  # what somebody still looks at can be looked at
    del slot
    gc.collect()
    assert mapped_rings() == 0


def test_a_ring_has_no_name_that_could_be_left_behind(store_address: str) -> None:
    gc.collect()
    files, name = sorted(os.listdir("/dev/shm")), ring._address(make_meeting(store_address, "e1/0-0", True))[1:]
    with running_peer("shm", store_address) as peer:
        receiver = make_side("shm", store_address, "e1/0-0", False, 60)
        peer.expect("paired")
        assert mapped_rings() == mapped_rings(peer.process.pid) == 1  # the ring is there
        assert sorted(os.listdir("/dev/shm")) == files
        peer.kill()
        peer.closed_at()
        receiver.close()
    del receiver
    gc.collect()
    assert mapped_rings() == 0
    assert name not in Path("/proc/net/unix").read_text()
    assert sorted(os.listdir("/dev/shm")) == files


def test_all_pages_exist_before_the_pair_is_made(store_address: str) -> None:
    gc.collect()
    where = make_meeting(store_address, "e1/0-0", True, num_slots=2, slot_bytes=1 << 20)
    slots, descriptor = HostMemory().make(where)
    assert os.fstat(descriptor).st_blocks * 512 == 2 << 20
    os.close(descriptor)
    lines = Path("/proc/self/smaps").read_text().split("memfd:baton-kv")[1].splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    assert resident == 2 << 10
    assert len(slots) == 2


def test_memory_that_cannot_be_had_fails_the_meeting(store_address: str) -> None:
    where = make_meeting(store_address, "e1/0-0", True, num_slots=1 << 20, slot_bytes=1 << 40)
    with pytest.raises(TransferFailed, match="bytes of shared memory are wanted, but the host has"):
        make_pair("shm", where)
