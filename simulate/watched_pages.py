"""Pages that tattle: to read KV that was freed, used again or is another's raises PageAlarm, as to write over it does.

Each slot keeps, beside its own KV, the KV of the token before it. What a step or a transfer reads must hang together
from a sequence's first token on: so every slot holds what was written for exactly these tokens, whoever wrote it. A
block counts its lives: from the begin of a step (or a transfer) to its end, no block that it touches may be let go.
KV that is there is written over only by the same; `WatchedBlocks` empties a block when it is handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.kv_groups import all_layers
from engine.kv.tiered_blocks import TieredBlocks
from engine.step_input import IntArray, StepInput
from engine.token_hash import StateArray, states_after
from simulate.model import Content, Done, KvPages, LayerArray, PageAlarm


class WatchedPages(KvPages):
    """The pages of one worker."""

    def __init__(
        self, num_blocks: int, block_size: int, num_layers: int, num_slots: int = 0, num_disk_slots: int = 0
    ) -> None:
        super().__init__(num_blocks, block_size, num_layers, num_slots, num_disk_slots)
        self.blocks = WatchedBlocks(self, num_blocks, block_size, num_slots, num_disk_slots)
        self._parents: StateArray = np.zeros(num_blocks * block_size, dtype=np.uint64)
        """The KV of the token before that of each slot."""
        self._lives: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        """Odd while somebody holds the block."""
        self._by_block = [
            pages.reshape(num_blocks, block_size) for pages in (self._states, self._parents, self._layers)
        ]
        self._running: deque[tuple[StepInput, IntArray, npt.NDArray[np.int64]]] = deque()
        """Steps under way, with the blocks that each touches and their lives."""

    def hand_out(self, blocks: Sequence[int]) -> None:
        """Somebody holds these blocks now, whatever was in them."""
        for block in blocks:
            self._by_block[2][block] = 0
        self.take_up(blocks)

    def take_up(self, blocks: Sequence[int]) -> None:
        """Somebody holds these blocks, for what is in them."""
        for block in blocks:
            self._lives[block] |= 1

    def let_go(self, block: int) -> None:
        """Nobody holds the block any more."""
        self._lives[block] += 1

    # Steps

    def write_step(self, step: StepInput) -> StateArray:
        is_used = np.arange(step.block_tables.shape[1]) < -(-step.seqlens_k // self.block_size)[:, None]
        touched = step.block_tables[is_used]
        lives = self._held(touched, "a step touches")
        for source, target in step.block_copies.tolist():
            self._held(np.array((source, target)), "a step copies")
            self._copy_block(source, target)
        self._check_before(step)
        before = self._before(step)
        states = states_after(before, step.token_ids, step.cu_seqlens_q)
        parents = np.empty_like(states)
        parents[1:] = states[:-1]
        parents[step.cu_seqlens_q[:-1]] = before
        self._store(step.slot_mapping, states, self._all_layers)
        self._parents[step.slot_mapping] = parents
        self._running.append((step, touched, lives))
        last: StateArray = states[step.cu_seqlens_q[1:] - 1]
        return last

    def check_step(self, step: StepInput, last: StateArray) -> None:
        launched, touched, lives = self._running.popleft()
        assert launched is step, "steps end in the order in which they were launched"
        if np.count_nonzero(self._lives[touched] != lives):
            raise PageAlarm("a block was let go while a step was under way that touches it")
        super().check_step(step, last)

    def _check_before(self, step: StepInput) -> None:
        """All that a step reads hangs together, from each sequence's first token on."""
        starts = step.positions[step.cu_seqlens_q[:-1]]
        num_blocks = -(-max(starts.tolist(), default=0) // self.block_size)
        if not num_blocks:
            return
        tables = step.block_tables[:, :num_blocks]
        states, parents, layers = (each[tables].reshape(len(tables), -1) for each in self._by_block)
        is_wrong = layers != self._all_layers
        is_wrong[:, 0] |= parents[:, 0] != 0
        is_wrong[:, 1:] |= parents[:, 1:] != states[:, :-1]
        is_wrong &= np.arange(is_wrong.shape[1]) < starts[:, None]
        if np.count_nonzero(is_wrong):
            row, place = np.argwhere(is_wrong)[0].tolist()
            raise PageAlarm(f"a step reads at token {place} of {starts[row]} KV that is not of its sequence")

    # Transfers

    def read(self, block_table: Sequence[int], start: int, end: int) -> StateArray:
        self._held(self._touched(block_table, start, end), "a gather reads")
        return super().read(block_table, start, end)

    def land(self, block_table: Sequence[int], start: int, states: StateArray, layers: tuple[int, int]) -> None:
        self._held(self._touched(block_table, start, start + len(states) - 1), "a transfer writes to")
        super().land(block_table, start, states, layers)
        self._parents[self._slots(block_table, start, start + len(states) - 1)] = states[:-1]

    def tear(self, block_table: Sequence[int], start: int, end: int) -> None:
        self._held(self._touched(block_table, start, end), "a failing transfer writes to")
        super().tear(block_table, start, end)

    def _content(self, block: int) -> Content:
        return *super()._content(block), self._parents[self._rows(block)].copy()

    def _load(self, block: int, content: Content) -> None:
        self._held(np.array([block]), "a load writes to")
        super()._load(block, content)
        self._parents[self._rows(block)] = content[2]

    def guarded(self, block_table: Sequence[int], start: int, end: int, done: Done) -> Done:
        touched = self._touched(block_table, start, end)
        lives = self._held(touched, "a transfer begins with")

        def answer(*arguments: Any) -> None:
            if np.count_nonzero(self._lives[touched] != lives):
                raise PageAlarm("a block was let go while a transfer was under way that touches it")
            done(*arguments)

        return answer

    def _touched(self, block_table: Sequence[int], start: int, end: int) -> IntArray:
        return np.array(block_table[start // self.block_size : -(-end // self.block_size)], dtype=np.int32)

    def _held(self, touched: IntArray, who: str) -> npt.NDArray[np.int64]:
        """The lives of some blocks, all of which are held."""
        lives: npt.NDArray[np.int64] = self._lives[touched]
        if np.count_nonzero(lives & 1 == 0):
            raise PageAlarm(f"{who} block {touched[(lives & 1) == 0][0]}, which nobody holds")
        return lives

    def _store(self, slots: IntArray, states: StateArray, layers: LayerArray | int) -> None:
        if np.count_nonzero((self._layers[slots] != 0) & (self._states[slots] != states)):
            raise PageAlarm("KV that is there is written over with that of other tokens")
        super()._store(slots, states, layers)

    def _copy_block(self, source: int, target: int) -> None:
        super()._copy_block(source, target)
        self._by_block[1][target] = self._by_block[1][source]


class WatchedBlocks(TieredBlocks):
    """Tells the pages which blocks are held."""

    def __init__(
        self, pages: WatchedPages, num_blocks: int, block_size: int, num_slots: int, num_disk_slots: int
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            groups=all_layers(pages.num_layers),
            num_slots=num_slots,
            num_disk_slots=num_disk_slots,
        )
        self._pages = pages
        self._salts: dict[int, bytes] = {}
        """Salts with which blocks were published."""

    def allocate(self, num_blocks: int) -> list[int]:
        blocks = super().allocate(num_blocks)
        for block in blocks:
            self._salts.pop(block, None)
        self._pages.hand_out(blocks)
        return blocks

    def match_prefix(self, token_ids: Sequence[int], salt: bytes = b"", num_landing: int = 0) -> list[int]:
        matched = super().match_prefix(token_ids, salt, num_landing)
        for block in self._arriving:  # what begins to arrive by this belongs to the salt that it was found under
            self._salts.setdefault(block, salt)
        if any(self._salts[block] != salt for block in matched):
            raise PageAlarm("a prefix is found under another salt than it was published with")
        self._pages.take_up(matched)
        return matched

    def publish(
        self,
        token_ids: Sequence[int],
        block_table: Sequence[int],
        salt: bytes,
        num_computed: int,
        num_landed: int = 0,
    ) -> None:
        super().publish(token_ids, block_table, salt, num_computed, num_landed)
        for block in block_table[: num_computed // self.block_size]:
            self._salts.setdefault(block, salt)

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        for block in set(blocks):
            if not self.refcount(block):
                self._pages.let_go(block)
