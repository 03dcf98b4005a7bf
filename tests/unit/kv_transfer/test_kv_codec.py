"""A slot carries its chunk exactly, between any two layouts, and what does not fit a slot is refused."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import POISON, RankCaches, decoded, make_slot, move

from cluster.errors import Corrupted, TransferFailed
from kv_transfer import codec as codec_module
from kv_transfer.actions import Range
from kv_transfer.codec import SlotCodec
from kv_transfer.header import HEADER_BYTES
from kv_transfer.layout import FLOAT_DTYPES, WIRE_FORMATS, KvLayout, LayoutMismatch

LAYOUT = KvLayout(num_layers=3, num_kv_heads=8, head_dim=4, dtype="bfloat16", tp_size=1, block_size=4, model="m")
TOKENS = 21
EVERYTHING = Range(0, TOKENS, 0, 3)
TAG = 0xFEED_0000_0000_0007
every_format = pytest.mark.parametrize("wire_format", WIRE_FORMATS)


def make_truth(layout: KvLayout = LAYOUT, seed: int = 1) -> torch.Tensor:
    """[L, P, T, H, D] in the layout's dtype."""
    shape = (layout.num_layers, layout.num_planes, TOKENS, layout.num_kv_heads, layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, layout.dtype))


def one_pair(
    wire_format: str = "native", digest: str = "on", dtype: str = "bfloat16"
) -> tuple[SlotCodec, SlotCodec, RankCaches, RankCaches]:
    sender, receiver = LAYOUT, replace(LAYOUT, block_size=8, dtype=dtype)
    caches = RankCaches(sender, TOKENS), RankCaches(receiver, TOKENS, seed=5)
    caches[0].load(make_truth())
    heads = slice(2, 7)
    ours = SlotCodec(sender, receiver, heads, is_sender=True, wire_format=wire_format, digest=digest)
    theirs = SlotCodec(receiver, sender, heads, is_sender=False, wire_format=wire_format, digest=digest)
    return ours, theirs, *caches


# What arrives.


@pytest.mark.parametrize("sender_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("receiver_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_every_pair_of_tensor_parallel_sizes_ends_with_the_senders_kv(
    sender_tp: int, receiver_tp: int, num_kv_heads: int
) -> None:
    layout = replace(LAYOUT, num_kv_heads=num_kv_heads)
    sender = RankCaches(replace(layout, tp_size=sender_tp), TOKENS)
    receiver = RankCaches(replace(layout, tp_size=receiver_tp, block_size=16), TOKENS)
    truth = make_truth(layout)
    sender.load(truth)
    move(sender, receiver, [EVERYTHING])
    for rank in range(receiver_tp):
        heads = receiver.layout.head_range(rank)
        assert torch.equal(receiver.rows(rank)[:, :, :TOKENS], truth[:, :, :, heads.start : heads.stop])
        assert receiver.rows(rank)[:, :, TOKENS:].eq(POISON).all()


@every_format
@pytest.mark.parametrize("tp_sizes", [(1, 2), (2, 1), (4, 2), (2, 4)], ids=str)
def test_latents_are_one_plane_that_every_rank_gets_whole(wire_format: str, tp_sizes: tuple[int, int]) -> None:
    layout = replace(LAYOUT, num_kv_heads=1, num_planes=1)
    sender, receiver = (RankCaches(replace(layout, tp_size=size), TOKENS) for size in tp_sizes)
    truth = make_truth(layout)
    sender.load(truth)
    move(sender, receiver, [Range(0, 9, 0, 3), Range(9, TOKENS, 0, 3)], wire_format)
    for rank in range(tp_sizes[1]):
        assert torch.equal(receiver.rows(rank)[:, :, :TOKENS], decoded(truth, wire_format, "bfloat16"))
    codec = SlotCodec(layout, layout, slice(0, 1), is_sender=True)
    assert codec.num_bytes(EVERYTHING) == HEADER_BYTES + 3 * TOKENS * layout.head_dim * 2


@every_format
@pytest.mark.parametrize("sender_dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("receiver_dtype", FLOAT_DTYPES)
def test_dtypes_are_bridged_in_every_format_or_refused(
    wire_format: str, sender_dtype: str, receiver_dtype: str
) -> None:
    sender = RankCaches(replace(LAYOUT, dtype=sender_dtype, tp_size=2), TOKENS)
    receiver = RankCaches(replace(LAYOUT, dtype=receiver_dtype, tp_size=4), TOKENS)
    truth = make_truth(sender.layout)
    sender.load(truth)
    if receiver_dtype == "float16" and sender_dtype != "float16":
        with pytest.raises(LayoutMismatch, match="beyond the range"):
            SlotCodec(sender.layout, receiver.layout, slice(0, 1), is_sender=True, wire_format=wire_format)
        return
    move(sender, receiver, [EVERYTHING], wire_format)
    due = decoded(truth, wire_format, receiver_dtype)
    # A product rounded once more or less: the last bit of the code's dtype, nothing else.
    torch.testing.assert_close(receiver.held(TOKENS), due, rtol=0 if wire_format == "native" else 2**-7, atol=1e-6)


def small_ranges() -> Iterator[Range]:
    for start, end in itertools.combinations(range(10), 2):
        for first, last in itertools.combinations(range(4), 2):
            yield Range(start, end, first, last)


@every_format
def test_every_small_range_arrives_and_nothing_beside_it_is_written(wire_format: str) -> None:
    ours, theirs, sender, receiver = one_pair(wire_format)
    slot, truth = make_slot(ours), make_truth()
    whole = decoded(truth, wire_format, "bfloat16")
    for what in small_ranges():
        receiver.caches[0].fill_(POISON)
        ours.pack(sender.caches[0], sender.table, what, TAG, slot)
        theirs.unpack(slot, receiver.caches[0], receiver.table, what, TAG)
        part = slice(what.layer_start, what.layer_end), slice(None), slice(what.token_start, what.token_end)
        rows = receiver.rows(0)
        torch.testing.assert_close(rows[part][:, :, :, 2:7], whole[part][:, :, :, 2:7], rtol=2**-7, atol=1e-6)
        rows[part][:, :, :, 2:7] = POISON
        assert rows.eq(POISON).all(), what
        untouched = [block for block in range(receiver.caches[0].shape[2]) if block not in receiver.table]
        assert receiver.caches[0][:, :, untouched].eq(POISON).all()


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, int, list[Range]]:
    """Two tensor-parallel sizes, two block sizes, and a prompt cut into rectangles, shuffled."""
    sizes = [draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2)] + [draw(st.sampled_from([1, 3, 4, 16]))] * 2
    sizes[3] = draw(st.sampled_from([1, 5, 8]))
    tokens = sorted({0, TOKENS, *draw(st.lists(st.integers(1, TOKENS - 1), max_size=3))})
    ranges = []
    for start, end in itertools.pairwise(tokens):
        layers = sorted({0, 3, *draw(st.lists(st.integers(1, 2), max_size=2))})
        ranges += [Range(start, end, first, last) for first, last in itertools.pairwise(layers)]
    return sizes[0], sizes[1], sizes[2], sizes[3], draw(st.permutations(ranges))


@given(cuts(), st.sampled_from(WIRE_FORMATS))
@settings(max_examples=60)
def test_a_prompt_cut_into_any_rectangles_arrives_whole(
    cut: tuple[int, int, int, int, list[Range]], wire_format: str
) -> None:
    sender_tp, receiver_tp, sender_block, receiver_block, ranges = cut
    layout = replace(LAYOUT, num_kv_heads=4)
    sender = RankCaches(replace(layout, tp_size=sender_tp, block_size=sender_block), TOKENS)
    receiver = RankCaches(replace(layout, tp_size=receiver_tp, block_size=receiver_block), TOKENS)
    truth = make_truth(layout)
    sender.load(truth)
    move(sender, receiver, list(ranges), wire_format)
    due = decoded(truth, wire_format, "bfloat16")
    torch.testing.assert_close(receiver.held(TOKENS), due, rtol=0 if wire_format == "native" else 2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_nan_and_infinity_survive_the_native_format_bit_for_bit(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    integer = torch.int32 if dtype == "float32" else torch.int16
    bits = torch.iinfo(integer)
    shape = (3, 2, TOKENS, 8, 4)
    truth = torch.randint(bits.min, bits.max, shape, dtype=integer).view(getattr(torch, dtype))
    truth[0, 0, :3, 0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    sender, receiver = RankCaches(layout, TOKENS), RankCaches(replace(layout, block_size=8), TOKENS)
    sender.load(truth)
    move(sender, receiver, [EVERYTHING])
    assert torch.equal(receiver.held(TOKENS).view(integer), truth.view(integer))


@pytest.mark.parametrize("wire_format", ["int8", "fp8"])
def test_the_bytes_of_a_slot_do_not_depend_on_how_it_is_cut_for_work(
    wire_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, sender, receiver = one_pair(wire_format)
    slots = []
    for piece_bytes in (1 << 22, 1, 3 * 2 * 5 * 4 * 4, 50 * 2 * 5 * 4 * 4):
        monkeypatch.setattr(codec_module, "_CPU_PIECE_BYTES", piece_bytes)
        slots.append(make_slot(ours))
        ours.pack(sender.caches[0], sender.table, EVERYTHING, TAG, slots[-1])
        assert torch.equal(slots[-1], slots[0])
        receiver.caches[0].fill_(POISON)
        theirs.unpack(slots[-1], receiver.caches[0], receiver.table, EVERYTHING, TAG)
        assert not receiver.rows(0)[:, :, :TOKENS, 2:7].eq(POISON).any()


# Sizes and memory.


def test_one_byte_a_value_is_about_half_of_bfloat16() -> None:
    layout = replace(LAYOUT, num_layers=32, head_dim=128)
    what = Range(0, 256, 0, 32)
    sizes = {
        name: SlotCodec(layout, layout, slice(0, 8), is_sender=True, wire_format=name).num_bytes(what)
        for name in WIRE_FORMATS
    }
    payload = 32 * 2 * 256 * 8 * 128 * 2
    assert sizes["native"] == HEADER_BYTES + payload
    assert sizes["int8"] == sizes["fp8"] == HEADER_BYTES + payload // 2 + payload // 128 * 2


@every_format
def test_a_slot_holds_every_range_of_its_cells(wire_format: str) -> None:
    layout = replace(LAYOUT, num_layers=12, num_kv_heads=1, head_dim=1, dtype="float16")
    codec = SlotCodec(layout, layout, slice(0, 1), is_sender=True, wire_format=wire_format)
    for tokens, layers in itertools.product(range(1, 8), range(1, 13)):
        what = Range(3, 3 + tokens, 0, layers)
        assert codec.num_bytes(what) <= codec.slot_bytes(what.num_cells) <= codec.slot_bytes(what.num_cells + 1)
        assert codec.slot_bytes(what.num_cells) % 64 == 0


@every_format
@pytest.mark.parametrize("layers", [1, 2])
def test_odd_sizes_are_padded_with_zeros_and_arrive(wire_format: str, layers: int) -> None:
    layout = replace(LAYOUT, num_layers=2, num_kv_heads=1, head_dim=1, dtype="float16", block_size=1)
    sender, receiver = RankCaches(layout, 5), RankCaches(layout, 5, seed=3)
    truth = torch.randn(2, 2, 5, 1, 1).half()
    sender.load(truth)
    for tokens in (1, 2, 3, 5):
        receiver.caches[0].fill_(POISON)
        move(sender, receiver, [Range(0, tokens, 0, layers)], wire_format)
        held = receiver.held(5)
        due = decoded(truth, wire_format, "float16")
        torch.testing.assert_close(held[:layers, :, :tokens], due[:layers, :, :tokens], rtol=2**-9, atol=0)
        assert held[:, :, tokens:].eq(POISON).all() and held[layers:].eq(POISON).all()


@every_format
def test_nothing_of_an_earlier_chunk_is_left_between_the_parts_of_a_slot(wire_format: str) -> None:
    layout = replace(LAYOUT, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", block_size=1)
    codec = SlotCodec(layout, layout, slice(0, 1), is_sender=True, wire_format=wire_format)
    sender, what = RankCaches(layout, 1), Range(0, 1, 0, 1)
    slots = [torch.full((codec.slot_bytes(1),), garbage, dtype=torch.uint8) for garbage in (0, 0xAB)]
    sizes = [codec.pack(sender.caches[0], sender.table, what, TAG, slot) for slot in slots]
    assert torch.equal(slots[0][: sizes[0]], slots[1][: sizes[1]])


def test_slots_may_lie_in_shared_memory_one_after_another() -> None:
    ours, theirs, sender, receiver = one_pair()
    size = ours.slot_bytes(EVERYTHING.num_cells)
    with mmap.mmap(-1, 2 * size) as shared:
        ring = torch.frombuffer(shared, dtype=torch.uint8)
        slots = [ring[:size], ring[size:]]
        for tag, slot in enumerate(slots):
            ours.pack(sender.caches[0], sender.table, EVERYTHING, tag, slot)
        for tag, slot in enumerate(slots):
            receiver.caches[0].fill_(POISON)
            theirs.unpack(slot, receiver.caches[0], receiver.table, EVERYTHING, tag)
            assert torch.equal(receiver.held(TOKENS)[:, :, :, 2:7], make_truth()[:, :, :, 2:7])
        del ring, slots, slot


def test_a_slot_that_is_too_small_or_crooked_is_refused() -> None:
    ours, theirs, sender, receiver = one_pair()
    size = ours.num_bytes(EVERYTHING)
    for slot, message in (
        (torch.zeros(size - 1, dtype=torch.uint8), f"give contiguous uint8 \\[>= {size}\\]"),
        (torch.zeros(size, dtype=torch.int8), "give contiguous uint8"),
        (torch.zeros(2 * size, dtype=torch.uint8)[::2], "give contiguous uint8"),
        (torch.zeros(size + 4, dtype=torch.uint8)[4:], "an address that 8 does not divide"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.pack(sender.caches[0], sender.table, EVERYTHING, TAG, slot)
        with pytest.raises(ValueError, match=message):
            theirs.unpack(slot, receiver.caches[0], receiver.table, EVERYTHING, TAG)


def test_what_no_slot_can_hold_is_refused() -> None:
    ours, _, sender, _ = one_pair()
    for what, tag, message in (
        (Range(0, TOKENS, 0, 4), TAG, r"layers \[0, 4\) are no range of 3"),
        (Range(0, 25, 0, 3), TAG, "but the block table has"),
        (EVERYTHING, 1 << 64, "does not fit 64 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.pack(sender.caches[0], sender.table, what, tag, make_slot(ours, 99))


def test_a_codec_for_heads_that_a_rank_does_not_hold_is_refused() -> None:
    for heads in (slice(0, 9), slice(3, 3), slice(-1, 2)):
        with pytest.raises(ValueError, match="are no range of 8 local heads"):
            SlotCodec(LAYOUT, LAYOUT, heads, is_sender=True)


def test_damage_counts_as_a_failed_transfer() -> None:
    assert issubclass(Corrupted, TransferFailed)
