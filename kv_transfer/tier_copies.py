"""Copies whole blocks between one rank's KV pool and the tiers below it: slots of host memory, of a file on a disk,
and objects in a store.

It carries out what `engine.kv.tiered_blocks` decides, on a thread of its own; nothing is copied to a slot or a block
that somebody else uses. On a GPU slots are page-locked, and copies run on a stream of their own beside the steps.

Legend: L layers of a block, P planes, N blocks, S slots, B block_size, H KV heads of this rank, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kv_transfer import pages
from kv_transfer.actions import Range
from kv_transfer.block_store import StoreObjects
from kv_transfer.copy_streams import CopyStreams
from kv_transfer.disk_slots import DiskSlots
from kv_transfer.sealed import Key

_STAGED_BYTES = 32 << 20
"""Of blocks that are copied at a time between a GPU and the host, by way of as much of its memory."""


class TierCopies:
    """`kv` is [L, P, N, B, H, D], the slots are [S, L, P, B, H, D] of the same type."""

    disk: DiskSlots | None = None
    store: StoreObjects | None = None
    open_disk: Callable[[int], DiskSlots]
    """Opens this rank's file of those with a number. Raises OSError."""
    found: Sequence[tuple[int, Key]] = ()
    """What was in the file that was taken over last."""

    def __init__(
        self, kv: Tensor, num_slots: int, streams: CopyStreams, page_kernel: pages.PageKernel | None = None
    ) -> None:
        """The system gives memory to slots when they are first used; on a GPU, whose slots are page-locked, at once."""
        self._kv = kv
        self._streams = streams
        self._stream, self._disk_stream = streams.new_stream(), streams.new_stream()
        self._store_stream = streams.new_stream()
        self._page_kernel = page_kernel
        shape = (num_slots, *kv.shape[:2], *kv.shape[3:])
        if kv.is_cuda:
            self._slots = torch.empty(shape, dtype=kv.dtype, pin_memory=True)
        else:
            size = math.prod(shape) * kv.element_size()
            memory = torch.from_numpy(np.empty(size, np.uint8))  # numpy asks for huge pages, torch does not
            self._slots = memory.view(kv.dtype).view(shape)
            num_rows = kv.shape[0] * kv.shape[1]
            self._pool_parts, self._slot_parts = _parts_of(kv, num_rows), _parts_of(self._slots, num_rows)

    @property
    def block_bytes(self) -> int:
        return self._slots[0].nbytes

    def save(self, blocks: Sequence[int], slots: Sequence[int], ready: Any = None) -> int:
        """Copies blocks to slots; returns the bytes. `ready`: on a GPU, the event of what has written them last; None:
        all that was launched so far."""
        with self._streams.scattering(self._stream, ready):
            if self._kv.is_cuda:
                for staged, places in self._staged(blocks):
                    self._copy(pages.gather, blocks[places], staged)
                    for at, slot in enumerate(slots[places]):
                        self._slots[slot].copy_(self._of(staged, at), non_blocking=True)
            else:
                for block, slot, num in _runs(blocks, slots):
                    here = self._pool_parts[:, :, block : block + num]
                    self._slot_parts[slot : slot + num] = here.transpose(2, 0, 1, 3)
        return len(blocks) * self.block_bytes

    def load(self, blocks: Sequence[int], slots: Sequence[int], ready: Any = None) -> int:
        """The other way. `ready`: the event of what has read or written the blocks last."""
        with self._streams.scattering(self._stream, ready):
            if self._kv.is_cuda:
                for staged, places in self._staged(blocks):
                    for at, slot in enumerate(slots[places]):
                        self._of(staged, at).copy_(self._slots[slot], non_blocking=True)
                    self._copy(pages.scatter, blocks[places], staged)
            else:
                for block, slot, num in _runs(blocks, slots):
                    there = self._slot_parts[slot : slot + num]
                    self._pool_parts[:, :, block : block + num] = there.transpose(1, 2, 0, 3)
        return len(blocks) * self.block_bytes

    def spill(self, slots: Sequence[int], on_disk: Sequence[int], keys: Sequence[Key]) -> int:
        """Writes slots of host memory to the disk. Raises OSError."""
        assert self.disk is not None, "blocks are spilled to a disk that this rank has not"
        self.disk.write(on_disk, keys, [_bytes_of(self._slots[slot]) for slot in slots])
        return len(slots) * self.block_bytes

    def read(self, blocks: Sequence[int], on_disk: Sequence[int], keys: Sequence[Key], ready: Any = None) -> int:
        """Reads blocks from the disk. `ready`: as of `load`. Raises Corrupted and OSError; some may be written then."""
        assert self.disk is not None, "blocks are read from a disk that this rank has not"
        with self._streams.scattering(self._disk_stream, ready):
            for place, found in self.disk.read(on_disk, keys):
                self._write(blocks[place], found)
        return len(blocks) * self.block_bytes

    def push(self, slots: Sequence[int], keys: Sequence[Key]) -> int:
        """Writes slots of host memory to the store. Raises OSError."""
        assert self.store is not None, "blocks are pushed to a store that this rank has not"
        self.store.push(keys, (_bytes_of(self._slots[slot]).numpy().tobytes() for slot in slots))
        return len(slots) * self.block_bytes

    def fetch(self, blocks: Sequence[int], keys: Sequence[Key], ready: Any = None) -> int:
        """Reads blocks from the store. `ready` and errors: as of `read`."""
        assert self.store is not None, "blocks are fetched from a store that this rank has not"
        with self._streams.scattering(self._store_stream, ready):
            for block, found in zip(blocks, self.store.fetch(keys), strict=True):
                self._write(block, torch.frombuffer(found, dtype=torch.uint8))
        return len(blocks) * self.block_bytes

    def _write(self, block: int, found: Tensor) -> None:
        """Writes what was read, uint8 [block_bytes], to a block of the pool."""
        if self._kv.is_cuda:
            shape = (*self._kv.shape[:2], *self._kv.shape[3:])
            self._copy(pages.scatter, [block], found.view(self._kv.dtype).view(shape).to(self._kv.device))
        else:
            parts = found.numpy().view(self._slot_parts.dtype)
            self._pool_parts[:, :, block] = parts.reshape(self._slot_parts.shape[1:])

    def take_over(self, number: int) -> None:
        """Has the files of another number take the place of the present ones. Raises OSError."""
        disk = self.open_disk(number)
        if self.disk is not None:
            self.disk.close()
        self.disk, self.found = disk, list(disk.keys())

    def flush(self, *, is_disk: bool) -> int:
        """Empties the disk, or deletes this rank's objects from the store; returns their bytes. Raises OSError."""
        if is_disk and self.disk is not None:
            self.disk.flush()
        return 0 if is_disk or self.store is None else self.store.flush() * self.store.object_bytes

    def _copy(self, copy: Any, blocks: Sequence[int], staged: Tensor) -> None:
        """Between blocks and a buffer [L, P, tokens, H, D]."""
        what = Range(0, staged.shape[2], 0, staged.shape[0])
        copy(self._kv, blocks, what, slice(0, staged.shape[3]), staged, self._page_kernel)

    def _of(self, staged: Tensor, at: int) -> Tensor:
        """One block's share of what is staged, [L, P, B, H, D]."""
        size = self._kv.shape[3]
        return staged[:, :, at * size : (at + 1) * size]

    def _staged(self, blocks: Sequence[int]) -> Iterator[tuple[Tensor, slice]]:
        """A buffer on the device for some of the blocks at a time, and their places."""
        each = max(1, _STAGED_BYTES // self.block_bytes)
        for begin in range(0, len(blocks), each):
            places = slice(begin, min(begin + each, len(blocks)))
            num_tokens = (places.stop - places.start) * self._kv.shape[3]
            yield self._kv.new_empty((*self._kv.shape[:2], num_tokens, *self._kv.shape[4:])), places


def _runs(blocks: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First block, first slot and number of those that lie side by side in both: one copy is quicker than many."""
    begin = 0
    for end in range(1, len(blocks) + 1):
        num = end - begin
        if end == len(blocks) or (blocks[end], slots[end]) != (blocks[begin] + num, slots[begin] + num):
            yield blocks[begin], slots[begin], num
            begin = end


def _bytes_of(block: Tensor) -> Tensor:
    return block.flatten().view(torch.uint8)


def _parts_of(blocks: Tensor, num_rows: int) -> np.ndarray[Any, Any]:
    """[x, y, z, B, H, D] as [x, y, z, parts], opaque elements of numpy in the same memory: each of the `num_rows` rows
    of a block's tokens, cut so that a block has enough for numpy to let other threads run while it copies them."""
    rows = blocks.flatten(3).view(torch.uint8).numpy()
    size, num_parts = rows.shape[3], num_rows
    while num_parts <= pages.HELD_GIL_ELEMENTS and size % 2 == 0:
        size, num_parts = size // 2, num_parts * 2
    return rows.view(np.dtype((np.void, size)))
