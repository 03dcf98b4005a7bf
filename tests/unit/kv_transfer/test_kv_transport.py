"""Pairs over real sockets on 127.0.0.1: what they carry, and what becomes of them when the other side does not."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from contextlib import ExitStack

import pytest
from pair_harness import HOST, HOST_TRANSPORTS, QUICK_S, Waiter, make_both, make_side, put, read, running_peer
from waiting import wait_stopped

from cluster.errors import ConfigError, TransferFailed
from kv_transfer.transports.interface import Pair, StoreClients, connect_store, serve_store

both = pytest.mark.parametrize("transport", HOST_TRANSPORTS)


@both
def test_a_pair_carries_slots_into_the_slots_of_the_same_number(transport: str, store_address: str) -> None:
    sender, receiver = make_both(transport, store_address)
    messages = {slot: random.Random(slot).randbytes(size) for slot, size in ((2, 60_000), (0, 1), (1, 4097))}
    receives = {slot: receiver.receive(slot, len(data)) for slot, data in messages.items()}
    sends = []
    for slot, data in messages.items():
        put(sender, slot, data)
        sends.append(sender.send(slot, len(data)))
    for slot, data in messages.items():
        receives[slot].wait(5)
        assert read(receiver, slot, len(data)) == data
        receiver.release(slot)
    for send in sends:
        send.wait(5)
    sender.close()
    receiver.close()


@both
def test_a_slot_is_used_again_and_again(transport: str, store_address: str) -> None:
    sender, receiver = make_both(transport, store_address)
    for number in range(20):
        data = bytes([number]) * (100 + number)
        receive = receiver.receive(number % 2, len(data))
        put(sender, number % 2, data)
        send = sender.send(number % 2, len(data))
        receive.wait(5)
        assert read(receiver, number % 2, len(data)) == data
        receiver.release(number % 2)
        send.wait(5)
    sender.close()
    receiver.close()


@both
def test_pairs_of_different_epochs_do_not_hear_one_another(transport: str, store_address: str) -> None:
    first = make_both(transport, store_address, "e1/0-0")
    second = make_both(transport, store_address, "e2/0-0")
    receive = second[1].receive(0, 4)
    put(first[0], 0, b"1111")
    put(second[0], 0, b"2222")
    sends = first[0].send(0, 4), second[0].send(0, 4)
    receive.wait(5)
    assert read(second[1], 0, 4) == b"2222"
    second[1].release(0)
    sends[1].wait(5)
    for pair in (*first, *second):
        pair.close()


@both
def test_a_closed_pair_leaves_its_neighbour_alone(transport: str, store_address: str) -> None:
    first = make_both(transport, store_address, "e1/0-0")
    second = make_both(transport, store_address, "e1/0-1")
    for pair in first:
        pair.close()
    receive = second[1].receive(0, 4)
    put(second[0], 0, b"here")
    send = second[0].send(0, 4)
    receive.wait(5)
    second[1].release(0)
    send.wait(5)
    for pair in second:
        pair.close()


@both
@pytest.mark.parametrize("is_sender", [True, False])
def test_nobody_on_the_other_side_fails_after_the_timeout(transport: str, is_sender: bool, store_address: str) -> None:
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=f"{transport} pair e1/0-0 was not made"):
        make_side(transport, store_address, "e1/0-0", is_sender, 0.3)
    assert 0.2 < time.monotonic() - started < 0.3 + QUICK_S


@both
@pytest.mark.parametrize("operation", ["send", "receive"])
def test_a_silent_peer_fails_the_operation_after_its_timeout(
    transport: str, operation: str, store_address: str
) -> None:
    sender, receiver = make_both(transport, store_address)
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=f"{operation} on {transport} pair e1/0-0 failed: Timed out"):
        (sender.send if operation == "send" else receiver.receive)(0, 8).wait(0.2)
    assert 0.15 < time.monotonic() - started < 0.2 + QUICK_S
    sender.close()
    receiver.close()


@both
@pytest.mark.parametrize("closer", ["this side", "the other side"])
@pytest.mark.parametrize("operation", ["send", "receive"])
def test_closing_wakes_whoever_waits_on_the_pair(
    transport: str, operation: str, closer: str, store_address: str
) -> None:
    sender, receiver = make_both(transport, store_address)
    here, there = (sender, receiver) if operation == "send" else (receiver, sender)
    waiter = Waiter(here.send(0, 8) if operation == "send" else here.receive(0, 8), 30)
    closed = time.monotonic()
    (here if closer == "this side" else there).close()
    error, woken = waiter.outcome()
    assert isinstance(error, TransferFailed)
    assert woken - closed < QUICK_S
    sender.close()
    receiver.close()


@both
def test_a_closed_pair_says_so_and_may_be_closed_again(transport: str, store_address: str) -> None:
    sender, receiver = make_both(transport, store_address)
    for pair in (sender, receiver, sender):
        pair.close()
    with pytest.raises(TransferFailed, match=f"{transport} pair e1/0-0 is closed"):
        sender.send(0, 1)
    with pytest.raises(TransferFailed, match=f"{transport} pair e1/0-0 is closed"):
        receiver.receive(0, 1)


def count_resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settle(before: tuple[int, int]) -> tuple[int, int]:
    """The store's own thread drops its ends of the connections in its own time."""
    deadline = time.monotonic() + 10
    while any(map(int.__gt__, count_resources(), before)) and time.monotonic() < deadline:
        os.sched_yield()
    return count_resources()


@both
def test_closed_pairs_leave_no_thread_and_no_descriptor_behind(transport: str, store_address: str) -> None:
    for pair in make_both(transport, store_address, "warm-up/0-0"):
        pair.close()
    before = count_resources()
    sender: Pair
    receiver: Pair
    for number in range(60):
        sender, receiver = make_both(transport, store_address, f"e{number}/0-0")
        if number % 10 == 0:
            with pytest.raises(TransferFailed) as caught:
                receiver.receive(0, 8).wait(0.01)
            # A failure that is still being looked at keeps no connection.
            assert caught.value.__traceback__ is not None
        sender.close()
        receiver.close()
    del sender, receiver
    assert all(map(int.__le__, settle(before), before))


@both
@pytest.mark.parametrize("is_sender", [True, False])
def test_a_pair_that_is_not_made_leaves_nothing_behind(transport: str, is_sender: bool, store_address: str) -> None:
    for pair in make_both(transport, store_address, "warm-up/0-0"):
        pair.close()
    del pair
    before = count_resources()
    for number in range(3):
        with pytest.raises(TransferFailed):
            make_side(transport, store_address, f"e{number}/0-0", is_sender, 0.05)
    assert all(map(int.__le__, settle(before), before))


@both
def test_a_killed_peer_process_is_noticed_within_100_ms_of_its_socket_closing(
    transport: str, store_address: str
) -> None:
    for number in range(5):  # one of them is not held up by what else the machine does
        prefix = f"e{number}/0-0"
        with running_peer(transport, store_address, prefix) as peer:
            receiver = make_side(transport, store_address, prefix, False, 60)
            peer.expect("paired")
            waiter = Waiter(receiver.receive(0, 1000), 30)
            peer.kill()
            closed = peer.closed_at()
            error, woken = waiter.outcome()
            assert isinstance(error, TransferFailed)
            assert f"receive on {transport} pair {prefix} failed" in str(error)
            took_s = woken - closed
            with pytest.raises(TransferFailed):
                receiver.receive(1, 1000).wait(30)
            receiver.close()
            assert peer.process.wait(10) == -signal.SIGKILL
        if took_s < 0.1:
            break
    assert took_s < 0.1


@both
def test_a_send_to_a_killed_process_fails(transport: str, store_address: str) -> None:
    with running_peer(transport, store_address) as peer:
        here = make_side(transport, store_address, "e1/0-0", False, 60)
        peer.expect("paired")
        peer.kill()
        peer.closed_at()
        with pytest.raises(TransferFailed):
            here.receive(0, 8).wait(30)
        with pytest.raises(TransferFailed, match=f"send on {transport} pair e1/0-0 failed"):
            here.send(0, 8).wait(30)
        here.close()


@both
def test_what_was_sent_before_its_sender_died_can_still_land(transport: str, store_address: str) -> None:
    with running_peer(transport, store_address) as peer:
        receiver = make_side(transport, store_address, "e1/0-0", False, 60)
        peer.expect("paired")
        receive = receiver.receive(0, 1000)
        peer.send(1000)
        if transport == "gloo":
            receive.wait(30)  # gloo's bytes are on their way; those of shared memory are there
        peer.kill()
        peer.closed_at()
        if transport == "shm":
            receive.wait(30)
            assert len(read(receiver, 0, 1000)) == 1000  # the memory outlives who made it
        receiver.close()


@both
def test_a_stopped_peer_process_fails_after_the_timeout(transport: str, store_address: str) -> None:
    with running_peer(transport, store_address) as peer:
        receiver = make_side(transport, store_address, "e1/0-0", False, 60)
        peer.expect("paired")
        peer.process.send_signal(signal.SIGSTOP)
        wait_stopped(peer.process.pid)
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="Timed out"):
            receiver.receive(0, 1000).wait(0.2)
        receiver.close()
        assert 0.15 < time.monotonic() - started < 0.2 + QUICK_S


@both
def test_failures_say_what_failed_without_the_paths_of_the_library(transport: str, store_address: str) -> None:
    sender, receiver = make_both(transport, store_address)
    with pytest.raises(TransferFailed) as caught:
        receiver.receive(0, 8).wait(0.01)
    assert "/" not in str(caught.value).replace("e1/0-0", "") and "\n" not in str(caught.value)
    assert caught.value.reason == "TRANSFER_FAILED" and caught.value.grpc_code == "UNAVAILABLE"
    sender.close()
    receiver.close()


def test_a_store_that_is_gone_fails_at_once() -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        address = f"{HOST}:{unused.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(TransferFailed, match=f"the pair store at {address} cannot be reached"):
            connect_store(address, 30)
        assert time.monotonic() - started < QUICK_S


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", "127.0.0.1:http"])
def test_a_store_address_that_is_none_is_a_failure_of_the_transfer(address: str) -> None:
    with pytest.raises(TransferFailed, match="write HOST:PORT"):
        connect_store(address, 1)


def test_a_store_for_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the pair store cannot listen on 192\.0\.2\.1"):
        serve_store("192.0.2.1")


def test_the_store_listens_on_its_own_host_only() -> None:
    store, address = serve_store(HOST)
    port = int(address.rpartition(":")[2])
    socket.create_connection((HOST, port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    del store


def test_a_connection_to_a_store_is_kept_for_the_next_meeting_there(store_address: str) -> None:
    stores = StoreClients(5)
    with stores.client(store_address) as first, stores.client(store_address) as second:
        assert first is not second  # one that waits for a key can do nothing else
        first.set("key", "value")
    with stores.client(store_address) as again:
        assert again is first or again is second
        assert again.get("key") == b"value"
    stores.clear()
    with stores.client(store_address) as fresh:
        assert fresh is not first and fresh is not second


def test_a_connection_whose_meeting_failed_is_not_kept(store_address: str) -> None:
    stores = StoreClients(5)
    with pytest.raises(TransferFailed, match="nobody came"), stores.client(store_address) as broken:
        raise TransferFailed("nobody came")
    with stores.client(store_address) as fresh:
        assert fresh is not broken


def test_a_kept_connection_to_a_store_that_has_gone_is_not_used() -> None:
    stores = StoreClients(5)
    store, address = serve_store(HOST)
    with stores.client(address) as old:
        old.set("key", "value")
    del store
    with pytest.raises(TransferFailed, match="cannot be reached"), stores.client(address):
        raise AssertionError("a store that has gone was used")


def test_no_more_connections_are_kept_than_the_limit(store_address: str) -> None:
    stores = StoreClients(5)
    with ExitStack() as stack:
        for _ in range(StoreClients.MAX_IDLE + 3):
            stack.enter_context(stores.client(store_address))
    assert len(stores._idle) == StoreClients.MAX_IDLE
