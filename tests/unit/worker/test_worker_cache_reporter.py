"""What routers are told of a prefix cache: each by its own count, in small events, and always enough to know it."""

from __future__ import annotations

from collections import defaultdict
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.pb import worker_pb2
from engine.kv.block_manager import BlockManager
from router.routing.prefix_index import PrefixIndex
from worker import reporter
from worker.reporter import MOST_HASHES, CacheReporter, Reporter, RouterSession

BLOCK_SIZE = 2


class Worker:
    """A pool and who tells of it; `told` keeps the events of each session."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.told: defaultdict[str, list[worker_pb2.CacheEvents]] = defaultdict(list)
        self._reporter = Reporter()
        self._sessions: dict[str, RouterSession] = {}
        self.caches = CacheReporter(self.blocks, self._reporter)

    def session(self, name: str) -> RouterSession:
        def send(events: list[worker_pb2.Event]) -> None:
            self.told[name] += [event.cache for event in events]

        return self._sessions.setdefault(name, send)

    def open(self, name: str) -> None:
        self._reporter.open_session(self.session(name))
        self.caches.open_session(self.session(name))

    def close(self, name: str) -> None:
        self._reporter.close_session(self.session(name))
        self.caches.close_session(self.session(name))
        self.told.pop(name, None)

    def cache(self, tokens: list[int], salt: bytes = b"") -> None:
        table = self.blocks.allocate(len(tokens) // BLOCK_SIZE)
        self.blocks.publish(tokens, table, salt, len(tokens))
        self.blocks.release(table)

    def turn(self) -> None:
        self.caches.gather()
        self._reporter.flush()


def shapes(told: list[worker_pb2.CacheEvents]) -> list[tuple[int, bool, int, int]]:
    return [(e.sequence_number, e.snapshot, len(e.stored), len(e.evicted)) for e in told]


def test_a_session_begins_with_a_snapshot_and_goes_on_with_changes() -> None:
    worker = Worker(num_blocks=4)
    worker.cache([1, 2, 3, 4])
    worker.open("a")
    worker.turn()
    worker.turn()
    worker.cache([5, 6])
    worker.turn()
    worker.cache([7, 8, 9, 9])
    worker.turn()
    assert shapes(worker.told["a"]) == [(1, True, 2, 0), (2, False, 1, 0), (3, False, 2, 1)]


def test_an_empty_cache_has_a_snapshot_too() -> None:
    worker = Worker()
    worker.open("a")
    worker.turn()
    assert shapes(worker.told["a"]) == [(1, True, 0, 0)]


def test_each_session_has_a_count_of_its_own_and_its_snapshot_includes_no_change_that_follows() -> None:
    worker = Worker()
    worker.open("a")
    worker.turn()
    worker.cache([1, 2])
    worker.open("b")
    worker.cache([3, 4])
    worker.turn()
    assert shapes(worker.told["a"]) == [(1, True, 0, 0), (2, False, 1, 0), (3, False, 1, 0)]
    assert shapes(worker.told["b"]) == [(1, True, 1, 0), (2, False, 1, 0)]


def test_a_long_snapshot_and_a_long_change_are_told_in_events_of_bounded_size() -> None:
    worker = Worker(num_blocks=2 * MOST_HASHES)
    worker.cache(list(range(2 * BLOCK_SIZE * MOST_HASHES)))
    worker.open("a")
    worker.turn()
    assert shapes(worker.told["a"]) == [(1, True, MOST_HASHES, 0), (2, False, MOST_HASHES, 0)]
    assert max(event.ByteSize() for event in worker.told["a"]) < 40_000
    worker.told.clear()
    worker.cache(list(range(1, 4 * MOST_HASHES, 2)))
    worker.turn()
    assert shapes(worker.told["a"]) == [(3, False, 0, MOST_HASHES), (4, False, MOST_HASHES, 0)]


def test_once_the_last_router_is_gone_nothing_is_noted_until_the_next_comes() -> None:
    worker = Worker()
    worker.open("a")
    worker.open("b")
    worker.close("a")
    worker.cache([1, 2])
    assert worker.blocks.take_cache_events() is not None
    worker.close("b")
    worker.cache([3, 4])
    assert worker.blocks.take_cache_events() is None
    worker.open("c")
    worker.turn()
    assert shapes(worker.told["c"]) == [(1, True, 2, 0)]


MOVES = st.one_of(
    st.tuples(st.just("cache"), st.lists(st.integers(0, 1), min_size=2, max_size=12)),
    st.tuples(st.sampled_from(["turn", "open", "close", "ask", "hear", "lose"]), st.sampled_from("ab")),
)


@settings(max_examples=300, derandomize=True, database=None)
@given(st.lists(MOVES, max_size=60), st.integers(1, 5), st.integers(1, 20))
def test_whatever_is_lost_on_the_way_a_router_that_asks_knows_the_cache(
    moves: list[tuple[str, list[int] | str]], most_hashes: int, most_changes: int
) -> None:
    """Never more than the pool has blocks at any time either, or hashes would be missing at the end."""
    worker = Worker(num_blocks=6)
    indices: dict[str, PrefixIndex] = {}

    def hear(name: str, is_lost: bool = False) -> None:
        events = worker.told[name].pop(0)
        if not is_lost and not indices[name].apply(events):
            worker.caches.resync(name)

    def move(what: str, name: str) -> None:
        if what == "turn":
            worker.turn()
        elif what == "open" and name not in indices:
            worker.open(name)
            worker.blocks.watch_cache(True, most_changes)
            indices[name] = PrefixIndex(BLOCK_SIZE, 6)
        elif what == "close" and indices.pop(name, None) is not None:
            worker.close(name)
        elif what == "ask" and name in indices:
            worker.caches.resync(name)
        elif what in ("hear", "lose") and worker.told[name]:
            hear(name, is_lost=what == "lose")

    with patch.object(reporter, "MOST_HASHES", most_hashes):
        for what, argument in moves:
            if isinstance(argument, list):
                worker.cache(argument)
            else:
                move(what, argument)
        for name in indices:
            worker.caches.resync(name)  # or it would not show that the last event was lost
        worker.turn()
        for name in indices:
            while worker.told[name]:
                hear(name)
                worker.turn()
    for index in indices.values():
        assert index.is_known and index.hashes == worker.blocks.cached_hashes
