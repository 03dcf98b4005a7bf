"""A slot is refused, and no page written, when it is another chunk, another format, or damaged in any way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kv_cases import POISON, RankCaches

from cluster.errors import Corrupted
from kv_transfer.actions import Range
from kv_transfer.codec import SlotCodec
from kv_transfer.header import HEADER_BYTES, DigestKind, DigestPolicy
from kv_transfer.layout import WIRE_FORMATS, KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, dtype="float16", tp_size=1, block_size=2, model="m")
WHAT = Range(1, 6, 0, 2)
TAG = 0xFEED_0000_0000_0007

Damage = Callable[[torch.Tensor], None]


class Crossing:
    """A slot that was packed, and a receiver whose pages show whether anything was written."""

    def __init__(self, wire_format: str = "native", digest: str = "on", layout: KvLayout = LAYOUT) -> None:
        heads = slice(0, layout.num_local_heads)
        options = {"wire_format": wire_format, "digest": digest}
        self.sender = SlotCodec(layout, layout, heads, is_sender=True, **options)
        self.receiver = SlotCodec(layout, layout, heads, is_sender=False, **options)
        self.source, self.target = RankCaches(layout, 8), RankCaches(layout, 8, seed=2)
        shape = (layout.num_layers, 2, 8, layout.num_kv_heads, layout.head_dim)
        self.source.load(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
        self.slot = torch.full((self.sender.slot_bytes(WHAT.num_cells),), 0xAB, dtype=torch.uint8)
        self.size = self.pack()
        self.packed = self.slot.clone()

    def pack(self, what: Range = WHAT, tag: int = TAG) -> int:
        return self.sender.pack(self.source.caches[0], self.source.table, what, tag, self.slot)

    def land(self, what: Range = WHAT, tag: int = TAG) -> None:
        self.receiver.unpack(self.slot, self.target.caches[0], self.target.table, what, tag)

    def refuse(self, match: str = "does not hold|not as it was sent", what: Range = WHAT, tag: int = TAG) -> None:
        with pytest.raises(Corrupted, match=match):
            self.land(what, tag)
        assert self.target.caches[0].eq(POISON).all()

    def restore(self) -> None:
        self.slot.copy_(self.packed)


@pytest.fixture(params=list(DigestKind), ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DigestKind:
    """Each kind, on the CPU: WORDS runs on any device."""
    chosen: DigestKind = request.param
    monkeypatch.setattr(DigestPolicy, "next_kind", lambda self, device: chosen)
    return chosen


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_every_single_flipped_bit_is_found(kind: DigestKind, wire_format: str) -> None:
    crossing = Crossing(wire_format)
    covered = HEADER_BYTES if kind is DigestKind.NONE else crossing.size
    for bit in range(8 * covered):
        crossing.slot[bit // 8] ^= 1 << bit % 8
        crossing.refuse()
        crossing.slot[bit // 8] ^= 1 << bit % 8
    crossing.land()
    assert not crossing.target.caches[0].eq(POISON).all()


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@given(data=st.data())
@settings(max_examples=60)
def test_bytes_that_changed_places_or_were_lost_are_found(wire_format: str, data: st.DataObject) -> None:
    crossing = Crossing(wire_format)
    size = crossing.size
    slot = crossing.slot[:size]
    match data.draw(st.sampled_from(["swapped", "truncated", "shifted", "repeated", "random"])):
        case "swapped":
            width = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
            one, other = (width * data.draw(st.integers(0, size // width - 1)) for _ in range(2))
            slot[one : one + width] = crossing.packed[other : other + width]
            slot[other : other + width] = crossing.packed[one : one + width]
        case "truncated":
            slot[data.draw(st.integers(0, size - 1)) :] = data.draw(st.sampled_from([0, 0xAB, 0xFF]))
        case "shifted":
            slot.copy_(crossing.packed[:size].roll(data.draw(st.integers(1, size - 1))))
        case "repeated":
            start = data.draw(st.integers(HEADER_BYTES, size - 8))
            slot[start + 1 :] = crossing.packed[start : size - 1]
        case "random":
            start, end = sorted(data.draw(st.integers(0, size)) for _ in range(2))
            slot[start:end] = torch.frombuffer(
                bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8
            )[start:end]
    assume(not torch.equal(crossing.slot, crossing.packed))
    crossing.refuse()


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_what_lies_behind_the_chunk_does_not_matter(wire_format: str) -> None:
    crossing = Crossing(wire_format)
    crossing.slot[crossing.size :] = 0x55
    crossing.land()
    assert crossing.packed[crossing.size :].eq(0xAB).all()


def test_a_slot_that_was_never_filled_is_refused(kind: DigestKind) -> None:
    crossing = Crossing()
    for content in (0, 0xAB, 0xFF):
        crossing.slot.fill_(content)
        crossing.refuse("magic is ")


def test_an_older_chunk_in_the_slot_is_refused_by_its_tag(kind: DigestKind) -> None:
    Crossing().refuse(rf"tag is {TAG:#x}, not {TAG + 1:#x}", tag=TAG + 1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (replace(WHAT, token_start=0), r"token start is 1, not 0; payload bytes is "),
        (replace(WHAT, token_start=0, token_end=5), r"token start is 1, not 0; token end is 6, not 5$"),
        (replace(WHAT, layer_end=1), r"layer end is 2, not 1; payload bytes is "),
        (replace(WHAT, layer_start=1), r"layer start is 0, not 1; payload bytes is "),
    ],
)
def test_another_range_is_refused_by_name(kind: DigestKind, what: Range, message: str) -> None:
    Crossing().refuse(message, what=what)


@pytest.mark.parametrize(
    ("layout", "wire_format", "message"),
    [
        (LAYOUT, "int8", r"wire format is 0, not 1; payload bytes is \d+, not \d+; wire dtype is 2, not 3"),
        (replace(LAYOUT, num_kv_heads=1, head_dim=4), "native", "heads is 2, not 1; head size is 2, not 4"),
        (replace(LAYOUT, dtype="bfloat16"), "native", "wire dtype is 2, not 1"),
    ],
)
def test_another_layout_or_format_is_refused_by_name(layout: KvLayout, wire_format: str, message: str) -> None:
    ours, theirs = Crossing(), Crossing(wire_format, layout=layout)
    theirs.slot[: ours.size] = ours.slot[: ours.size][: len(theirs.slot)]
    theirs.refuse(message)


def test_damage_to_the_payload_is_told_from_a_wrong_chunk(kind: DigestKind) -> None:
    crossing = Crossing()
    crossing.slot[HEADER_BYTES] ^= 1
    if kind is DigestKind.NONE:
        crossing.land()
    else:
        crossing.refuse(rf"the slot with tag {TAG:#x} is not as it was sent: its digest \({kind.name}\) is 0x")


def test_no_size_from_a_header_is_used() -> None:
    crossing = Crossing(digest="off")
    for offset in range(16, 56):
        crossing.slot[offset] = 0xFF
        if not torch.equal(crossing.slot, crossing.packed):
            crossing.refuse()
        crossing.restore()


def test_one_slot_in_sixteen_is_digested_when_sampled_and_the_receiver_is_told() -> None:
    crossing = Crossing(digest="sampled")
    found = []
    for tag in range(1, 34):
        crossing.pack(tag=tag)
        crossing.slot[HEADER_BYTES + 3] ^= 1
        try:
            crossing.land(tag=tag)
        except Corrupted:
            found.append(tag)
    # The slot that Crossing packed itself was the first.
    assert found == [16, 32]


def test_the_sender_alone_decides_whether_there_is_a_digest() -> None:
    checked, unchecked = Crossing(digest="on"), Crossing(digest="off")
    for crossing in (checked, unchecked):
        crossing.slot[HEADER_BYTES] ^= 1
    checked.receiver, unchecked.receiver = unchecked.receiver, checked.receiver
    checked.refuse("is not as it was sent")
    unchecked.land()
