"""A pool of KV blocks above a tier in host memory, and one on a disk below that: what the pool evicts is found there.

    cached in the pool -> (saved: host memory has a copy as well) -> evicted from the pool -> loaded into another block
    kept in host memory -> (spilled: the disk has a copy as well) -> given up there -> read into a block of the pool

Copies down go ahead of eviction: the blocks that will be evicted next are copied while steps run, as long as fewer than
half of the pool, or of host memory, are free or copied. Blocks of the pool stay evictable meanwhile; a copy of one that
was evicted before it was done is thrown away. A prefix that is found in a tier gets blocks of the pool into which it is
loaded: they are arriving, are found by others at once, and whoever found them waits (`have_arrived`). The content of a
block whose load failed is unknown: who waited for it begins anew.

One invariant over all: a digest leads to at most one block of the pool and one slot of each tier, with equal content;
the watcher of the cache hears of it as long as any has it. Moves are decided here (`take_moves`), made elsewhere,
and their end is told here (`moved`). Knows nothing of tensors, requests or time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import chain, islice, takewhile

from cluster import prefix_hash
from cluster.kv_groups import KvGroup
from engine.kv import kv_tier
from engine.kv.kv_tier import BlockMove, KvTier, KvTierName, MoveKind, TierCounts, TierKey
from engine.kv.retaining_blocks import RetainingBlocks

MOST_MOVES = 2
"""Moves in one direction that are under way at a time."""

_MOST_AHEAD = 4096
"""Blocks that are spilled before host memory gives them up: to look for them takes some microseconds each."""
IsQuicker = Callable[[Mapping[MoveKind, int], int, int], bool]
"""Whether to load and read so many blocks is quicker than to compute so many tokens, behind so many that are there."""


class TieredBlocks(RetainingBlocks):
    """A block manager with `num_slots` blocks in host memory, and `num_disk_slots` on a disk."""

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
    ) -> None:
        """`num_ahead`: blocks that are to be free or saved, so that a prompt which needs as many at once evicts none
        that are lost; None: half of the pool. Never more than host memory holds."""
        super().__init__(num_blocks, block_size, enable_prefix_cache, groups)
        self.host, self.disk = KvTier(num_slots), KvTier(num_disk_slots)
        self.tiers = {"host": self.host, "disk": self.disk}
        self.sources = {MoveKind.LOAD: self.host, MoveKind.READ: self.disk}
        self.is_quicker: IsQuicker = lambda num_moves, num_tokens, num_before: True
        self.counts = TierCounts()
        self._num_ahead = min(num_slots, -(-num_blocks // 2) if num_ahead is None else num_ahead)
        self._num_spilled_ahead = min(num_disk_slots, -(-num_slots // 2), _MOST_AHEAD)
        self._saving: dict[int, int] = {}
        """Blocks that are being copied down and have not been evicted since, with the slots that they go to."""
        self._spilling: dict[TierKey, int] = {}
        """What is being copied to the disk and has not been dropped since, with the slots there."""
        self._arriving: dict[int, TierKey] = {}
        self._arriving_at: dict[TierKey, int] = {}
        self._to_load: dict[MoveKind, list[tuple[int, int, TierKey]]] = {MoveKind.LOAD: [], MoveKind.READ: []}
        """(pinned slot, block, key)."""
        self._num_given = 0  # blocks allocated since the start
        self._look_from = {MoveKind.SAVE: 0, MoveKind.SPILL: 0}  # how many there are when it is time to copy down
        self._halves: list[BlockMove] = []  # of reads that have failed
        self.num_under_way = Counter[MoveKind]()  # moves
        self._to_save, self._to_spill, self._is_ending = deque[int](), deque[TierKey](), False

    # Finding

    def match_prefix(self, token_ids: Sequence[int], salt: bytes = b"", num_landing: int = 0) -> list[int]:
        """As `BlockManager.match_prefix`, with blocks that are arriving, or begin to arrive by this (`have_arrived`).

        Where other tokens land, only what the pool has counts.
        """
        if num_landing or not (self._arriving or any(map(len, self.sources.values()))):
            return super().match_prefix(token_ids, salt, num_landing)
        table, missing = self._find(token_ids, salt)
        held = [block for block in table if block >= 0]
        if not self._is_worth(len(token_ids), len(table), missing, held):
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

    def _is_worth(self, num_tokens: int, num_found: int, missing: Mapping[int, TierKey], held: Sequence[int]) -> bool:
        """Whether to load what is missing for a prompt: `num_found` blocks are found with it, `held` without."""
        to_load = [key for key in missing.values() if key not in self._arriving_at]
        if not self._has_room_for(num_tokens, num_found, len(to_load), held):
            return False
        if not to_load:
            return True
        count = len(self.groups)
        num_before = min(missing) // count * self.block_size
        num_moves = Counter(self._kind_of(key) for key in to_load)
        num_moves.update({kind: len(waiting) for kind, waiting in self._to_load.items() if kind in num_moves})
        if self.is_quicker(num_moves, num_found // count * self.block_size - num_before, num_before):
            return True
        self.counts.declined += len(to_load)
        return False

    def _kind_of(self, key: TierKey) -> MoveKind:
        """The way up of what is not in the pool."""
        return MoveKind.LOAD if key in self.host else MoveKind.READ

    def where_found(self, table: Sequence[int]) -> Counter[KvTierName]:
        if not self._arriving:
            return super().where_found(table)
        count, found = len(self.groups), Counter[KvTierName]()
        for row in range(0, len(table), count):
            kinds = {self._kind_of(self._arriving[each]) for each in table[row : row + count] if each in self._arriving}
            lowest = [tier for kind, tier in kv_tier.FROM.items() if kind in kinds][-1:]
            found[lowest[0] if lowest else "device"] += self.block_size
        return found

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
        return digest in self._published[place] or (key := (place, digest)) in self._arriving_at or self._is_below(key)

    def _is_below(self, key: TierKey) -> bool:
        return key in self.host or key in self.disk

    def _can_load(self, key: TierKey) -> bool:
        """Whether it is anywhere below the pool."""
        return self._is_below(key)

    def _has_room_for(self, num_tokens: int, num_found: int, num_loads: int, held: Sequence[int]) -> bool:
        """Whether what is to be loaded has room, beside what is found and the blocks of the tokens behind it: else it
        would be evicted, and loaded again, until there is."""
        num_behind = 0 if self.has_windows else -(-num_tokens // self.block_size) * len(self.groups) - num_found
        return num_loads + num_behind <= self.num_available - sum(block in self._cached for block in held)

    def _begin_load(self, key: TierKey) -> int:
        """A block of the pool for what a key names, held by whoever asked and by the load."""
        kind = self._kind_of(key)
        tier = self.sources[kind]
        tier.touch(key)
        slot = tier.pin(key)
        [block] = self.allocate(1)
        self._refcounts[block] += 1
        self._arriving[block], self._arriving_at[key] = key, block
        self._to_load[kind].append((slot, block, key))
        return block

    def have_arrived(self, blocks: Iterable[int]) -> bool | None:
        if self._arriving and any(block in self._arriving for block in blocks):
            return None
        return all(block in self._digests for block in blocks if block >= 0)

    # Moves

    def take_moves(self) -> list[BlockMove]:
        """Returns what is to be copied now; `moved` is to be called at the end of each."""
        moves, self._halves = self._halves, []
        self.num_under_way.update(half.kind for half in moves)
        for kind, waiting in self._to_load.items():
            while waiting and self.num_under_way[kind] < MOST_MOVES:
                self.num_under_way[kind] += 1
                moves.append(BlockMove(kind, *zip(*waiting[: kv_tier.MOST_BLOCKS], strict=True)))
                del waiting[: kv_tier.MOST_BLOCKS]
        for kind, next_move in ((MoveKind.SAVE, self._next_to_save), (MoveKind.SPILL, self._next_to_spill)):
            while self.num_under_way[kind] < MOST_MOVES and (move := next_move()) is not None:
                self.num_under_way[kind] += 1
                moves.append(move)
        return moves

    def put_by(self) -> None:
        """The end is near: from now on all that is cached goes to the disk as far as it has room, what was used last
        first, and nothing else is copied down."""
        for key in chain(self.host, map(self._key_of, self._cached)):
            self.disk.touch(key)
        saves = [block for block in self._cached if self._is_unsaved(block) and self._key_of(block) not in self.disk]
        spills = list(filter(self._is_unspilled, self.host))
        room = self.disk.num_total
        self._to_save = deque(saves[: -room - 1 : -1])
        self._to_spill = deque(spills[: -max(0, room - len(self._to_save)) - 1 : -1])
        self._is_ending = True

    def allocate(self, num_blocks: int) -> list[int]:
        self._num_given += num_blocks
        return super().allocate(num_blocks)

    def _next_to_save(self) -> BlockMove | None:
        """The blocks that are evicted next and have no copy, if there are few others to take."""
        if self._is_ending and (self._to_spill or self.num_under_way[MoveKind.SPILL]):
            return None  # what host memory gives up for them is to be on the disk
        num_looked_at = self._num_ahead - self.num_free
        if self._may_look(MoveKind.SAVE, self._to_save, num_looked_at):
            for block in islice(self._cached, num_looked_at):
                self.host.touch(self._key_of(block))  # else what is saved might take the place of what was saved before
                if self._is_unsaved(block):
                    self._to_save.append(block)
        blocks = list(filter(self._is_unsaved, kv_tier.first_of(self._to_save)))
        slots, lost = self.host.take(len(blocks))
        self._give_up(lost, self.disk)
        blocks = kv_tier.as_many_as(blocks, slots, self._to_save)
        if not slots:
            return None
        self._saving.update(zip(blocks, slots, strict=True))
        return BlockMove(MoveKind.SAVE, tuple(blocks), tuple(slots), tuple(map(self._key_of, blocks)))

    def _next_to_spill(self) -> BlockMove | None:
        """Picks what host memory gives up next and the disk has not, if there is little else to take."""
        num_looked_at = self._num_spilled_ahead - self.host.num_free
        if self._may_look(MoveKind.SPILL, self._to_spill, num_looked_at):
            for key in islice(self.host, num_looked_at):
                self.disk.touch(key)
                if self._is_unspilled(key):
                    self._to_spill.append(key)
        keys = list(filter(self._is_unspilled, kv_tier.first_of(self._to_spill)))
        slots, lost = self.disk.take(len(keys))
        self._give_up(lost, self.host)
        keys = kv_tier.as_many_as(keys, slots, self._to_spill)
        if not slots:
            return None
        self._spilling.update(zip(keys, slots, strict=True))
        return BlockMove(MoveKind.SPILL, tuple(map(self.host.pin, keys)), tuple(slots), tuple(keys))

    def _may_look(self, kind: MoveKind, left: Collection[object], num_looked_at: int) -> bool:
        """Whether it is time to look what else to copy down: that takes a while, and each time brings many moves."""
        if left or num_looked_at <= 0 or self._is_ending or self._num_given < self._look_from[kind]:
            return False
        self._wait(kind)
        return True

    def _is_unsaved(self, block: int) -> bool:
        return block in self._cached and block not in self._saving and self._key_of(block) not in self.host

    def _is_unspilled(self, key: TierKey) -> bool:
        return key in self.host and key not in self.disk and key not in self._spilling

    def _wait(self, kind: MoveKind) -> None:
        """Copies nothing down in this way until more blocks have been allocated."""
        ahead = {MoveKind.SAVE: self._num_ahead, MoveKind.SPILL: self._num_spilled_ahead}.get(kind, self.host.num_total)
        self._look_from[kind] = self._num_given + max(1, ahead // 4)

    def moved(self, move: BlockMove, error: str = "") -> None:
        """A move has ended; with an error none of its copies counts, and copies down are not tried again at once. Reads
        are, by halves: a damaged block ends no other."""
        self.num_under_way[move.kind] -= 1
        if error and move.kind in (MoveKind.READ, MoveKind.FETCH) and len(move.keys) > 1:
            self._halves += kv_tier.halves_of(move)
            return
        self.counts.failed += len(move.keys) if error else 0
        if error and not move.kind.is_up:
            (self._to_save if move.kind is MoveKind.SAVE else self._to_spill).clear()
            self._wait(move.kind)
        for source, target, key in zip(move.sources, move.targets, move.keys, strict=True):
            match move.kind:
                case MoveKind.SAVE:
                    is_kept = self._saved(source, target, key, is_there=not error)
                case MoveKind.SPILL:
                    is_kept = self._spilled(source, target, key, is_there=not error)
                case _:
                    is_kept = self._loaded(self.sources[move.kind], source, target, key, is_there=not error)
            self.counts.add(move.kind, is_kept)

    def _saved(self, block: int, slot: int, key: TierKey, *, is_there: bool) -> bool:
        is_wanted = self._saving.get(block) == slot
        if is_wanted:
            del self._saving[block]
        if is_there and is_wanted:
            self.host.keep(slot, key)
            if self._is_ending:
                self._to_spill.append(key)
        else:
            self.host.put_back(slot)
        return is_there and is_wanted

    def _spilled(self, slot: int, on_disk: int, key: TierKey, *, is_there: bool) -> bool:
        self.host.unpin(slot)
        is_wanted = self._spilling.get(key) == on_disk
        if is_wanted:
            del self._spilling[key]
        if is_there and is_wanted:
            self.disk.keep(on_disk, key)
        else:
            self.disk.put_back(on_disk)
        return is_there and is_wanted

    def _loaded(self, tier: KvTier, slot: int, block: int, key: TierKey, *, is_there: bool) -> bool:
        tier.unpin(slot)
        is_wanted = self._arriving.pop(block) == key and self._arriving_at.get(key) == block
        if is_wanted:
            del self._arriving_at[key]
        if is_there and is_wanted:
            place, digest = key
            self._digests[block], self._group_of[block] = digest, place
            if self._published[place].setdefault(digest, block) == block and not place:
                self._report_stored([digest])
        elif not is_there and tier.drop(key):
            if tier is self.host:
                self._spilling.pop(key, None)  # a copy of what could not be read is no better
            self._give_up([key], self.disk if tier is self.host else self.host)
        self.release([block])
        return is_there and is_wanted

    def find_again(self, slots: Iterable[tuple[int, TierKey]]) -> None:
        """Takes up what free slots of the disk hold from before, of this worker or another one."""
        found = [(slot, key) for slot, key in slots if key[0] < len(self.groups)]
        known = {key for _, key in found if self._is_below(key) or key[1] in self._published[key[0]]}
        super()._report_stored([key[1] for key in self.disk.adopt(found) if key[0] == 0 and key not in known])

    def forget_disk(self) -> None:
        """Nothing on the disk is found any more: another one takes its place."""
        lost = dict.fromkeys(self.disk)
        self._spilling.clear()
        self.disk.flush()
        for key in [key for key in self._arriving_at if key in lost or not self._can_load(key)]:
            del self._arriving_at[key]  # what is read may be of the other one
        self._give_up(list(lost), self.host)

    # Losing

    def _evict(self, num_blocks: int) -> None:
        for block in islice(self._cached, num_blocks):
            self._saving.pop(block, None)
            key = self._key_of(block)
            self.host.touch(key)
            if self.host.num_total > 0 and not self._is_below(key):
                self.counts.unsaved += 1
                self._look_from[MoveKind.SAVE] = self._num_given  # a preempted sequence's end, say: its rest is next
        super()._evict(num_blocks)

    def _report_stored(self, digests: Collection[bytes]) -> None:
        super()._report_stored([digest for digest in digests if not self._is_below((0, digest))])

    def _report_evicted(self, digests: Collection[bytes]) -> None:
        super()._report_evicted([digest for digest in digests if not self._is_below((0, digest))])

    def _give_up(self, keys: Sequence[TierKey], other: KvTier) -> None:
        """A tier has given these up; `other` may have them."""
        lost = [(place, digest) for place, digest in keys if (place, digest) not in other]
        self.counts.given_up += len(lost)
        for key in keys:
            other.touch(key)
        self._report_evicted([digest for place, digest in lost if not place and digest not in self._published[0]])

    def flush_cache(self) -> int:
        """As `BlockManager.flush_cache`, of the tiers as well: what moves is found no more when it has moved."""
        num_unsaved, kept = self.counts.unsaved, {*self.host, *self.disk}
        self._saving.clear()
        self._spilling.clear()
        self._arriving_at.clear()
        num_only_here = sum(digest not in self._published[place] for place, digest in kept)
        for tier in self.tiers.values():
            tier.flush()
        self._report_evicted([digest for place, digest in kept if not place and digest not in self._published[0]])
        num_in_pool = super().flush_cache()
        self.counts.unsaved = num_unsaved
        return num_in_pool + num_only_here

    @property
    def cached_hashes(self) -> Set[bytes]:
        below = (digest for place, digest in chain(self.host, self.disk) if place == 0)
        return self._published[0].keys() | set(below)

    def _find_wrong(self) -> list[str]:
        wrong = super()._find_wrong() + self.host.check() + self.disk.check()
        for block, (place, digest) in self._arriving.items():
            if self._refcounts[block] < 1 or block in self._digests:
                wrong.append(f"block {block} is arriving, with {self._refcounts[block]} owners")
            if self._arriving_at.get((place, digest)) == block and not self._can_load((place, digest)):
                wrong.append(f"block {block} arrives, and no tier has what it is to hold")
        for block in self._saving:
            if not self._is_published(block):
                wrong.append(f"block {block} is being saved, and cannot be found")
        return wrong
