"""One pool of blocks for layers that keep everything and layers that keep a window."""

from __future__ import annotations

from cluster.kv_groups import STATE_WINDOW, KvGroup, StateShape, group_layers
from engine.kv.block_manager import BlockManager

GROUPS = (KvGroup((0,)), KvGroup((1,), window=6))
TOKENS = list(range(100, 120))


def filled(manager: BlockManager, num_tokens: int = 16, num_landed: int = 0) -> list[int]:
    """The table of a sequence whose tokens are computed, as its windows hold them behind the last."""
    table: list[int] = []
    manager.fill(table, num_tokens // 4, [range(num_tokens // 4)] * 2)
    manager.publish(TOKENS, table, b"", num_tokens, num_landed)
    manager.leave_windows(table, num_tokens)
    return table


def test_blocks_that_leave_a_window_are_free_for_others_while_the_sequence_runs() -> None:
    manager = BlockManager(8, 4, enable_prefix_cache=False, groups=GROUPS)
    table = filled(manager)
    assert [block >= 0 for block in table] == [True, False, True, False, True, True, True, True]
    assert (manager.num_held, manager.num_free) == (6, 2)
    manager.check()
    manager.leave_windows(table, 19)  # 14 is the first that is seen
    assert manager.num_free == 3
    manager.share(table)
    manager.release(table)
    manager.release(table)
    assert manager.num_free == 8


def test_a_prefix_needs_the_window_before_its_end_and_everything_else() -> None:
    manager = BlockManager(10, 4, groups=GROUPS)
    table = filled(manager)
    kept = list(table)
    manager.release(table)
    manager.check()

    again = manager.match_prefix(TOKENS)
    assert [a for a, k in zip(again, kept, strict=True) if k >= 0] == [k for k in kept if k >= 0]
    assert again[1] == -1, "behind 16 tokens nobody sees the first block"
    manager.release(again)

    manager.allocate(4)  # two were free, and two had left the window
    assert manager.match_prefix(TOKENS) == again
    manager.release(again)
    manager.allocate(1)  # the end of the window
    assert manager.match_prefix(TOKENS) == []
    manager.check()


def test_of_what_landed_only_whole_blocks_of_a_window_can_be_found() -> None:
    """16 tokens land, of which a window of 6 holds from the 12th on: its block of tokens 8 to 11 is not whole."""
    manager = BlockManager(12, 4, groups=GROUPS)
    table = filled(manager, num_landed=16)
    manager.release(table)
    assert manager.match_prefix(TOKENS[:17]) == [], "nothing says what tokens 8 to 10 were in the window"
    landing = manager.match_prefix([*TOKENS[:16], 1, 2, 3, 4], num_landing=20)
    assert len(landing) == 8 and landing[-1] >= 0 and landing[-3] == -1
    manager.release(landing)
    manager.check()


def test_a_windows_hashes_go_on_though_what_came_before_has_left_it() -> None:
    """Groups of 16 hashes begin from the last of the group before, which a short window does not hold."""
    tokens, windows = list(range(200)), (KvGroup((0,), window=3),)
    manager, whole = BlockManager(64, 4, groups=windows), BlockManager(64, 4)
    table: list[int] = []
    for end in range(4, 200, 4):
        manager.fill(table, end // 4, [range(len(table), end // 4)])
        manager.publish(tokens, table, b"", end)
        manager.leave_windows(table, end)
    everything = whole.allocate(49)
    whole.publish(tokens, everything, b"", 196)
    assert list(manager.cached_hashes) == list(whole.cached_hashes)


def test_a_watcher_is_told_of_the_first_group() -> None:
    manager = BlockManager(8, 4, groups=GROUPS)
    manager.watch_cache(True)
    filled(manager)
    events = manager.take_cache_events()
    assert events is not None and len(events.stored) == 4 == len(manager.cached_hashes)
    assert manager.flush_cache() == 8
    events = manager.take_cache_events()
    assert events is not None and len(events.evicted) == 4


def test_a_watcher_is_not_told_when_a_block_of_another_group_is_evicted() -> None:
    manager = BlockManager(8, 4, groups=GROUPS)
    manager.watch_cache(True)
    manager.release(filled(manager))
    manager.take_cache_events()
    manager.allocate(3)  # the first two blocks of the window, which had left it, and the end of the window
    assert manager.take_cache_events() is None
    manager.allocate(1)  # the end of what keeps everything
    events = manager.take_cache_events()
    assert events is not None and len(events.evicted) == 1 and len(manager.cached_hashes) == 3


STATES = (KvGroup((0,)), KvGroup((1,), window=STATE_WINDOW, has_state=True))


def run_with_state(manager: BlockManager, num_tokens: int) -> list[int]:
    """The table of a sequence that has taken its tokens in one after another, with the states that it still needs."""
    table: list[int] = []
    for end in range(1, num_tokens + 1):
        rows = -(-end // 4)
        manager.fill(table, rows, [range(len(table) // 2, rows)] * 2)
        manager.publish(TOKENS, table, b"", end)
        manager.leave_windows(table, end)
    return table


def test_a_sequence_keeps_its_newest_state_and_those_at_block_ends_stay_cached() -> None:
    manager = BlockManager(12, 4, groups=STATES)
    table = run_with_state(manager, 14)
    assert [block >= 0 for block in table[1::2]] == [False, False, False, True]
    assert (manager.num_held, manager.num_cached, manager.num_free) == (5, 3, 4)
    manager.leave_windows(table, 16)
    assert table[7] >= 0, "the next token goes on from the state behind 16"
    manager.check()


def test_a_prefix_ends_where_a_state_is() -> None:
    manager = BlockManager(8, 4, groups=STATES)
    table = run_with_state(manager, 14)
    manager.release(table)
    again = manager.match_prefix(TOKENS)
    assert [block >= 0 for block in again] == [True, False, True, False, True, True]
    manager.release(again)
    manager.release(manager.allocate(3))  # what is free, and the state behind four tokens
    assert len(manager.match_prefix(TOKENS)) == 6
    manager.check()


def test_a_state_that_landed_is_found_where_it_ends_a_block_and_not_before() -> None:
    manager = BlockManager(12, 4, groups=STATES)
    table: list[int] = []
    manager.fill(table, 4, [range(4), range(3, 4)])
    manager.publish(TOKENS, table, b"", 16, num_landed=16)
    assert len(manager.match_prefix(TOKENS)) == 8
    assert manager.match_prefix(TOKENS[:16]) == [], "nobody has the state behind 12 tokens"
    other = BlockManager(12, 4, groups=STATES)
    table = []
    other.fill(table, 4, [range(4), range(3, 4)])
    other.publish(TOKENS, table, b"", 14, num_landed=14)
    assert other.match_prefix(TOKENS) == [], "what landed is the state behind 14 tokens"
    other.publish(TOKENS, table, b"", 16, num_landed=14)
    assert len(other.match_prefix(TOKENS)) == 8, "two tokens later it is the state behind 16"
    other.check()


def test_layers_with_a_state_come_in_groups_as_large_as_the_others() -> None:
    windows = tuple(None if layer % 4 == 3 else STATE_WINDOW for layer in range(8))
    groups = group_layers(windows, [layer for layer in range(8) if layer % 4 != 3])
    assert groups[0] == KvGroup((3, 7))
    assert [(group.layers, group.has_state) for group in groups[1:]] == [((0, 4), True), ((1, 5), True), ((2, 6), True)]


def test_heads_of_a_state_lie_where_every_rank_finds_them() -> None:
    """In planes too small for a part: each value once, whichever ranks share it out."""
    shape = StateShape(4, (10, 3))
    planes = [[-1] * 20, [-1] * 20, [-1] * 20]
    for head in range(4):
        for run in shape.runs(4, 20, range(head, head + 1)):
            for place in range(run.start, run.stop):
                assert planes[run.plane][place] == -1
                planes[run.plane][place] = head * 13 + run.at + place - run.start
    flat = [value for plane in planes for value in plane]
    assert sorted(flat[:52]) == list(range(52)) and set(flat[52:]) == {-1}
    first = shape.runs(4, 20, range(4), 0)
    assert sum(run.stop - run.start for run in first) == 40 and [run.at for run in first] == [0, 20]
    assert shape.size_bytes(4) == 52 * 4 and shape.head_range(1, 2) == range(2, 4)
