"""The transfer engine when a transfer, a pair or a peer fails: slots, quarantine, who is woken, and what is left."""

from __future__ import annotations

import gc
import logging
import threading
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
)

from cluster.errors import Corrupted, TransferFailed
from kv_transfer.transports.gloo import GlooPair
from kv_transfer.transports.interface import TransferWork

both = pytest.mark.parametrize("transport", HOST_TRANSPORTS)


@both
def test_a_failed_transfer_retires_its_pair_and_no_other(
    workers: list[Worker], store_address: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = make_workers(workers, receiver_timeout_s=1.0)
    open_both(sender, receiver, "e1", store_address, transport)
    open_both(sender, receiver, "e2", store_address, transport)
    landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(TransferFailed, match="Timed out"):
        receiver.engine.complete_receive(landing)
    assert 0.9 < time.monotonic() - started < 1.0 + QUICK_S
    assert "pair e1 retired" in caplog.text
    assert_untouched(receiver)
    assert_nothing_is_held(receiver)  # the pair is closed, so nothing can touch the slots any more
    with pytest.raises(TransferFailed, match=f"pair e1 cannot be used: receive on {transport} pair e1/0-0 failed"):
        receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    sender.engine.gather(chunk("e1", 0, 0, 16), sender.table)  # it has not heard of it yet
    with pytest.raises(TransferFailed):
        sender.engine.complete_send(sender.engine.send("e1", 0))
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
    sender.engine.gather(chunk("e1", 0, 0, 16), sender.table)
    sending = sender.engine.send("e1", 0)
    with pytest.raises(TransferFailed, match=f"send on {transport} pair e1/0-0 failed: Timed out"):
        sender.engine.complete_send(sending)
    assert_nothing_is_held(sender)


@both
def test_one_route_that_fails_ends_all_routes_of_the_link(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers, tp_size=2)
    open_both(sender, receiver, "e1", store_address, transport)
    landings = [engine.post_receive(chunk("e1", 0, 0, 16), receiver.table) for engine in receiver.engines]
    waiting = [Completing(engine, landing) for engine, landing in zip(receiver.engines, landings, strict=True)]

    def fail(slot: int, num_bytes: int, after: object = None) -> TransferWork:
        raise TransferFailed(f"no {num_bytes} bytes of slot {slot}")

    sender.engine._pairs["e1"]._routes[0].pair.send = fail  # type: ignore[method-assign]
    sender.engine.gather(chunk("e1", 0, 0, 16), sender.table)
    with pytest.raises(TransferFailed, match="bytes of slot 0"):
        sender.engine.send("e1", 0)
    for completing in waiting:
        completing.failure()  # also on the route that was well
    assert_untouched(receiver)
    assert_nothing_is_held(sender, receiver)


@both
@pytest.mark.parametrize("place", [0, 8, 64, 100, 3135], ids=["magic", "tag", "first", "middle", "last"])
def test_a_damaged_slot_touches_no_page_and_retires_the_pair(
    workers: list[Worker], store_address: str, transport: str, place: int
) -> None:
    sender, receiver = make_workers(workers)
    open_both(sender, receiver, "e1", store_address, transport)
    landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    assert sender.engine.gather(chunk("e1", 0, 0, 16), sender.table) == 3136
    sender.engine._pairs["e1"]._routes[0].slots[0][place] ^= 16
    sending = sender.engine.send("e1", 0)
    with pytest.raises(Corrupted):
        receiver.engine.complete_receive(landing)
    assert_untouched(receiver)
    with pytest.raises(TransferFailed, match=r"pair e1 cannot be used: (a|the) slot"):
        receiver.engine.post_receive(chunk("e1", 1, 0, 16), receiver.table)
    if transport == "shm":  # gloo's sender was done when the bytes were on their way
        with pytest.raises(TransferFailed):
            sender.engine.complete_send(sending)


def test_a_chunk_under_another_name_is_corrupt(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16, index=7), receiver.table)
    sender.engine.gather(chunk("e1", 0, 0, 16, index=6), sender.table)
    sending = sender.engine.send("e1", 0)
    with pytest.raises(Corrupted, match="tag"):
        receiver.engine.complete_receive(landing)
    assert_untouched(receiver)
    with pytest.raises(TransferFailed):
        sender.engine.complete_send(sending)


def test_what_has_landed_has_landed_also_where_the_sender_is_gone_before_it_is_told(
    pair: tuple[Worker, Worker],
) -> None:
    sender, receiver = pair
    expected = receiver.fill(make_truth(), 0, 16)
    landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    sender.engine.gather(chunk("e1", 0, 0, 16), sender.table)
    sender.engine.send("e1", 0)
    sender.engine.close_pair("e1")
    assert receiver.engine.complete_receive(landing) == 3136
    assert torch.equal(receiver.caches[0], expected[0])
    with pytest.raises(TransferFailed, match="pair e1 cannot be used"):
        receiver.engine.post_receive(chunk("e1", 1, 0, 16), receiver.table)


def test_slots_of_a_pair_that_cannot_be_closed_stay_quarantined(
    workers: list[Worker], store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make_workers(workers)
    open_both(sender, receiver, "e1", store_address, "gloo")
    landing = receiver.engine.post_receive(chunk("e1", 1, 0, 16), receiver.table)
    address, close = landing.routes[0].slots[1].data_ptr(), GlooPair.close

    def cannot_close(pair: GlooPair) -> None:
        close(pair)
        raise TransferFailed("stuck")

    monkeypatch.setattr(GlooPair, "close", cannot_close)
    receiver.engine.close_pair("e1")
    assert len(receiver.engine._quarantined()) == 1
    assert receiver.engine.quarantined_bytes == 3136
    with pytest.raises(TransferFailed):
        receiver.engine.complete_receive(landing)
    del landing
    gc.collect()
    held = [slot.data_ptr() for slot in receiver.engine._quarantined()]
    assert held == [address]


@both
def test_slots_are_quarantined_until_the_pair_is_closed(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers)
    open_both(sender, receiver, "e1", store_address, transport)
    pair = receiver.engine._pairs["e1"]._routes[0].pair
    is_closing, may_close, close = threading.Event(), threading.Event(), pair.close

    def close_slowly() -> None:
        is_closing.set()
        assert may_close.wait(20)
        close()

    pair.close = close_slowly  # type: ignore[method-assign]
    receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(receiver.engine.close_pair, "e1")
        assert is_closing.wait(20)
        assert (len(receiver.engine._quarantined()), receiver.engine.quarantined_bytes) == (1, 3136)
        may_close.set()
        closing.result(20)
    assert_nothing_is_held(receiver)


def test_a_retired_link_lets_go_of_its_slots_before_it_is_closed(workers: list[Worker], store_address: str) -> None:
    gc.collect()
    before = mapped_rings()
    sender, receiver = make_workers(workers, receiver_timeout_s=0.1)
    open_both(sender, receiver, "e1", store_address, "shm")
    assert mapped_rings() == before + 2
    with pytest.raises(TransferFailed):
        receiver.engine.complete_receive(receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table))
    gc.collect()
    assert mapped_rings() == before + 1  # the sender's
    sender.engine.close_pair("e1")
    gc.collect()
    assert mapped_rings() == before


@both
def test_closing_a_pair_wakes_the_landing_that_waits_on_it(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = make_workers(workers, receiver_timeout_s=60)
    open_both(sender, receiver, "e1", store_address, transport)
    landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    completing = Completing(receiver.engine, landing)
    closed = time.monotonic()
    receiver.engine.close_pair("e1")
    _, woken = completing.failure()
    assert woken - closed < QUICK_S
    assert_untouched(receiver)
