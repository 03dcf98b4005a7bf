"""Chunks that a receiver copies out of the sender's own pages, by mapped memory of the host."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transfer_harness import (
    DIM,
    HEADS,
    HOST,
    LAYERS,
    POISON,
    Worker,
    assert_nothing_is_held,
    assert_untouched,
    chunk,
    make_layout,
    make_truth,
    move,
    open_both,
)

from cluster.errors import Corrupted, TransferFailed
from kv_transfer.actions import Range
from kv_transfer.header import HEADER_BYTES
from kv_transfer.layout import KvLayout, LayoutMismatch
from kv_transfer.page_lists import PageListCodec
from kv_transfer.transfer_engine import TransferEngine
from kv_transfer.transports.selection import make_pool
from kv_transfer.transports.shm_pages import HostPool

TRANSPORT = "shm_pages"


class SharedWorker(Worker):
    """Its ranks' caches lie in memory that others can map, in pools of some more blocks than those of others."""

    def __init__(self, layout: KvLayout, extra_blocks: int = 0, timeout_s: float = 10.0) -> None:
        super().__init__(layout, timeout_s=timeout_s)
        self.close()
        old, self.caches, self.engines = self.caches, [], []
        for rank, cache in enumerate(old):
            layers, two, blocks, *token = cache.shape
            memory, shape = HostPool(), (layers, two, blocks + extra_blocks, *token)
            raw = memory.allocate(torch.Size(shape).numel() * cache.itemsize)
            self.caches.append(raw.view(cache.dtype).view(shape).fill_(POISON))
            engine = TransferEngine(self.caches[-1], layout, rank, timeout_s=timeout_s, host=HOST, memory=memory)
            self.engines.append(engine)


def shared_pair(workers: list[Worker], address: str, layout: KvLayout | None = None) -> tuple[Worker, Worker]:
    sender, receiver = SharedWorker(layout or make_layout()), SharedWorker(layout or make_layout(), extra_blocks=5)
    workers += [sender, receiver]
    sender.load(make_truth(sender.layout.dtype))
    open_both(sender, receiver, "e1", address, TRANSPORT)
    return sender, receiver


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_pages_are_copied_to_pages_and_no_other_is_touched(
    workers: list[Worker], store_address: str, tp_size: int, block_size: int, dtype: str
) -> None:
    """With 8 ranks of 4 heads, a rank of the sender has two routes."""
    sender, receiver = shared_pair(workers, store_address, make_layout(tp_size, block_size, dtype))
    before = [cache.clone() for cache in sender.caches]
    expected = receiver.fill(make_truth(dtype), 5, 43)
    gathered, received = move(sender, receiver, "e1", [(5, 21), (21, 22), (22, 37), (37, 43)])
    for rank, cache in enumerate(receiver.caches):
        assert torch.equal(cache, expected[rank]), f"receiving rank {rank}"
    assert all(torch.equal(cache, old) for cache, old in zip(sender.caches, before, strict=True))
    size = receiver.caches[0].itemsize
    assert received == gathered == LAYERS * 2 * (43 - 5) * receiver.layout.num_local_heads * DIM * size * tp_size


@pytest.mark.parametrize(("tp_size", "block_size"), [(2, 4), (4, 8), (4, 4)])
def test_of_shared_tokens_each_rank_copies_its_own(
    workers: list[Worker], store_address: str, tp_size: int, block_size: int
) -> None:
    """Some chunks have no token for some ranks."""
    layout = make_layout(tp_size, block_size, heads=1, shares=tp_size)
    sender, receiver = SharedWorker(layout), SharedWorker(layout, extra_blocks=5)
    workers += [sender, receiver]
    truth = make_truth()[:, :, :, :1]
    sender.load(truth)
    open_both(sender, receiver, "e1", store_address, TRANSPORT)
    expected = receiver.fill(truth, 5, 43)
    gathered, received = move(sender, receiver, "e1", [(5, 21), (21, 22), (22, 37), (37, 43)])
    for rank, cache in enumerate(receiver.caches):
        assert torch.equal(cache, expected[rank]), f"receiving rank {rank}"
    assert received == gathered == LAYERS * 2 * (43 - 5) * DIM * 4


def test_some_layers_of_many_tokens_are_those_and_no_others(workers: list[Worker], store_address: str) -> None:
    sender, receiver = shared_pair(workers, store_address)
    expected = receiver.fill(make_truth(), 3, 35, range(1, 2))
    move(sender, receiver, "e1", [(3, 35, 1, 2)])  # twice the tokens of a slot, of half the layers
    assert torch.equal(receiver.caches[0], expected[0])


def test_nothing_is_gathered_so_what_is_read_is_what_the_pages_hold_then(
    workers: list[Worker], store_address: str
) -> None:
    """This is why the sender has to hold them."""
    sender, receiver = shared_pair(workers, store_address)
    sender.engine.gather(chunk("e1", 0, 0, 16), sender.table)
    sender.caches[0].fill_(5.0)
    landing = receiver.engine.post_receive(chunk("e1", 0, 0, 16), receiver.table)
    sending = sender.engine.send("e1", 0)
    receiver.engine.complete_receive(landing)
    sender.engine.complete_send(sending)
    blocks = receiver.table[:4]
    assert receiver.caches[0][:, :, blocks].eq(5.0).all()


def test_what_is_read_while_the_sender_closes_the_pair_has_not_landed(
    workers: list[Worker], store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy runs to its end; the sender may have written to the pages meanwhile."""
    sender, receiver = shared_pair(workers, store_address)
    what = chunk("e1", 0, 0, 16)
    sender.engine.gather(what, sender.table)
    landing, copied = receiver.engine.post_receive(what, receiver.table), []
    sending, unpack = sender.engine.send("e1", 0), PageListCodec.unpack

    def late(self: PageListCodec, *arguments: object) -> None:
        unpack(self, *arguments)  # type: ignore[arg-type]
        sender.engine.close_pair("e1")
        copied.append(arguments)

    monkeypatch.setattr(PageListCodec, "unpack", late)
    with pytest.raises(TransferFailed):
        receiver.engine.complete_receive(landing)
    assert copied
    with pytest.raises(TransferFailed):
        sender.engine.complete_send(sending)
    assert_nothing_is_held(sender, receiver)


def test_a_chunk_of_a_pair_that_was_closed_before_does_not_land(workers: list[Worker], store_address: str) -> None:
    sender, receiver = shared_pair(workers, store_address)
    what = chunk("e1", 0, 0, 16)
    sender.engine.gather(what, sender.table)
    landing = receiver.engine.post_receive(what, receiver.table)
    sender.engine.send("e1", 0)
    sender.engine.close_pair("e1")
    with pytest.raises(TransferFailed):
        receiver.engine.complete_receive(landing)


def test_the_sender_is_done_when_the_receiver_has_read(workers: list[Worker], store_address: str) -> None:
    sender, receiver = shared_pair(workers, store_address)
    what = chunk("e1", 0, 0, 16)
    sender.engine.gather(what, sender.table)
    landing, sending = receiver.engine.post_receive(what, receiver.table), sender.engine.send("e1", 0)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.engine.complete_send, sending)
        assert not sent.done()
        receiver.engine.complete_receive(landing)
        sent.result(10)


def test_closing_a_pair_returns_when_it_is_closed_whoever_closes_it(workers: list[Worker], store_address: str) -> None:
    sender, _ = shared_pair(workers, store_address)
    pair = sender.engine.find_pair("e1")
    with ThreadPoolExecutor(2) as pool:
        for closing in [pool.submit(sender.engine.close_pair, "e1") for _ in range(2)]:
            closing.result(10)
    assert pair._closed.is_set()


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"block_size": 8}, "block_size is 4 at the sender and 8 at the receiver"),
        ({"tp_size": 2}, "tp_size is 1 at the sender and 2 at the receiver"),
        ({"dtype": "bfloat16"}, "dtype is float32 at the sender and bfloat16 at the receiver"),
    ],
)
def test_unequal_layouts_share_no_pages(change: dict[str, object], differs: str) -> None:
    other = replace(make_layout(), **change)  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match=f"pages cannot be shared: {differs}"):
        PageListCodec(make_layout(), other)


def test_a_wire_format_that_rounds_is_for_slots() -> None:
    with pytest.raises(LayoutMismatch, match="wire_format is int8"):
        PageListCodec(make_layout(), make_layout(), wire_format="int8")


def test_a_worker_whose_pool_is_its_own_cannot_send_and_can_receive(workers: list[Worker], store_address: str) -> None:
    plain, shared, impatient = (
        Worker(make_layout()),
        SharedWorker(make_layout()),
        SharedWorker(make_layout(), timeout_s=0.5),
    )
    workers += [plain, shared, impatient]
    with pytest.raises(TransferFailed, match=r"not in memory that can be shared|did not come"):
        open_both(plain, impatient, "e1", store_address, TRANSPORT)
    shared.load(make_truth())
    open_both(shared, plain, "e2", store_address, TRANSPORT)
    expected = plain.fill(make_truth(), 0, 16)
    move(shared, plain, "e2", [(0, 16)])
    assert torch.equal(plain.caches[0], expected[0])


@pytest.fixture
def filled() -> Iterator[tuple[PageListCodec, torch.Tensor, torch.Tensor]]:
    """A receiver's codec, a slot that says where tokens 3 to 10 lie, and the receiver's pages."""
    codec = PageListCodec(make_layout(), make_layout())
    source = torch.full((LAYERS, 2, 6, 4, HEADS, DIM), 2.0)
    slot = torch.zeros(codec.slot_bytes(40), dtype=torch.uint8)
    assert codec.pack(source, [5, 1, 0], Range(3, 10, 0, LAYERS), 7, slot) == HEADER_BYTES + 3 * 4
    codec.attach(source, source.device)
    yield codec, slot, torch.full((LAYERS, 2, 9, 4, HEADS, DIM), POISON)


def test_what_a_slot_says_is_checked_before_anything_is_read(
    filled: tuple[PageListCodec, torch.Tensor, torch.Tensor],
) -> None:
    codec, slot, kv = filled
    what, table = Range(3, 10, 0, LAYERS), [8, 2, 4]
    for place in (0, 20, HEADER_BYTES + 1):
        damaged = slot.clone()
        damaged[place] ^= 1
        with pytest.raises(Corrupted):
            codec.unpack(damaged, kv, table, what, 7)
    with pytest.raises(Corrupted, match="tag"):
        codec.unpack(slot, kv, table, what, 8)
    codec.attach(torch.zeros(LAYERS, 2, 5, 4, HEADS, DIM), kv.device)
    with pytest.raises(Corrupted, match="the sender has 5 blocks, and names 0 to 5"):
        codec.unpack(slot, kv, table, what, 7)
    assert kv.eq(POISON).all()


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ([5, 1], Range(3, 10, 0, LAYERS)),
        ([5, 1, 9], Range(3, 10, 0, LAYERS)),
        ([5, 1, 0], Range(3, 10, 0, LAYERS + 1)),
    ],
    ids=["tokens", "blocks", "layers"],
)
def test_a_range_that_does_not_fit_is_refused_by_both_sides(
    filled: tuple[PageListCodec, torch.Tensor, torch.Tensor], table: list[int], what: Range
) -> None:
    codec, slot, kv = filled
    before = slot.clone()
    for act in (codec.pack, lambda kv, table, what, tag, slot: codec.unpack(slot, kv, table, what, tag)):
        with pytest.raises(ValueError, match=r"layers|blocks|block table"):
            act(kv, table, what, 7, slot)
    assert kv.eq(POISON).all() and torch.equal(slot, before)


def test_pages_of_another_gpu_are_left_to_slots_where_there_is_no_kernel() -> None:
    source, device = torch.zeros(LAYERS, 2, 5, 4, HEADS, DIM, device="meta"), torch.device("cpu")
    with pytest.raises(TransferFailed, match="tokens of 48 bytes from meta to cpu are not copied by torch"):
        PageListCodec(make_layout(), make_layout()).attach(source, device)
    PageListCodec(make_layout(), make_layout(), kernel=lambda *arguments: True).attach(source, device)


def test_every_range_that_fits_a_slot_has_room_for_its_blocks() -> None:
    codec = PageListCodec(make_layout(block_size=3), make_layout(block_size=3))
    for num_cells in range(1, 20):
        for start in range(4):
            assert codec.num_bytes(Range(start, start + num_cells, 0, 1)) <= codec.slot_bytes(num_cells)


def num_read_only_pools() -> int:
    """Mapped by this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("baton-kv-pool" in line and " r--s " in line for line in lines)


def test_a_pool_is_mapped_for_reading_as_long_as_somebody_refers_to_it() -> None:
    ours, theirs = HostPool(), HostPool()
    pool = ours.allocate(1 << 16)
    assert not pool.any()
    descriptor = ours.export()
    seen = theirs.attach(descriptor, 1 << 16)
    with pytest.raises(TransferFailed, match="has 65536 bytes"):
        theirs.attach(descriptor, 1 << 15)
    os.close(descriptor)
    pool[77] = 3
    assert seen[77] == 3
    assert num_read_only_pools() == 1
    part = seen[70:80]
    del seen
    gc.collect()
    assert part[7] == 3
    del part
    gc.collect()
    assert num_read_only_pools() == 0


def test_a_descriptor_that_is_no_pool_is_refused() -> None:
    with open(os.devnull) as nothing, pytest.raises(TransferFailed, match="cannot be mapped"):
        HostPool().attach(nothing.fileno(), 64)
    with pytest.raises(TransferFailed, match="not in memory that can be shared"):
        HostPool().export()


def test_a_receiver_that_is_refused_by_what_it_maps_writes_nothing(workers: list[Worker], store_address: str) -> None:
    sender, receiver = shared_pair(workers, store_address)
    what = chunk("e1", 0, 0, 16)
    sender.engine.gather(what, sender.table)
    slot = sender.engine.find_pair("e1")._routes[0].slots[0]
    slot[HEADER_BYTES] ^= 1
    landing = receiver.engine.post_receive(what, receiver.table)
    sender.engine.send("e1", 0)
    with pytest.raises(Corrupted):
        receiver.engine.complete_receive(landing)
    assert_untouched(receiver)


def test_a_pool_lies_in_memory_that_others_map_where_a_transport_shares_pages() -> None:
    made: list[torch.Tensor | None] = []

    def make(memory: Callable[[int], torch.Tensor] | None) -> None:
        made.append(None if memory is None else memory(64))

    assert make_pool(("shm", "gloo"), torch.device("cpu"), make) is None and made == [None]
    memory = make_pool(("shm_pages",), torch.device("cpu"), make)
    assert memory is not None and made[1] is not None and len(made[1]) == 64
    os.close(memory.export())


def test_a_pool_that_cannot_be_shared_is_made_as_ever_and_the_reason_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: HostPool, num_bytes: int) -> torch.Tensor:
        raise TransferFailed("there is no memory of that kind")

    monkeypatch.setattr(HostPool, "allocate", refuse)
    made: list[torch.Tensor | None] = []

    def make(memory: Callable[[int], torch.Tensor] | None) -> None:
        made.append(None if memory is None else memory(64))

    assert make_pool(("shm_pages", "gloo"), torch.device("cpu"), make) is None and made == [None]
    assert "the KV pool cannot be shared, its pages go through slots: there is no memory of that kind" in caplog.text
