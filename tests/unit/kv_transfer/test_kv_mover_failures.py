"""The mover when a transfer, a pair or a peer fails: slots, quarantine and who is woken."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from mover_harness import PEER, POISON, QUICK_S, ROOT, Worker, make_layout, make_truth, move, open_both

from kv_transfer.mover import KvMover
from kv_transfer.transport import GlooPair, TransferFailed


def buffer_addresses(mover: KvMover, is_sender: bool) -> list[int]:
    return [slot.buffer.data_ptr() for slot in mover._lanes[is_sender].slots]


def test_slots_are_allocated_once(pair: tuple[Worker, Worker], store_address: str) -> None:
    sender, receiver = pair
    before = buffer_addresses(sender.movers[0], True), buffer_addresses(receiver.movers[0], False)
    move(sender, receiver, "e1", [(0, 16), (16, 32), (32, 45)])
    open_both(sender, receiver, "e2", store_address)
    move(sender, receiver, "e2", [(0, 16)])
    assert (buffer_addresses(sender.movers[0], True), buffer_addresses(receiver.movers[0], False)) == before


def test_a_failed_transfer_retires_its_pair_and_replaces_its_slot_and_no_other(
    workers: list[Worker], store_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    truth = make_truth()
    sender, receiver = Worker(make_layout()), Worker(make_layout(), timeout_s=1.0)
    workers += [sender, receiver]
    sender.load(truth)
    open_both(sender, receiver, "e1", store_address)
    open_both(sender, receiver, "e2", store_address)
    target = receiver.movers[0]
    before = buffer_addresses(target, False)
    kept = target._lanes[False].slots[0].buffer  # so that its address cannot be given out again
    with caplog.at_level(logging.WARNING), pytest.raises(TransferFailed, match="Timed out waiting"):
        target.receive("e1", 0, 0, 16, receiver.table)
    assert "pair e1 retired" in caplog.text
    assert not receiver.caches[0].ne(POISON).any()
    after = buffer_addresses(target, False)
    assert kept.data_ptr() == before[0] != after[0] and before[1] == after[1]
    assert target.quarantined_bytes == 0  # the pair is closed, so nothing can touch the old buffer any more
    with pytest.raises(TransferFailed, match="pair e1 cannot be used: receive on gloo pair e1/0-0 failed"):
        target.post_receive("e1", 0, 0, 16, receiver.table)
    with pytest.raises(TransferFailed):
        sender.movers[0].gather("e1", 0, 0, 16, sender.table)
        sender.movers[0].send("e1", 0, 16)
    expected = receiver.fill(truth, 0, 16)
    move(sender, receiver, "e2", [(0, 16)])
    assert torch.equal(receiver.caches[0], expected[0])


def test_buffers_of_a_pair_that_cannot_be_closed_stay_quarantined(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pair[1].movers[0]
    landing = target.post_receive("e1", 1, 0, 16, pair[1].table)
    address, end = landing.buffer.data_ptr(), GlooPair._end

    def cannot_end(pair: GlooPair, group: object) -> None:
        end(pair, group)
        raise TransferFailed("stuck")

    monkeypatch.setattr(GlooPair, "_end", cannot_end)
    target.close_pair("e1")
    assert target.quarantined_bytes == 16 * 192
    with pytest.raises(TransferFailed):
        target.complete_receive(landing)
    del landing
    gc.collect()
    assert any(buffer.data_ptr() == address for buffers in target._quarantine.values() for buffer in buffers)
    assert address not in buffer_addresses(target, False)


def test_closing_a_pair_wakes_the_landing_that_waits_on_it(pair: tuple[Worker, Worker]) -> None:
    receiver = pair[1]
    target, is_waiting = receiver.movers[0], threading.Event()
    landing = target.post_receive("e1", 0, 0, 16, receiver.table)

    def land() -> float:
        is_waiting.set()
        with pytest.raises(TransferFailed):
            target.complete_receive(landing)
        return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        woken = pool.submit(land)
        assert is_waiting.wait(5)
        closed = time.monotonic()
        target.close_pair("e1")
        assert woken.result(10) - closed < QUICK_S
    assert not receiver.caches[0].ne(POISON).any()


def test_a_pair_that_is_closed_while_it_opens_never_opens(workers: list[Worker], store_address: str) -> None:
    sender, receiver = Worker(make_layout(1)), Worker(make_layout(2), timeout_s=3)
    workers += [sender, receiver]
    first, second = receiver.movers
    with ThreadPoolExecutor(2) as pool:
        opening = pool.submit(sender.movers[0].open_pair, "e1", store_address, True, receiver.layout)
        first.open_pair("e1", store_address, False, sender.layout)
        sender.movers[0].close_pair("e1")  # its connection to the second rank is still missing
        meeting = pool.submit(second.open_pair, "e1", store_address, False, sender.layout)
        with pytest.raises(TransferFailed, match="pair e1 was given up while it opened: it was closed"):
            opening.result(15)
        assert isinstance(meeting.exception(15), TransferFailed | None)
    with pytest.raises(TransferFailed, match="pair e1 cannot be used: it was never opened, or closed"):
        sender.movers[0].gather("e1", 0, 0, 16, sender.table)


def test_a_peer_that_never_comes_fails_the_opening_and_leaves_the_epoch_free(
    workers: list[Worker], store_address: str
) -> None:
    sender, receiver = Worker(make_layout(), timeout_s=0.3), Worker(make_layout())
    workers += [sender, receiver]
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="gloo pair e1/0-0 was not made"):
        sender.movers[0].open_pair("e1", store_address, True, receiver.layout)
    assert time.monotonic() - started < 0.3 + QUICK_S
    with pytest.raises(TransferFailed, match="it was never opened, or closed"):
        sender.movers[0].gather("e1", 0, 0, 16, sender.table)


def test_a_stopping_worker_opens_no_pair(pair: tuple[Worker, Worker]) -> None:
    mover = pair[0].movers[0]
    mover.close()
    with pytest.raises(TransferFailed, match="this worker is stopping"):
        mover.open_pair("e2", "127.0.0.1:1", True, pair[1].layout)


def test_a_killed_peer_process_fails_the_transfer_at_once_and_the_next_one_succeeds(
    workers: list[Worker], store_address: str
) -> None:
    receiver, sender = Worker(make_layout(), timeout_s=60), Worker(make_layout())
    workers += [receiver, sender]
    sender.load(make_truth())
    expected, target = receiver.fill(make_truth(), 0, 16), receiver.movers[0]
    command = [sys.executable, "-c", PEER, "e1", store_address]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        target.open_pair("e1", store_address, False, sender.layout)
        assert peer.stdout is not None and peer.stdout.readline() == "open\n"
        landing = target.post_receive("e1", 0, 0, 16, receiver.table)
        peer.send_signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="receive on gloo pair e1/0-0 failed"):
            target.complete_receive(landing)
        assert time.monotonic() - started < QUICK_S
        assert peer.wait(10) == -signal.SIGKILL
    assert not receiver.caches[0].ne(POISON).any()
    open_both(sender, receiver, "e2", store_address)
    move(sender, receiver, "e2", [(0, 16)])
    assert torch.equal(receiver.caches[0], expected[0])


def test_opening_and_closing_are_logged(
    workers: list[Worker], store_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = Worker(make_layout()), Worker(make_layout())
    workers += [sender, receiver]
    with caplog.at_level(logging.INFO, logger="kv_transfer.mover"):
        open_both(sender, receiver, "e1", store_address)
        sender.movers[0].close_pair("e1")
    assert "pair e1 opened as sender: 1 gloo connections with m [2 layers" in caplog.text
    assert "pair e1 closed" in caplog.text
