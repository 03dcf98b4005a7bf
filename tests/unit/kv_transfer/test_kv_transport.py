"""Pairs over real sockets on 127.0.0.1: what they carry, and what becomes of them when the other side does not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cluster.errors import ConfigError
from kv_transfer import transport
from kv_transfer.transport import RECEIVER, SENDER, GlooPair, TransferFailed, connect_store, serve_store

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[3]
QUICK_S = 5.0  # on a busy machine; what it is held against takes 30 s and more

PEER = """
import sys, torch
from kv_transfer.transport import GlooPair, SENDER, connect_store
pair = GlooPair(connect_store(sys.argv[1], 30), sys.argv[2], SENDER, host="127.0.0.1", timeout_s=30)
print("paired", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def store_address() -> Iterator[str]:
    store, address = serve_store(HOST)
    yield address
    del store


def make_side(address: str, prefix: str, rank: int, timeout_s: float) -> GlooPair:
    return GlooPair(connect_store(address, timeout_s), prefix, rank, host=HOST, timeout_s=timeout_s)


def make_both(address: str, prefix: str, timeout_s: float = 10.0) -> tuple[GlooPair, GlooPair]:
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(make_side, address, prefix, RECEIVER, timeout_s)
        sender = make_side(address, prefix, SENDER, timeout_s)
        return sender, receiver.result()


def test_a_pair_carries_buffers_in_the_order_in_which_they_were_posted(store_address: str) -> None:
    sender, receiver = make_both(store_address, "e1/0-0")
    outgoing = [torch.randn(3, 5), torch.randn(200_000).to(torch.bfloat16), torch.arange(7)]
    landed = [torch.zeros_like(tensor) for tensor in outgoing]
    receives = [receiver.receive(tensor) for tensor in landed]
    sends = [sender.send(tensor) for tensor in outgoing]
    for work in [*sends, *receives]:
        work.wait(5)
    assert all(torch.equal(a, b) for a, b in zip(outgoing, landed, strict=True))
    sender.close()
    receiver.close()


def test_pairs_of_different_epochs_do_not_hear_one_another(store_address: str) -> None:
    first, second = make_both(store_address, "e1/0-0"), make_both(store_address, "e2/0-0")
    landed = torch.zeros(4)
    receive = second[RECEIVER].receive(landed)
    first[SENDER].send(torch.full((4,), 1.0))
    second[SENDER].send(torch.full((4,), 2.0)).wait(5)
    receive.wait(5)
    assert landed.tolist() == [2.0] * 4
    for pair in (*first, *second):
        pair.close()


def test_a_closed_pair_leaves_its_neighbour_alone(store_address: str) -> None:
    first, second = make_both(store_address, "e1/0-0"), make_both(store_address, "e1/0-1")
    for pair in first:
        pair.close()
    landed = torch.zeros(1)
    receive = second[RECEIVER].receive(landed)
    second[SENDER].send(torch.ones(1)).wait(5)
    receive.wait(5)
    assert landed.item() == 1.0
    for pair in second:
        pair.close()


def test_nobody_on_the_other_side_fails_after_the_timeout(store_address: str) -> None:
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="gloo pair e1/0-0 was not made"):
        make_side(store_address, "e1/0-0", SENDER, 0.3)
    assert 0.2 < time.monotonic() - started < 0.3 + QUICK_S


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


@pytest.mark.parametrize("operation", ["send", "receive"])
def test_a_silent_peer_fails_the_operation_after_its_timeout(store_address: str, operation: str) -> None:
    sender, receiver = make_both(store_address, "e1/0-0")
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=f"{operation} on gloo pair e1/0-0 failed: Timed out"):
        (sender.send if operation == "send" else receiver.receive)(torch.zeros(8)).wait(0.2)
    assert 0.15 < time.monotonic() - started < 0.2 + QUICK_S
    sender.close()
    receiver.close()


@pytest.mark.parametrize("closer", ["this side", "the other side"])
def test_closing_wakes_whoever_waits_on_the_pair(store_address: str, closer: str) -> None:
    sender, receiver = make_both(store_address, "e1/0-0")
    work, is_waiting = receiver.receive(torch.zeros(8)), threading.Event()

    def wait() -> float:
        is_waiting.set()
        with pytest.raises(TransferFailed):
            work.wait(30)
        return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        woken = pool.submit(wait)
        assert is_waiting.wait(5)
        closed = time.monotonic()
        (receiver if closer == "this side" else sender).close()
        assert woken.result(10) - closed < QUICK_S
    sender.close()
    receiver.close()


def test_a_closed_pair_says_so_and_may_be_closed_again(store_address: str) -> None:
    sender, receiver = make_both(store_address, "e1/0-0")
    for pair in (sender, receiver, sender):
        pair.close()
    with pytest.raises(TransferFailed, match="gloo pair e1/0-0 is closed"):
        sender.send(torch.zeros(1))
    with pytest.raises(TransferFailed, match="gloo pair e1/0-0 is closed"):
        receiver.receive(torch.zeros(1))


def count_resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_closed_pairs_leave_no_thread_and_no_socket_behind(store_address: str) -> None:
    for pair in make_both(store_address, "warm-up/0-0"):
        pair.close()
    before = count_resources()
    for number in range(5):
        sender, receiver = make_both(store_address, f"e{number}/0-0")
        with pytest.raises(TransferFailed) as caught:
            receiver.receive(torch.zeros(8)).wait(0.01)
        sender.close()
        receiver.close()
        # Neither a failure that is still being looked at nor the closed pair itself keeps a connection.
        assert caught.value.__traceback__ is not None and repr(receiver)
    # The store's own thread drops its ends of the connections in its own time.
    deadline = time.monotonic() + 10
    while any(map(int.__gt__, count_resources(), before)) and time.monotonic() < deadline:
        os.sched_yield()
    assert all(map(int.__le__, count_resources(), before))


def test_a_killed_peer_process_fails_send_and_receive_at_once(store_address: str) -> None:
    command = [sys.executable, "-c", PEER, store_address, "e1/0-0"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        receiver = make_side(store_address, "e1/0-0", RECEIVER, 60)
        assert peer.stdout is not None and peer.stdout.readline() == "paired\n"
        work = receiver.receive(torch.zeros(1000))
        peer.send_signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="receive on gloo pair e1/0-0 failed"):
            work.wait(30)
        with pytest.raises(TransferFailed, match="send on gloo pair e1/0-0 failed"):
            receiver.send(torch.zeros(1000)).wait(30)
        assert time.monotonic() - started < QUICK_S
        assert peer.wait(10) == -signal.SIGKILL
    receiver.close()


def test_a_stopped_peer_process_fails_after_the_timeout(store_address: str) -> None:
    command = [sys.executable, "-c", PEER, store_address, "e1/0-0"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        receiver = make_side(store_address, "e1/0-0", RECEIVER, 60)
        assert peer.stdout is not None and peer.stdout.readline() == "paired\n"
        peer.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="Timed out"):
            receiver.receive(torch.zeros(1000)).wait(0.2)
        receiver.close()
        assert time.monotonic() - started < 0.2 + QUICK_S
        peer.kill()


def test_failures_say_what_failed_without_the_paths_of_the_library(store_address: str) -> None:
    sender, receiver = make_both(store_address, "e1/0-0")
    with pytest.raises(TransferFailed) as caught:
        receiver.receive(torch.zeros(8)).wait(0.01)
    assert "/" not in str(caught.value).replace("e1/0-0", "") and "\n" not in str(caught.value)
    assert caught.value.reason == "TRANSFER_FAILED" and caught.value.grpc_code == "UNAVAILABLE"
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("wanted", "device", "has_nccl", "expected"),
    [
        ("auto", "cpu", True, ("gloo", "the KV cache is in cpu memory")),
        ("auto", "cuda", True, ("nccl", "the KV cache is on a GPU")),
        ("auto", "cuda:1", False, ("gloo", "this build of torch has no NCCL")),
        ("gloo", "cuda", True, ("gloo", "it was asked for")),
        ("nccl", "cuda", True, ("nccl", "it was asked for")),
    ],
)
def test_the_transport_is_chosen_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, has_nccl: bool, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    assert transport.choose_transport(wanted, device) == expected


@pytest.mark.parametrize(
    ("wanted", "device", "message"),
    [
        ("nccl", "cpu", "nccl moves GPU memory, but the device is cpu; use auto or gloo"),
        ("nccl", "cuda", "this build of torch has no NCCL; use auto or gloo"),
        ("rdma", "cuda", "'rdma' is none of auto, gloo, nccl"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, message: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        transport.choose_transport(wanted, device)
