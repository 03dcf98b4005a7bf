"""Block ownership and the prefix cache, by example and by random walks that a plain model of the books follows."""

from __future__ import annotations

from itertools import takewhile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.prefix_hash import GROUP, prefix_hashes
from engine.kv.block_manager import BlockManager
from engine.kv.errors import BlockAccountingError, NoFreeBlocks


def books(manager: BlockManager) -> tuple[int, int, int]:
    return manager.num_free, manager.num_held, manager.num_cached


def test_every_block_is_free_held_or_cached() -> None:
    manager = BlockManager(num_blocks=5, block_size=2)
    table = manager.allocate(3)
    assert books(manager) == (2, 3, 0)
    manager.publish([1, 2, 3, 4, 5], table, b"", num_computed=5)
    manager.release(table)
    assert books(manager) == (3, 0, 2)
    manager.check()


def test_a_flushed_cache_serves_nothing_and_takes_no_block_from_its_owners() -> None:
    manager = BlockManager(num_blocks=6, block_size=2)
    manager.watch_cache(True)
    held, ended = manager.allocate(2), manager.allocate(2)
    manager.publish([1, 2, 3, 4], held, b"", num_computed=4)
    manager.publish([5, 6, 7, 8], ended, b"", num_computed=4)
    manager.release(ended)
    served = set(manager.cached_hashes)
    manager.take_cache_events()

    assert manager.flush_cache() == 4

    assert books(manager) == (4, 2, 0)
    assert manager.match_prefix([1, 2, 3, 4, 9]) == manager.match_prefix([5, 6, 7, 8, 9]) == []
    events = manager.take_cache_events()
    assert events is not None and (set(events.evicted), events.stored) == (served, [])
    manager.release(held)
    assert books(manager) == (6, 0, 0)
    manager.check()


def test_blocks_released_while_a_step_runs_are_free_after_it_if_the_cache_was_flushed_meanwhile() -> None:
    manager = BlockManager(num_blocks=3, block_size=2)
    table = manager.allocate(2)
    manager.publish([1, 2, 3, 4], table, b"", num_computed=4)
    manager.begin_step()
    manager.release(table)
    assert manager.flush_cache() == 2
    assert books(manager) == (1, 2, 0)
    manager.end_step()
    assert books(manager) == (3, 0, 0)
    manager.check()


def test_blocks_wait_for_the_newest_step_that_ran_when_they_were_released() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    first, second, third = ([block] for block in manager.allocate(3))
    manager.begin_step()
    manager.release(first)
    manager.begin_step()
    manager.release(second)
    with pytest.raises(BlockAccountingError, match="2 steps are running already"):
        manager.begin_step()
    assert books(manager) == (1, 3, 0)
    manager.end_step()
    assert books(manager) == (2, 2, 0) and manager.refcount(second[0]) == 1
    manager.release(third)
    manager.begin_step()
    manager.end_step()
    assert books(manager) == (4, 0, 0)
    manager.end_step()
    with pytest.raises(BlockAccountingError, match="no step is running"):
        manager.end_step()
    manager.check()


def test_an_allocation_gives_distinct_blocks_or_none_at_all() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    assert len(set(manager.allocate(3))) == 3
    assert not manager.can_allocate(2)
    with pytest.raises(NoFreeBlocks, match="2 KV blocks wanted, but of 4 only 1 are free"):
        manager.allocate(2)
    assert books(manager) == (1, 3, 0)


def test_a_freed_block_is_not_freed_again() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    table = manager.allocate(2)
    manager.release(table)
    with pytest.raises(BlockAccountingError, match="has 0 owners"):
        manager.release(table)
    assert books(manager) == (4, 0, 0)


def test_a_release_that_names_a_block_more_often_than_it_is_owned_changes_nothing() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    (block,) = manager.allocate(1)
    with pytest.raises(BlockAccountingError, match="2 times: it has 1 owners"):
        manager.release([block, block])
    assert manager.refcount(block) == 1
    manager.share([block])
    manager.release([block, block])
    assert books(manager) == (4, 0, 0)


@pytest.mark.parametrize("block", [-1, 4, 2])
def test_only_a_held_block_can_be_shared(block: int) -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    assert manager.allocate(1) != [2]
    with pytest.raises(BlockAccountingError, match=f"cannot share block {block}"):
        manager.share([block])


def test_a_shared_block_is_held_until_its_last_owner_lets_go() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    table = manager.allocate(2)
    manager.share(table)
    manager.release(table)
    assert [manager.refcount(b) for b in table] == [1, 1]
    assert manager.num_held == 2
    manager.release(table)
    assert manager.num_free == 4


def test_a_published_prefix_is_found_and_held_again() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    table = manager.allocate(3)
    manager.publish([1, 2, 3, 4, 5, 6], table, b"", num_computed=6)
    manager.release(table)
    assert manager.match_prefix([1, 2, 3, 4, 9, 9, 9]) == table[:2]
    assert books(manager) == (5, 2, 1)
    manager.check()


def test_the_last_token_is_always_left_to_compute() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    table = manager.allocate(2)
    manager.publish([1, 2, 3, 4], table, b"", num_computed=4)
    assert manager.match_prefix([1, 2, 3, 4]) == table[:1]
    assert manager.match_prefix([1, 2]) == []
    assert manager.match_prefix([1]) == []
    assert manager.match_prefix([]) == []


def test_only_full_blocks_that_are_computed_are_published() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = manager.allocate(3)
    tokens = list(range(12))
    manager.publish(tokens, table, b"", num_computed=7)
    assert manager.match_prefix(tokens) == table[:1]
    manager.publish(tokens, table, b"", num_computed=8)
    assert manager.match_prefix(tokens) == table[:2]


def test_equal_tokens_after_another_prefix_do_not_match() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    table = manager.allocate(2)
    manager.publish([1, 2, 3, 4], table, b"", num_computed=4)
    assert manager.match_prefix([7, 7, 3, 4, 0]) == []
    assert manager.match_prefix([3, 4, 3, 4, 0]) == []


def test_a_tenants_prefix_is_invisible_under_another_salt() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    table = manager.allocate(1)
    manager.publish([1, 2], table, b"tenant a", num_computed=2)
    assert manager.match_prefix([1, 2, 3], b"tenant b") == []
    assert manager.match_prefix([1, 2, 3]) == []
    assert manager.match_prefix([1, 2, 3], b"tenant a") == table


def test_a_salt_may_be_longer_than_a_hash_key() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    table = manager.allocate(1)
    manager.publish([1, 2], table, b"x" * 1000, num_computed=2)
    assert manager.match_prefix([1, 2, 3], b"x" * 999) == []
    assert manager.match_prefix([1, 2, 3], b"x" * 1000) == table


def test_publishing_again_changes_nothing_and_goes_on_where_it_stopped() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    table = manager.allocate(3)
    for num_computed in (2, 2, 3, 4, 4, 6, 6):
        manager.publish([1, 2, 3, 4, 5, 6], table, b"s", num_computed)
    fresh = BlockManager(num_blocks=8, block_size=2)
    fresh.publish([1, 2, 3, 4, 5, 6], fresh.allocate(3), b"s", 6)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    assert manager.match_prefix(tokens, b"s") == fresh.match_prefix(tokens, b"s") == table


@pytest.mark.parametrize("step", [1, 2, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP, 3 * GROUP])
def test_a_long_prefix_has_the_names_by_which_others_look_for_it(step: int) -> None:
    """Each group of blocks is named by the last block of the group before."""
    num_blocks = 3 * GROUP + 5
    manager, tokens = BlockManager(num_blocks, block_size=2), list(range(2 * num_blocks))
    table = manager.allocate(num_blocks)
    for num_computed in (*range(2 * step, len(tokens), 2 * step), len(tokens)):
        manager.publish(tokens, table, b"s", num_computed)
    assert list(manager.cached_hashes) == list(prefix_hashes([*tokens, 0], 2, b"s"))
    assert manager.match_prefix([*tokens, 0], b"s") == table


def test_the_twin_of_a_published_block_stays_private_and_is_freed() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    first, second = manager.allocate(2), manager.allocate(2)
    manager.publish([1, 2, 3, 4], first, b"", 4)
    manager.publish([1, 2, 3, 4], second, b"", 4)
    assert manager.match_prefix([1, 2, 3, 4, 5]) == first
    manager.release(second)
    assert books(manager) == (6, 2, 0)
    manager.check()


def test_a_sequence_whose_beginning_has_a_twin_still_publishes_its_own_end() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    first, second = manager.allocate(1), manager.allocate(2)
    manager.publish([1, 2], first, b"", 2)
    manager.publish([1, 2, 3, 4], second, b"", 2)
    manager.publish([1, 2, 3, 4], second, b"", 4)
    assert manager.match_prefix([1, 2, 3, 4, 5]) == [first[0], second[1]]


def test_eviction_takes_the_least_recently_used_and_the_end_of_a_prefix_first() -> None:
    manager = BlockManager(num_blocks=4, block_size=1)
    old, young = manager.allocate(2), manager.allocate(2)
    manager.publish([1, 2], old, b"", 2)
    manager.publish([8, 9], young, b"", 2)
    manager.release(old)
    manager.release(young)
    manager.release(manager.match_prefix([1, 2, 0]))  # used again: now the younger one
    assert manager.allocate(1) == [young[1]]
    assert manager.match_prefix([8, 9, 0]) == young[:1]
    assert manager.allocate(1) == [old[1]]
    manager.check()


def test_an_evicted_block_is_no_longer_found() -> None:
    manager = BlockManager(num_blocks=2, block_size=2)
    table = manager.allocate(1)
    manager.publish([1, 2], table, b"", 2)
    manager.release(table)
    assert manager.can_allocate(2)
    manager.release(manager.allocate(2))
    assert manager.match_prefix([1, 2, 3]) == []
    assert books(manager) == (2, 0, 0)


def test_without_a_prefix_cache_nothing_is_cached() -> None:
    manager = BlockManager(num_blocks=4, block_size=2, enable_prefix_cache=False)
    table = manager.allocate(2)
    manager.publish([1, 2, 3, 4], table, b"", 4)
    assert manager.match_prefix([1, 2, 3, 4, 5]) == []
    manager.release(table)
    assert books(manager) == (4, 0, 0)


def test_a_block_that_nobody_holds_cannot_be_published() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    table = manager.allocate(1)
    manager.release(table)
    with pytest.raises(BlockAccountingError, match="cannot publish"):
        manager.publish([1, 2], table, b"", 2)
    with pytest.raises(BlockAccountingError, match="2 full blocks"):
        manager.publish([1, 2, 3, 4], manager.allocate(1), b"", 4)


def test_check_names_the_block_whose_books_disagree() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    table = manager.allocate(1)
    manager._free.append(table[0])
    with pytest.raises(BlockAccountingError, match=f"block {table[0]}: free=True cached=False refcount=1"):
        manager.check()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockManager(num_blocks, block_size)


SALTS = (b"", b"a")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class BlockManagerWalk(RuleBasedStateMachine):
    """Sequences come, fork and go in a pool of 12. The model keeps only tables, and what was written to each block.

    `content` stands for the KV: it is what the owner wrote, so a match that leads to a block of other content is a
    prefix cache that would have served one prompt another's KV.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=12, block_size=2)
        self.live: list[tuple[list[int], list[int], bytes]] = []  # tokens, table, salt
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.heard: set[bytes] = set()  # what the cache holds by its events, to who hears them now and then
        self.manager.watch_cache(True, most_changes=4)

    def add(self, tokens: list[int], table: list[int], salt: bytes) -> None:
        self.live.append((tokens, table, salt))
        for index in range(len(tokens) // 2):
            self.content[table[index]] = (salt, tuple(tokens[: 2 * index + 2]))

    @rule(tokens=TOKENS, salt=st.sampled_from(SALTS))
    def start(self, tokens: list[int], salt: bytes) -> None:
        promised = list(takewhile(self.manager.cached_hashes.__contains__, prefix_hashes(tokens, 2, salt)))
        matched = self.manager.match_prefix(tokens, salt)
        assert 2 * len(matched) < len(tokens)
        assert len(matched) == len(promised)
        for index, block in enumerate(matched):
            assert self.content[block] == (salt, tuple(tokens[: 2 * index + 2]))
        wanted = -(-len(tokens) // 2) - len(matched)
        if not self.manager.can_allocate(wanted):
            with pytest.raises(NoFreeBlocks):
                self.manager.allocate(wanted)
            self.manager.release(matched)
            return
        self.add(tokens, matched + self.manager.allocate(wanted), salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        tokens, table, salt = data.draw(st.sampled_from(self.live))
        self.manager.publish(tokens, table, salt, data.draw(st.integers(0, len(tokens))))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data: st.DataObject, token: int) -> None:
        """A sequence of the same prompt: full blocks are shared, the partial one is its own."""
        tokens, table, salt = data.draw(st.sampled_from(self.live))
        if not self.manager.can_allocate(1):
            return
        shared = table[: len(tokens) // 2]
        self.manager.share(shared)
        self.add([*tokens[: 2 * len(shared)], token], [*shared, *self.manager.allocate(1)], salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.manager.release(self.live.pop(index)[1])

    @rule()
    def flush(self) -> None:
        held = self.manager.num_held
        self.manager.flush_cache()
        assert not self.manager.cached_hashes
        assert books(self.manager) == (12 - held, held, 0)

    @rule()
    def hear(self) -> None:
        events = self.manager.take_cache_events()
        if events is not None and events.is_snapshot:
            self.heard.clear()
        if events is not None:
            assert self.heard >= set(events.evicted) and not self.heard & set(events.stored)
            self.heard = self.heard - set(events.evicted) | set(events.stored)
        assert self.heard == self.manager.cached_hashes
        assert self.manager.take_cache_events() is None

    @invariant()
    def the_books_agree_with_the_owners(self) -> None:
        owners = [block for _, table, _ in self.live for block in table]
        assert self.manager.num_held == len(set(owners))
        assert sum(books(self.manager)) == 12
        for block in range(12):
            assert self.manager.refcount(block) == owners.count(block)
        self.manager.check()

    def teardown(self) -> None:
        for _, table, _ in self.live:
            self.manager.release(table)
        assert self.manager.num_free + self.manager.num_cached == 12


TestBlockManagerWalk = BlockManagerWalk.TestCase
TestBlockManagerWalk.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, database=None)
