"""What a prefix cache can serve, told as changes: block hashes stored and evicted since they were last taken.

Only the net change is kept: what came and went in between was never there. So what waits is bounded by the pool, and
by `MOST_CHANGES`: more than that are dropped, and everything is told anew instead. Pure data; knows no block.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MOST_CHANGES = 16_384
"""Hashes that wait to be taken, at most; a megabyte or so."""


@dataclass(frozen=True)
class CacheEvents:
    """Hashes that a prefix cache serves from now on, and that it serves no longer; none is in both."""

    stored: list[bytes]
    evicted: list[bytes]
    is_snapshot: bool = False
    """`stored` is all there is: what was told before is void."""


class CacheChanges:
    """Gathers what `take` returns. A hash that is stored is not served already, one that is evicted is."""

    def __init__(self, most: int = MOST_CHANGES) -> None:
        self._most = most
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._has_overflowed = False

    def store(self, block_hash: bytes) -> None:
        self._note(block_hash, self._stored, self._evicted)

    def evict(self, block_hash: bytes) -> None:
        self._note(block_hash, self._evicted, self._stored)

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

    def _note(self, block_hash: bytes, here: dict[bytes, None], there: dict[bytes, None]) -> None:
        if self._has_overflowed:
            return
        if block_hash in there:
            del there[block_hash]
            return
        here[block_hash] = None
        if len(here) + len(there) > self._most:
            self._stored, self._evicted = {}, {}
            self._has_overflowed = True
