"""A KV pool above host memory and a disk, without a model: the real books and the real copies, one after the other.

What a block holds is its digest, again and again, so that every block can be told from every other one, and each byte
of it can be checked. Chaos tests damage its files (tests/chaos/test_chaos_tiers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cluster.errors import Corrupted
from cluster.prefix_hash import prefix_hashes
from engine.kv.kv_tier import MoveKind
from engine.kv.tiered_blocks import TieredBlocks
from kv_transfer.copy_streams import CopyStreams
from kv_transfer.disk_slots import DiskSlots
from kv_transfer.tier_copies import TierCopies

NAMESPACE = b"tier pool".ljust(32)


@dataclass(frozen=True)
class Shape:
    """Of a block: layers, tokens, heads, and values of 4 bytes in a head; keys and values."""

    layers: int = 2
    tokens: int = 16
    heads: int = 1
    head_dim: int = 16

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.tokens * self.heads * self.head_dim * 4


class TieredPool:
    """`wrong` counts blocks that were found with another content than their tokens'."""

    def __init__(self, shape: Shape, num_blocks: int, num_slots: int, num_disk_slots: int, file: Path) -> None:
        self.shape, self.file = shape, file
        self._kv = torch.zeros(shape.layers, 2, num_blocks, shape.tokens, shape.heads, shape.head_dim)
        self._rows = self._kv.flatten(3).view(torch.uint8).numpy()  # [L, P, N, bytes]
        self._copies = TierCopies(self._kv, num_slots, CopyStreams(self._kv.device, None))
        self.blocks = TieredBlocks(num_blocks, shape.tokens, num_slots=num_slots, num_disk_slots=num_disk_slots)
        self._num_disk_slots = num_disk_slots
        self.wrong = 0
        self.errors: list[str] = []
        """What copies failed of."""
        self._open()

    def _open(self) -> None:
        if self._num_disk_slots:
            disk = DiskSlots(self.file, NAMESPACE, self._num_disk_slots, self._copies.block_bytes)
            self._copies.disk = disk
            self.blocks.find_again(disk.keys())

    def close(self) -> None:
        if self._copies.disk is not None:
            self._copies.disk.close()

    def again(self) -> TieredPool:
        """Another life: what the file holds is all that is left."""
        self.close()
        sizes = self.blocks.num_total, self.blocks.host.num_total, self._num_disk_slots
        pool = TieredPool(self.shape, *sizes, self.file)
        pool.wrong = self.wrong
        return pool

    def ask(self, tokens: Sequence[int]) -> int:
        """A prompt comes, is loaded as far as it is there, computed behind that, and goes; returns the tokens that were
        loaded or cached."""
        blocks = self.blocks
        while (arrived := blocks.have_arrived(table := blocks.match_prefix(tokens))) is not True:
            if arrived is None:
                self.move()
            if blocks.have_arrived(table):
                break
            blocks.release(table)
        digests = list(prefix_hashes(tokens, self.shape.tokens, b""))
        for block, digest in zip(table, digests, strict=False):
            self.wrong += bool((self._rows[:, :, block] != self._content(digest)).any())
        num_found = len(table)
        table = table + blocks.allocate(-(-len(tokens) // self.shape.tokens) - num_found)
        for block, digest in list(zip(table, digests, strict=False))[num_found:]:
            self._rows[:, :, block] = self._content(digest)
        blocks.publish(tokens, table, b"", num_computed=len(tokens))
        blocks.release(table)
        self.move()
        return num_found * self.shape.tokens

    def move(self) -> None:
        """Makes all copies that are wanted now."""
        while moves := self.blocks.take_moves():
            for move in moves:
                try:
                    match move.kind:
                        case MoveKind.SAVE:
                            self._copies.save(move.sources, move.targets)
                        case MoveKind.LOAD:
                            self._copies.load(move.targets, move.sources)
                        case MoveKind.SPILL:
                            self._copies.spill(move.sources, move.targets, move.keys)
                        case MoveKind.READ:
                            self._copies.read(move.targets, move.sources, move.keys)
                except (Corrupted, OSError) as error:
                    self.errors.append(str(error))
                    self.blocks.moved(move, str(error))
                else:
                    self.blocks.moved(move)

    def _content(self, digest: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        row = np.frombuffer(digest, np.uint8)
        return np.resize(row, self._rows.shape[3])
