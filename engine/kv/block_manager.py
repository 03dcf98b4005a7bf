"""Owns which KV block belongs to whom: reference counts, the free list, and the prefix cache by keyed block hash.

A block is free (content worthless), held (referenced by at least one owner) or cached (published, referenced by nobody,
evicted least recently used first). Invariant, always: free + held + cached == total; `check` proves it.
While steps run (`begin_step` to `end_step`), what is released stays held until the newest of them has ended, which may
still touch it.
Only a full block whose KV is computed may be published; its digest (`cluster.prefix_hash`) covers all tokens before it
as well, so that equal digests mean equal KV. A watcher of the cache can take the net change of its digests: what waits
to be taken is bounded by the pool and by `MAX_CHANGES`, beyond which a snapshot takes the place of the changes.
Knows nothing of tensors, requests or time. Used from one thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, KeysView, Sequence
from dataclasses import dataclass
from itertools import islice

from cluster import prefix_hash
from cluster.errors import BatonError, InternalError

MAX_CHANGES = 16_384
"""Hashes that wait to be taken, at most; a megabyte or so."""
MOST_STEPS = 2
"""Steps that run at a time, at most: one, and one that was launched behind it."""


class NoFreeBlocks(BatonError):
    """The pool cannot give that many blocks now; the scheduler waits or preempts."""

    grpc_code = "RESOURCE_EXHAUSTED"
    reason = "NO_FREE_BLOCKS"


class BlockAccountingError(InternalError):
    """An owner did what it may not (released twice, say), or an invariant is broken: a bug, never load."""


@dataclass(frozen=True)
class CacheEvents:
    """Hashes that the prefix cache serves from now on, and those that it serves no longer; none is in both."""

    stored: list[bytes]
    evicted: list[bytes]
    is_snapshot: bool = False
    """`stored` is all there is and replaces every earlier report."""


class CacheChanges:
    """Gathers what `take` returns. A hash that is stored is not served already, one that is evicted is."""

    def __init__(self, most: int = MAX_CHANGES) -> None:
        self._most = most
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._has_overflowed = False

    @property
    def has_stored(self) -> bool:
        return bool(self._stored) or self._has_overflowed

    def store(self, block_hashes: Collection[bytes]) -> None:
        self._note(block_hashes, self._stored, self._evicted)

    def evict(self, block_hashes: Collection[bytes]) -> None:
        self._note(block_hashes, self._evicted, self._stored)

    def take(self, served: Collection[bytes]) -> CacheEvents | None:
        """The changes since the last take; all that is `served` now when too many had piled up; None without any."""
        if self._has_overflowed:
            self._has_overflowed = False
            return CacheEvents(list(served), [], is_snapshot=True)
        if not self._stored and not self._evicted:
            return None
        events = CacheEvents(list(self._stored), list(self._evicted))
        self._stored, self._evicted = {}, {}
        return events

    def _note(self, block_hashes: Collection[bytes], here: dict[bytes, None], there: dict[bytes, None]) -> None:
        if self._has_overflowed:
            return
        if there.keys().isdisjoint(block_hashes):
            here.update(dict.fromkeys(block_hashes))
        else:
            for block_hash in block_hashes:
                if block_hash in there:
                    del there[block_hash]
                else:
                    here[block_hash] = None
        if len(here) + len(there) > self._most:
            self._stored, self._evicted = {}, {}
            self._has_overflowed = True


class BlockManager:
    """Hands out the block ids [0, num_blocks) of one KV pool."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least 1 block of 1 token (got {num_blocks} of {block_size})")
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._refcounts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: few blocks in use touch few pages of memory
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._digests: dict[int, bytes] = {}  # content of full blocks, also of private twins of a published block
        self._published: dict[bytes, int] = {}
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

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free + self.num_cached

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks of unspecified content, evicting cached ones once none is free. NoFreeBlocks: none was taken."""
        if not self.can_allocate(num_blocks):
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

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one owner to each block, all of which are held."""
        self._require_held(blocks, "share")
        for block in blocks:
            self._refcounts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one owner of each block. A table given in order has its end evicted before its beginning."""
        self._require_held(blocks, "release")
        if self._released_in_steps:
            self._released_in_steps[-1].append(list(blocks))
            return
        refcounts, digests, published = self._refcounts, self._digests, self._published
        for block in reversed(blocks):
            refcounts[block] -= 1
            if refcounts[block] > 0:
                continue
            digest = digests.get(block)
            if digest is None:
                self._free.append(block)
            elif published.get(digest) == block:
                self._cached[block] = None
            else:
                del digests[block]
                self._free.append(block)

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

    def match_prefix(self, token_ids: Sequence[int], salt: bytes = b"") -> list[int]:
        """Finds the longest run of published blocks that `token_ids` starts with, and takes a reference on each.

        The last token is never covered: computing it is what gives the logits of the next one.
        """
        matched: list[int] = []
        if not self.enable_prefix_cache:
            return matched
        for digest in prefix_hash.prefix_hashes(token_ids, self.block_size, salt):
            block = self._published.get(digest)
            if block is None:
                break
            matched.append(block)
        for block in matched:
            self._cached.pop(block, None)
            self._refcounts[block] += 1
        return matched

    def publish(self, token_ids: Sequence[int], block_table: Sequence[int], salt: bytes, num_computed: int) -> None:
        """Makes the full blocks of a sequence findable, as far as the KV of its first `num_computed` tokens reaches.

        Idempotent, and cheap when repeated: hashing goes on where an earlier call stopped. Where an equal block is
        published already, this sequence's own stays private.
        """
        if not self.enable_prefix_cache:
            return
        num_full = min(num_computed, len(token_ids)) // self.block_size
        if num_full > len(block_table):
            raise BlockAccountingError(f"{num_full} full blocks to publish, but the table has {len(block_table)}")
        start = num_full
        while start > 0 and block_table[start - 1] not in self._digests:
            start -= 1
        if start == num_full:
            return
        self._require_held(block_table[start:num_full], "publish")
        key, size, known, published = prefix_hash.key_of(salt), self.block_size, self._digests, self._published
        stored: list[bytes] = []
        while start < num_full:
            first = start // prefix_hash.GROUP * prefix_hash.GROUP
            end = min(first + prefix_hash.GROUP, num_full)
            parent = known[block_table[first - 1]] if first else prefix_hash.root_of(size)
            tokens = token_ids[first * size : end * size]
            group = block_table[start:end]
            digests = list(prefix_hash.block_hashes(parent, tokens, size, key, start - first))
            known.update(zip(group, digests, strict=True))
            new = dict(zip(digests, group, strict=True))
            for digest in published.keys() & new.keys():
                del new[digest]
            published.update(new)
            stored += new
            start = end
        if self._changes is not None:
            self._changes.store(stored)

    def flush_cache(self) -> int:
        """Makes every published block unfindable, and free unless it is held; returns how many there were.

        Owners keep what they hold, and publish what they fill from now on.
        """
        num_published = len(self._published)
        self._evict(len(self._cached))
        if self._changes is not None:
            self._changes.evict(self._published)
        self._published.clear()
        return num_published

    @property
    def cached_hashes(self) -> KeysView[bytes]:
        """Digests of all blocks that `match_prefix` can find now, held or not; a live view."""
        return self._published.keys()

    def watch_cache(self, is_watched: bool, most_changes: int = MAX_CHANGES) -> None:
        """Starts or stops recording changes for `take_cache_events`."""
        self._changes = CacheChanges(most_changes) if is_watched else None

    @property
    def has_stored(self) -> bool:
        """Whether `take_cache_events` would have more to say than which blocks were evicted."""
        return self._changes is not None and self._changes.has_stored

    def take_cache_events(self) -> CacheEvents | None:
        """The changes of `cached_hashes` since the last call, or since the watch began; None without any.

        A snapshot of all hashes once more than `most_changes` changes have waited.
        """
        return self._changes.take(self._published) if self._changes is not None else None

    def check(self) -> None:
        """Raises BlockAccountingError naming every block whose books disagree. Reads the whole pool."""
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
        for digest, block in self._published.items():
            if self._digests.get(block) != digest:
                wrong.append(f"a published digest leads to block {block}, which has another")
        if wrong:
            raise BlockAccountingError(
                f"books of {self.num_total} KV blocks (free {self.num_free}, held {self.num_held}, "
                f"cached {self.num_cached}): " + "; ".join(wrong)
            )

    def _is_published(self, block: int) -> bool:
        digest = self._digests.get(block)
        return digest is not None and self._published.get(digest) == block

    def _evict(self, num_blocks: int) -> None:
        """Frees so many cached blocks, least recently used first."""
        oldest = list(islice(self._cached, num_blocks))
        evicted = list(map(self._digests.pop, oldest))
        deque(map(self._cached.__delitem__, oldest), maxlen=0)  # all in one go
        deque(map(self._published.__delitem__, evicted), maxlen=0)
        self._free += oldest
        if self._changes is not None:
            self._changes.evict(evicted)

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
