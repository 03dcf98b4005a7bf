"""Copies whole blocks between one rank's KV pool and the tier below it, slots of host memory that this owns.

It carries out what `engine.kv.tiered_blocks` decides, on a thread of its own; nothing is copied to a slot or a block
that somebody else uses. On a GPU slots are page-locked, and copies run on a stream of their own beside the steps.

Legend: L layers of a block, P planes, N blocks, S slots, B block_size, H KV heads of this rank, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kv_transfer import pages
from kv_transfer.actions import Range
from kv_transfer.copy_streams import CopyStreams

_STAGED_BYTES = 32 << 20
"""Of blocks that are copied at a time between a GPU and the host, by way of as much of its memory."""


class TierCopies:
    """`kv` is [L, P, N, B, H, D], the slots are [S, L, P, B, H, D] of the same type."""

    def __init__(
        self, kv: Tensor, num_slots: int, streams: CopyStreams, page_kernel: pages.PageKernel | None = None
    ) -> None:
        """The system gives memory to slots when they are first used; on a GPU, whose slots are page-locked, at once."""
        self._kv = kv
        self._streams = streams
        self._stream = streams.new_stream()
        self._page_kernel = page_kernel
        shape = (num_slots, *kv.shape[:2], *kv.shape[3:])
        self._slots = torch.empty(shape, dtype=kv.dtype, pin_memory=kv.is_cuda)
        self._block = Range(0, kv.shape[3], 0, kv.shape[0])
        self._heads = slice(0, kv.shape[4])

    @property
    def block_bytes(self) -> int:
        return self._slots[0].nbytes

    def save(self, blocks: Sequence[int], slots: Sequence[int], ready: Any = None) -> int:
        """Copies blocks to slots; returns the bytes. `ready`: on a GPU, the event of what has written them last; None:
        all that was launched so far."""
        with self._streams.scattering(self._stream, ready):
            if self._kv.is_cuda:
                for part, places in self._staged(blocks, slots):
                    self._copy(pages.gather, blocks[places], part)
                    for at, slot in enumerate(slots[places]):
                        self._slots[slot].copy_(self._of(part, at), non_blocking=True)
            else:
                for block, slot in zip(blocks, slots, strict=True):
                    self._copy(pages.gather, [block], self._slots[slot])
        return len(blocks) * self.block_bytes

    def load(self, blocks: Sequence[int], slots: Sequence[int], ready: Any = None) -> int:
        """The other way. `ready`: the event of what has read or written the blocks last."""
        with self._streams.scattering(self._stream, ready):
            if self._kv.is_cuda:
                for part, places in self._staged(blocks, slots):
                    for at, slot in enumerate(slots[places]):
                        self._of(part, at).copy_(self._slots[slot], non_blocking=True)
                    self._copy(pages.scatter, blocks[places], part)
            else:
                for block, slot in zip(blocks, slots, strict=True):
                    self._copy(pages.scatter, [block], self._slots[slot])
        return len(blocks) * self.block_bytes

    def _copy(self, copy: Any, blocks: Sequence[int], buffer: Tensor) -> None:
        """Between blocks and a buffer [L, P, tokens, H, D]."""
        what = Range(0, len(blocks) * self._block.token_end, 0, self._block.layer_end)
        copy(self._kv, blocks, what, self._heads, buffer, self._page_kernel)

    def _of(self, part: Tensor, at: int) -> Tensor:
        """One block's share of a staged part, [L, P, B, H, D]."""
        size = self._block.token_end
        return part[:, :, at * size : (at + 1) * size]

    def _staged(self, blocks: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[Tensor, slice]]:
        """A buffer on the device for some of the blocks at a time, and their places."""
        assert len(blocks) == len(slots)
        each = max(1, _STAGED_BYTES // self.block_bytes)
        for begin in range(0, len(blocks), each):
            places = slice(begin, min(begin + each, len(blocks)))
            num_tokens = (places.stop - places.start) * self._block.token_end
            shape = (*self._kv.shape[:2], num_tokens, *self._kv.shape[4:])
            yield self._kv.new_empty(shape), places
