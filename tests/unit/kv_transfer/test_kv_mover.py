"""Whole workers' ranks in one process, over real sockets: the numbers arrive where they belong, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from mover_harness import DIM, HEADS, HOST, LAYERS, POISON, TP_SIZES, Worker, make_layout, make_truth, move, open_both

from kv_transfer.layout import LayoutMismatch
from kv_transfer.mover import KvMover
from kv_transfer.transport import TransferFailed


@pytest.mark.parametrize("block_sizes", [(4, 4), (4, 16), (16, 3)], ids=str)
@pytest.mark.parametrize("receiver_tp", TP_SIZES)
@pytest.mark.parametrize("sender_tp", TP_SIZES)
def test_any_shape_reaches_any_shape_and_no_other_page_is_touched(
    workers: list[Worker], store_address: str, sender_tp: int, receiver_tp: int, block_sizes: tuple[int, int]
) -> None:
    truth = make_truth()
    sender = Worker(make_layout(sender_tp, block_sizes[0]))
    receiver = Worker(make_layout(receiver_tp, block_sizes[1]))
    workers += [sender, receiver]
    sender.load(truth)
    before = [cache.clone() for cache in sender.caches]
    expected = receiver.fill(truth, 5, 43)
    open_both(sender, receiver, "e1", store_address)
    gathered, received = move(sender, receiver, "e1", [(5, 21), (21, 22), (22, 37), (37, 43)])
    for rank, cache in enumerate(receiver.caches):
        assert torch.equal(cache, expected[rank]), f"receiving rank {rank}"
    assert all(torch.equal(cache, old) for cache, old in zip(sender.caches, before, strict=True))
    size = sum(LAYERS * 2 * (43 - 5) * receiver.layout.num_local_heads * DIM * 4 for _ in receiver.movers)
    assert gathered == received == size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_arrives_bit_for_bit(workers: list[Worker], store_address: str, dtype: str) -> None:
    truth = make_truth(dtype)
    sender, receiver = Worker(make_layout(2, dtype=dtype)), Worker(make_layout(1, dtype=dtype))
    workers += [sender, receiver]
    sender.load(truth)
    expected = receiver.fill(truth, 0, 16)
    open_both(sender, receiver, "e1", store_address)
    move(sender, receiver, "e1", [(0, 16)])
    assert torch.equal(receiver.caches[0].view(torch.int16), expected[0].view(torch.int16))


def test_one_worker_sends_to_two_and_receives_from_one_at_the_same_time(
    workers: list[Worker], store_address: str
) -> None:
    truth = make_truth()
    first, second, third = Worker(make_layout(2)), Worker(make_layout(1)), Worker(make_layout(4))
    workers += [first, second, third]
    first.load(truth)
    expected_second, expected_third = second.fill(truth, 0, 16), third.fill(truth, 0, 16)
    open_both(first, second, "e1", store_address)
    open_both(first, third, "e2", store_address)
    open_both(second, first, "e3", store_address)
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
    (source,), (target,) = sender.movers, receiver.movers
    landings = [
        target.post_receive("e1", 0, 0, 16, receiver.table),
        target.post_receive("e1", 1, 16, 20, receiver.table),
    ]
    source.gather("e1", 0, 0, 16, sender.table)
    source.gather("e1", 1, 16, 20, sender.table)
    source.send("e1", 0, 16)
    source.send("e1", 1, 4)
    assert not receiver.caches[0].ne(POISON).any()  # nothing is written before it is completed
    assert [target.complete_receive(landing) for landing in landings] == [16 * 192, 4 * 192]
    assert torch.equal(receiver.caches[0], expected[0])


def test_a_gathered_chunk_no_longer_needs_its_pages(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    expected = receiver.fill(make_truth(), 0, 16)
    landing = receiver.movers[0].post_receive("e1", 0, 0, 16, receiver.table)
    sender.movers[0].gather("e1", 0, 0, 16, sender.table)
    sender.caches[0].fill_(POISON)
    sender.movers[0].send("e1", 0, 16)
    receiver.movers[0].complete_receive(landing)
    assert torch.equal(receiver.caches[0], expected[0])


def test_a_sender_that_a_lower_rank_replicates_has_nothing_to_do(workers: list[Worker]) -> None:
    sender = Worker(make_layout(8))
    workers.append(sender)
    idle = sender.movers[1]
    idle.open_pair("e1", "127.0.0.1:1", True, make_layout(2))  # meets nobody, so it needs no store
    assert idle.gather("e1", 0, 0, 16, sender.table) == 0
    idle.send("e1", 0, 16)
    idle.close_pair("e1")


def test_layouts_that_do_not_fit_are_refused_when_the_pair_meets(pair: tuple[Worker, Worker]) -> None:
    sender, _ = pair
    with pytest.raises(LayoutMismatch, match="model is m at the sender and other at the receiver"):
        sender.movers[0].open_pair("e2", "127.0.0.1:1", True, make_layout(model="other"))
    with pytest.raises(LayoutMismatch, match="dtype is bfloat16 at the sender and float32 at the receiver"):
        sender.movers[0].open_pair("e2", "127.0.0.1:1", False, make_layout(dtype="bfloat16"))


def test_a_cache_that_is_not_what_its_layout_says_is_refused() -> None:
    with pytest.raises(ValueError, match="the KV cache is"):
        KvMover(
            torch.zeros(LAYERS, 2, 8, 4, HEADS, DIM),
            make_layout(tp_size=2),
            0,
            num_slots=1,
            chunk_tokens=4,
            timeout_s=1,
            transport="gloo",
            host=HOST,
        )


def test_what_the_caller_got_wrong_is_said_and_harms_no_pair(pair: tuple[Worker, Worker]) -> None:
    sender, receiver = pair
    (source,), (target,) = sender.movers, receiver.movers
    expected = receiver.fill(make_truth(), 0, 8)
    landing = target.post_receive("e1", 0, 0, 8, receiver.table)
    with pytest.raises(ValueError, match="slot 0 has operations posted on it"):
        target.post_receive("e1", 0, 0, 8, receiver.table)
    with pytest.raises(ValueError, match="need 12 blocks of 4, but the block table has 1"):
        target.post_receive("e1", 1, 40, 45, [0])
    with pytest.raises(ValueError, match=r"slot 2 is outside \[0, 2\)"):
        source.gather("e1", 2, 0, 8, sender.table)
    with pytest.raises(ValueError, match="a chunk of 17 tokens does not fit a slot of 16"):
        source.gather("e1", 0, 0, 17, sender.table)
    with pytest.raises(ValueError, match="pair e1 was opened as the sender"):
        source.post_receive("e1", 0, 0, 8, sender.table)
    with pytest.raises(ValueError, match="pair e1 is open already"):
        source.open_pair("e1", "127.0.0.1:1", True, receiver.layout)
    source.gather("e1", 0, 0, 8, sender.table)
    with pytest.raises(ValueError, match=r"slot 0 holds \('e1', 8\), not \('e1', 7\)"):
        source.send("e1", 0, 7)
    source.send("e1", 0, 8)
    with pytest.raises(ValueError, match="gather it first"):
        source.send("e1", 0, 8)
    target.complete_receive(landing)
    with pytest.raises(ValueError, match="completed already"):
        target.complete_receive(landing)
    assert torch.equal(receiver.caches[0], expected[0])


@pytest.mark.parametrize("operation", ["gather", "send", "receive"])
def test_an_epoch_that_is_over_is_dropped_by_identity(pair: tuple[Worker, Worker], operation: str) -> None:
    mover = pair[1 if operation == "receive" else 0].movers[0]
    mover.close_pair("e1")
    mover.close_pair("e1")
    with pytest.raises(TransferFailed, match="pair e1 cannot be used"):
        if operation == "send":
            mover.send("e1", 0, 16)
        else:
            getattr(mover, operation)("e1", 0, 0, 16, pair[0].table)
