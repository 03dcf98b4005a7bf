"""The workers' prefix caches, as far as their events describe them: the part of a prompt that each need not compute.

    UNKNOWN -> (snapshot) -> KNOWN -> (a number is missing) -> UNKNOWN

While unknown, nothing counts as cached, and every event but a snapshot is ignored. The known state is a moment old: a
worker may have evicted a block meanwhile, so it helps to choose a worker and decides nothing else.
All workers of a router share one table, so that one walk over a prompt's hashes finds what each of them has of it.
Pure: no connection, no clock. An index lives as long as one session with its worker does. `Candidate` is a worker as it
is seen by those that choose among workers: by its cache, its pool and what its steps cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice, repeat
from operator import itemgetter
from typing import NamedTuple, Protocol

from cluster.pb import worker_pb2
from cluster.prefix_hash import GROUP, PrefixHashes
from cluster.step_cost import StepCost

MOST_MASKS = 16_384
"""Sets of workers of which blocks share one object."""
_FIRST_BYTE = itemgetter(0)


class Step(NamedTuple):
    """Workers that hold equally much of a prompt."""

    depth: int
    """Blocks, from the first on."""
    holding: int
    """The bits of the workers that hold so many, and no more."""


class Depths:
    """The number of blocks of a prompt that each worker holds. A group is looked into only when it matters who holds
    how much."""

    def __init__(self, table: Holders, hashes: PrefixHashes) -> None:
        self.groups: list[tuple[int, int]] = []
        """Groups, each with the bits of the workers that hold all before it, and not all of it; the deepest last."""
        self._table = table
        self._hashes = hashes
        self._masks: dict[int, int] = {}
        """The bits of the workers that hold the last block of so many, by the number of blocks."""

    def deepest_first(self, among: int) -> Iterator[Step]:
        """Yields steps of the workers whose bits are in `among`, as far as they hold a block."""
        for group, leaving in reversed(self.groups):
            if some := leaving & among:
                yield from self._steps_in(group, some)

    def widest(self, among: int) -> Step | None:
        """The step of the most workers, of those in the group that most leave; None: all leave in the first."""
        later = [(group, some) for group, leaving in self.groups if group and (some := leaving & among)]
        if not later:
            return None
        steps = self._steps_in(*max(later, key=lambda one: one[1].bit_count()))
        return max(steps, key=lambda step: step.holding.bit_count())

    def of(self, bit: int) -> int:
        """Blocks that one worker holds, from the first on."""
        for group, leaving in self.groups:
            if leaving & bit:
                if not (group or bit & self._mask_of(1)):
                    return 0
                return next((step.depth for step in self._steps_in(group, bit)), 0)
        return 0

    def _steps_in(self, group: int, holding: int) -> Iterator[Step]:
        """Steps of workers that hold all before a group, but not all of it."""
        first = group * GROUP
        return self._steps(first, min(first + GROUP, self._hashes.num_blocks + 1), holding)

    def _steps(self, low: int, high: int, holding: int) -> Iterator[Step]:
        """Steps of workers that hold `low` blocks and not `high`, the deepest first, by halves; who holds any is asked
        first."""
        while high - low > 1:
            middle = (low + high) // 2 if low else 1
            further = holding & self._mask_of(middle)
            if further == holding:
                low = middle
                continue
            if further:
                yield from self._steps(middle, high, further)
            high, holding = middle, holding ^ further
        if low:
            yield Step(low, holding)

    def _mask_of(self, num_blocks: int) -> int:
        mask = self._masks.get(num_blocks)
        if mask is None:
            mask = self._masks[num_blocks] = self._table.mask_of(self._hashes.of_first(num_blocks))
        return mask


class Holders:
    """Maps each block to the workers that hold it, one bit each. Blocks that no worker holds are not in it.

    Among many workers such a set is a number of many bytes; blocks that the same workers hold share it. Everything here
    is made of bytes and numbers alone, which the collector of cycles does not look at.
    """

    def __init__(self) -> None:
        self._tables: list[dict[bytes, int]] = [{} for _ in range(256)]
        """Tables by the first byte of a block's hash: Python copies a table that grows, of a million blocks for 40
        ms."""
        self._masks: dict[int, int] = {}
        """Each set of workers, to be shared."""
        self._members = 0
        """Bits in use."""
        self._workers: list[tuple[str, int]] = []
        """Ids and bits, by the number of the bit."""
        self.version = 0
        """Grows with each change."""

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def add_worker(self, worker_id: str = "") -> int:
        """Returns a free bit for a worker."""
        bit = ~self._members & (self._members + 1)
        self._members |= bit
        number = bit.bit_length() - 1
        self._workers[number : number + 1] = [(worker_id, bit)]
        return bit

    def remove_worker(self, bit: int) -> None:
        """Frees the bit of a worker that holds nothing any more."""
        self._members &= ~bit

    def worker_ids(self, holding: int) -> Iterator[str]:
        """Yields the id of each worker whose bit is set, the highest one first: what is left becomes shorter."""
        while holding:
            worker_id, bit = self._workers[holding.bit_length() - 1]
            yield worker_id
            holding ^= bit

    def add(self, bit: int, hashes: Sequence[bytes]) -> None:
        """A worker holds these blocks, some of which it may hold already."""
        self.version += 1
        tables, alone, last, mask = self._tables, self._shared(bit), -1, 0
        own = map(tables.__getitem__, map(_FIRST_BYTE, hashes))
        before = list(map(dict.setdefault, own, hashes, repeat(alone)))  # all in one go: most are held by one worker
        if before.count(alone) == len(before):
            return
        for block_hash, held in zip(hashes, before, strict=True):
            if held is alone:
                continue
            if held is not last:  # neighbours are mostly held by the same workers
                last, mask = held, self._shared(held | bit)
            tables[block_hash[0]][block_hash] = mask

    def remove(self, bit: int, hashes: Sequence[bytes]) -> None:
        """A worker holds these blocks no longer."""
        self.version += 1
        tables, last, mask = self._tables, -1, 0
        own = map(tables.__getitem__, map(_FIRST_BYTE, hashes))
        before = list(map(dict.pop, own, hashes, repeat(bit)))  # as above
        if before.count(bit) == len(before):
            return
        for block_hash, held in zip(hashes, before, strict=True):
            if held is not last:
                last, mask = held, self._shared(held & ~bit)
            if mask:
                tables[block_hash[0]][block_hash] = mask

    def mask_of(self, block_hash: bytes) -> int:
        """The bits of the workers that hold a block."""
        return self._tables[block_hash[0]].get(block_hash, 0)

    def _shared(self, mask: int) -> int:
        """The object that stands for this set of workers."""
        if len(self._masks) >= MOST_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def depths(self, hashes: PrefixHashes) -> Depths:
        """Finds for each worker how many of these blocks it holds, from the first on.

        A worker that holds a block that is looked up is taken to hold all before it: caches evict the end of a prefix
        first, so that a gap is rare.
        """
        depths, holding = Depths(self, hashes), -1  # at first every worker, of no block
        for group in range(hashes.num_groups):
            is_whole = (group + 1) * GROUP <= hashes.num_blocks
            still = holding & self.mask_of(hashes.end_of_group(group)) if is_whole else 0
            if still != holding:
                depths.groups.append((group, holding ^ still))
            if not still:
                return depths
            holding = still
        if hashes.num_blocks:
            depths.groups.append((hashes.num_groups, holding))
        return depths


class PromptHashes:
    """Hashes of one prompt under its tenant's salt, for each block size that workers have.

    Each is computed once, and only when some worker holds the blocks before it: for a long prompt that no worker has
    cached, only those of the first group."""

    def __init__(self, token_ids: Sequence[int], salt: bytes) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._by_block_size: dict[int, PrefixHashes] = {}
        self._found: dict[int, tuple[Holders, int, Depths]] = {}
        """The table, its version, and the depths found there, by block size."""

    @property
    def salt(self) -> bytes:
        return self._salt

    @property
    def block_sizes(self) -> Collection[int]:
        """Those of which somebody has asked for hashes."""
        return self._by_block_size.keys()

    def first_tokens(self, num_tokens: int) -> Sequence[int]:
        return self._token_ids[:num_tokens]

    def of(self, block_size: int) -> PrefixHashes:
        if block_size not in self._by_block_size:
            self._by_block_size[block_size] = PrefixHashes(self._token_ids, block_size, self._salt)
        return self._by_block_size[block_size]

    def depths(self, holders: Holders, block_size: int) -> Depths:
        """Depths of the prompt in `holders`, looked up once for as long as nothing changes there."""
        found = self._found.get(block_size)
        if found is None or found[0] is not holders or found[1] != holders.version:
            found = self._found[block_size] = holders, holders.version, holders.depths(self.of(block_size))
        return found[2]


class PrefixIndex:
    """The prefix cache of one worker, of at most `num_blocks` blocks of `block_size` tokens; more are not kept.

    `holders`: the table shared with other workers; None: its own. `close` it when the session is over.
    """

    def __init__(self, block_size: int, num_blocks: int, holders: Holders | None = None, worker_id: str = "") -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self.holders = Holders() if holders is None else holders
        self.bit = self.holders.add_worker(worker_id)
        self._hashes: dict[bytes, None] = {}
        """A dictionary of nothing but bytes is left alone by the collector of cycles; a set is not."""
        self._last_number: int | None = None
        """Number of the last events applied; None: the state is unknown."""

    @property
    def is_known(self) -> bool:
        return self._last_number is not None

    @property
    def hashes(self) -> frozenset[bytes]:
        """A copy of all known hashes."""
        return frozenset(self._hashes)

    def apply(self, events: worker_pb2.CacheEvents) -> bool:
        """Applies events of the worker. False: events before these were missed, and the caller requests a snapshot,
        once; until it comes, events change nothing."""
        if events.snapshot:
            self._forget()
        elif self._last_number is None:
            return True
        elif events.sequence_number != self._last_number + 1:
            self._forget()
            self._last_number = None
            return False
        self._last_number = events.sequence_number
        hashes, bit = self._hashes, self.bit
        if events.evicted:
            self.holders.remove(bit, [h for h in events.evicted if hashes.pop(h, bit) is None])
        if events.stored:
            stored: Sequence[bytes] = events.stored
            if len(hashes) + len(stored) > self._num_blocks:
                new = dict.fromkeys(h for h in stored if h not in hashes)
                stored = list(islice(new, max(0, self._num_blocks - len(hashes))))
            hashes.update(dict.fromkeys(stored))
            self.holders.add(bit, stored)
        return True

    def close(self) -> None:
        """Forgets everything; no events follow."""
        self._forget()
        self.holders.remove_worker(self.bit)

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        """Tokens of a prompt in the worker's cache, counted in known blocks from the first on."""
        return self.block_size * prompt.depths(self.holders, self.block_size).of(self.bit)

    def _forget(self) -> None:
        self.holders.remove(self.bit, list(self._hashes))
        self._hashes.clear()


class Candidate(Protocol):
    """A worker that is ready: the router's connection to it, or a simulated one."""

    @property
    def worker_id(self) -> str: ...

    @property
    def weights_revision(self) -> str:
        """Names the weights that it serves: the workers of one request have the same."""
        ...

    @property
    def step_cost(self) -> StepCost | None:
        """Cost of its steps as it has measured them; None: not yet."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Size of its KV pool."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that it decodes in one step; 0 while unknown."""
        ...

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """The index of what its prefix cache holds; None: that is not known."""
        ...

    @property
    def prefix_format(self) -> str:
        """Names how it keeps KV: workers of one format may fetch prefixes from one another. Empty: it does not."""
        ...

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        """Tokens of a prompt that its prefix cache holds, as far as its events describe it."""
        ...
