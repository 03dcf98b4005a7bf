"""A pool of KV blocks above a tier in host memory: what the pool evicts is kept there, and found there.

    cached in the pool -> (saved: the tier has a copy as well) -> evicted from the pool -> loaded into another block

Saving goes ahead of eviction: the blocks that will be evicted next are copied while steps run, as long as fewer than
`num_ahead` are free or saved. They stay evictable meanwhile; a copy of a block that was evicted before it was done is
thrown away. A prefix that is found in the tier gets blocks of the pool into which it is loaded: they are arriving,
are found by others at once, and whoever found them waits (`have_arrived`). The content of a block whose load failed is
unknown: who waited for it begins anew.

One invariant over both: a digest leads to one block of the pool, one slot of the tier, or both with equal content;
the watcher of the cache hears of it as long as either has it. Moves are decided here (`take_moves`), made elsewhere,
and their end is told here (`moved`). Knows nothing of tensors, requests or time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice, takewhile

from cluster import prefix_hash
from cluster.kv_groups import KvGroup
from engine.kv.block_manager import BlockManager
from engine.kv.kv_tier import KvTier, TierKey

MOST_BLOCKS = 64
"""Blocks of one move: the next one begins when it has ended."""
MOST_MOVES = 2
"""Moves in one direction that are under way at a time."""

IsQuicker = Callable[[int, int, int], bool]
"""Whether to load so many blocks is quicker than to compute so many tokens, behind so many that are there."""


@dataclass(frozen=True)
class BlockMove:
    """Blocks that are copied between the pool and the tier: each to the slot at its place, or from it."""

    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    keys: tuple[TierKey, ...]
    is_load: bool


@dataclass
class TierCounts:
    """Blocks since the start."""

    saved: int = 0
    loaded: int = 0
    given_up: int = 0
    """Evicted from the tier."""
    unsaved: int = 0
    """Evicted from the pool before they were saved."""
    failed: int = 0
    """Whose copy failed."""
    declined: int = 0
    """Found in the tier, and computed because that was quicker."""


class TieredBlocks(BlockManager):
    """A block manager with a tier of `num_slots` below it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_cache: bool = True,
        groups: Sequence[KvGroup] = (KvGroup((0,)),),
        *,
        num_slots: int,
        num_ahead: int | None = None,
        is_quicker: IsQuicker = lambda num_blocks, num_tokens, num_before: True,
    ) -> None:
        """`num_ahead`: blocks that are to be free or saved, so that a prompt which needs as many at once evicts none
        that are lost; None: half of the pool. Never more than the tier holds."""
        super().__init__(num_blocks, block_size, enable_prefix_cache, groups)
        self.tier = KvTier(num_slots)
        self.is_quicker = is_quicker
        self.counts = TierCounts()
        self._num_ahead = min(num_slots, -(-num_blocks // 2) if num_ahead is None else num_ahead)
        self._saving: dict[int, int] = {}
        """Blocks that are being copied down and have not been evicted since, with the slots that they go to."""
        self._arriving: dict[int, TierKey] = {}
        self._arriving_at: dict[TierKey, int] = {}
        self._to_load: list[tuple[int, int, TierKey]] = []
        """(block, pinned slot, key)."""
        self._num_given = self._save_from = 0
        """Blocks allocated since the start; how many there are when it is time to look what to save."""
        self._num_under_way = {False: 0, True: 0}
        """Moves, by `is_load`."""

    # Finding

    def match_prefix(self, token_ids: Sequence[int], salt: bytes = b"", num_landing: int = 0) -> list[int]:
        """As `BlockManager.match_prefix`, with blocks that are arriving, or begin to arrive by this (`have_arrived`).

        Where other tokens land, only what the pool has counts.
        """
        if num_landing or not (len(self.tier) or self._arriving):
            return super().match_prefix(token_ids, salt, num_landing)
        table, missing = self._find(token_ids, salt)
        to_load = [key for key in missing.values() if key not in self._arriving_at]
        held = [block for block in table if block >= 0]
        if not self._has_room_for(len(token_ids), len(table), len(to_load), held):
            return super().match_prefix(token_ids, salt)
        if to_load:
            num_before = min(missing) // len(self.groups) * self.block_size
            num_tokens = len(table) // len(self.groups) * self.block_size - num_before
            if not self.is_quicker(len(to_load) + len(self._to_load), num_tokens, num_before):
                self.counts.declined += len(to_load)
                return super().match_prefix(token_ids, salt)
        for block in held:
            self._cached.pop(block, None)
            self._refcounts[block] += 1
        for at, key in missing.items():
            table[at] = self._arriving_at.get(key, -1)
            if table[at] < 0:
                table[at] = self._begin_load(key)
            else:
                self._refcounts[table[at]] += 1
        return table

    def _find(self, token_ids: Sequence[int], salt: bytes) -> tuple[list[int], dict[int, TierKey]]:
        """The longest table that pool and tier have together, and the keys of what the pool lacks, by its place in the
        table, where it is -1."""
        hashes = prefix_hash.prefix_hashes(token_ids, self.block_size, salt)
        whole = [place for place, group in enumerate(self.groups) if group.window is None]
        digests = list(takewhile(lambda digest: all(self._is_known(place, digest) for place in whole), hashes))
        if self.has_windows:
            del digests[self._num_usable(digests, 0) :]
        firsts = self._first_rows(len(digests) * self.block_size)
        table: list[int] = []
        missing: dict[int, TierKey] = {}
        for row, digest in enumerate(digests):
            for place, first in enumerate(firsts):
                block = self._published[place].get(digest, -1) if row >= first else -1
                if block < 0 and row >= first:
                    missing[len(table)] = (place, digest)
                table.append(block)
        return table, missing

    def _is_known(self, place: int, digest: bytes) -> bool:
        key = (place, digest)
        return digest in self._published[place] or key in self._arriving_at or key in self.tier

    def _has_room_for(self, num_tokens: int, num_found: int, num_loads: int, held: Sequence[int]) -> bool:
        """Whether what is to be loaded has room, beside what is found and the blocks of the tokens behind it: else it
        would be evicted, and loaded again, until there is."""
        num_behind = 0 if self.has_windows else -(-num_tokens // self.block_size) * len(self.groups) - num_found
        return num_loads + num_behind <= self.num_available - sum(block in self._cached for block in held)

    # Loads

    def _begin_load(self, key: TierKey) -> int:
        """A block of the pool for what a key names, held by whoever asked and by the load."""
        slot = self.tier.pin(key)
        [block] = self.allocate(1)
        self._refcounts[block] += 1
        self._arriving[block], self._arriving_at[key] = key, block
        self._to_load.append((block, slot, key))
        return block

    def have_arrived(self, blocks: Iterable[int]) -> bool | None:
        if self._arriving and any(block in self._arriving for block in blocks):
            return None
        return all(block in self._digests for block in blocks if block >= 0)

    # Moves

    def take_moves(self) -> list[BlockMove]:
        """What is to be copied now; `moved` is to be called at the end of each."""
        moves: list[BlockMove] = []
        while self._to_load and self._num_under_way[True] < MOST_MOVES:
            part, self._to_load = self._to_load[:MOST_BLOCKS], self._to_load[MOST_BLOCKS:]
            blocks, slots, keys = zip(*part, strict=True)
            moves.append(self._begin(BlockMove(blocks, slots, keys, is_load=True)))
        while self._num_under_way[False] < MOST_MOVES and (saved := self._next_to_save()) is not None:
            moves.append(self._begin(saved))
        return moves

    def _begin(self, move: BlockMove) -> BlockMove:
        self._num_under_way[move.is_load] += 1
        return move

    def allocate(self, num_blocks: int) -> list[int]:
        self._num_given += num_blocks
        return super().allocate(num_blocks)

    def _next_to_save(self) -> BlockMove | None:
        """The blocks that are evicted next and have no copy, if there are few others to take."""
        num_looked_at = self._num_ahead - self.num_free
        if num_looked_at <= 0 or self._num_given < self._save_from:
            return None
        unsaved: dict[int, TierKey] = {}
        for block in islice(self._cached, num_looked_at):
            key = self._group_of[block], self._digests[block]
            self.tier.touch(key)  # else what is saved now might take the place of what was saved before
            if block not in self._saving and key not in self.tier and len(unsaved) < MOST_BLOCKS:
                unsaved[block] = key
        slots, lost = self.tier.take(len(unsaved))
        self._forget(lost)
        if not slots:  # all is saved, until a part of it has been taken
            self._save_from = self._num_given + self._num_ahead // 4
            return None
        blocks = tuple(islice(unsaved, len(slots)))
        self._saving.update(zip(blocks, slots, strict=True))
        return BlockMove(blocks, tuple(slots), tuple(unsaved[block] for block in blocks), is_load=False)

    def moved(self, move: BlockMove, error: str = "") -> None:
        """A move has ended; with an error none of its copies counts."""
        self._num_under_way[move.is_load] -= 1
        for block, slot, key in zip(move.blocks, move.slots, move.keys, strict=True):
            if move.is_load:
                self._loaded(block, slot, key, is_there=not error)
            else:
                self._saved(block, slot, key, is_there=not error)

    def _saved(self, block: int, slot: int, key: TierKey, *, is_there: bool) -> None:
        is_wanted = self._saving.get(block) == slot
        if is_wanted:
            del self._saving[block]
        if is_there and is_wanted:
            self.tier.keep(slot, key)
            self.counts.saved += 1
        else:
            self.tier.put_back(slot)
            self.counts.failed += not is_there

    def _loaded(self, block: int, slot: int, key: TierKey, *, is_there: bool) -> None:
        self.tier.unpin(slot)
        is_wanted = self._arriving.pop(block) == key and self._arriving_at.get(key) == block
        if is_wanted:
            del self._arriving_at[key]
        if is_there and is_wanted:
            self.counts.loaded += 1
            place, digest = key
            self._digests[block], self._group_of[block] = digest, place
            self._published[place].setdefault(digest, block)
        elif not is_there:
            self.counts.failed += 1
            if self.tier.drop(key):
                self._forget([key])
        self.release([block])

    # Losing

    def _evict(self, num_blocks: int) -> None:
        for block in islice(self._cached, num_blocks):
            self._saving.pop(block, None)
            key = self._group_of[block], self._digests[block]
            self.tier.touch(key)
            self.counts.unsaved += key not in self.tier and self.tier.num_total > 0
        super()._evict(num_blocks)

    def _report_stored(self, digests: Collection[bytes]) -> None:
        super()._report_stored([digest for digest in digests if (0, digest) not in self.tier])

    def _report_evicted(self, digests: Collection[bytes]) -> None:
        super()._report_evicted([digest for digest in digests if (0, digest) not in self.tier])

    def _forget(self, keys: Sequence[TierKey]) -> None:
        """The tier has given these up."""
        self.counts.given_up += len(keys)
        self._report_evicted([digest for place, digest in keys if not place and digest not in self._published[0]])

    def flush_cache(self) -> int:
        """As `BlockManager.flush_cache`, of the tier as well: what moves is found no more when it has moved."""
        num_unsaved, kept = self.counts.unsaved, list(self.tier)
        self._saving.clear()
        self._arriving_at.clear()
        num_only_here = sum(digest not in self._published[place] for place, digest in kept)
        self.tier.flush()
        self._report_evicted([digest for place, digest in kept if not place and digest not in self._published[0]])
        num_in_pool = super().flush_cache()
        self.counts.unsaved = num_unsaved
        return num_in_pool + num_only_here

    @property
    def cached_hashes(self) -> Set[bytes]:
        return self._published[0].keys() | {digest for place, digest in self.tier if place == 0}

    def _find_wrong(self) -> list[str]:
        wrong = super()._find_wrong() + self.tier.check()
        for block, (place, digest) in self._arriving.items():
            if self._refcounts[block] < 1 or block in self._digests:
                wrong.append(f"block {block} is arriving, with {self._refcounts[block]} owners")
            if self._arriving_at.get((place, digest)) == block and (place, digest) not in self.tier:
                wrong.append(f"block {block} arrives, and the tier has not what it is to hold")
        for block in self._saving:
            if not self._is_published(block):
                wrong.append(f"block {block} is being saved, and cannot be found")
        return wrong
