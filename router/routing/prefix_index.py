"""The workers' prefix caches, as far as their events describe them: the part of a prompt that each need not compute.

    UNKNOWN -> (snapshot) -> KNOWN -> (a number is missing) -> UNKNOWN

While unknown, nothing counts as cached, and every event but a snapshot is ignored. The known state is a moment old: a
worker may have evicted a block meanwhile, so it helps to choose a worker and decides nothing else.
All workers of a router share one table, so that one walk over a prompt's hashes finds what each of them has of it.
Pure: no connection, no clock. An index lives as long as one session with its worker does. `Candidate` is a worker as it
is seen by those that choose among workers: by its cache, its pool and what its steps cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from cluster.pb import worker_pb2
from cluster.prefix_hash import GROUP, PrefixHashes
from cluster.step_cost import StepCost


class Holders:
    """Maps each block to the workers that hold it, one bit each. Blocks that no worker holds are not in it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._members = 0
        """Bits in use."""
        self.version = 0
        """Grows with each change."""

    def __len__(self) -> int:
        return len(self._holders)

    def add_worker(self) -> int:
        """Returns a free bit for a worker."""
        bit = ~self._members & (self._members + 1)
        self._members |= bit
        return bit

    def remove_worker(self, bit: int) -> None:
        """Frees the bit of a worker that holds nothing any more."""
        self._members &= ~bit

    def add(self, bit: int, block_hash: bytes) -> None:
        self.version += 1
        self._holders[block_hash] = self._holders.get(block_hash, 0) | bit

    def remove(self, bit: int, hashes: Iterable[bytes]) -> None:
        self.version += 1
        for block_hash in hashes:
            left = self._holders.get(block_hash, 0) & ~bit
            if left:
                self._holders[block_hash] = left
            else:
                self._holders.pop(block_hash, None)

    def depths(self, hashes: PrefixHashes) -> dict[int, int]:
        """Maps the bit of each worker that holds any of these blocks to the number that it holds from the first on.

        A worker that holds the last block of a whole group is taken to hold all of it: caches evict the end of a prefix
        first, so that a gap before it is rare.
        """
        depths: dict[int, int] = {}
        holding = -1  # at first every worker, of no block
        for group in range(hashes.num_groups):
            depth = group * GROUP
            is_whole = depth + GROUP <= hashes.num_blocks
            still = holding & self._holders.get(hashes.end_of_group(group), 0) if is_whole else 0
            if still != holding:
                self._leave_within(holding ^ still, hashes.of_group(group), depth, depths)
            if not still:
                return depths
            holding = still
        return depths | dict.fromkeys(_bits(holding), hashes.num_blocks) if hashes.num_blocks else depths

    def _leave_within(self, holding: int, hashes: Iterable[bytes], depth: int, depths: dict[int, int]) -> None:
        """Fills in the depths of workers that hold `depth` blocks, but not all of the next group, with these hashes."""
        for block_hash in hashes:
            still = holding & self._holders.get(block_hash, 0)
            if still != holding:
                if depth:
                    depths |= dict.fromkeys(_bits(holding ^ still), depth)
                if not still:
                    return
                holding = still
            depth += 1
        depths |= dict.fromkeys(_bits(holding), depth)


class PromptHashes:
    """Hashes of one prompt under its tenant's salt, for each block size that workers have.

    Each is computed once, and only when some worker holds the blocks before it: for a long prompt that no worker has
    cached, only those of the first group."""

    def __init__(self, token_ids: Sequence[int], salt: bytes) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._by_block_size: dict[int, PrefixHashes] = {}
        self._found: dict[int, tuple[Holders, int, dict[int, int]]] = {}
        """By block size: the table, its version, and the depths found there."""

    def of(self, block_size: int) -> PrefixHashes:
        if block_size not in self._by_block_size:
            self._by_block_size[block_size] = PrefixHashes(self._token_ids, block_size, self._salt)
        return self._by_block_size[block_size]

    def depths(self, holders: Holders, block_size: int) -> dict[int, int]:
        """Depths of the prompt in `holders`, looked up once for as long as nothing changes there."""
        found = self._found.get(block_size)
        if found is None or found[0] is not holders or found[1] != holders.version:
            found = self._found[block_size] = holders, holders.version, holders.depths(self.of(block_size))
        return found[2]


class PrefixIndex:
    """The prefix cache of one worker, of at most `num_blocks` blocks of `block_size` tokens; more are not kept.

    `holders`: the table shared with other workers; None: its own. `close` it when the session is over.
    """

    def __init__(self, block_size: int, num_blocks: int, holders: Holders | None = None) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._holders = Holders() if holders is None else holders
        self._bit = self._holders.add_worker()
        self._hashes: set[bytes] = set()
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
        gone = self._hashes.intersection(events.evicted)
        self._hashes -= gone
        self._holders.remove(self._bit, gone)
        for block_hash in events.stored:
            if len(self._hashes) >= self._num_blocks:
                break
            self._hashes.add(block_hash)
            self._holders.add(self._bit, block_hash)
        return True

    def close(self) -> None:
        """Forgets everything; no events follow."""
        self._forget()
        self._holders.remove_worker(self._bit)

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        """Tokens of a prompt in the worker's cache, counted in known blocks from the first on."""
        return self.block_size * prompt.depths(self._holders, self.block_size).get(self._bit, 0)

    def _forget(self) -> None:
        self._holders.remove(self._bit, self._hashes)
        self._hashes.clear()


def _bits(mask: int) -> Iterator[int]:
    """Yields each bit that is set."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


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

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        """Tokens of a prompt that its prefix cache holds, as far as its events describe it."""
        ...
