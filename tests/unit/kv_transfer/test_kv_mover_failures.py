"""The mover when a transfer, a pair or a peer fails: slots, quarantine, who is woken, and what is left."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from mover_harness import (
    HOST_TRANSPORTS,
    PEER,
    POISON,
    QUICK_S,
    ROOT,
    Worker,
    chunk,
    make_layout,
    make_truth,
    move,
    open_both,
)

from kv_transfer.failures import Corrupted, TransferFailed
from kv_transfer.gloo import GlooPair
from kv_transfer.mover import KvMover, Landing

both = pytest.mark.parametrize("transport", HOST_TRANSPORTS)


def make_workers(workers: list[Worker], receiver_timeout_s: float = 10.0, tp_size: int = 1) -> tuple[Worker, Worker]:
    sender, receiver = Worker(make_layout()), Worker(make_layout(tp_size), timeout_s=receiver_timeout_s)
    workers += [sender, receiver]
    sender.load(make_truth())
    return sender, receiver


@contextmanager
def running_peer(receiver: Worker, epoch: str, address: str, transport: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has opened a pair towards the receiver and gathered a chunk for it."""
    command = [sys.executable, "-c", PEER, epoch, address, transport]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        try:
            receiver.mover.open_pair(receiver.spec(epoch, address, make_layout(), is_sender=False, transport=transport))
            assert peer.stdout is not None and peer.stdout.readline() == "open\n"
            yield peer
        finally:
            peer.kill()


class Completing:
    """Completes a landing on a thread of its own."""

    def __init__(self, mover: KvMover, landing: Landing) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._is_waiting = threading.Event()
        self._future = self._pool.submit(self._complete, mover, landing)
        assert self._is_waiting.wait(5)

    def failure(self) -> tuple[TransferFailed, float]:
        """The failure, and when it was raised."""
        try:
            return self._future.result(60)
        finally:
            self._pool.shutdown()

    def _complete(self, mover: KvMover, landing: Landing) -> tuple[TransferFailed, float]:
        self._is_waiting.set()
        with pytest.raises(TransferFailed) as caught:
            mover.complete_receive(landing)
        return caught.value, time.monotonic()


def assert_untouched(worker: Worker) -> None:
    assert not any(cache.ne(POISON).any() for cache in worker.caches)


def assert_nothing_is_held(*workers: Worker) -> None:
    for worker in workers:
        for mover in worker.movers:
            assert (mover.quarantined_bytes, mover.num_quarantined_slots) == (0, 0)


@both
def test_a_failed_transfer_retires_its_pair_and_no_other(
    workers: list[Worker], store_address: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = make_workers(workers, receiver_timeout_s=1.0)
    open_both(sender, receiver, "e1", store_address, transport)
    open_both(sender, receiver, "e2", store_address, transport)
    landing = receiver.mover.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(TransferFailed, match="Timed out"):
        receiver.mover.complete_receive(landing)
    assert 0.9 < time.monotonic() - started < 1.0 + QUICK_S
    assert "pair e1 retired" in caplog.text
    assert_untouched(receiver)
    assert_nothing_is_held(receiver)  # the pair is closed, so nothing can touch the slots any more
    with pytest.raises(TransferFailed, match=f"pair e1 cannot be used: receive on {transport} pair e1/0-0 failed"):
        receiver.mover.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    sender.mover.gather(chunk("e1", 0, 0, 16), sender.table)  # it has not heard of it yet
    with pytest.raises(TransferFailed):
        sender.mover.complete_send(sender.mover.send("e1", 0))
    expected = receiver.fill(make_truth(), 0, 16)
    move(sender, receiver, "e2", [(0, 16)])
    assert torch.equal(receiver.caches[0], expected[0])


@both
def test_a_send_that_nobody_takes_fails_after_the_timeout(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = Worker(make_layout(), timeout_s=0.5), Worker(make_layout())
    workers += [sender, receiver]
    open_both(sender, receiver, "e1", store_address, transport)
    sender.mover.gather(chunk("e1", 0, 0, 16), sender.table)
    sending = sender.mover.send("e1", 0)
    with pytest.raises(TransferFailed, match=f"send on {transport} pair e1/0-0 failed: Timed out"):
        sender.mover.complete_send(sending)
    assert_nothing_is_held(sender)


@both
def test_one_route_that_fails_ends_all_routes_of_the_link(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers, tp_size=2)
    open_both(sender, receiver, "e1", store_address, transport)
    landings = [mover.post_receive(chunk("e1", 0, 0, 16), receiver.table) for mover in receiver.movers]
    second = Completing(receiver.movers[1], landings[1])
    sender.mover.gather(chunk("e1", 0, 0, 16), sender.table)
    receiver.movers[0].close_pair("e1")
    with pytest.raises(TransferFailed):
        sender.mover.complete_send(sender.mover.send("e1", 0))
    second.failure()  # the sender's other route is closed with the first, so its receiver does not wait either
    receiver.close()
    assert_untouched(Worker(receiver.layout, caches=[]))
    assert_nothing_is_held(sender, receiver)


@both
@pytest.mark.parametrize("place", [0, 8, 64, 100, 3135], ids=["magic", "tag", "first", "middle", "last"])
def test_a_damaged_slot_touches_no_page_and_retires_the_pair(
    workers: list[Worker], store_address: str, transport: str, place: int
) -> None:
    sender, receiver = make_workers(workers)
    open_both(sender, receiver, "e1", store_address, transport)
    landing = receiver.mover.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    assert sender.mover.gather(chunk("e1", 0, 0, 16), sender.table) == 3136
    sender.mover._links["e1"]._lanes[0].slots[0][place] ^= 16
    sending = sender.mover.send("e1", 0)
    with pytest.raises(Corrupted):
        receiver.mover.complete_receive(landing)
    assert_untouched(receiver)
    with pytest.raises(TransferFailed, match=r"pair e1 cannot be used: (a|the) slot"):
        receiver.mover.post_receive(chunk("e1", 1, 0, 16), receiver.table)
    if transport == "shm":  # gloo's sender was done when the bytes were on their way
        with pytest.raises(TransferFailed):
            sender.mover.complete_send(sending)


def test_a_chunk_under_another_name_is_corrupt(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    landing = receiver.mover.post_receive(chunk("e1", 0, 0, 16, tag=1 << 63), receiver.table)
    sender.mover.gather(chunk("e1", 0, 0, 16, tag=1 << 62), sender.table)
    sending = sender.mover.send("e1", 0)
    with pytest.raises(Corrupted, match="tag"):
        receiver.mover.complete_receive(landing)
    assert_untouched(receiver)
    with pytest.raises(TransferFailed):
        sender.mover.complete_send(sending)


def test_what_has_landed_has_landed_also_where_the_sender_is_gone_before_it_is_told(
    pair: tuple[Worker, Worker],
) -> None:
    sender, receiver = pair
    expected = receiver.fill(make_truth(), 0, 16)
    landing = receiver.mover.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    sender.mover.gather(chunk("e1", 0, 0, 16), sender.table)
    sender.mover.send("e1", 0)
    sender.mover.close_pair("e1")
    assert receiver.mover.complete_receive(landing) == 3136
    assert torch.equal(receiver.caches[0], expected[0])
    with pytest.raises(TransferFailed, match="pair e1 cannot be used"):
        receiver.mover.post_receive(chunk("e1", 1, 0, 16), receiver.table)


def test_slots_of_a_pair_that_cannot_be_closed_stay_quarantined(
    workers: list[Worker], store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make_workers(workers)
    open_both(sender, receiver, "e1", store_address, "gloo")
    landing = receiver.mover.post_receive(chunk("e1", 1, 0, 16), receiver.table)
    address, close = landing.lanes[0].slots[1].data_ptr(), GlooPair.close

    def cannot_close(pair: GlooPair) -> None:
        close(pair)
        raise TransferFailed("stuck")

    monkeypatch.setattr(GlooPair, "close", cannot_close)
    receiver.mover.close_pair("e1")
    assert receiver.mover.num_quarantined_slots == 1
    assert receiver.mover.quarantined_bytes == 3136
    with pytest.raises(TransferFailed):
        receiver.mover.complete_receive(landing)
    del landing
    gc.collect()
    held = [slot.data_ptr() for slot in receiver.mover._quarantined()]
    assert held == [address]


@both
def test_slots_are_quarantined_until_the_pair_is_closed(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers)
    open_both(sender, receiver, "e1", store_address, transport)
    pair = receiver.mover._links["e1"]._lanes[0].pair
    is_closing, may_close, close = threading.Event(), threading.Event(), pair.close

    def close_slowly() -> None:
        is_closing.set()
        assert may_close.wait(20)
        close()

    pair.close = close_slowly  # type: ignore[method-assign]
    receiver.mover.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(receiver.mover.close_pair, "e1")
        assert is_closing.wait(20)
        assert (receiver.mover.num_quarantined_slots, receiver.mover.quarantined_bytes) == (1, 3136)
        may_close.set()
        closing.result(20)
    assert_nothing_is_held(receiver)


def mapped_rings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


def test_a_retired_link_lets_go_of_its_slots_before_it_is_closed(workers: list[Worker], store_address: str) -> None:
    gc.collect()
    before = mapped_rings()
    sender, receiver = make_workers(workers, receiver_timeout_s=0.1)
    open_both(sender, receiver, "e1", store_address, "shm")
    assert mapped_rings() == before + 2
    with pytest.raises(TransferFailed):
        receiver.mover.complete_receive(receiver.mover.post_receive(chunk("e1", 0, 0, 16), receiver.table))
    gc.collect()
    assert mapped_rings() == before + 1  # the sender's
    sender.mover.close_pair("e1")
    gc.collect()
    assert mapped_rings() == before


@both
def test_closing_a_pair_wakes_the_landing_that_waits_on_it(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers, receiver_timeout_s=60)
    open_both(sender, receiver, "e1", store_address, transport)
    landing = receiver.mover.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    completing = Completing(receiver.mover, landing)
    closed = time.monotonic()
    receiver.mover.close_pair("e1")
    _, woken = completing.failure()
    assert woken - closed < QUICK_S
    assert_untouched(receiver)


@both
def test_a_pair_that_is_closed_while_it_opens_never_opens(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = Worker(make_layout(1)), Worker(make_layout(2), timeout_s=3)
    workers += [sender, receiver]
    first, second = receiver.movers
    incoming = receiver.spec("e1", store_address, sender.layout, is_sender=False, transport=transport)
    outgoing = sender.spec("e1", store_address, receiver.layout, is_sender=True, transport=transport)
    with ThreadPoolExecutor(2) as pool:
        opening = pool.submit(sender.mover.open_pair, outgoing)
        first.open_pair(incoming)
        sender.mover.close_pair("e1")  # its connection to the second rank is still missing
        meeting = pool.submit(second.open_pair, incoming)
        with pytest.raises(TransferFailed, match=r"it was closed|not wanted any more"):
            opening.result(15)
        assert isinstance(meeting.exception(15), TransferFailed | None)
    with pytest.raises(TransferFailed, match="pair e1 cannot be used: it was never opened, or closed"):
        sender.mover.gather(chunk("e1", 0, 0, 16), sender.table)


def test_a_shared_memory_pair_that_is_closed_while_it_waits_for_its_peer_gives_up_at_once(
    workers: list[Worker], store_address: str
) -> None:
    sender = Worker(make_layout(), timeout_s=60)
    workers.append(sender)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(
            sender.mover.open_pair, sender.spec("e1", store_address, sender.layout, is_sender=True, transport="shm")
        )
        while not sender.mover._links:
            os.sched_yield()
        started = time.monotonic()
        sender.mover.close_pair("e1")
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
            worker.mover.open_pair(spec)
        assert time.monotonic() - started < 0.3 + 2 * QUICK_S
    with pytest.raises(TransferFailed, match="it was never opened, or closed"):
        worker.mover.send("e1", 0)


def test_a_stopping_worker_opens_no_pair(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    sender.mover.close()
    with pytest.raises(TransferFailed, match="this worker is stopping"):
        sender.mover.open_pair(sender.spec("e2", "127.0.0.1:1", receiver.layout, is_sender=True))


@both
def test_a_killed_peer_process_fails_the_landing_at_once_and_the_next_pair_succeeds(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers, receiver_timeout_s=60)
    expected = receiver.fill(make_truth(), 0, 16)
    took_s = []
    for number in range(3):  # one of them is not held up by what else the machine does
        with running_peer(receiver, f"e{number}", store_address, transport) as peer:
            landing = receiver.mover.post_receive(chunk(f"e{number}", 0, 0, 16), receiver.table)
            completing = Completing(receiver.mover, landing)
            peer.send_signal(signal.SIGKILL)
            assert peer.stdout is not None and peer.stdout.read() == ""  # its files are closed
            closed = time.monotonic()
            failure, noticed = completing.failure()
            assert f"receive on {transport} pair e{number}/0-0 failed" in failure.message
            took_s.append(noticed - closed)
            assert peer.wait(10) == -signal.SIGKILL
    assert min(took_s) < 0.1
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
        assert peer.stdin is not None and peer.stdout is not None
        receiver.mover._timeout_s = 0.3  # from here on: the peer took longer to start
        landing = receiver.mover.post_receive(chunk("e1", 0, 0, 16), receiver.table)
        peer.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(peer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        with pytest.raises(TransferFailed, match="Timed out"):
            receiver.mover.complete_receive(landing)
        receiver.mover._timeout_s = 10.0
        open_both(sender, receiver, "e2", store_address, transport)
        expected = receiver.fill(make_truth(), 0, 16)
        peer.stdin.write("send\n")
        peer.stdin.flush()
        peer.send_signal(signal.SIGCONT)
        output = peer.stdout.readline()  # "sent", or nothing where posting failed: it has acted either way
        move(sender, receiver, "e2", [(0, 16)])
        assert torch.equal(receiver.caches[0], expected[0])
        assert output in ("sent\n", "")


def interrupt(operation: Callable[[], object]) -> None:
    with pytest.raises(TransferFailed):
        operation()


@both
def test_two_hundred_pairs_leave_no_descriptor_no_thread_and_no_memory(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers)
    expected = receiver.fill(make_truth(), 0, 16)

    def cycle(number: int) -> None:
        epoch = f"{transport}-{number}"
        open_both(sender, receiver, epoch, store_address, transport)
        if number % 4 == 0:
            move(sender, receiver, epoch, [(0, 16)])
        sender.mover.close_pair(epoch)
        if number % 2:
            interrupt(
                lambda: receiver.mover.complete_receive(
                    receiver.mover.post_receive(chunk(epoch, 0, 0, 16), receiver.table)
                )
            )
        receiver.mover.close_pair(epoch)

    def resources() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), mapped_rings()

    for number in range(4):  # what is made once
        cycle(number)
    before = resources()
    for number in range(4, 204):
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
    with caplog.at_level(logging.INFO, logger="kv_transfer.mover"):
        open_both(sender, receiver, "e1", store_address, "gloo")
        sender.mover.close_pair("e1")
    assert "pair e1 opened as sender: 1 gloo connections with m [2 layers" in caplog.text
    assert "pair e1 closed" in caplog.text
