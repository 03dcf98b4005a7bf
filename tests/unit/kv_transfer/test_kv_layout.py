"""Which rank holds and sends which heads, and which layouts meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pb import handoff_pb2
from kv_transfer.layout import (
    FLOAT_DTYPES,
    KvLayout,
    LayoutMismatch,
    Route,
    check_compatible,
    check_wire_format,
    routes,
    wire_dtype,
)

LAYOUT = KvLayout(
    num_layers=6, num_kv_heads=4, head_dim=32, dtype="float32", tp_size=2, block_size=16, model="tiny-shakespeare"
)

head_counts = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    heads = draw(head_counts)
    sizes = [n for n in range(1, heads + 1) if heads % n == 0] + [heads * 2, heads * 3]
    sender, receiver = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    return (
        replace(LAYOUT, num_kv_heads=heads, tp_size=sender),
        replace(LAYOUT, num_kv_heads=heads, tp_size=receiver, block_size=draw(st.sampled_from([8, 16, 32]))),
    )


@given(layout_pairs())
def test_every_receiving_rank_gets_each_of_its_heads_exactly_once(pair: tuple[KvLayout, KvLayout]) -> None:
    sender, receiver = pair
    for rank in range(receiver.tp_size):
        mine = [r for r in routes(sender, receiver) if r.dst_rank == rank]
        heads = sorted(head for r in mine for head in range(r.head_start, r.head_end))
        assert heads == list(receiver.head_range(rank))


@given(layout_pairs())
def test_a_head_is_sent_by_the_lowest_rank_that_holds_it(pair: tuple[KvLayout, KvLayout]) -> None:
    sender, receiver = pair
    for route in routes(sender, receiver):
        for head in range(route.head_start, route.head_end):
            holders = [rank for rank in range(sender.tp_size) if head in sender.head_range(rank)]
            assert route.src_rank == holders[0]


@given(layout_pairs())
def test_there_is_one_route_at_most_between_two_ranks_and_all_sides_see_one_order(
    pair: tuple[KvLayout, KvLayout],
) -> None:
    ranks = [(route.src_rank, route.dst_rank) for route in routes(*pair)]
    assert ranks == sorted(set(ranks))


@pytest.mark.parametrize(
    ("tp_size", "expected"),
    [
        (1, [range(4)]),
        (2, [range(2), range(2, 4)]),
        (4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        (8, [range(h, h + 1) for h in (0, 0, 1, 1, 2, 2, 3, 3)]),
    ],
)
def test_heads_are_cut_into_equal_runs_or_replicated(tp_size: int, expected: list[range]) -> None:
    layout = replace(LAYOUT, tp_size=tp_size)
    assert [layout.head_range(rank) for rank in range(tp_size)] == expected
    assert {len(heads) for heads in expected} == {layout.num_local_heads}


def test_ranks_that_replicate_a_lower_one_send_nothing() -> None:
    sender = replace(LAYOUT, num_kv_heads=2, tp_size=4)
    receiver = replace(LAYOUT, num_kv_heads=2, tp_size=2)
    assert routes(sender, receiver) == (Route(0, 0, 0, 1), Route(2, 1, 1, 2))


@given(
    st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5)),
    st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5)),
)
def test_ranks_meet_that_keep_some_token_in_common(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    """Shares, and the tokens of each, on either side: against all tokens of both sides' blocks, one by one."""
    sender, receiver = (
        replace(LAYOUT, num_kv_heads=1, tp_size=count, num_token_shares=count, block_size=count * size)
        for count, size in (ours, theirs)
    )
    common = set()
    for token in range(sender.block_size * receiver.block_size):
        holders = (token % layout.block_size // layout.num_local_tokens for layout in (sender, receiver))
        common.add(tuple(holders))
    assert [(route.src_rank, route.dst_rank) for route in routes(sender, receiver)] == sorted(common)


def test_equal_ranks_that_share_tokens_meet_those_of_their_number() -> None:
    shared = replace(LAYOUT, num_kv_heads=1, tp_size=8, num_token_shares=8, block_size=64)
    assert routes(shared, shared) == tuple(Route(rank, rank, 0, 1) for rank in range(8))


@pytest.mark.parametrize(
    "change", [{"num_token_shares": 4}, {"block_size": 15}, {"num_kv_heads": 2}, {"tp_size": 4}], ids=str
)
def test_shares_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    fitting = replace(LAYOUT, num_kv_heads=1, num_token_shares=2)
    assert fitting.num_local_tokens == 8
    with pytest.raises(LayoutMismatch, match="cannot be divided into"):
        replace(fitting, **change)


def test_a_layout_with_shares_survives_its_message() -> None:
    shared = replace(LAYOUT, num_kv_heads=1, num_planes=1, num_token_shares=2)
    assert KvLayout.from_proto(handoff_pb2.KvLayout.FromString(shared.to_proto().SerializeToString())) == shared
    assert "latents split over 2 ranks" in str(shared)
    assert not shared.to_proto().block_size, "a peer that does not know of shares must refuse the layout"


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tp_rank 2 is outside \[0, 2\)"):
        LAYOUT.head_range(2)


def test_a_layout_survives_its_message() -> None:
    assert KvLayout.from_proto(handoff_pb2.KvLayout.FromString(LAYOUT.to_proto().SerializeToString())) == LAYOUT


def test_an_empty_message_from_a_peer_is_refused_by_name() -> None:
    with pytest.raises(LayoutMismatch, match="num_layers must be at least 1"):
        KvLayout.from_proto(handoff_pb2.KvLayout())


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "tp_size", "block_size"])
def test_billions_that_a_damaged_message_claims_are_refused_at_once(name: str) -> None:
    message = LAYOUT.to_proto()
    setattr(message, name, 2**32 - 4)
    with pytest.raises(LayoutMismatch, match=f"{name} must be at most"):
        KvLayout.from_proto(message)


def test_an_unknown_dtype_is_refused_with_those_that_are_served() -> None:
    with pytest.raises(LayoutMismatch, match="'int3' is not served; use one of float32, bfloat16, float16"):
        replace(LAYOUT, dtype="int3")


@pytest.mark.parametrize("tp_size", [3, 6])
def test_a_tp_size_that_does_not_fit_the_heads_is_refused_with_those_that_do(tp_size: int) -> None:
    with pytest.raises(LayoutMismatch, match=rf"tp_size {tp_size} does not divide 4 KV heads; use one of \[1, 2, 4\]"):
        replace(LAYOUT, tp_size=tp_size)


def test_tp_size_and_block_size_may_differ() -> None:
    check_compatible(LAYOUT, replace(LAYOUT, tp_size=8, block_size=64))


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"num_layers": 7}, {"num_kv_heads": 8}, {"head_dim": 64}, {"num_planes": 1}],
    ids=lambda change: next(iter(change)),
)
def test_anything_else_that_differs_is_refused_naming_both(change: dict[str, object]) -> None:
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    name, value = next(iter(change.items()))
    with pytest.raises(LayoutMismatch) as caught:
        routes(LAYOUT, other)
    message = str(caught.value)
    assert f"{name} is {getattr(LAYOUT, name)} at the sender and {value} at the receiver" in message
    assert str(LAYOUT) in message and str(other) in message
    assert caught.value.grpc_code == "FAILED_PRECONDITION"


@pytest.mark.parametrize("sender", FLOAT_DTYPES)
@pytest.mark.parametrize("receiver", FLOAT_DTYPES)
def test_dtypes_are_bridged_unless_values_might_leave_the_receivers_range(sender: str, receiver: str) -> None:
    ours, theirs = replace(LAYOUT, dtype=sender), replace(LAYOUT, dtype=receiver)
    if receiver != "float16" or sender == "float16":
        check_compatible(ours, theirs)
        return
    with pytest.raises(LayoutMismatch) as caught:
        routes(ours, theirs)
    message = str(caught.value)
    assert f"dtype is {sender} at the sender, beyond the range of the receiver's float16" in message
    assert str(ours) in message and str(theirs) in message


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_the_wire_dtype_is_the_senders_or_the_formats_own(dtype: str) -> None:
    found = [wire_dtype(replace(LAYOUT, dtype=dtype), wire_format) for wire_format in ("native", "int8", "fp8")]
    assert found == [dtype, "int8", "float8_e4m3fn"]


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("other", [*FLOAT_DTYPES, "int8", "uint8"])
def test_what_is_rounded_goes_to_the_same_and_as_it_is(kind: str, other: str) -> None:
    rounded = replace(LAYOUT, dtype=kind, head_dim=68)
    check_compatible(rounded, rounded)
    assert wire_dtype(rounded, "native") == kind
    plain = replace(LAYOUT, dtype=other if other != kind else "float32")
    for sender, receiver in ((rounded, plain), (plain, rounded)):
        with pytest.raises(LayoutMismatch, match="start both workers with the same kv_cache_dtype") as caught:
            routes(sender, receiver)
        assert str(sender) in str(caught.value) and str(receiver) in str(caught.value)
    for wire_format in ("int8", "fp8"):
        with pytest.raises(LayoutMismatch, match=f"not rounded to {wire_format} once more; use wire_format native"):
            wire_dtype(rounded, wire_format)


def test_both_sides_must_speak_one_wire_format() -> None:
    check_wire_format("int8", "int8")
    with pytest.raises(LayoutMismatch, match="wire_format is native at the sender and fp8 at the receiver"):
        check_wire_format("native", "fp8")


@pytest.mark.parametrize(("pair", "side"), [(("zip", "native"), "sender"), (("native", "zip"), "receiver")])
def test_an_unknown_wire_format_is_refused_with_those_that_are_known(pair: tuple[str, str], side: str) -> None:
    with pytest.raises(LayoutMismatch, match=f"the {side}'s wire_format 'zip' is not known; use one of native, int8"):
        check_wire_format(*pair)
    with pytest.raises(LayoutMismatch, match="wire_format 'zip' is not known"):
        wire_dtype(LAYOUT, "zip")
