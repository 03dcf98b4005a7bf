"""Whole workers' ranks in one process, over real sockets: the numbers arrive where they belong, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from transfer_harness import (
    DIM,
    HEADS,
    HOST,
    HOST_TRANSPORTS,
    LAYERS,
    POISON,
    TP_SIZES,
    Worker,
    chunk,
    make_layout,
    make_truth,
    move,
    open_both,
    open_pair,
)

from cluster.errors import TransferFailed
from kv_transfer.header import HEADER_BYTES
from kv_transfer.layout import LayoutMismatch
from kv_transfer.transfer_engine import TransferEngine

both = pytest.mark.parametrize("transport", HOST_TRANSPORTS)


@both
@pytest.mark.parametrize("block_sizes", [(4, 4), (4, 16), (16, 3)], ids=str)
@pytest.mark.parametrize("receiver_tp", TP_SIZES)
@pytest.mark.parametrize("sender_tp", TP_SIZES)
def test_any_shape_reaches_any_shape_and_no_other_page_is_touched(
    workers: list[Worker],
    store_address: str,
    sender_tp: int,
    receiver_tp: int,
    block_sizes: tuple[int, int],
    transport: str,
) -> None:
    truth = make_truth()
    sender = Worker(make_layout(sender_tp, block_sizes[0]))
    receiver = Worker(make_layout(receiver_tp, block_sizes[1]))
    workers += [sender, receiver]
    sender.load(truth)
    before = [cache.clone() for cache in sender.caches]
    expected = receiver.fill(truth, 5, 43)
    open_both(sender, receiver, "e1", store_address, transport)
    gathered, received = move(sender, receiver, "e1", [(5, 21), (21, 22), (22, 37), (37, 43)])
    for rank, cache in enumerate(receiver.caches):
        assert torch.equal(cache, expected[rank]), f"receiving rank {rank}"
    assert all(torch.equal(cache, old) for cache, old in zip(sender.caches, before, strict=True))
    size = sum(LAYERS * 2 * (43 - 5) * receiver.layout.num_local_heads * DIM * 4 for _ in receiver.engines)
    num_headers = 4 * len(sender.all_routes(receiver.layout))
    # Headers, and up to 8 bytes to round each payload up.
    assert gathered == received and 0 <= received - size - num_headers * HEADER_BYTES < 8 * num_headers


@both
@pytest.mark.parametrize("receiving", [(4, 1), (4, 4), (2, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("sending", [(4, 4), (2, 1)], ids=str)
def test_ranks_that_share_tokens_get_and_send_their_own(
    workers: list[Worker],
    store_address: str,
    sending: tuple[int, int],
    receiving: tuple[int, int],
    transport: str,
) -> None:
    """Ranks, and shares of each block's tokens. Some chunks have no token for some of the routes."""
    (tp_size, shares), (other_size, other_shares) = sending, receiving
    sender = Worker(make_layout(tp_size, 8, heads=1, shares=shares))
    receiver = Worker(make_layout(other_size, 12, heads=1, shares=other_shares))
    workers += [sender, receiver]
    truth = make_truth()[:, :, :, :1]
    sender.load(truth)
    expected = receiver.fill(truth, 5, 43)
    open_both(sender, receiver, "e1", store_address, transport)
    gathered, received = move(sender, receiver, "e1", [(5, 21), (21, 22), (22, 37), (37, 43)])
    for rank, cache in enumerate(receiver.caches):
        assert torch.equal(cache, expected[rank]), f"receiving rank {rank}"
    copies = other_size if other_shares == 1 else 1
    least = copies * LAYERS * 2 * (43 - 5) * DIM * 4
    num_headers = 4 * len(sender.all_routes(receiver.layout))
    assert received == gathered and least < received < least + num_headers * (HEADER_BYTES + 8)


@both
def test_a_range_of_layers_fills_those_and_no_others(workers: list[Worker], store_address: str, transport: str) -> None:
    truth = make_truth()
    sender, receiver = Worker(make_layout(2)), Worker(make_layout(1, 16))
    workers += [sender, receiver]
    sender.load(truth)
    open_both(sender, receiver, "e1", store_address, transport)
    expected = receiver.fill(truth, 3, 19, range(1, 2))
    move(sender, receiver, "e1", [(3, 19, 1, 2)])
    assert torch.equal(receiver.caches[0], expected[0])
    expected = receiver.fill(truth, 3, 35, range(1))
    move(sender, receiver, "e1", [(3, 35, 0, 1)])  # twice the tokens fit where half the layers are sent
    assert torch.equal(receiver.caches[0], expected[0])


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_arrives_bit_for_bit(
    workers: list[Worker], store_address: str, dtype: str, transport: str
) -> None:
    truth = make_truth(dtype)
    sender, receiver = Worker(make_layout(2, dtype=dtype)), Worker(make_layout(1, dtype=dtype))
    workers += [sender, receiver]
    sender.load(truth)
    expected = receiver.fill(truth, 0, 16)
    open_both(sender, receiver, "e1", store_address, transport)
    move(sender, receiver, "e1", [(0, 16)])
    assert torch.equal(receiver.caches[0].view(torch.int16), expected[0].view(torch.int16))


@both
def test_a_receiver_with_a_wider_dtype_gets_the_same_values(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    truth = make_truth("bfloat16")
    sender, receiver = Worker(make_layout(dtype="bfloat16")), Worker(make_layout(2))
    workers += [sender, receiver]
    sender.load(truth)
    expected = receiver.fill(truth.float(), 0, 16)
    open_both(sender, receiver, "e1", store_address, transport)
    move(sender, receiver, "e1", [(0, 16)])
    assert all(torch.equal(a, b) for a, b in zip(receiver.caches, expected, strict=True))


def test_one_worker_sends_to_two_and_receives_from_one_at_the_same_time(
    workers: list[Worker], store_address: str
) -> None:
    truth = make_truth()
    first, second, third = Worker(make_layout(2)), Worker(make_layout(1)), Worker(make_layout(4))
    workers += [first, second, third]
    first.load(truth)
    expected_second, expected_third = second.fill(truth, 0, 16), third.fill(truth, 0, 16)
    open_both(first, second, "e1", store_address, "shm")
    open_both(first, third, "e2", store_address, "gloo")
    open_both(second, first, "e3", store_address, "shm")
    move(first, second, "e1", [(0, 16)])
    move(first, third, "e2", [(0, 16)])
    for cache in first.caches:
        cache.fill_(POISON)
    expected_first = first.fill(truth, 0, 16)
    move(second, first, "e3", [(0, 16)])
    for worker, expected in ((first, expected_first), (second, expected_second), (third, expected_third)):
        assert all(torch.equal(a, b) for a, b in zip(worker.caches, expected, strict=True))


def test_receives_are_posted_ahead_and_land_in_order(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    expected = receiver.fill(make_truth(), 0, 20)
    first, second = chunk("e1", 0, 0, 16, index=1), chunk("e1", 1, 16, 20, index=2)
    landings = [receiver.engine.post_receive(what, receiver.table) for what in (first, second)]
    sizes = [sender.engine.gather(what, sender.table) for what in (first, second)]
    sendings = [sender.engine.send("e1", slot) for slot in (0, 1)]
    assert not receiver.caches[0].ne(POISON).any()  # nothing is written before it is completed
    assert [receiver.engine.complete_receive(landing) for landing in landings] == sizes == [3136, 832]
    assert torch.equal(receiver.caches[0], expected[0])
    for sending in sendings:
        sender.engine.complete_send(sending)


def test_a_gathered_chunk_no_longer_needs_its_pages(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    expected = receiver.fill(make_truth(), 0, 16)
    landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    sender.engine.gather(chunk("e1", 0, 0, 16), sender.table)
    sender.caches[0].fill_(POISON)
    sending = sender.engine.send("e1", 0)
    receiver.engine.complete_receive(landing)
    sender.engine.complete_send(sending)
    assert torch.equal(receiver.caches[0], expected[0])


def test_a_slot_may_be_gathered_into_again_instead_of_being_sent(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    expected = receiver.fill(make_truth(), 16, 20)
    sender.engine.gather(chunk("e1", 0, 0, 16, index=1), sender.table)  # its request was cancelled before the grant
    landing = receiver.engine.post_receive(chunk("e1", 0, 16, 20, index=2), receiver.table)
    sender.engine.gather(chunk("e1", 0, 16, 20, index=2), sender.table)
    sending = sender.engine.send("e1", 0)
    receiver.engine.complete_receive(landing)
    sender.engine.complete_send(sending)
    assert torch.equal(receiver.caches[0], expected[0])


def test_a_sender_that_a_lower_rank_replicates_has_nothing_to_do(workers: list[Worker]) -> None:
    sender = Worker(make_layout(8))
    workers.append(sender)
    idle = sender.engines[1]
    open_pair(idle, sender.spec("e1", "127.0.0.1:1", make_layout(2), is_sender=True))  # meets nobody: needs no store
    assert idle.gather(chunk("e1", 0, 0, 16), sender.table) == 0
    idle.complete_send(idle.send("e1", 0))
    idle.close_pair("e1")


def test_layouts_that_do_not_fit_are_refused_when_the_pair_meets(pair: tuple[Worker, Worker]) -> None:
    sender, _ = pair
    with pytest.raises(LayoutMismatch, match="model is m at the sender and other at the receiver"):
        open_pair(sender.engine, sender.spec("e2", "127.0.0.1:1", make_layout(model="other"), is_sender=True))
    with pytest.raises(LayoutMismatch, match="float16"):
        open_pair(sender.engine, sender.spec("e2", "127.0.0.1:1", make_layout(dtype="float16"), is_sender=True))
    spec = sender.spec("e2", "127.0.0.1:1", make_layout(), is_sender=True)
    spec.agreed.wire_format = "int3"
    with pytest.raises(LayoutMismatch, match="wire_format"):
        open_pair(sender.engine, spec)


def test_a_cache_that_is_not_what_its_layout_says_is_refused() -> None:
    with pytest.raises(ValueError, match="the KV cache is"):
        TransferEngine(torch.zeros(LAYERS, 2, 8, 4, HEADS, DIM), make_layout(tp_size=2), 0, timeout_s=1, host=HOST)


@both
def test_what_the_caller_got_wrong_is_said_and_harms_no_pair(
    workers: list[Worker], store_address: str, transport: str
) -> None:
    sender, receiver = Worker(make_layout()), Worker(make_layout())
    workers += [sender, receiver]
    sender.load(make_truth())
    open_both(sender, receiver, "e1", store_address, transport)
    source, target = sender.engine, receiver.engine
    expected = receiver.fill(make_truth(), 0, 8)
    landing = target.post_receive(chunk("e1", 0, 0, 8), receiver.table)
    with pytest.raises(ValueError, match="slot 0 is posted; wait for it"):
        target.post_receive(chunk("e1", 0, 0, 8), receiver.table)
    with pytest.raises(ValueError, match="need 12 blocks of 4, but the block table has 1"):
        target.post_receive(chunk("e1", 1, 40, 45), [0])
    for slot in (2, -1):
        with pytest.raises(ValueError, match=rf"slot {slot} is outside \[0, 2\)"):
            source.gather(chunk("e1", slot, 0, 8), sender.table)
        with pytest.raises(ValueError, match=rf"slot {slot} is outside \[0, 2\)"):
            source.send("e1", slot)
    with pytest.raises(ValueError, match="a chunk of 34 tokens x layers does not fit a slot of 32"):
        source.gather(chunk("e1", 0, 0, 17), sender.table)
    for layers in ((0, 0), (1, 0)):
        with pytest.raises(ValueError, match="does not fit"):
            source.gather(chunk("e1", 0, 0, 8, layers), sender.table)
    with pytest.raises(ValueError, match="layers"):
        source.gather(chunk("e1", 0, 0, 4, (0, 3)), sender.table)
    with pytest.raises(ValueError, match="pair e1 was opened as the sender"):
        source.post_receive(chunk("e1", 0, 0, 8), sender.table)
    with pytest.raises(ValueError, match="pair e1 is open already"):
        source.add_pair(sender.spec("e1", "127.0.0.1:1", receiver.layout, is_sender=True))
    with pytest.raises(ValueError, match="slot 1 is free; gather it first"):
        source.send("e1", 1)
    source.gather(chunk("e1", 0, 0, 8), sender.table)
    sending = source.send("e1", 0)
    with pytest.raises(ValueError, match="slot 0 is posted; gather it first"):
        source.send("e1", 0)
    with pytest.raises(ValueError, match="slot 0 is being sent"):
        source.gather(chunk("e1", 0, 0, 8), sender.table)
    target.complete_receive(landing)
    source.complete_send(sending)
    with pytest.raises(ValueError, match="completed already"):
        target.complete_receive(landing)
    assert torch.equal(receiver.caches[0], expected[0])


@pytest.mark.parametrize("operation", ["gather", "send", "receive"])
def test_an_epoch_that_is_over_is_dropped_by_identity(pair: tuple[Worker, Worker], operation: str) -> None:
    worker = pair[1 if operation == "receive" else 0]
    worker.engine.close_pair("e1")
    worker.engine.close_pair("e1")
    with pytest.raises(TransferFailed, match="pair e1 cannot be used: it was never opened, or closed"):
        match operation:
            case "send":
                worker.engine.send("e1", 0)
            case "gather":
                worker.engine.gather(chunk("e1", 0, 0, 16), worker.table)
            case "receive":
                worker.engine.post_receive(chunk("e1", 0, 0, 16), worker.table)
