"""What the workers' prefix caches hold, as far as their events tell: which part of a prompt each need not compute.

    UNKNOWN -> (snapshot) -> KNOWN -> (a number is missing) -> UNKNOWN

While unknown, nothing is taken as cached and nothing but a snapshot is heard. What is known is a moment old: a worker
may have evicted a block meanwhile, so this helps to choose a worker and decides nothing else.
All workers of a router share one table, so that one walk over a prompt's hashes finds what each of them has of it.
Pure: no connection, no clock. An index lives as long as one session with its worker does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cluster.pb import worker_pb2
from cluster.prefix_hash import GROUP, PrefixHashes


class Holders:
    """By block: which workers hold it, each of them a bit. Blocks that nobody holds are not in it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._members = 0
        """Bits that are taken."""
        self.version = 0
        """Grows whenever something changes."""

    def __len__(self) -> int:
        return len(self._holders)

    def join(self) -> int:
        """A bit for a worker."""
        bit = ~self._members & (self._members + 1)
        self._members |= bit
        return bit

    def leave(self, bit: int) -> None:
        """It may be another worker's from now on; it holds nothing any more."""
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
        """By bit: how many of these blocks, from the first on, each worker holds that holds any.

        Who holds the last of a whole group is taken to hold all of it: caches evict the end of a prefix first, so that
        a gap before it is rare.
        """
        depths: dict[int, int] = {}
        holding = -1  # at first everybody, of no block
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
        """Notes how far those get who hold `depth` blocks, but not all of the group behind them, with these hashes."""
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
    """Hashes of one prompt under its tenant's salt, each computed once for each size of block that workers have, and
    when somebody gets so far: of a long prompt that nobody has cached, those of the first group alone."""

    def __init__(self, token_ids: Sequence[int], salt: bytes) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._by_block_size: dict[int, PrefixHashes] = {}
        self._found: dict[int, tuple[Holders, int, dict[int, int]]] = {}
        """By block size: where was looked, at which version, and what was found."""

    def of(self, block_size: int) -> PrefixHashes:
        if block_size not in self._by_block_size:
            self._by_block_size[block_size] = PrefixHashes(self._token_ids, block_size, self._salt)
        return self._by_block_size[block_size]

    def depths(self, holders: Holders, block_size: int) -> dict[int, int]:
        """What `holders` says of them, looked up once for as long as nothing changes there."""
        found = self._found.get(block_size)
        if found is None or found[0] is not holders or found[1] != holders.version:
            found = self._found[block_size] = holders, holders.version, holders.depths(self.of(block_size))
        return found[2]


class PrefixIndex:
    """Of a worker with blocks of `block_size` tokens, at most `num_blocks` of them: more hashes are not kept.

    `holders` is what it shares with other workers; None: nothing. `close` it when the session is over.
    """

    def __init__(self, block_size: int, num_blocks: int, holders: Holders | None = None) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._holders = Holders() if holders is None else holders
        self._bit = self._holders.join()
        self._hashes: set[bytes] = set()
        self._last_number: int | None = None
        """Of the events heard; None: unknown."""

    @property
    def is_known(self) -> bool:
        return self._last_number is not None

    @property
    def hashes(self) -> frozenset[bytes]:
        """A copy of all that is known."""
        return frozenset(self._hashes)

    def apply(self, events: worker_pb2.CacheEvents) -> bool:
        """Takes in what the worker tells. False when events before these were missed: the worker is to be asked for a
        snapshot, once; what comes until then changes nothing."""
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
        """Nothing is known any more, and nothing will be heard."""
        self._forget()
        self._holders.leave(self._bit)

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        """Tokens that a prompt finds on the worker: of its blocks from the first on, as long as they are known."""
        return self.block_size * prompt.depths(self._holders, self.block_size).get(self._bit, 0)

    def _forget(self) -> None:
        self._holders.remove(self._bit, self._hashes)
        self._hashes.clear()


def _bits(mask: int) -> Iterator[int]:
    """Each bit of it that is set."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest
