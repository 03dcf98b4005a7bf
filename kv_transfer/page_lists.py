"""A chunk that stays where it is: the slot says in which of the sender's blocks it lies, and the receiver copies it.

    64 bytes   header, as of a chunk that is packed (`codec`), with a digest of all of the slot
    payload    int32 of each of the sender's blocks that hold tokens of the chunk at this rank, in order

Both sides have one layout, so that whole tokens are copied, all of a rank's heads at once. The sender holds the pages
until the receiver has said that they are read, or the pair is closed; that what was read was whole is known only then
(`transports.interface.Pair.release`). Nothing that the slot says is used before it is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cluster.errors import Corrupted, TransferFailed
from kv_transfer import header, pages
from kv_transfer.actions import Range
from kv_transfer.header import HEADER_BYTES, DigestKind, Header
from kv_transfer.layout import KvLayout, LayoutMismatch, page_obstacle

_ID_BYTES = 4


class PageListCodec:
    """Fills and reads the slots of one route between equal layouts (`kv_transfer.codec.ChunkCodec`)."""

    def __init__(
        self,
        local: KvLayout,
        remote: KvLayout,
        *,
        tp_rank: int = 0,
        wire_format: str = "native",
        kernel: pages.PoolKernel | None = None,
    ) -> None:
        """`tp_rank`: of either side, whose ranks meet those of their number. `kernel` copies from pool to pool. Raises
        LayoutMismatch."""
        unequal = page_obstacle(local, remote, wire_format)
        if unequal:
            raise LayoutMismatch(f"pages cannot be shared: {unequal}")
        self._layout = local
        self._share = local.share_of(tp_rank)
        self._kernel = kernel
        self._source: Tensor | None = None

    def attach(self, source: Tensor, device: torch.device) -> None:
        """Names the sender's pool, [L, P, N, B, H, D], to the receiver, whose own lies on `device`. Raises
        TransferFailed."""
        token_bytes = self._row_bytes * self._layout.num_local_heads
        if source.device != device and (self._kernel is None or token_bytes % 4):
            where = f"from {source.device} to {device}"
            raise TransferFailed(f"tokens of {token_bytes} bytes {where} are not copied by torch")
        self._source = source

    def slot_bytes(self, num_cells: int) -> int:
        """Size of a slot for any range of up to `num_cells` tokens times layers, a multiple of 64."""
        most_blocks = -(-num_cells // self._layout.block_size) + 1
        return -(-(HEADER_BYTES + most_blocks * _ID_BYTES) // 64) * 64

    def num_bytes(self, what: Range) -> int:
        """Bytes of a slot that the range fills, header included; equal on both sides."""
        return HEADER_BYTES + _ID_BYTES * len(self._places(what))

    def moved_bytes(self, what: Range) -> int:
        """Bytes that are copied from pages to pages."""
        return self._copied(what).num_cells * self._layout.num_local_rows * self._row_bytes

    def pack(self, kv: Tensor, block_table: Sequence[int], what: Range, tag: int, slot: Tensor) -> int:
        """Says in the slot where the range lies; returns the bytes to send. Raises ValueError."""
        pages.check_range(kv, block_table, what, self._share.num_shares)
        filled = slot[: self.num_bytes(what)]
        ids = torch.tensor([int(block_table[place]) for place in self._places(what)], dtype=torch.int32)
        filled[HEADER_BYTES:].view(torch.int32).copy_(ids)
        header.seal(filled, self._header(what, tag), DigestKind.XXH3)
        return len(filled)

    def unpack(self, slot: Tensor, kv: Tensor, block_table: Sequence[int], what: Range, tag: int) -> None:
        """Copies the range from the sender's pages to `kv`; on a GPU the copy is launched.

        Raises Corrupted, and ValueError for a range that does not fit; no page has been written then.
        """
        pages.check_range(kv, block_table, what, self._share.num_shares)
        assert self._source is not None, "the sender's pages are not mapped"
        filled = slot[: self.num_bytes(what)].clone()  # checked and read once
        header.check(filled, self._header(what, tag))
        ids = filled[HEADER_BYTES:].view(torch.int32).tolist()
        if not ids:
            return  # all of it is other ranks'
        if min(ids) < 0 or max(ids) >= self._source.shape[2]:
            raise Corrupted(f"the sender has {self._source.shape[2]} blocks, and names {min(ids)} to {max(ids)}")
        pages.copy_across(self._source, ids, kv, block_table, self._copied(what), self._kernel)

    @property
    def _row_bytes(self) -> int:
        return self._layout.head_dim * int(getattr(torch, self._layout.dtype).itemsize)

    def _copied(self, what: Range) -> Range:
        """The tokens that this rank keeps, as it numbers them; of layers with a state all of the newest one's block."""
        first, last = self._share.num_before(what.token_start), self._share.num_before(what.token_end)
        if self._layout.groups[what.group].has_state:
            size = self._layout.block_size
            first = (what.token_end - 1) // size * size
            last = first + size
        return replace(what, token_start=first, token_end=last)

    def _places(self, what: Range) -> range:
        """Returns the places of the blocks of those tokens in a block table."""
        size, copied = self._share.size, self._copied(what)
        return range(copied.token_start // size, -(-copied.token_end // size) if copied.num_tokens else 0)

    def _header(self, what: Range, tag: int) -> Header:
        return Header(
            tag=tag,
            range=what,
            wire_format="native",
            wire_dtype=self._layout.dtype,
            num_heads=self._layout.num_local_heads,
            head_dim=self._layout.head_dim,
            payload_bytes=self.num_bytes(what) - HEADER_BYTES,
        )
