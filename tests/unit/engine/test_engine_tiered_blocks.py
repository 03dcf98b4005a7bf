"""A pool above a tier in host memory, by example."""

from __future__ import annotations

import pytest

from cluster.kv_groups import KvGroup
from cluster.prefix_hash import prefix_hashes
from engine.kv.kv_tier import BlockMove, MoveKind
from engine.kv.tiered_blocks import TieredBlocks


def fill(manager: TieredBlocks, tokens: list[int], salt: bytes = b"") -> None:
    """A prompt comes, is computed, and goes."""
    table = manager.match_prefix(tokens, salt)
    assert manager.have_arrived(table)
    table = table + manager.allocate(-(-len(tokens) // manager.block_size) - len(table))
    manager.publish(tokens, table, salt, num_computed=len(tokens))
    manager.release(table)


def settle(manager: TieredBlocks, error: str = "") -> list[BlockMove]:
    """Every move that is wanted begins and ends."""
    made: list[BlockMove] = []
    while moves := manager.take_moves():
        for move in moves:
            manager.moved(move, error)
        made += moves
        manager.check()
    return made


def test_what_is_evicted_is_found_in_the_tier_and_loaded_into_other_blocks() -> None:
    manager = TieredBlocks(num_blocks=4, block_size=2, num_slots=8, num_ahead=4)
    fill(manager, [1, 2, 3, 4, 5])
    [saved] = settle(manager)
    assert len(saved.sources) == 2 and saved.kind is MoveKind.SAVE
    fill(manager, [6, 7, 8, 9, 10, 11, 12, 13])  # takes the whole pool
    assert manager.counts.unsaved == 0 and manager.counts.saved == 2

    table = manager.match_prefix([1, 2, 3, 4, 99])
    assert len(table) == 2 and manager.have_arrived(table) is None
    [load] = [move for move in manager.take_moves() if move.kind is MoveKind.LOAD]
    assert load.targets == tuple(table) and load.keys == tuple(sorted(saved.keys, key=load.keys.index))
    assert [saved.targets[saved.keys.index(key)] for key in load.keys] == list(load.sources)
    manager.moved(load)
    assert manager.have_arrived(table) and manager.counts.loaded == 2
    manager.release(table)
    manager.check()
    assert manager.match_prefix([1, 2, 3, 4, 99]) == table, "it is in the pool again"


def test_nothing_is_saved_while_the_pool_has_room() -> None:
    manager = TieredBlocks(num_blocks=64, block_size=2, num_slots=8, num_ahead=8)
    fill(manager, list(range(40)))
    assert not settle(manager)


def test_one_load_serves_all_who_wait_for_the_same_prefix() -> None:
    manager = TieredBlocks(num_blocks=8, block_size=2, num_slots=8, num_ahead=8)
    fill(manager, [1, 2, 3, 4, 5])
    settle(manager)
    fill(manager, list(range(10, 26)))
    first, second = manager.match_prefix([1, 2, 3, 4, 5]), manager.match_prefix([1, 2, 3, 4, 6])
    assert first == second and manager.refcount(first[0]) == 3
    [load] = [move for move in manager.take_moves() if move.kind.is_up]
    manager.release(first)  # one of them is cancelled
    assert manager.have_arrived(second) is None
    manager.moved(load)
    assert manager.have_arrived(second)
    manager.release(second)
    manager.check()


def test_blocks_of_a_failed_load_have_no_content_and_are_not_found_again() -> None:
    manager = TieredBlocks(num_blocks=4, block_size=2, num_slots=8, num_ahead=4)
    manager.watch_cache(True)
    fill(manager, [1, 2, 3, 4, 5])
    settle(manager)
    fill(manager, [6, 7, 8, 9, 10, 11, 12, 13])
    manager.take_cache_events()
    table = manager.match_prefix([1, 2, 3, 4, 5])
    for move in manager.take_moves():
        manager.moved(move, "the slot is damaged")
    assert manager.have_arrived(table) is False
    manager.release(table)
    manager.check()
    assert manager.match_prefix([1, 2, 3, 4, 5]) == [] and manager.counts.failed >= 2
    events = manager.take_cache_events()
    assert events is not None and set(events.evicted) >= set(prefix_hashes([1, 2, 3, 4, 5], 2, b""))


def test_a_copy_of_a_block_that_was_evicted_meanwhile_is_thrown_away() -> None:
    manager = TieredBlocks(num_blocks=4, block_size=2, num_slots=8, num_ahead=4)
    fill(manager, [1, 2, 3, 4, 5])
    [save] = manager.take_moves()
    fill(manager, [6, 7, 8, 9, 10, 11, 12, 13])
    manager.moved(save)
    assert not len(manager.host) and manager.counts.unsaved == 2
    manager.check()


def test_what_is_computed_sooner_is_not_loaded() -> None:
    asked: list[object] = []
    manager = TieredBlocks(num_blocks=4, block_size=2, num_slots=8, num_ahead=4)
    manager.is_quicker = lambda *question: bool(asked.append(question))
    fill(manager, [1, 2, 3, 4, 5])
    settle(manager)
    fill(manager, [6, 7, 8, 9, 10, 11, 12, 13])
    assert manager.match_prefix([1, 2, 3, 4, 5]) == []
    assert asked == [({MoveKind.LOAD: 2}, 4, 0)] and manager.counts.declined == 2
    manager.check()


def test_no_load_begins_for_a_prompt_that_does_not_fit() -> None:
    manager = TieredBlocks(num_blocks=4, block_size=2, num_slots=8, num_ahead=4)
    fill(manager, [1, 2, 3, 4, 5])
    settle(manager)
    held = manager.allocate(4)
    manager.release(held[:3])
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7]) == [] and manager.num_free == 3
    manager.release(held[3:])
    assert len(manager.match_prefix([1, 2, 3, 4, 5, 6, 7])) == 2


def test_windows_come_back_as_far_as_the_next_token_sees_them() -> None:
    groups = (KvGroup((0,)), KvGroup((1,), window=4))
    manager = TieredBlocks(num_blocks=12, block_size=2, groups=groups, num_slots=12, num_ahead=12)
    tokens = list(range(11))
    table: list[int] = []
    manager.fill(table, 6, [range(6), range(6)])
    manager.publish(tokens, table, b"", num_computed=11)
    manager.release(table)
    settle(manager)
    manager.release(manager.allocate(12))
    found = manager.match_prefix(tokens)
    assert len(found) == 10 and found[1] == found[3] == found[5] == -1 and min(found[7:]) >= 0
    settle(manager)
    assert manager.have_arrived(found)
    manager.release(found)
    manager.check()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_tier_smaller_than_a_prompt_keeps_its_beginning_or_nothing(num_slots: int) -> None:
    manager = TieredBlocks(num_blocks=4, block_size=2, num_slots=num_slots, num_ahead=4)
    fill(manager, list(range(8)))
    settle(manager)
    assert len(manager.host) == num_slots
    manager.check()


def test_what_the_pool_has_evicted_last_the_tier_gives_up_last() -> None:
    manager = TieredBlocks(num_blocks=2, block_size=2, num_slots=2, num_ahead=2)
    fill(manager, [1, 2, 0])
    settle(manager)
    fill(manager, [3, 4, 5, 6])
    settle(manager)  # the tier is full with the first prompt's block and one of the second
    assert manager.counts.given_up == 1 and manager.counts.unsaved == 0
    for key in list(manager.host):
        assert key[1] in set(prefix_hashes([3, 4, 5, 6, 0], 2, b""))


def test_what_host_memory_gives_up_is_read_from_the_disk_and_found_again_by_the_next_worker() -> None:
    manager = TieredBlocks(4, 2, num_slots=4, num_disk_slots=16, num_ahead=4)
    for first in range(0, 60, 10):
        fill(manager, [first, 1, 2, 3, 4])
        settle(manager)
    assert manager.counts.spilled >= 6 and manager.counts.given_up == 0
    table = manager.match_prefix([0, 1, 2, 3, 9])
    assert len(table) == 2 and {move.kind for move in settle(manager)} == {MoveKind.READ}
    assert manager.have_arrived(table) and manager.counts.read == 2

    manager.put_by()
    assert settle(manager) and set(manager.cached_hashes) == {digest for _, digest in manager.disk}

    other = TieredBlocks(4, 2, num_slots=4, num_disk_slots=16)
    other.find_again((slot, key) for key, slot in manager.disk._kept.items())
    assert set(other.disk) == set(manager.disk) and len(other.match_prefix([10, 1, 2, 3, 9])) == 2
    other.check()


def test_a_disk_that_takes_anothers_place_while_it_is_read_is_found_as_far_as_it_can_be() -> None:
    """Slots that are still read hold nothing of the other disk, and what they brought is nobody's."""
    manager = TieredBlocks(4, 2, num_slots=4, num_disk_slots=16, num_ahead=4)
    for first in range(0, 60, 10):
        fill(manager, [first, 1, 2, 3, 4])
        settle(manager)
    manager.watch_cache(True)
    manager.take_cache_events()
    before = set(manager.cached_hashes)
    table = manager.match_prefix([0, 1, 2, 3, 9])
    [read] = manager.take_moves()
    kept = [(slot, key) for key, slot in manager.disk._kept.items()]
    manager.forget_disk()
    manager.find_again(kept)
    manager.moved(read)
    assert manager.have_arrived(table) is False and read.kind is MoveKind.READ
    manager.release(table)
    manager.check()
    assert not manager.cached_hashes & {digest for _, digest in read.keys} and len(manager.disk) == len(kept) - 2
    heard = manager.take_cache_events()
    assert heard is not None and before - set(heard.evicted) | set(heard.stored) == manager.cached_hashes


def test_a_spill_of_what_could_not_be_loaded_is_thrown_away_and_the_watcher_told() -> None:
    manager = TieredBlocks(4, 2, num_slots=6, num_disk_slots=16, num_ahead=4)
    manager.watch_cache(True)
    fill(manager, [1, 2, 3, 4, 5])
    spills = []
    for first in (10, 20, 30):
        for move in manager.take_moves():
            spills.append(move) if move.kind is MoveKind.SPILL else manager.moved(move)
        if not spills:
            fill(manager, [first, 1, 2, 3, 4, 5, 6, 7])
    [spill] = spills
    table = manager.match_prefix([1, 2, 3, 4, 99])
    [load] = [move for move in manager.take_moves() if move.kind is MoveKind.LOAD]
    assert set(load.keys) <= set(spill.keys)
    manager.moved(load, "the copy failed")
    manager.release(table)
    manager.moved(spill)
    manager.check()
    assert not set(load.keys) & set(manager.disk), "what could not be read was copied, too"
    events = manager.take_cache_events()
    assert events is not None and set(events.stored) == manager.cached_hashes


def test_before_its_end_a_pool_puts_by_what_was_used_last_as_far_as_the_disk_has_room() -> None:
    manager = TieredBlocks(12, 2, num_slots=4, num_disk_slots=7, num_ahead=2)
    for first in range(0, 50, 10):
        fill(manager, [first, 1, 2, 3, 4])
        settle(manager)
    manager.put_by()
    settle(manager)
    last = [digest for first in (40, 30, 20) for digest in prefix_hashes([first, 1, 2, 3, 4], 2, b"")]
    assert {digest for _, digest in manager.disk} >= set(last) and len(manager.disk) == 7
