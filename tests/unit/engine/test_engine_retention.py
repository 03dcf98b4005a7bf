"""Sessions whose KV is given up last: by example, and by random walks in which the books are checked at each step."""

from __future__ import annotations

import random

import pytest

from cluster.kv_groups import KvGroup
from engine.kv.retaining_blocks import RetainingBlocks
from engine.kv.retention import MOST_SHARED, EvictionOrder, Retention, Session, SessionName
from engine.kv.tiered_blocks import TieredBlocks

A, B, C = (SessionName("a", str(number)) for number in range(3))
OTHER = SessionName("b", "0")


def pool(num_blocks: int = 8, share: float = 0.5) -> RetainingBlocks:
    blocks = RetainingBlocks(num_blocks, 2)
    blocks.session_share = share
    blocks.tick(0.0)
    return blocks


def turn(blocks: RetainingBlocks, tokens: list[int], session: SessionName | None = None, ttl_s: float = 60.0) -> None:
    """A prompt comes, is computed, and goes."""
    table = blocks.match_prefix(tokens)
    table = table + blocks.allocate(-(-len(tokens) // 2) - len(table))
    blocks.publish(tokens, table, b"", len(tokens))
    if session is not None:
        blocks.retain(Session(session, ttl_s), table)
    blocks.release(table)
    blocks.check()


def others(blocks: RetainingBlocks, first: int, num: int) -> None:
    for number in range(num):
        turn(blocks, [first + number, 0, 1, 2])


def num_found(blocks: RetainingBlocks, tokens: list[int]) -> int:
    table = blocks.match_prefix([*tokens, 99])
    blocks.release(table)
    return len(table)


def test_a_session_outlives_what_came_later_and_everything_else_goes_first() -> None:
    blocks = pool()
    turn(blocks, [1, 2, 3, 4], A)
    turn(blocks, [5, 6, 7, 8])
    others(blocks, 100, 10)
    assert num_found(blocks, [1, 2, 3, 4]) == 2 and num_found(blocks, [5, 6, 7, 8]) == 0


def test_what_is_retained_is_given_up_when_there_is_nothing_else() -> None:
    blocks = pool()
    turn(blocks, [1, 2, 3, 4], A)
    held = blocks.allocate(8)
    assert len(held) == 8 and num_found(blocks, [1, 2, 3, 4]) == 0
    blocks.release(held)
    blocks.check()


def test_its_time_begins_again_with_each_turn_and_then_it_is_as_all_others() -> None:
    blocks = pool()
    turn(blocks, [1, 2, 3, 4], A, ttl_s=10)
    blocks.tick(8.0)
    turn(blocks, [1, 2, 3, 4], A, ttl_s=10)
    blocks.tick(17.0)
    others(blocks, 100, 10)
    assert num_found(blocks, [1, 2, 3, 4]) == 2
    blocks.tick(18.5)
    assert not list(blocks.sessions())
    others(blocks, 200, 10)
    assert num_found(blocks, [1, 2, 3, 4]) == 0


def test_a_session_that_is_ended_and_caches_that_are_flushed_retain_nothing() -> None:
    blocks = pool()
    turn(blocks, [1, 2, 3, 4], A)
    blocks.end(A)
    others(blocks, 100, 10)
    assert num_found(blocks, [1, 2, 3, 4]) == 0
    turn(blocks, [1, 2, 3, 4], A)
    assert blocks.flush_cache() and not list(blocks.sessions())
    blocks.check()


def test_a_turn_takes_the_place_of_the_one_before_it() -> None:
    blocks = pool(share=0.5)
    turn(blocks, [1, 2, 3, 4], A)
    turn(blocks, [1, 2, 5, 6], A)
    others(blocks, 100, 10)
    assert num_found(blocks, [1, 2, 5, 6]) == 2 and num_found(blocks, [1, 2, 3, 4]) == 1


def test_the_share_is_the_most_and_the_tenant_with_most_loses_its_oldest_session() -> None:
    retention: Retention[int] = Retention(4)
    retention.retain(OTHER, [1], 9.0)
    retention.retain(A, [2, 3], 9.0)
    retention.retain(B, [4], 9.0)
    retention.retain(C, [5], 9.0)
    assert [name for name, *_ in retention.sessions()] == [OTHER, B, C] and len(retention) == 3
    retention.retain(C, range(10, 20), 9.0)
    assert {name: list(keys) for name, keys, _ in retention.sessions()} == {C: [10, 11, 12, 13]}, "of more, the first"
    retention.end(C)
    retention.end(C)
    assert not retention.check() and not len(retention)


def test_a_turn_that_was_cut_off_leaves_what_the_session_had() -> None:
    retention: Retention[int] = Retention(8)
    retention.retain(A, [1, 2, 3], 9.0)
    retention.retain(A, [1], 12.0)
    assert [(tuple(keys), until) for _, keys, until in retention.sessions()] == [((1, 2, 3), 12.0)]
    retention.retain(A, [1, 4], 13.0)
    assert [tuple(keys) for _, keys, _ in retention.sessions()] == [(1, 4)], "another turn"
    blocks = RetainingBlocks(8, 2)
    blocks.session_share = 0.9
    turn(blocks, [1, 2, 3, 4], A)
    blocks.retain(Session(A, 9.0), [])
    assert len(next(blocks.sessions())[1]) == 2, "one that was cancelled before it had a block"


def test_of_a_session_the_end_goes_first_and_all_of_it_once_its_time_is_over() -> None:
    retention: Retention[int] = Retention(8)
    order: EvictionOrder[int, None] = EvictionOrder(retention.__contains__, dict.fromkeys([1, 2, 3, 4, 5]))
    retention.on_change = order.sort_in
    retention.retain(A, [2, 3, 4], 9.0)
    assert list(order) == [1, 5, 4, 3, 2]
    retention.expire(10.0)
    assert list(order) == [4, 3, 2, 1, 5]


def test_what_expires_costs_what_expires_and_a_session_that_went_on_does_not_expire_with_its_first_turn() -> None:
    retention: Retention[int] = Retention(1000)
    for turn in range(300):
        for name in (A, B, C):
            retention.retain(name, [turn], 10.0 + turn)
    assert len(retention._ends) < 200 and not retention.check(), "ends of earlier turns are forgotten"
    retention.retain(A, [1, 2], 5.0)
    retention.retain(B, [3], 400.0)
    retention.expire(5.0)
    assert {name for name, *_ in retention.sessions()} == {B, C}, "a turn may also end sooner than the one before it"
    retention.end(C)
    retention.expire(399.0)
    assert [name for name, *_ in retention.sessions()] == [B] and not retention.check()
    retention.expire(400.0)
    assert not len(retention) and not retention._ends


def test_blocks_that_sessions_share_count_once_but_not_without_end() -> None:
    retention: Retention[int] = Retention(4)
    for number in range(1000):
        retention.retain(SessionName("a", str(number)), [1, 2, 3], 9.0)
    assert len(retention) == 3 and len(list(retention.sessions())) == MOST_SHARED * 4 // 3


def test_a_tier_below_keeps_more_sessions_than_the_pool_and_finds_them_there() -> None:
    blocks = TieredBlocks(8, 2, num_slots=40, num_ahead=8)
    blocks.session_share = 0.5
    blocks.tick(0.0)

    def settle() -> None:
        while moves := blocks.take_moves():
            for move in moves:
                blocks.moved(move)
        blocks.check()

    sessions = [SessionName("a", str(number)) for number in range(8)]
    for number, name in enumerate(sessions):
        turn(blocks, [number, 1, 2, 3], name)
        settle()
    for number in range(60):
        turn(blocks, [100 + number, 1, 2, 3])
        settle()
    assert [len(blocks.retentions[tier]) for tier in ("device", "host")] == [4, 16]
    for number in range(8):
        assert num_found(blocks, [number, 1, 2, 3]) == 2, number
        settle()
    assert num_found(blocks, [100, 1, 2, 3]) == 0, "one that came later, without a session"
    listed = {name: keys for name, keys, _ in blocks.sessions()}
    assert list(listed) == sessions and blocks.num_kept("host", listed[sessions[0]]) == 2


def test_tokens_without_a_session_are_their_own_and_give_way_to_what_continues_them() -> None:
    blocks, nameless = pool(16), SessionName("a", "")
    turn(blocks, [1, 2, 3, 4], nameless)
    [(first, keys, _)] = blocks.sessions()
    assert first == SessionName("a", f"prefix-{keys[-1][1].hex()}")
    turn(blocks, [1, 2, 3, 4], nameless)
    assert [name for name, *_ in blocks.sessions()] == [first]
    turn(blocks, [1, 2, 3, 4, 5, 6], nameless)
    [(second, keys, _)] = blocks.sessions()
    assert second != first and len(keys) == 3
    turn(blocks, [1, 2, 3, 4, 7, 8], nameless)
    turn(blocks, [1, 2, 3, 4], SessionName("b", ""))
    assert len(list(blocks.sessions())) == 3
    others(blocks, 100, 20)
    assert num_found(blocks, [1, 2, 3, 4, 5, 6]) == num_found(blocks, [1, 2, 3, 4, 7, 8]) == 3


def test_sessions_without_a_share_are_as_all_others() -> None:
    blocks = RetainingBlocks(8, 2)
    turn(blocks, [1, 2, 3, 4], A)
    others(blocks, 100, 10)
    assert num_found(blocks, [1, 2, 3, 4]) == 0


def test_an_order_of_eviction_is_a_mapping() -> None:
    retained = {2, 4}
    order: EvictionOrder[int, str] = EvictionOrder(retained.__contains__)
    for number in range(6):
        order[number] = str(number)
    order.move_to_end(0)
    order.move_to_end(2)
    assert list(order) == [1, 3, 5, 0, 4, 2] and list(order.values())[:2] == ["1", "3"] and len(order) == 6
    retained.discard(4)
    order.sort_in([4, 9])
    assert list(order) == [4, 1, 3, 5, 0, 2], "what is retained no more comes first"
    assert order.pop(4) == "4" and order.pop(4, None) is None
    retained.add(1)
    order.sort_in([1])
    assert list(order) == [3, 5, 0, 2, 1] and 1 in order and 4 not in order
    del order[1]
    assert list(order) == [3, 5, 0, 2]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_tiers", [False, True])
def test_in_a_random_walk_the_books_are_right_and_every_block_can_be_had(seed: int, with_tiers: bool) -> None:
    draw = random.Random(seed)
    groups = [KvGroup((0,))] if seed % 2 else [KvGroup((0,)), KvGroup((1,), window=4)]
    blocks: RetainingBlocks = (
        TieredBlocks(24, 2, True, groups, num_slots=12, num_disk_slots=20)
        if with_tiers
        else RetainingBlocks(24, 2, True, groups)
    )
    blocks.session_share = draw.choice((0.1, 0.5, 0.9))
    under_way: list[object] = []
    for now in range(400):
        blocks.tick(float(now))
        tokens = [draw.randrange(2) for _ in range(draw.randrange(2, 9))]
        table = blocks.match_prefix(tokens)
        held = len(table) // len(groups) * 2
        spans = [range(held // 2, -(-len(tokens) // 2))] * len(groups)
        if blocks.can_allocate(sum(map(len, spans))):
            blocks.fill(table, -(-len(tokens) // 2), spans)
            if blocks.have_arrived(table):
                blocks.publish(tokens, table, b"", len(tokens))
            if draw.random() < 0.5:
                name = SessionName(draw.choice("ab"), draw.choice("xyz"))
                blocks.retain(Session(name, draw.choice((1.0, 30.0))), table)
        blocks.release(table)
        if isinstance(blocks, TieredBlocks):
            under_way += blocks.take_moves()
            while under_way and draw.random() < 0.7:
                blocks.moved(under_way.pop(draw.randrange(len(under_way))), draw.choice(("", "", "", "a bad disk")))  # type: ignore[arg-type]
        if draw.random() < 0.02:
            blocks.flush_cache()
        blocks.check()
    if isinstance(blocks, TieredBlocks):
        for move in under_way:
            blocks.moved(move)  # type: ignore[arg-type]
    everything = blocks.allocate(24)
    blocks.release(everything)
    blocks.check()
