"""Injected faults: each does what it says, is counted and logged, and is survived as a real one would be."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import pytest
import torch
from pair_harness import make_both, put, read
from transfer_harness import HOST_TRANSPORTS, POISON, Worker, chunk, make_layout, make_truth, open_both

from cluster.errors import Corrupted, TransferFailed
from kv_transfer import fault_injection
from kv_transfer.fault_injection import RECEIVE_FAULTS, SEND_FAULTS, Faults

both = pytest.mark.parametrize("transport", HOST_TRANSPORTS)


class Chosen(Faults):
    """The faults that a test wants, one for each operation."""

    def __init__(self, *wanted: str | None) -> None:
        super().__init__(1.0, 0)
        self._wanted = list(wanted)

    def draw(self, faults: Sequence[str], where: object) -> str | None:
        fault = self._wanted.pop(0)
        assert fault is None or fault in faults
        if fault is not None:
            self.counts[fault] += 1
        return fault


def test_the_share_of_faults_is_as_set_and_the_same_for_the_same_seed() -> None:
    first, again, other = Faults(0.05, 7), Faults(0.05, 7), Faults(0.05, 8)
    drawn = [first.draw(SEND_FAULTS, "a pair") for _ in range(4000)]
    assert drawn == [again.draw(SEND_FAULTS, "a pair") for _ in range(4000)]
    assert drawn != [other.draw(SEND_FAULTS, "a pair") for _ in range(4000)]
    assert 140 < first.counts.total() < 260
    assert first.counts.total() == sum(fault is not None for fault in drawn)
    assert set(first.counts) == set(SEND_FAULTS)


def test_no_faults_are_drawn_at_rate_zero_and_always_at_one() -> None:
    assert not any(Faults(0.0, 1).draw(RECEIVE_FAULTS, "a pair") for _ in range(100))
    assert all(Faults(1.0, 1).draw(RECEIVE_FAULTS, "a pair") for _ in range(100))
    for rate in (-0.1, 1.1):
        with pytest.raises(ValueError, match="is not between 0 and 1"):
            Faults(rate, 1)


def test_each_fault_is_logged_with_its_pair(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kv_transfer.fault_injection"):
        fault = Faults(1.0, 1).draw(("close",), "shm pair e1/0-0")
    assert fault == "close"
    assert "injected: close on shm pair e1/0-0" in caplog.text


@both
def test_a_corrupted_slot_differs_in_one_bit_behind_the_header(transport: str, store_address: str) -> None:
    sender, receiver = make_both(transport, store_address)
    faulty, data = Chosen("corrupt").wrap(sender), bytes(range(256))
    receive = receiver.receive(0, 256)
    put(sender, 0, data)
    send = faulty.send(0, 256)
    receive.wait(5)
    landed = read(receiver, 0, 256)
    receiver.release(0)
    send.wait(5)
    assert landed[:64] == data[:64]
    assert sum((a ^ b).bit_count() for a, b in zip(landed, data, strict=True)) == 1
    faulty.close()
    receiver.close()


@both
def test_a_failed_operation_posts_nothing(transport: str, store_address: str) -> None:
    sender, receiver = make_both(transport, store_address)
    with pytest.raises(TransferFailed, match=f"send on {transport} pair e1/0-0 failed: injected"):
        Chosen("fail").wrap(sender).send(0, 8)
    with pytest.raises(TransferFailed, match=f"receive on {transport} pair e1/0-0 failed: injected"):
        Chosen("fail").wrap(receiver).receive(0, 8)
    receive = receiver.receive(0, 8)
    with pytest.raises(TransferFailed, match="Timed out"):
        receive.wait(0.05)  # nothing was sent
    sender.close()
    receiver.close()


@both
@pytest.mark.parametrize("operation", ["send", "receive"])
def test_a_pair_that_closes_in_the_middle_fails_both_sides(transport: str, operation: str, store_address: str) -> None:
    sender, receiver = make_both(transport, store_address)
    if operation == "send":
        here, there = Chosen("close").wrap(sender).send(0, 8), None
    else:
        here, there = Chosen("close").wrap(receiver).receive(0, 8), sender
    with pytest.raises(TransferFailed):
        here.wait(10)
    if there is not None:
        with pytest.raises(TransferFailed):
            there.send(0, 8).wait(10)
    sender.close()
    receiver.close()


@both
def test_a_delay_delays_and_no_more(transport: str, store_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faults, "delay_s", lambda self: 0.03)
    sender, receiver = make_both(transport, store_address)
    receive = Chosen("delay").wrap(receiver).receive(0, 8)
    put(sender, 0, b"in time!")
    send = sender.send(0, 8)
    started = time.monotonic()
    receive.wait(10)
    assert time.monotonic() - started >= 0.03
    assert read(receiver, 0, 8) == b"in time!"
    receiver.release(0)
    send.wait(10)
    sender.close()
    receiver.close()


@both
def test_a_transfer_engine_with_faults_finds_corruption_and_retires_the_pair(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    injected = Chosen("corrupt")
    sender, receiver = Worker(make_layout(), faults=injected), Worker(make_layout())
    workers += [sender, receiver]
    sender.load(make_truth())
    open_both(sender, receiver, "e1", store_address, transport)
    landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    sender.engine.gather(chunk("e1", 0, 0, 16), sender.table)
    sending = sender.engine.send("e1", 0)
    with pytest.raises(Corrupted):
        receiver.engine.complete_receive(landing)
    assert injected.counts == {"corrupt": 1}
    assert not receiver.caches[0].ne(POISON).any()
    assert sending.works


@both
def test_under_many_faults_what_is_said_to_have_landed_is_right(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    truth = make_truth()
    source, target = Faults(0.2, 3), Faults(0.2, 4)
    sender = Worker(make_layout(), faults=source, timeout_s=2)
    receiver = Worker(make_layout(), faults=target, timeout_s=2)
    workers += [sender, receiver]
    sender.load(truth)
    expected = receiver.fill(truth, 0, 16)[0]
    landed, failed, epoch = 0, 0, 0
    open_both(sender, receiver, f"e{epoch}", store_address, transport)
    while landed < 60:
        receiver.caches[0].fill_(POISON)
        what = chunk(f"e{epoch}", landed % 2, 0, 16, index=landed)
        try:
            landing = receiver.engine.post_receive(what, receiver.table)
            sender.engine.gather(what, sender.table)
            sending = sender.engine.send(what.epoch, what.slot)
            receiver.engine.complete_receive(landing)
            sender.engine.complete_send(sending)
        except TransferFailed:
            failed += 1
            assert torch.equal(receiver.caches[0], expected) or not receiver.caches[0].ne(POISON).any()
            sender.engine.close_pair(what.epoch)
            receiver.engine.close_pair(what.epoch)
            epoch += 1
            open_both(sender, receiver, f"e{epoch}", store_address, transport)
        else:
            landed += 1
            assert torch.equal(receiver.caches[0], expected)
    made = source.counts + target.counts
    assert set(made) == set(SEND_FAULTS) | set(RECEIVE_FAULTS)
    assert 0 < failed <= made.total() - made["delay"]
    for worker in (sender, receiver):
        assert len(worker.engine._quarantined()) == 0
    assert fault_injection.MAX_DELAY_S < 1
