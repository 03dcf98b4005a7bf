"""What one worker's prefix cache holds, as far as its events tell: which part of a prompt it need not compute.

    UNKNOWN -> (snapshot) -> KNOWN -> (a number is missing) -> UNKNOWN

While unknown, nothing is taken as cached and nothing but a snapshot is heard. What is known is a moment old: a worker
may have evicted a block meanwhile, so this helps to choose a worker and decides nothing else.
Pure: no connection, no clock. Lives as long as one session with the worker does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes


class PromptHashes:
    """Hashes of one prompt under its tenant's salt, each computed once for each size of block that workers have, and
    when somebody gets so far: of a long prompt that nobody has cached, the first alone."""

    def __init__(self, token_ids: Sequence[int], salt: bytes) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._by_block_size: dict[int, tuple[list[bytes], Iterator[bytes]]] = {}
        """Those that were computed, and the rest."""

    def of(self, block_size: int) -> Iterator[bytes]:
        """Those of `cluster.prefix_hash.prefix_hashes`."""
        if block_size not in self._by_block_size:
            self._by_block_size[block_size] = [], prefix_hashes(self._token_ids, block_size, self._salt)
        known, rest = self._by_block_size[block_size]
        for index in count():
            if index == len(known):
                following = next(rest, None)
                if following is None:
                    return
                known.append(following)
            yield known[index]


class PrefixIndex:
    """Of a worker with blocks of `block_size` tokens, at most `num_blocks` of them: more hashes are not kept."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
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
            self._hashes.clear()
        elif self._last_number is None:
            return True
        elif events.sequence_number != self._last_number + 1:
            self._hashes.clear()
            self._last_number = None
            return False
        self._last_number = events.sequence_number
        self._hashes.difference_update(events.evicted)
        for block_hash in events.stored:
            if len(self._hashes) >= self._num_blocks:
                break
            self._hashes.add(block_hash)
        return True

    def num_cached_tokens(self, hashes: Iterable[bytes]) -> int:
        """Tokens that a prompt with these hashes, those for blocks of `block_size`, finds on the worker: of its blocks
        from the first on, as long as they are known."""
        num_blocks = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            num_blocks += 1
        return num_blocks * self.block_size
