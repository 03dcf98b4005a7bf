"""The net change of a prefix cache's hashes, gathered for whoever watches it. Knows no blocks.

What waits to be taken is bounded: beyond that a snapshot takes the place of the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

MAX_CHANGES = 16_384
"""Hashes that wait to be taken, at most; a megabyte or so."""


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

    def take(self, served: Callable[[], Collection[bytes]]) -> CacheEvents | None:
        """The changes since the last take; all that is `served` now when too many had piled up; None without any."""
        if self._has_overflowed:
            self._has_overflowed = False
            return CacheEvents(list(served()), [], is_snapshot=True)
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
