"""Ranks that keep a share of each block's tokens hand them over to ranks that do, and that keep whole blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import RankCaches, decoded, move

from kv_transfer import codec as codec_module
from kv_transfer.actions import Range
from kv_transfer.codec import SlotCodec
from kv_transfer.header import HEADER_BYTES
from kv_transfer.layout import WIRE_FORMATS, KvLayout, routes
from kv_transfer.shares import RouteTokens

TOKENS = 21
LATENTS = KvLayout(
    num_layers=3, num_kv_heads=1, head_dim=4, dtype="bfloat16", tp_size=1, block_size=4, model="m", num_planes=1
)


@st.composite
def shared_cuts(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, list[Range]]:
    """Two layouts of latents, whose ranks have each a share of every block's tokens or all of them, and a prompt cut
    into rectangles."""
    layouts = []
    for _ in "ab":
        tp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
        count = draw(st.sampled_from([1, tp_size]))
        block_size = count * draw(st.sampled_from([1, 2, 3, 5, 8]))
        layouts.append(replace(LATENTS, tp_size=tp_size, block_size=block_size, num_token_shares=count))
    tokens = sorted({0, TOKENS, *draw(st.lists(st.integers(1, TOKENS - 1), max_size=5))})
    ranges = []
    for start, end in itertools.pairwise(tokens):
        layers = sorted({0, 3, *draw(st.lists(st.integers(1, 2), max_size=2))})
        ranges += [Range(start, end, first, last) for first, last in itertools.pairwise(layers)]
    return layouts[0], layouts[1], draw(st.permutations(ranges))


@given(shared_cuts(), st.sampled_from(WIRE_FORMATS), st.sampled_from([1 << 22, 1]))
@settings(max_examples=200)
def test_shares_of_latents_go_from_any_ranks_to_any_ranks(
    cut: tuple[KvLayout, KvLayout, list[Range]], wire_format: str, piece_bytes: int
) -> None:
    """From shares to shares, from whole latents to shares and back; each rank gets its own tokens and no other."""
    sender, receiver = (RankCaches(layout, TOKENS) for layout in cut[:2])
    truth = torch.randn((3, 1, TOKENS, 1, 4), generator=torch.Generator().manual_seed(1)).bfloat16()
    sender.load(truth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_module, "_CPU_PIECE_BYTES", piece_bytes)
        move(sender, receiver, cut[2], wire_format)
    due = RankCaches(receiver.layout, TOKENS)
    due.load(decoded(truth, wire_format, "bfloat16"))
    for found, wanted in zip(receiver.caches, due.caches, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0 if wire_format == "native" else 2**-7, atol=1e-6)


@pytest.mark.parametrize("counts", [(2, 2), (2, 1), (1, 4)], ids=str)
def test_rounded_shares_go_as_they_are(counts: tuple[int, int]) -> None:
    layout = replace(LATENTS, dtype="int8", block_size=12)
    sender, receiver = (RankCaches(replace(layout, tp_size=n, num_token_shares=n), TOKENS) for n in counts)
    truth = torch.randint(0, 100, (3, 1, TOKENS, 1, 4), dtype=torch.int8)
    sender.load(truth)
    move(sender, receiver, [Range(0, 9, 0, 3), Range(9, TOKENS, 0, 3)])
    assert torch.equal(receiver.held(TOKENS), truth)


def test_what_the_routes_of_shares_carry_is_what_is_kept_once_and_a_header_each() -> None:
    latents = replace(LATENTS, block_size=8)
    shared, whole = replace(latents, tp_size=4, num_token_shares=4), replace(latents, tp_size=4)
    kept = 3 * TOKENS * latents.head_dim * 2

    def payload(sender: KvLayout, receiver: KvLayout) -> tuple[int, int]:
        codecs = [
            SlotCodec(
                sender,
                receiver,
                slice(0, 1),
                is_sender=True,
                tokens=RouteTokens.of(route, sender, receiver, is_sender=True),
            )
            for route in routes(sender, receiver)
        ]
        return len(codecs), sum(codec.num_bytes(Range(0, TOKENS, 0, 3)) // 8 * 8 - HEADER_BYTES for codec in codecs)

    assert payload(shared, shared) == (4, kept)
    assert payload(shared, replace(shared, block_size=16)) == (8, kept)
    assert payload(whole, shared) == (4, kept)
    assert payload(shared, whole) == (16, 4 * kept)
    assert payload(whole, whole) == (4, 4 * kept)
