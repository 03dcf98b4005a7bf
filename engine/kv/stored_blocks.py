"""A pool of KV blocks and its tiers above a store that other workers write and read as well.

    wanted in the store -> (saved to host memory) -> pushed          known to be in the store -> fetched into the pool

`store` is an index of what is known to be in the store: what this worker has pushed, and what a look-up has found there
(`learn`). It is no promise: others delete from it. So what a prompt could use of it is looked up each time; a block
that is gone when it is fetched is a load that failed. What is wanted there goes by way of host memory, so that nothing
in the pool waits for a slow store. Watchers of the cache hear nothing of the store, which is the same for all of them.

Decides only; knows no network, and no time. Used from one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

from cluster import prefix_hash
from cluster.config.choices import KvStorePolicyName
from cluster.kv_groups import KvGroup
from engine.kv import kv_tier
from engine.kv.kv_tier import BlockMove, KvTier, KvTierName, MoveKind, TierKey
from engine.kv.tiered_blocks import MOST_MOVES, TieredBlocks

MOST_KNOWN = 65_536
"""Blocks of the store that a worker knows of; each takes some 200 bytes of its books."""
_MOST_WANTED = 8192
_MOST_LOOKED_AT = 32
"""Blocks that are wanted in the store and looked at each time: most of them wait for their request to end."""


class StoredBlocks(TieredBlocks):
    """A block manager with host memory, a store, and maybe a disk between the two."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_cache: bool = True,
        groups: Sequence[KvGroup] = (KvGroup((0,)),),
        *,
        num_slots: int,
        num_disk_slots: int = 0,
        num_ahead: int | None = None,
        policy: KvStorePolicyName = "reused",
        num_known: int = MOST_KNOWN,
    ) -> None:
        """`policy`: what is pushed before the end (`engine.kv_store_policy`). `num_known`: blocks in the index."""
        sizes = {"num_slots": num_slots, "num_disk_slots": num_disk_slots, "num_ahead": num_ahead}
        super().__init__(num_blocks, block_size, enable_prefix_cache, groups, **sizes)  # type: ignore[arg-type]
        self.store = KvTier(num_known)
        self._policy = policy
        self.sources[MoveKind.FETCH] = self.store
        self._to_load[MoveKind.FETCH] = []
        self._look_from[MoveKind.PUSH] = 0
        self._wanted: dict[TierKey, None] = {}
        self._asked_for: set[int] = set()
        """Blocks that are to be saved because the store wants them."""
        self._push_from = 0
        """Blocks that have been allocated when it is time to push again, after a push that failed."""
        self._private: set[TierKey] = set()
        """Blocks of requests that bypass the prefix cache, which are never pushed, and others that were there."""
        self._pushing: dict[TierKey, int] = {}
        """What is on its way to the store and has not been flushed since, with its place in the index."""

    # Finding

    def to_look_up(self, token_ids: Sequence[int], salt: bytes) -> list[list[TierKey]]:
        """Returns what a prompt could use of the store, block by block of its tokens, from the first that is not found
        above it. Whatever is missing, nothing behind it can be used."""
        places = range(len(self.groups))
        rows = [
            [(place, digest) for place in places]
            for digest in prefix_hash.prefix_hashes(token_ids, self.block_size, salt)
        ]
        is_above = super()._is_known
        missing = (at for at, row in enumerate(rows) if not all(is_above(*key) for key in row))
        return rows[next(missing, len(rows)) :]

    def _is_known(self, place: int, digest: bytes) -> bool:
        return super()._is_known(place, digest) or (place, digest) in self.store

    def learn(self, keys: Iterable[TierKey], gone: Iterable[TierKey] = ()) -> None:
        """The store has answered: these are there, and those that are `gone` are not."""
        self._push_from = 0
        for key in gone:
            if key not in self._arriving_at:  # else the end of its load says so
                self.store.drop(key)
        new = []
        for key in dict.fromkeys(keys):
            if key in self.store:
                self.store.touch(key)
            elif key not in self._pushing:
                new.append(key)
        slots, _ = self.store.take(len(new))
        for key, slot in zip(new, slots, strict=False):
            self.store.keep(slot, key)

    def _can_load(self, key: TierKey) -> bool:
        return self._is_below(key) or key in self.store

    def _kind_of(self, key: TierKey) -> MoveKind:
        return super()._kind_of(key) if self._is_below(key) else MoveKind.FETCH

    # Wanting

    def count_hits(self, table: Sequence[int], found: Mapping[KvTierName, int]) -> None:
        super().count_hits(table, found)
        if self._policy != "reused":
            return
        count, new = len(self.groups), list[TierKey]()
        for place in range(count):
            keys = [self._key_of(block) for block in table[place::count] if block >= 0]
            is_begun = bool(keys) and self._is_stored(keys[0])
            for key in reversed(keys):
                if not self._is_stored(key):
                    new.append(key)
                elif is_begun:  # what is between the two is there as well
                    break
        self._want(reversed(new))

    def _is_stored(self, key: TierKey) -> bool:
        """Whether the store has it, or will have."""
        return key in self.store or key in self._pushing or key in self._wanted

    def _publish_of(self, place: int, blocks: Sequence[int], digests: Sequence[bytes], salt: bytes) -> dict[bytes, int]:
        new = super()._publish_of(place, blocks, digests, salt)
        if salt.startswith(prefix_hash.PRIVATE):
            self._private.update((place, digest) for digest in new)
            if len(self._private) > 2 * (self.num_total + self.host.num_total + self.disk.num_total):
                self._private = {key for key in self._private if self._is_known(*key)}
        elif self._policy == "all":
            self._want((place, digest) for digest in new)
        return new

    def _want(self, keys: Iterable[TierKey]) -> None:
        """Has these saved and pushed, while there is room: nothing that is wanted already, or begins a prompt, goes."""
        new = (key for key in keys if key not in self._wanted and key not in self._private)
        self._wanted.update(dict.fromkeys(islice(new, max(0, _MOST_WANTED - len(self._wanted)))))

    def put_by(self) -> None:
        super().put_by()
        last_first = chain(reversed(list(self.host)), map(self._key_of, reversed(list(self._cached))))
        self._wanted = dict.fromkeys(key for key in last_first if key not in self.store and key not in self._private)
        self._push_from = 0

    # Moves

    def take_moves(self) -> list[BlockMove]:
        if self._policy == "evicted" and not self._is_ending:
            num_looked_at = -(-self.host.num_total // 2) - self.host.num_free
            if self._may_look(MoveKind.PUSH, self._wanted, num_looked_at):
                self._want(key for key in islice(self.host, min(num_looked_at, _MOST_WANTED)) if key not in self.store)
        pushes = list(self._pushes()) if self._wanted and self._num_given >= self._push_from else []
        return super().take_moves() + pushes

    def _pushes(self) -> Iterable[BlockMove]:
        """Pushes what is wanted and in host memory, and has saved what is only in the pool."""
        if not self._to_save:
            self._asked_for.clear()
        ready, later = list[TierKey](), list[TierKey]()
        room = (MOST_MOVES - self.num_under_way[MoveKind.PUSH]) * kv_tier.MOST_BLOCKS
        num_looked_at = len(self._wanted) if self._is_ending else max(_MOST_LOOKED_AT, room)
        for key in list(islice(self._wanted, num_looked_at)):
            if key in self.store or key in self._pushing:
                del self._wanted[key]
            elif key in self.host:
                if len(ready) < room:
                    ready.append(key)
            else:
                later.append(key)
        is_busy = self._is_ending and (ready or self.num_under_way[MoveKind.PUSH])
        for key in later:
            del self._wanted[key]
            if self._is_on_its_way(key, may_save=not is_busy):  # to save gives up what is not pushed yet
                self._wanted[key] = None
        for begin in range(0, len(ready), kv_tier.MOST_BLOCKS):
            keys = ready[begin : begin + kv_tier.MOST_BLOCKS]
            slots, _ = self.store.take(len(keys))
            del keys[len(slots) :]
            if not keys:
                return
            for key, slot in zip(keys, slots, strict=True):
                del self._wanted[key]
                self._pushing[key] = slot
            self.num_under_way[MoveKind.PUSH] += 1
            yield BlockMove(MoveKind.PUSH, tuple(map(self.host.pin, keys)), tuple(slots), tuple(keys))

    def _is_on_its_way(self, key: TierKey, *, may_save: bool) -> bool:
        """Whether a block that host memory has not will be there."""
        place, digest = key
        block = self._published[place].get(digest)
        if block is None:
            return key in self._arriving_at
        if may_save and self._is_unsaved(block) and block not in self._asked_for:
            self._asked_for.add(block)
            self._to_save.append(block)
        return True

    def moved(self, move: BlockMove, error: str = "") -> None:
        if error and move.kind is MoveKind.SAVE:  # else it is to be saved again at once
            for key in move.keys:
                self._wanted.pop(key, None)
        if error and move.kind is MoveKind.PUSH:
            self._push_from = self._num_given + -(-self.num_total // 4)
        if move.kind is not MoveKind.PUSH:
            super().moved(move, error)
            return
        self.num_under_way[MoveKind.PUSH] -= 1
        self.counts.failed += len(move.keys) if error else 0
        for source, slot, key in zip(move.sources, move.targets, move.keys, strict=True):
            self.host.unpin(source)
            is_wanted = self._pushing.get(key) == slot
            if is_wanted:
                del self._pushing[key]
            if is_wanted and not error:
                self.store.keep(slot, key)
            else:
                self.store.put_back(slot)
            if is_wanted and error:
                self._want([key])
            self.counts.add(MoveKind.PUSH, is_wanted and not error)

    def _loaded(self, tier: KvTier, slot: int, block: int, key: TierKey, *, is_there: bool) -> bool:
        if tier is self.store and not is_there:
            tier.drop(key)
        return super()._loaded(tier, slot, block, key, is_there=is_there)

    def flush_cache(self) -> int:
        self._wanted.clear()
        self._pushing.clear()
        self.store.flush()
        return super().flush_cache()

    def _find_wrong(self) -> list[str]:
        wrong = super()._find_wrong() + self.store.check()
        return wrong + [f"{key} is pushed, and not on its way" for key in self._pushing if key in self.store]
