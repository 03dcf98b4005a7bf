"""Recurrent states through slots: each head of them arrives once, with its bits, whatever the ranks and blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from cluster.kv_groups import STATE_WINDOW, StateShape
from engine.kv.states import StatePages
from kv_transfer.actions import Range
from kv_transfer.codec import HEADER_BYTES, SlotCodec
from kv_transfer.layout import WIRE_FORMATS, KvLayout, LayoutMismatch, Route, check_compatible, page_obstacle, routes
from kv_transfer.page_lists import PageListCodec
from kv_transfer.states import StateHeads

SHAPE = StateShape(4, (14, 3))
LAYOUT = KvLayout(
    num_layers=3,
    num_kv_heads=2,
    head_dim=4,
    dtype="bfloat16",
    tp_size=1,
    block_size=12,
    model="m",
    layer_windows=(STATE_WINDOW, STATE_WINDOW, None),
    state_layers=(0, 1),
    state=SHAPE,
)
PLACES = {"prompt": 29, "end of a block": 24, "one token": 1}


class Side:
    """A worker's pools by rank, and the tables of one sequence by group."""

    def __init__(self, tp_size: int, block_size: int, **more: object) -> None:
        self.layout = replace(LAYOUT, tp_size=tp_size, block_size=block_size, **more)  # type: ignore[arg-type]
        layout = self.layout
        shape = (1, 2, 9, block_size, layout.num_local_heads, layout.head_dim)
        self.pools = [torch.full(shape, -7.0, dtype=getattr(torch, layout.dtype)) for _ in range(tp_size)]
        self.table = [8, 3, 5, 1][: -(-32 // block_size)]

    def pages(self, rank: int) -> StatePages:
        return StatePages(self.pools[rank][0], SHAPE, SHAPE.num_local_heads(self.layout.tp_size))

    def block(self, num_tokens: int) -> torch.Tensor:
        return torch.tensor([self.table[(num_tokens - 1) // self.layout.block_size]])

    def codec(self, route: Route, other: KvLayout, *, is_sender: bool, wire_format: str = "native") -> SlotCodec:
        rank = route.src_rank if is_sender else route.dst_rank
        held = self.layout.head_range(rank).start if route.head_end > route.head_start else 0
        return SlotCodec(
            self.layout,
            other,
            slice(route.head_start - held, route.head_end - held),
            states=StateHeads.of(route, self.layout, rank),
            is_sender=is_sender,
            wire_format=wire_format,
        )


def fill(side: Side, num_tokens: int) -> list[torch.Tensor]:
    """Writes one whole state over the ranks; returns its parts, [heads, values of a head]."""
    whole = [torch.rand(4, size) for size in SHAPE.part_sizes]
    for rank in range(side.layout.tp_size):
        heads = SHAPE.head_range(rank, side.layout.tp_size)
        side.pages(rank).write(
            side.block(num_tokens), [part[heads.start : heads.stop].reshape(1, -1) for part in whole]
        )
    return whole


def check(side: Side, num_tokens: int, whole: list[torch.Tensor]) -> None:
    for rank in range(side.layout.tp_size):
        heads = SHAPE.head_range(rank, side.layout.tp_size)
        found = side.pages(rank).read(side.block(num_tokens))
        for part, expected in zip(found, whole, strict=True):
            assert torch.equal(part[0], expected[heads.start : heads.stop].flatten())


@pytest.mark.parametrize("num_tokens", [*PLACES.values()], ids=[*PLACES])
@pytest.mark.parametrize("tp_sizes", [*itertools.product((1, 2, 4), repeat=2)], ids=str)
def test_each_head_of_a_state_arrives_once_between_any_ranks(tp_sizes: tuple[int, int], num_tokens: int) -> None:
    sender, receiver = Side(tp_sizes[0], 12), Side(tp_sizes[1], 16)
    whole, what = fill(sender, num_tokens), Range(num_tokens - 1, num_tokens, 0, 1, 1)
    sent = 0
    for route in routes(sender.layout, receiver.layout):
        pack = sender.codec(route, receiver.layout, is_sender=True)
        unpack = receiver.codec(route, sender.layout, is_sender=False)
        slot = torch.full((pack.slot_bytes(1),), 0xAB, dtype=torch.uint8)
        size = pack.pack(sender.pools[route.src_rank], sender.table, what, 5, slot)
        assert size == unpack.num_bytes(what) <= len(slot)
        unpack.unpack(slot[:size].clone(), receiver.pools[route.dst_rank], receiver.table, what, 5)
        sent += size - HEADER_BYTES - (size - HEADER_BYTES) % SHAPE.size_bytes(1)
    check(receiver, num_tokens, whole)
    assert sent == SHAPE.size_bytes(4)


@pytest.mark.parametrize("tp_sizes", [*itertools.product((1, 2, 4), repeat=2)], ids=str)
def test_each_kv_head_arrives_once_beside_states(tp_sizes: tuple[int, int]) -> None:
    sender, receiver = (replace(LAYOUT, tp_size=size) for size in tp_sizes)
    found = routes(sender, receiver)
    for rank in range(receiver.tp_size):
        own = [route for route in found if route.dst_rank == rank]
        heads = [head for route in own for head in range(route.head_start, route.head_end)]
        states = [head for route in own for head in range(route.state_start, route.state_end)]
        assert heads == list(receiver.head_range(rank))
        assert states == list(SHAPE.head_range(rank, receiver.tp_size))
    if sender.tp_size == receiver.tp_size:
        assert all(route.src_rank == route.dst_rank for route in found)


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_a_state_keeps_its_bits_in_every_wire_format(wire_format: str) -> None:
    sender, receiver = Side(1, 12), Side(1, 12)
    whole, what = fill(sender, 12), Range(11, 12, 0, 1, 2)
    (route,) = routes(sender.layout, receiver.layout)
    pack = sender.codec(route, receiver.layout, is_sender=True, wire_format=wire_format)
    unpack = receiver.codec(route, sender.layout, is_sender=False, wire_format=wire_format)
    slot = torch.zeros(pack.slot_bytes(1), dtype=torch.uint8)
    size = pack.pack(sender.pools[0], sender.table, what, 5, slot)
    unpack.unpack(slot[:size], receiver.pools[0], receiver.table, what, 5)
    check(receiver, 12, whole)


def test_shared_pages_give_the_whole_block_of_a_state() -> None:
    sender, receiver = Side(2, 12), Side(2, 12)
    assert page_obstacle(sender.layout, receiver.layout, "native") == ""
    receiver.table = [0, 2, 4]
    whole, what = fill(sender, 29), Range(28, 29, 0, 1, 1)
    for rank in range(2):
        pack, unpack = PageListCodec(sender.layout, receiver.layout), PageListCodec(receiver.layout, sender.layout)
        unpack.attach(sender.pools[rank], torch.device("cpu"))
        slot = torch.zeros(pack.slot_bytes(1), dtype=torch.uint8)
        size = pack.pack(sender.pools[rank], sender.table, what, 5, slot)
        unpack.unpack(slot[:size], receiver.pools[rank], receiver.table, what, 5)
        assert unpack.moved_bytes(what) == 12 * 2 * 4 * 2
    check(receiver, 29, whole)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 8, "num_kv_heads": 8}, "tp_size 8 does not divide 4 heads of recurrent states"),
        ({"block_size": 8}, "a block has 256 bytes for a layer, and a recurrent state 272"),
        ({"state": None}, "no shape or no window"),
        ({"state_layers": (0, 2)}, "no shape or no window"),
        ({"state_layers": (0, 7)}, "no shape or no window"),
    ],
    ids=str,
)
def test_a_layout_that_cannot_hold_its_states_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        replace(LAYOUT, **fields)  # type: ignore[arg-type]


def test_states_of_another_shape_are_refused_and_a_layout_survives_the_wire() -> None:
    assert KvLayout.from_proto(LAYOUT.to_proto()) == LAYOUT
    with pytest.raises(LayoutMismatch, match="state is"):
        check_compatible(LAYOUT, replace(LAYOUT, state=StateShape(4, (13, 4))))
