"""Owns which KV block belongs to whom: reference counts, the free list, and the prefix cache by keyed block hash.

A block is free (content worthless), held (referenced by at least one owner) or cached (published, referenced by nobody,
evicted least recently used first). Invariant, always: free + held + cached == total; `check` proves it.
While steps run (`begin_step` to `end_step`), what is released stays held until the newest of them has ended, which may
still touch it. Only a full block whose KV is computed may be published; its digest (`cluster.prefix_hash`) covers all
tokens before it as well, so that equal digests mean equal KV. A watcher of the cache can take the net change of its
digests: what waits is bounded by `MAX_CHANGES`, beyond which a snapshot takes the place of the changes.

Any block serves any group of layers (`cluster.kv_groups`). A sequence's block table has a block of each group for its
first tokens, then of each group for the tokens behind those, and so on; -1 where a group keeps nothing of them. Cached
tokens can be used as far as every group has what the token behind them sees. A watcher is told of the first group.
Knows nothing of tensors, requests or time. Used from one thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence, Set
from itertools import islice, takewhile

from cluster import prefix_hash
from cluster.kv_groups import KvGroup
from engine.kv.cache_events import MAX_CHANGES, CacheChanges, CacheEvents
from engine.kv.errors import BlockAccountingError, NoFreeBlocks
from engine.kv.kv_tier import KvTierName
from engine.kv.retention import Session

MOST_STEPS = 2
"""Steps that run at a time, at most: one, and one that was launched behind it."""


class BlockManager:
    """Hands out the block ids [0, num_blocks) of one KV pool, whose layers are divided into `groups`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_cache: bool = True,
        groups: Sequence[KvGroup] = (KvGroup((0,)),),
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least 1 block of 1 token (got {num_blocks} of {block_size})")
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.groups = tuple(groups)
        self.has_windows = any(group.window is not None for group in groups)
        self._refcounts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: few blocks in use touch few pages of memory
        self._cached: MutableMapping[int, None] = OrderedDict()  # what is evicted first is first
        self._digests: dict[int, bytes] = {}  # content of full blocks, also of private twins of a published block
        self._published: list[dict[bytes, int]] = [{} for _ in groups]
        self._group_of = [0] * num_blocks  # of those with a digest
        self.hit_tokens = Counter[KvTierName]()  # found for sequences since the start, by where they were
        self._changes: CacheChanges | None = None  # None: nobody watches the cache
        self._released_in_steps: deque[list[list[int]]] = deque()  # of each step that runs, the oldest first

    @property
    def num_total(self) -> int:
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_total - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._free) + len(self._cached)

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free) + len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks of unspecified content, evicting cached ones once none is free. NoFreeBlocks: none was taken."""
        if num_blocks > len(self._free) + len(self._cached):
            raise NoFreeBlocks(
                f"{num_blocks} KV blocks wanted, but of {self.num_total} only {self.num_free} are free and "
                f"{self.num_cached} evictable; wait for a request to end or preempt one"
            )
        if len(self._free) < num_blocks:
            self._evict(num_blocks - len(self._free))
        if num_blocks <= 0:
            return []
        blocks = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        for block in blocks:
            self._refcounts[block] = 1
        return blocks

    def fill(self, block_table: MutableSequence[int], num_rows: int, spans: Sequence[range]) -> None:
        """Extends a table to `num_rows` rows, and gives each group blocks in its span of them. Raises NoFreeBlocks."""
        count, wanted = len(self.groups), sum(map(len, spans))
        new = iter(self.allocate(wanted))
        num_more = num_rows * count - len(block_table)
        if wanted == num_more:
            block_table.extend(new)
            return
        block_table.extend([-1] * num_more)
        for row in range(min(span.start for span in spans), max(span.stop for span in spans)):
            for place, span in enumerate(spans):
                if row in span:
                    block_table[row * count + place] = next(new)

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one owner to each block, all of which are held."""
        blocks = self._there(blocks)
        self._require_held(blocks, "share")
        for block in blocks:
            self._refcounts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one owner of each block. A table given in order has its end evicted before its beginning."""
        blocks = self._there(blocks)
        self._require_held(blocks, "release")
        if self._released_in_steps:
            self._released_in_steps[-1].append(list(blocks))
            return
        refcounts, digests, published = self._refcounts, self._digests, self._published
        free, cached, group_of = self._free, self._cached, self._group_of
        for block in reversed(blocks):
            refcounts[block] = num_owners = refcounts[block] - 1
            if num_owners > 0:
                continue
            digest = digests.get(block)
            if digest is None:
                free.append(block)
            elif published[group_of[block]].get(digest) == block:
                cached[block] = None
            else:
                del digests[block]
                free.append(block)

    def retain(self, session: Session, blocks: Sequence[int]) -> None:
        """Keeps published blocks for a session; does nothing where sessions have no share."""

    def begin_step(self) -> None:
        """A step that reads and writes held blocks has been launched, behind those that run."""
        if len(self._released_in_steps) == MOST_STEPS:
            raise BlockAccountingError(f"{MOST_STEPS} steps are running already; call end_step first")
        self._released_in_steps.append([])

    def end_step(self) -> None:
        """The oldest step has ended: what was released while it was the newest is let go, in that order."""
        if not self._released_in_steps:
            raise BlockAccountingError("no step is running; call begin_step first")
        released = self._released_in_steps.popleft()
        behind, self._released_in_steps = self._released_in_steps, deque()
        for blocks in released:
            self.release(blocks)
        self._released_in_steps = behind

    def leave_windows(self, block_table: MutableSequence[int], num_tokens: int) -> None:
        """Releases the blocks of a table whose tokens nobody sees any more once `num_tokens` are computed."""
        count, left = len(self.groups), []
        for place, group in enumerate(self.groups):
            at = (group.first_seen(num_tokens) // self.block_size - 1) * count + place
            while at >= 0 and block_table[at] >= 0:
                left.append(block_table[at])
                block_table[at] = -1
                at -= count
        if left:
            self.release(left[::-1])

    def of_group(self, block_table: Sequence[int], place: int) -> Sequence[int]:
        """The blocks of one group in a table, by their place in the sequence; 0 where it keeps nothing."""
        if len(self.groups) == 1 and not self.has_windows:
            return block_table
        return [max(block, 0) for block in block_table[place :: len(self.groups)]]

    def match_prefix(self, token_ids: Sequence[int], salt: bytes = b"", num_landing: int = 0) -> list[int]:
        """Finds the longest run of published blocks that `token_ids` starts with, and takes a reference on each.
        Returns the beginning of a block table. The last token is never covered: computing it is what gives the logits
        of the next one. Of a window, blocks are found as far as the token behind the run sees them, or the one behind
        `num_landing` tokens, if the others' KV is computed elsewhere."""
        if not self.enable_prefix_cache:
            return []
        everything = [known for known, group in zip(self._published, self.groups, strict=True) if group.window is None]
        found = prefix_hash.prefix_hashes(token_ids, self.block_size, salt)
        for known in everything:
            found = takewhile(known.__contains__, found)
        digests = list(found)
        if self.has_windows:
            del digests[self._num_usable(digests, num_landing) :]
        if everything and len(self.groups) == 1:
            table = [everything[0][digest] for digest in digests]
        else:
            firsts = self._first_rows(max(len(digests) * self.block_size, num_landing))
            table = [
                known[digest] if row >= first else -1
                for row, digest in enumerate(digests)
                for known, first in zip(self._published, firsts, strict=True)
            ]
        for block in self._there(table):
            self._cached.pop(block, None)
            self._refcounts[block] += 1
        return table

    def where_found(self, table: Sequence[int]) -> Counter[KvTierName]:
        """The tokens of what `match_prefix` has just found, by where they are."""
        return Counter[KvTierName]({"device": len(table) // len(self.groups) * self.block_size})

    def count_hits(self, table: Sequence[int], found: Mapping[KvTierName, int]) -> None:
        """Counts what `match_prefix` has found, and where (`where_found`), once it has arrived and is used."""
        self.hit_tokens.update(found)

    def _num_usable(self, digests: Sequence[bytes], num_landing: int) -> int:
        """The most of these blocks behind which every group has what a token sees."""
        runs, most = [0] * len(self.groups), 0
        for row, digest in enumerate(digests):
            runs = [run + 1 if self._is_known(place, digest) else 0 for place, run in enumerate(runs)]
            firsts = self._first_rows(max((row + 1) * self.block_size, num_landing))
            if all(run >= row + 1 - first for run, first in zip(runs, firsts, strict=True)):
                most = row + 1
        return most

    def _is_known(self, place: int, digest: bytes) -> bool:
        return digest in self._published[place]

    def _first_rows(self, num_tokens: int) -> list[int]:
        """The first block of each group that the token behind so many sees."""
        return [group.first_seen(num_tokens) // self.block_size for group in self.groups]

    def publish(
        self, token_ids: Sequence[int], block_table: Sequence[int], salt: bytes, num_computed: int, num_landed: int = 0
    ) -> None:
        """Makes the full blocks of a sequence findable, as far as the KV of its first `num_computed` tokens reaches.
        Of the first `num_landed`, computed elsewhere, a window may hold no more than the token behind them sees.
        Idempotent, and cheap when repeated: hashing goes on where an earlier call stopped. Where an equal block is
        published already, this sequence's own stays private."""
        if not self.enable_prefix_cache:
            return
        count, size = len(self.groups), self.block_size
        num_full = min(num_computed, len(token_ids)) // size
        num_blocks = num_full * count
        if num_blocks > len(block_table):
            raise BlockAccountingError(f"{num_blocks} full blocks to publish, but the table has {len(block_table)}")
        start = num_full
        if start > 0 and count == 1 and not self.has_windows and block_table[0] not in self._digests:
            start = 0  # as below, with one look-up for all blocks of a new prompt
        while start > 0 and self._digest_at(block_table, start - 1) is None:
            start -= 1
        if start == num_full:
            return
        self._require_held(self._there(block_table[start * count : num_blocks]), "publish")
        key = prefix_hash.key_of(salt)
        stored: list[bytes] = []
        while start < num_full:
            first = start // prefix_hash.GROUP * prefix_hash.GROUP
            end = min(first + prefix_hash.GROUP, num_full)
            parent = self._digest_at(block_table, first - 1) if first else prefix_hash.root_of(size)
            if parent is None:  # its tokens have left every window
                parent = prefix_hash.PrefixHashes(token_ids, size, salt).end_of_group(first // prefix_hash.GROUP - 1)
            tokens = token_ids[first * size : end * size]
            new = prefix_hash.block_hashes(parent, tokens, size, key, start - first)
            for place, group in enumerate(self.groups):
                blocks = block_table[start * count + place : end * count : count]
                num_cut = max(0, group.first_whole(num_landed, size) - start) if self.has_windows else 0
                found = self._publish_of(place, blocks[num_cut:], new[num_cut:], salt)
                if place == 0:
                    stored += found
            start = end
        self._report_stored(stored)

    def _publish_of(self, place: int, blocks: Sequence[int], digests: Sequence[bytes], salt: bytes) -> dict[bytes, int]:
        """Makes blocks of one group findable under a salt; returns those that nobody could find there before."""
        published, pairs = self._published[place], zip(digests, blocks, strict=True)
        new = {digest: block for digest, block in pairs if block >= 0} if self.has_windows else dict(pairs)
        self._digests.update(zip(new.values(), new, strict=True))
        if len(self.groups) > 1:
            for block in new.values():
                self._group_of[block] = place
        if not published.keys().isdisjoint(new):
            for digest in published.keys() & new.keys():
                del new[digest]
        published.update(new)
        return new

    def _digest_at(self, block_table: Sequence[int], row: int) -> bytes | None:
        """The digest of the tokens of a row of the table, if it is known."""
        count = len(self.groups)
        if count == 1:
            return self._digests.get(block_table[row])
        known = map(self._digests.get, block_table[row * count : (row + 1) * count])
        return next((digest for digest in known if digest is not None), None)

    def flush_cache(self) -> int:
        """Makes every published block unfindable, and free unless an owner holds it; returns how many there were."""
        num_published = sum(map(len, self._published))
        self._evict(len(self._cached))
        self._report_evicted(self._published[0])
        for known in self._published:
            known.clear()
        return num_published

    @property
    def cached_hashes(self) -> Set[bytes]:
        """Digests of all blocks of the first group that `match_prefix` can find now; may be a live view."""
        return self._published[0].keys()

    def watch_cache(self, is_watched: bool, most_changes: int = MAX_CHANGES) -> None:
        """Starts or stops recording changes for `take_cache_events`."""
        self._changes = CacheChanges(most_changes) if is_watched else None

    @property
    def has_stored(self) -> bool:
        """Whether `take_cache_events` would have more to say than which blocks were evicted."""
        return self._changes is not None and self._changes.has_stored

    def take_cache_events(self) -> CacheEvents | None:
        """The changes of `cached_hashes` since the last call, or since the watch began; None without any. A snapshot of
        all hashes once more than `most_changes` changes have waited."""
        return self._changes.take(lambda: self.cached_hashes) if self._changes is not None else None

    def have_arrived(self, blocks: Iterable[int]) -> bool | None:
        """Whether blocks that `match_prefix` has found have their content; None while some of it is on its way."""
        return True

    def check(self) -> None:
        """Raises BlockAccountingError naming every block whose books disagree. Reads the whole pool."""
        if wrong := self._find_wrong():
            raise BlockAccountingError(
                f"books of {self.num_total} KV blocks (free {self.num_free}, held {self.num_held}, "
                f"cached {self.num_cached}): " + "; ".join(wrong)
            )

    def _find_wrong(self) -> list[str]:
        free, cached = set(self._free), set(self._cached)
        wrong = [] if len(free) == len(self._free) else [f"the free list names a block twice: {self._free}"]
        for block, count in enumerate(self._refcounts):
            places = (block in free) + (block in cached) + (count > 0)
            if places != 1 or count < 0:
                wrong.append(f"block {block}: free={block in free} cached={block in cached} refcount={count}")
            if block in cached and not self._is_published(block):
                wrong.append(f"block {block} is cached, but cannot be found by its hash")
            if block in free and block in self._digests:
                wrong.append(f"block {block} is free, but keeps a digest")
        for place, known in enumerate(self._published):
            for digest, block in known.items():
                if self._digests.get(block) != digest or self._group_of[block] != place:
                    wrong.append(f"a published digest leads to block {block}, which has another")
        return wrong

    def _is_published(self, block: int) -> bool:
        digest = self._digests.get(block)
        return digest is not None and self._published[self._group_of[block]].get(digest) == block

    def _evict(self, num_blocks: int) -> None:
        """Frees so many cached blocks, least recently used first."""
        oldest = list(islice(self._cached, num_blocks))
        evicted = list(map(self._digests.pop, oldest))
        deque(map(self._cached.__delitem__, oldest), maxlen=0)  # all in one go
        if len(self.groups) > 1:
            places = [self._group_of[block] for block in oldest]
            for place, digest in zip(places, evicted, strict=True):
                del self._published[place][digest]
            evicted = [digest for place, digest in zip(places, evicted, strict=True) if place == 0]
        else:
            deque(map(self._published[0].__delitem__, evicted), maxlen=0)
        self._free += oldest
        self._report_evicted(evicted)

    def _report_stored(self, digests: Collection[bytes]) -> None:
        if self._changes is not None:
            self._changes.store(digests)

    def _report_evicted(self, digests: Collection[bytes]) -> None:
        if self._changes is not None:
            self._changes.evict(digests)

    def _there(self, blocks: Sequence[int]) -> Sequence[int]:
        return [block for block in blocks if block >= 0] if self.has_windows else blocks

    def _require_held(self, blocks: Sequence[int], action: str) -> None:
        if not blocks:
            return
        if min(blocks) >= 0 and max(blocks) < len(self._refcounts):  # as a rule each is there once, and has an owner
            fewest = min(map(self._refcounts.__getitem__, blocks))
            if fewest > 0 and (action != "release" or len(set(blocks)) == len(blocks)):
                return
        for block, times in Counter(blocks).items():
            owners = self._refcounts[block] if 0 <= block < self.num_total else 0
            if owners < (times if action == "release" else 1):
                raise BlockAccountingError(
                    f"cannot {action} block {block} of {self.num_total} {times} times: it has {owners} owners; "
                    "take a block with allocate, share or match_prefix and release it once for each"
                )
