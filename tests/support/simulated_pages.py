"""Pages that tattle: every cell says which token lies in it, who wrote it, and after which other tokens it may be read.

The "KV" of a token is the token itself with two marks: its owner (the request that wrote it) and its context, a hash
of the tenant's salt and of all tokens up to it. A request may read a cell only if its own context there is the same:
its own writing, or an equal prefix out of the prefix cache. A block is poisoned the moment it becomes free. Whoever
reads or writes what is not his raises `Alarm`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kv.block_manager import BlockManager

Cells = npt.NDArray[np.int64]  # [3, L, N]: token, owner, context of N positions in L layers
TOKEN, OWNER, CONTEXT = 0, 1, 2
POISON, TORN = -1, -2  # in place of a token; poison has no owner either

_POWERS = np.cumprod(np.full(4096, 0x2545F4914F6CDD1D, dtype=np.uint64)).view(np.int64)


class Alarm(AssertionError):
    """Somebody read or wrote what is not his, or used a slot that is in use."""


@dataclass(frozen=True)
class Mark:
    """What a request writes beside its tokens, and what it may read."""

    owner: int
    seed: int
    """Equal for requests that may share a prefix: of one tenant, and not bypassing the prefix cache."""

    def cells(self, tokens: Sequence[int], start: int = 0) -> Cells:
        """What lies at positions [start, len(tokens)) of a request with these tokens: [3, 1, N]."""
        values = np.asarray(tokens, dtype=np.int64)
        contexts = np.cumsum((values + 1) * _POWERS[: len(values)]) + self.seed
        cells = np.empty((3, 1, len(values) - start), dtype=np.int64)
        cells[TOKEN, 0], cells[OWNER, 0], cells[CONTEXT, 0] = values[start:], self.owner, contexts[start:]
        return cells


class Pages:
    """All KV of one worker."""

    def __init__(self, num_blocks: int, block_size: int, num_layers: int, counts: Counter[str]) -> None:
        self.block_size = block_size
        self.num_layers = num_layers
        self.blocks = PoisonedBlocks(num_blocks, block_size, self._poison)
        self._cells = np.full((3, num_layers, num_blocks * block_size), POISON, dtype=np.int64)
        self._counts = counts

    def places(self, block_table: Sequence[int], start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        return np.asarray(block_table, dtype=np.int64)[positions // self.block_size] * self.block_size + (
            positions % self.block_size
        )

    def read(self, places: npt.NDArray[np.int64], layers: slice, mine: Cells, who: str) -> Cells:
        """Copies cells [3, L, N] that must be as `mine` [3, 1, N], but for the owner of an equal prefix."""
        cells = self._cells[:, layers, places]
        self._counts["cells read"] += cells[TOKEN].size
        is_wrong = (cells[CONTEXT] != mine[CONTEXT]) | (cells[TOKEN] != mine[TOKEN])
        if is_wrong.any():
            layer, place = np.argwhere(is_wrong)[0].tolist()
            token, owner, _ = cells[:, layer, place].tolist()
            whose = "poison" if owner == POISON else f"the mark of request {owner}"
            raise Alarm(f"{who} reads {whose} (token {token}) as its cell {place}, of layer {layer} of those read")
        self._counts["cells shared"] += int((cells[OWNER] != mine[OWNER]).sum())
        return cells

    def write(self, places: npt.NDArray[np.int64], layers: slice, cells: Cells, owner: int, who: str) -> None:
        """Only held blocks may be written, and in them only what is free of marks or one's own."""
        for block in set((places // self.block_size).tolist()):
            if not self.blocks.refcount(block):
                raise Alarm(f"{who} writes to block {block}, which nobody holds")
        before = self._cells[OWNER, layers, places]
        others = before[(before != POISON) & (before != owner)]
        if others.size:
            raise Alarm(f"{who} writes over the mark of request {others[0]}")
        self._cells[:, layers, places] = cells

    def tear(self, places: npt.NDArray[np.int64], layers: slice, owner: int, who: str) -> None:
        """What a transfer leaves that failed half-way: nothing that anyone may read."""
        cells = np.full((3, 1, len(places)), TORN, dtype=np.int64)
        cells[OWNER] = owner
        self.write(places, layers, cells, owner, who)

    def copy_block(self, source: int, target: int) -> None:
        size = self.block_size
        for block in (source, target):
            if not self.blocks.refcount(block):
                raise Alarm(f"block {source} is copied to {target}, but nobody holds {block}")
        self._cells[:, :, target * size : (target + 1) * size] = self._cells[:, :, source * size : (source + 1) * size]

    def _poison(self, block: int) -> None:
        self._counts["blocks poisoned"] += 1
        self._cells[:, :, block * self.block_size : (block + 1) * self.block_size] = POISON


class PoisonedBlocks(BlockManager):
    """Tells of every block that becomes free."""

    def __init__(self, num_blocks: int, block_size: int, on_freed: Callable[[int], None]) -> None:
        super().__init__(num_blocks, block_size)
        self._on_freed = on_freed

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        for block in set(blocks):
            if not self.refcount(block) and block not in self._cached:
                self._on_freed(block)

    def _evict(self, num_blocks: int) -> None:
        oldest = list(self._cached)[:num_blocks]
        super()._evict(num_blocks)
        for block in oldest:
            self._on_freed(block)
