"""A pool above its tiers and a store, by random walks in which copies begin and end, or fail, at any time."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.config.choices import KvStorePolicyName
from cluster.prefix_hash import prefix_hashes
from engine.kv.kv_tier import BlockMove, MoveKind, TierKey
from engine.kv.stored_blocks import StoredBlocks
from engine.kv.tiered_blocks import TieredBlocks

SALTS = (b"", b"a")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
PROMPTS = [[first, second, 0, 0, 1, 1, 0][:length] for first in (0, 1) for second in (0, 1) for length in (5, 7)]
Content = tuple[bytes, tuple[int, ...]]


class TieredBlocksWalk(RuleBasedStateMachine):
    """Sequences come and go in a pool of 6 above host memory of 9, while copies begin, end and fail. The model keeps
    what was written to each block and each slot: a copy reads what is in its source when it ends, so that one of a
    block that was used for something else meanwhile is of something else."""

    num_slots, num_disk_slots = 9, 0

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.make()
        self.waiting: list[tuple[list[int], list[int], bytes]] = []
        self.live: list[tuple[list[int], list[int], bytes]] = []  # tokens, table, salt
        self.blocks: dict[int, Content] = {}
        self.slots: dict[int, Content] = {}
        self.on_disk: dict[int, Content] = {}
        self.stored: dict[TierKey, Content] = {}
        self.moves: list[BlockMove] = []
        self.heard: set[bytes] = set()
        self.manager.watch_cache(True, most_changes=4)

    def make(self) -> TieredBlocks:
        return TieredBlocks(6, 2, num_slots=self.num_slots, num_disk_slots=self.num_disk_slots, num_ahead=6)

    def could_find(self, digest: bytes) -> bool:
        return digest in self.manager.cached_hashes

    @rule(tokens=TOKENS, salt=st.sampled_from(SALTS))
    def start(self, tokens: list[int], salt: bytes) -> None:
        known = list(takewhile(self.could_find, prefix_hashes(tokens, 2, salt)))
        matched = self.manager.match_prefix(tokens, salt)
        assert len(matched) <= len(known) and 2 * len(matched) < len(tokens)
        wanted = -(-len(tokens) // 2) - len(matched)
        if not self.manager.can_allocate(wanted):
            self.manager.release(matched)
            return
        table = matched + self.manager.allocate(wanted)
        if self.manager.have_arrived(matched) is None:
            self.waiting.append((tokens, table, salt))
            return
        self.begin(tokens, table, len(matched), salt)

    @rule(tokens=st.sampled_from(PROMPTS), salt=st.sampled_from(SALTS))
    def come_and_go(self, tokens: list[int], salt: bytes) -> None:
        """A prompt is computed whole, and ends at once: so the pool turns over, and is asked for what it evicts."""
        num_live = len(self.live)
        self.start(tokens, salt)
        if len(self.live) > num_live:
            tokens, table, salt = self.live.pop()
            self.manager.publish(tokens, table, salt, len(tokens))
            self.manager.release(table)
        self.end_moves()
        self.move()

    def begin(self, tokens: list[int], table: list[int], num_matched: int, salt: bytes) -> None:
        for index, block in enumerate(table[: len(tokens) // 2]):
            content = (salt, tuple(tokens[: 2 * index + 2]))
            if index < num_matched:
                assert self.blocks[block] == content, "a prompt would read another one's KV"
            self.blocks[block] = content
        for block in table[len(tokens) // 2 :]:
            self.blocks[block] = (b"part", ())
        self.live.append((tokens, table, salt))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_cancelled=st.booleans())
    def go_on(self, data: st.DataObject, is_cancelled: bool) -> None:
        index = data.draw(st.integers(0, len(self.waiting) - 1))
        tokens, table, salt = self.waiting[index]
        has_arrived = self.manager.have_arrived(table[: (len(tokens) - 1) // 2])
        if has_arrived is None and not is_cancelled:
            return
        del self.waiting[index]
        found = [block for block in table if self.manager.have_arrived([block])]
        if is_cancelled or not has_arrived or table[: len(found)] != found:
            self.manager.release(table)
            return
        self.begin(tokens, table, len(found), salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        tokens, table, salt = data.draw(st.sampled_from(self.live))
        self.manager.publish(tokens, table, salt, data.draw(st.integers(0, len(tokens))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.manager.release(self.live.pop(index)[1])

    @rule()
    def move(self) -> None:
        self.moves += self.manager.take_moves()

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), fails=st.booleans())
    def end_move(self, data: st.DataObject, fails: bool) -> None:
        self.finish(self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1))), fails)

    def finish(self, move: BlockMove, fails: bool) -> None:
        places: dict[MoveKind, tuple[dict[Any, Content], dict[Any, Content]]] = {
            MoveKind.SAVE: (self.blocks, self.slots),
            MoveKind.LOAD: (self.slots, self.blocks),
            MoveKind.SPILL: (self.slots, self.on_disk),
            MoveKind.READ: (self.on_disk, self.blocks),
            MoveKind.PUSH: (self.slots, self.stored),
            MoveKind.FETCH: (self.stored, self.blocks),
        }
        read, written = places[move.kind]
        sources = move.keys if move.kind is MoveKind.FETCH else move.sources
        targets = move.keys if move.kind is MoveKind.PUSH else move.targets
        fails = fails or (move.kind is MoveKind.FETCH and not set(sources) <= self.stored.keys())
        if move.kind is MoveKind.PUSH and fails:
            targets = ()  # an object is there whole, or not at all
        for source, target in zip(sources, targets, strict=not fails):
            written[target] = (b"torn", ()) if fails else read.get(source, (b"none", ()))
        self.manager.moved(move, "it fails" if fails else "")

    def end_moves(self) -> None:
        while self.moves:
            self.finish(self.moves.pop(0), fails=False)

    @rule(time=st.integers(0, 5))
    def flush(self, time: int) -> None:
        if time:
            return
        self.manager.flush_cache()
        assert not self.manager.cached_hashes

    @rule(time=st.integers(0, 5))
    def take_over(self, time: int) -> None:
        """Another disk takes the place of this one: what was in each slot is in the next one, say."""
        if time or not self.num_disk_slots:
            return
        self.manager.forget_disk()
        self.manager.check()
        self.on_disk = {(slot + 1) % self.num_disk_slots: content for slot, content in self.on_disk.items()}
        there = [(slot, content) for slot, content in self.on_disk.items() if content[1]]
        self.manager.find_again(
            (slot, (0, list(prefix_hashes([*tokens, 0], 2, salt))[-1])) for slot, (salt, tokens) in there
        )

    @rule()
    def hear(self) -> None:
        events = self.manager.take_cache_events()
        if events is not None and events.is_snapshot:
            self.heard.clear()
        if events is not None:
            assert self.heard >= set(events.evicted) and not self.heard & set(events.stored)
            self.heard = self.heard - set(events.evicted) | set(events.stored)
        assert self.heard == self.manager.cached_hashes

    @invariant()
    def the_books_agree(self) -> None:
        self.manager.check()
        owners = [block for _, table, _ in self.live + self.waiting for block in table]
        moves = [*self.moves, *self.manager._halves]
        arriving = [block for move in moves if move.kind.is_up for block in move.targets]
        arriving += [block for waiting in self.manager._to_load.values() for _, block, _ in waiting]
        for block in range(6):
            assert self.manager.refcount(block) == owners.count(block) + arriving.count(block)
        for digest, block in self.manager._published[0].items():
            salt, tokens = self.blocks[block]
            assert list(prefix_hashes([*tokens, 0], 2, salt))[-1] == digest

    def teardown(self) -> None:
        for _, table, _ in self.live + self.waiting:
            self.manager.release(table)
        for move in self.moves:
            self.manager.moved(move, "stopped")
        while moves := self.manager.take_moves():
            for move in moves:
                self.manager.moved(move, "stopped")
        self.manager.check()
        assert self.manager.num_held == self.manager.host.num_moving == self.manager.disk.num_moving == 0


class DiskWalk(TieredBlocksWalk):
    """The same above host memory of 3 blocks and a disk of 9."""

    num_slots, num_disk_slots = 3, 9


class StoreWalk(TieredBlocksWalk):
    """The same with a disk of 4 blocks and a store, which others write and delete from."""

    num_slots, num_disk_slots = 5, 4
    policy: KvStorePolicyName = "all"
    manager: StoredBlocks

    def make(self) -> TieredBlocks:
        sizes: dict[str, Any] = {"num_slots": self.num_slots, "num_disk_slots": self.num_disk_slots, "num_ahead": 6}
        return StoredBlocks(6, 2, policy=self.policy, num_known=12, **sizes)

    def could_find(self, digest: bytes) -> bool:
        return super().could_find(digest) or (0, digest) in self.manager.store

    @rule(tokens=st.sampled_from(PROMPTS), salt=st.sampled_from(SALTS))
    def look_up(self, tokens: list[int], salt: bytes) -> None:
        keys = [key for row in self.manager.to_look_up(tokens, salt) for key in row]
        self.manager.learn([key for key in keys if key in self.stored], [key for key in keys if key not in self.stored])

    @rule(tokens=st.sampled_from(PROMPTS), salt=st.sampled_from(SALTS))
    def others_write(self, tokens: list[int], salt: bytes) -> None:
        for at, digest in enumerate(prefix_hashes(tokens, 2, salt)):
            self.stored[0, digest] = (salt, tuple(tokens[: 2 * at + 2]))

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def others_delete(self, data: st.DataObject) -> None:
        del self.stored[data.draw(st.sampled_from(sorted(self.stored)))]

    @invariant()
    def what_is_stored_is_what_it_is_named_by(self) -> None:
        for (_, digest), (salt, tokens) in self.stored.items():
            assert list(prefix_hashes([*tokens, 0], 2, salt))[-1] == digest

    def teardown(self) -> None:
        super().teardown()
        assert self.manager.store.num_moving == 0 and not self.manager._pushing


class ReusedStoreWalk(StoreWalk):
    num_disk_slots, policy = 0, "reused"


class EvictedStoreWalk(StoreWalk):
    num_disk_slots, policy = 0, "evicted"


TestTieredBlocksWalk = TieredBlocksWalk.TestCase
TestTieredBlocksWalk.settings = settings(max_examples=100, stateful_step_count=50, derandomize=True, database=None)
TestDiskWalk = DiskWalk.TestCase
TestDiskWalk.settings = TestTieredBlocksWalk.settings
TestStoreWalk = StoreWalk.TestCase
TestStoreWalk.settings = TestTieredBlocksWalk.settings
TestReusedStoreWalk = ReusedStoreWalk.TestCase
TestReusedStoreWalk.settings = TestTieredBlocksWalk.settings
TestEvictedStoreWalk = EvictedStoreWalk.TestCase
TestEvictedStoreWalk.settings = TestTieredBlocksWalk.settings
