"""What a block manager tells of its prefix cache: net changes, never more than were asked for, nothing when unheard."""

from __future__ import annotations

from engine.kv.block_manager import BlockManager
from engine.kv.cache_events import CacheEvents


def watched(num_blocks: int = 8, most_changes: int = 100) -> BlockManager:
    manager = BlockManager(num_blocks, block_size=2)
    manager.watch_cache(True, most_changes)
    return manager


def cache(manager: BlockManager, tokens: list[int]) -> list[bytes]:
    """Publishes these and lets them go; returns the hashes that this added, in their order."""
    before = set(manager.cached_hashes)
    table = manager.allocate(len(tokens) // 2)
    manager.publish(tokens, table, b"", len(tokens))
    manager.release(table)
    return [h for h in manager.cached_hashes if h not in before]


def test_a_published_block_is_told_once() -> None:
    manager = watched()
    table = manager.allocate(3)
    manager.publish([1, 2, 3, 4, 5, 6], table, b"", num_computed=4)
    assert manager.take_cache_events() == CacheEvents(list(manager.cached_hashes), [])
    manager.publish([1, 2, 3, 4, 5, 6], table, b"", num_computed=6)
    assert manager.take_cache_events() == CacheEvents(list(manager.cached_hashes)[2:], [])
    manager.publish([1, 2, 3, 4, 5, 6], table, b"", num_computed=6)
    manager.release(table)
    manager.release(manager.match_prefix([1, 2, 3, 4, 5, 6, 7]))
    assert manager.take_cache_events() is None


def test_the_private_twin_of_a_published_block_is_not_told() -> None:
    manager = watched()
    cache(manager, [1, 2])
    manager.take_cache_events()
    twin = manager.allocate(1)
    manager.publish([1, 2], twin, b"", 2)
    manager.release(twin)
    assert manager.take_cache_events() is None
    assert manager.num_cached == 1


def test_an_evicted_block_is_told() -> None:
    manager = watched(num_blocks=2)
    stored = cache(manager, [1, 2, 3, 4])
    manager.take_cache_events()
    manager.allocate(1)
    assert manager.take_cache_events() == CacheEvents([], stored[1:])


def test_what_came_and_went_between_two_takes_is_not_told() -> None:
    manager = watched(num_blocks=2)
    cache(manager, [1, 2])
    manager.release(manager.allocate(2))
    assert manager.take_cache_events() is None


def test_what_went_and_came_again_is_not_told() -> None:
    manager = watched(num_blocks=2)
    (stored,) = cache(manager, [1, 2])
    manager.take_cache_events()
    manager.release(manager.allocate(2))
    assert cache(manager, [1, 2]) == [stored]
    assert manager.take_cache_events() is None


def test_more_changes_than_may_wait_are_told_as_a_snapshot_and_then_as_changes_again() -> None:
    manager = watched(num_blocks=4, most_changes=3)
    first = cache(manager, [1, 2, 3, 4, 5, 6])
    assert manager.take_cache_events() == CacheEvents(first, [])
    cache(manager, [7, 8, 9, 9, 9, 8, 9, 7])
    snapshot = manager.take_cache_events()
    assert snapshot == CacheEvents(list(manager.cached_hashes), [], is_snapshot=True)
    assert len(snapshot.stored) == 4 and not set(first) & set(snapshot.stored)
    assert manager.take_cache_events() is None
    manager.allocate(1)
    assert manager.take_cache_events() == CacheEvents([], snapshot.stored[-1:])


def test_nothing_waits_while_nobody_watches() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    cache(manager, [1, 2])
    assert manager.take_cache_events() is None
    manager.watch_cache(True)
    assert manager.take_cache_events() is None
    later = cache(manager, [3, 4])
    manager.watch_cache(False)
    cache(manager, [5, 6])
    assert manager.take_cache_events() is None
    manager.watch_cache(True)
    assert manager.take_cache_events() is None, f"{later} was told to a watch that began after it"


def test_without_a_prefix_cache_nothing_is_told() -> None:
    manager = BlockManager(num_blocks=4, block_size=2, enable_prefix_cache=False)
    manager.watch_cache(True)
    assert cache(manager, [1, 2, 3, 4]) == []
    assert manager.take_cache_events() is None
