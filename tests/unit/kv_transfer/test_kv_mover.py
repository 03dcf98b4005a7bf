"""Whole workers' ranks in one process, over real sockets: the numbers arrive where they belong, and nowhere else."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kv_transfer.layout import KvLayout, LayoutMismatch
from kv_transfer.mover import KvMover
from kv_transfer.transport import GlooPair, TransferFailed, serve_store

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[3]
LAYERS, HEADS, DIM, TOKENS = 2, 4, 3, 45
POISON = -77.0
QUICK_S = 5.0  # on a busy machine; what it is held against takes 10 s and more
TP_SIZES = (1, 2, 4, 8)

PEER = """
import sys, torch
from kv_transfer.layout import KvLayout
from kv_transfer.mover import KvMover
layout = KvLayout(num_layers=2, num_kv_heads=4, head_dim=3, dtype="float32", tp_size=1, block_size=4, model="m")
mover = KvMover(torch.zeros(2, 2, 16, 4, 4, 3), layout, 0, num_slots=2, chunk_tokens=16, timeout_s=30,
                transport="gloo", host="127.0.0.1")
mover.open_pair(sys.argv[1], sys.argv[2], True, layout)
print("open", flush=True)
sys.stdin.readline()
"""


@dataclass
class Worker:
    """The ranks of one worker, each with a poisoned cache of its own; all use one block table."""

    layout: KvLayout
    timeout_s: float = 10.0
    num_slots: int = 2
    chunk_tokens: int = 16
    table: list[int] = field(default_factory=list)
    caches: list[torch.Tensor] = field(default_factory=list)
    movers: list[KvMover] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.layout.block_size
        used = -(-TOKENS // size)
        order = torch.randperm(used + 3, generator=torch.Generator().manual_seed(self.layout.tp_size * size)).tolist()
        self.table = order[:used]
        shape = (LAYERS, 2, used + 3, size, self.layout.num_local_heads, DIM)
        for rank in range(self.layout.tp_size):
            cache = torch.full(shape, POISON, dtype=getattr(torch, self.layout.dtype))
            self.caches.append(cache)
            self.movers.append(
                KvMover(
                    cache,
                    self.layout,
                    rank,
                    num_slots=self.num_slots,
                    chunk_tokens=self.chunk_tokens,
                    timeout_s=self.timeout_s,
                    transport="gloo",
                    host=HOST,
                )
            )

    def fill(self, truth: torch.Tensor, start: int, end: int) -> list[torch.Tensor]:
        """What each rank's cache holds with tokens [start, end) of `truth` [L, 2, T, H, D] in it, the rest as it is."""
        filled = []
        for rank, cache in enumerate(self.caches):
            heads = self.layout.head_range(rank)
            expected = cache.clone()
            for t in range(start, end):
                block, offset = self.table[t // self.layout.block_size], t % self.layout.block_size
                expected[:, :, block, offset] = truth[:, :, t, heads.start : heads.stop]
            filled.append(expected)
        return filled

    def load(self, truth: torch.Tensor) -> None:
        for cache, filled in zip(self.caches, self.fill(truth, 0, TOKENS), strict=True):
            cache.copy_(filled)

    def close(self) -> None:
        for mover in self.movers:
            mover.close()


def make_layout(tp_size: int = 1, block_size: int = 4, dtype: str = "float32", model: str = "m") -> KvLayout:
    return KvLayout(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
        tp_size=tp_size,
        block_size=block_size,
        model=model,
    )


def make_truth(dtype: str = "float32") -> torch.Tensor:
    return torch.randn(LAYERS, 2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(7)).to(
        getattr(torch, dtype)
    )


def run_all(jobs: Sequence[Callable[[], object]]) -> list[object]:
    """Every rank has its own thread; the first error is raised."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(60) for future in [pool.submit(job) for job in jobs]]


def open_both(sender: Worker, receiver: Worker, epoch: str, address: str) -> None:
    run_all(
        [lambda m=m: m.open_pair(epoch, address, True, receiver.layout) for m in sender.movers]
        + [lambda m=m: m.open_pair(epoch, address, False, sender.layout) for m in receiver.movers]
    )


def move(sender: Worker, receiver: Worker, epoch: str, chunks: list[tuple[int, int]]) -> tuple[int, int]:
    """Moves chunks one after another, slots in turn; returns the bytes gathered and those received."""

    def send(mover: KvMover) -> int:
        gathered = 0
        for number, (start, end) in enumerate(chunks):
            slot = number % sender.num_slots
            gathered += mover.gather(epoch, slot, start, end, sender.table)
            mover.send(epoch, slot, end - start)
        return gathered

    def receive(mover: KvMover) -> int:
        return sum(
            mover.receive(epoch, number % receiver.num_slots, start, end, receiver.table)
            for number, (start, end) in enumerate(chunks)
        )

    jobs: list[Callable[[], int]] = [lambda m=m: send(m) for m in sender.movers]  # type: ignore[misc]
    jobs += [lambda m=m: receive(m) for m in receiver.movers]  # type: ignore[misc]
    done = [size for size in run_all(jobs) if isinstance(size, int)]
    return sum(done[: len(sender.movers)]), sum(done[len(sender.movers) :])


@pytest.fixture
def store_address() -> Iterator[str]:
    store, address = serve_store(HOST)
    yield address
    del store


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.close()


@pytest.fixture
def pair(workers: list[Worker], store_address: str) -> tuple[Worker, Worker]:
    sender, receiver = Worker(make_layout()), Worker(make_layout())
    workers += [sender, receiver]
    sender.load(make_truth())
    open_both(sender, receiver, "e1", store_address)
    return sender, receiver


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
