"""The index of a tier, by example; random walks are those of the pool above it."""

from __future__ import annotations

from cluster.prefix_hash import prefix_hashes
from engine.kv.kv_tier import KvTier, TierKey
from engine.kv.tiered_blocks import TieredBlocks

KEYS = [(0, bytes([number])) for number in range(8)]


def test_a_tier_gives_up_what_was_used_least_recently_and_nothing_that_is_read() -> None:
    tier = KvTier(3)
    slots, lost = tier.take(3)
    assert sorted(slots) == [0, 1, 2] and not lost
    for slot, key in zip(slots, KEYS, strict=False):
        tier.keep(slot, key)
    tier.touch(KEYS[0])
    pinned = tier.pin(KEYS[1])
    taken, lost = tier.take(5)
    assert sorted(taken) == sorted([slots[0], slots[2]]) and lost == [KEYS[2], KEYS[0]] and tier.check() == []
    assert KEYS[1] in tier and tier.num_free == 0
    assert tier.drop(KEYS[1]) and not tier.drop(KEYS[1])
    assert tier.take(1) == ([], [])
    tier.unpin(pinned)
    assert tier.take(1) == ([pinned], []) and tier.check() == []


def test_what_is_found_from_before_takes_free_slots_alone() -> None:
    tier = KvTier(3)
    [moving], _ = tier.take(1)
    tier.adopt([(moving, KEYS[0]), (1, KEYS[1]), (2, KEYS[1])])
    assert KEYS[0] not in tier and KEYS[1] in tier and tier.num_free == 1 and tier.check() == []


def test_what_to_spill_is_looked_for_once_for_many_moves() -> None:
    manager = TieredBlocks(8, 2, num_slots=800, num_disk_slots=4000, num_ahead=8)
    looked_at: list[TierKey] = []
    touch = manager.disk.touch
    manager.disk.touch = lambda key: (looked_at.append(key), touch(key))[1]  # type: ignore[method-assign,func-returns-value]
    for first in range(1000):
        table = manager.allocate(2)
        manager.publish([first, 1, 2, 3], table, b"", num_computed=4)
        manager.release(table)
        while moves := manager.take_moves():
            for move in moves:
                manager.moved(move)
    assert manager.counts.spilled > 1000 and manager.counts.given_up == manager.counts.unsaved == 0
    assert len(looked_at) < 10 * manager.counts.spilled


def test_one_damaged_block_of_a_move_ends_no_other_and_the_prefix_up_to_it_is_used() -> None:
    manager = TieredBlocks(num_blocks=80, block_size=2, num_slots=4, num_disk_slots=400, num_ahead=80)
    tokens = list(range(121))
    manager.find_again(enumerate((0, digest) for digest in prefix_hashes(tokens, 2, b"")))
    table, damaged, num_moves = manager.match_prefix(tokens), 41, 0
    assert len(table) == 60 and manager.have_arrived(table) is None
    while moves := manager.take_moves():
        num_moves += len(moves)
        for move in moves:
            manager.moved(move, "it is damaged" if damaged in move.sources else "")
        manager.check()
    assert manager.have_arrived(table) is False
    manager.release(table)
    assert (manager.counts.failed, manager.counts.read, num_moves) == (1, 59, 13), "the whole, and six times two halves"
    assert manager.match_prefix(tokens) == table[:damaged] and manager.have_arrived(table[:damaged])
    assert list(prefix_hashes(tokens, 2, b""))[damaged] not in manager.cached_hashes and len(manager.disk) == 59
