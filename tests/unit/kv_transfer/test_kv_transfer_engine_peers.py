"""The transfer engine when pairs open and close, and when the peer process is killed, stopped or never comes."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transfer_harness import (
    HOST_TRANSPORTS,
    QUICK_S,
    Completing,
    Worker,
    assert_nothing_is_held,
    assert_untouched,
    chunk,
    make_layout,
    make_truth,
    make_workers,
    mapped_rings,
    move,
    open_both,
    open_pair,
    running_peer,
)
from waiting import wait_stopped

from cluster.errors import TransferFailed

both = pytest.mark.parametrize("transport", HOST_TRANSPORTS)


@both
def test_a_pair_that_is_closed_while_it_opens_never_opens(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = Worker(make_layout(1)), Worker(make_layout(2), timeout_s=3)
    workers += [sender, receiver]
    first, second = receiver.engines
    incoming = receiver.spec("e1", store_address, sender.layout, is_sender=False, transport=transport)
    outgoing = sender.spec("e1", store_address, receiver.layout, is_sender=True, transport=transport)
    with ThreadPoolExecutor(2) as pool:
        opening = pool.submit(open_pair, sender.engine, outgoing)
        open_pair(first, incoming)
        sender.engine.close_pair("e1")  # its connection to the second rank is still missing
        meeting = pool.submit(open_pair, second, incoming)
        with pytest.raises(TransferFailed, match=r"it was closed|not wanted any more"):
            opening.result(15)
        assert isinstance(meeting.exception(15), TransferFailed | None)
    with pytest.raises(TransferFailed, match="pair e1 cannot be used: it was never opened, or closed"):
        sender.engine.gather(chunk("e1", 0, 0, 16), sender.table)


def test_a_shared_memory_pair_that_is_closed_while_it_waits_for_its_peer_gives_up_at_once(
    workers: list[Worker], store_address: str
) -> None:
    sender = Worker(make_layout(), timeout_s=60)
    workers.append(sender)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(
            open_pair, sender.engine, sender.spec("e1", store_address, sender.layout, is_sender=True, transport="shm")
        )
        while not sender.engine._pairs:
            os.sched_yield()
        started = time.monotonic()
        sender.engine.close_pair("e1")
        with pytest.raises(TransferFailed, match=r"not wanted any more|given up"):
            opening.result(30)
        assert time.monotonic() - started < QUICK_S


@both
@pytest.mark.parametrize("is_sender", [True, False])
def test_a_peer_that_never_comes_fails_the_opening_and_leaves_the_epoch_free(
    workers: list[Worker], store_address: str, transport: str, is_sender: bool
) -> None:
    worker = Worker(make_layout(), timeout_s=0.3)
    workers.append(worker)
    spec = worker.spec("e1", store_address, worker.layout, is_sender=is_sender, transport=transport)
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(TransferFailed, match=f"{transport} pair e1/0-0 was not made"):
            open_pair(worker.engine, spec)
        assert time.monotonic() - started < 0.3 + 2 * QUICK_S
    with pytest.raises(TransferFailed, match="it was never opened, or closed"):
        worker.engine.send("e1", 0)


def test_a_stopping_worker_opens_no_pair(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    sender.engine.close()
    with pytest.raises(TransferFailed, match="this worker is stopping"):
        open_pair(sender.engine, sender.spec("e2", "127.0.0.1:1", receiver.layout, is_sender=True))


@both
def test_a_killed_peer_process_fails_the_landing_at_once_and_the_next_pair_succeeds(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers, receiver_timeout_s=60)
    expected = receiver.fill(make_truth(), 0, 16)
    for number in range(5):  # one of them is not held up by what else the machine does
        with running_peer(receiver, f"e{number}", store_address, transport) as peer:
            landing = receiver.engine.post_receive(chunk(f"e{number}", 0, 0, 16), receiver.table)
            completing = Completing(receiver.engine, landing)
            peer.send_signal(signal.SIGKILL)
            assert peer.stdout.read() == ""  # its files are closed
            closed = time.monotonic()
            failure, noticed = completing.failure()
            assert f"receive on {transport} pair e{number}/0-0 failed" in failure.message
            took_s = noticed - closed
            assert peer.wait(10) == -signal.SIGKILL
        if took_s < 0.1:
            break
    assert took_s < 0.1
    assert_untouched(receiver)
    assert_nothing_is_held(receiver)
    open_both(sender, receiver, "again", store_address, transport)
    move(sender, receiver, "again", [(0, 16)])
    assert torch.equal(receiver.caches[0], expected[0])


@both
def test_a_stopped_peer_that_wakes_up_later_harms_nobody(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers)
    with running_peer(receiver, "e1", store_address, transport) as peer:
        receiver.engine._timeout_s = 0.3  # from here on: the peer took longer to start
        landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
        peer.send_signal(signal.SIGSTOP)
        wait_stopped(peer.pid)
        with pytest.raises(TransferFailed, match="Timed out"):
            receiver.engine.complete_receive(landing)
        receiver.engine._timeout_s = 10.0
        open_both(sender, receiver, "e2", store_address, transport)
        expected = receiver.fill(make_truth(), 0, 16)
        peer.stdin.write("send\n")
        peer.stdin.flush()
        peer.send_signal(signal.SIGCONT)
        output = peer.stdout.readline()  # "sent", or nothing where posting failed: it has acted either way
        move(sender, receiver, "e2", [(0, 16)])
        assert torch.equal(receiver.caches[0], expected[0])
        assert output in ("sent\n", "")


@both
def test_a_hundred_pairs_leave_no_descriptor_no_thread_and_no_memory(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers)
    expected = receiver.fill(make_truth(), 0, 16)

    def cycle(number: int) -> None:
        epoch = f"{transport}-{number}"
        open_both(sender, receiver, epoch, store_address, transport)
        if number % 4 == 0:
            move(sender, receiver, epoch, [(0, 16)])
        sender.engine.close_pair(epoch)
        if number % 2:
            with pytest.raises(TransferFailed):
                receiver.engine.complete_receive(receiver.engine.post_receive(chunk(epoch, 0, 0, 16), receiver.table))
        receiver.engine.close_pair(epoch)

    def resources() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), mapped_rings()

    for number in range(4):  # what is made once
        cycle(number)
    before = resources()
    for number in range(4, 104):
        cycle(number)
    deadline = time.monotonic() + 10
    while any(map(int.__gt__, resources(), before)) and time.monotonic() < deadline:
        os.sched_yield()  # gloo's own threads end in their own time
    assert all(map(int.__le__, resources(), before)), (before, resources())
    assert torch.equal(receiver.caches[0], expected[0])


def test_opening_and_closing_are_logged(
    workers: list[Worker], store_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = make_workers(workers)
    with caplog.at_level(logging.INFO, logger="kv_transfer.transfer_engine"):
        open_both(sender, receiver, "e1", store_address, "gloo")
        sender.engine.close_pair("e1")
    assert "pair e1 opened as sender: 1 gloo connections with m [2 layers" in caplog.text
    assert "pair e1 closed" in caplog.text
