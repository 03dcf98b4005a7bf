"""The paged KV pool as one tensor, and the two ways to write it. Who owns which block is the block manager's affair.

Legend: L layers, N blocks, K block_size, H KV heads of this rank, D head_dim, T tokens, C copies.
"""

from __future__ import annotations

import torch


class KvCache:
    """`pool` is [L, 2, N, K, H, D], keys before values. The system zeroes it lazily: an unused page costs nothing."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self._pages = [(layer[0], layer[1]) for layer in self.pool]
        self._rows = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._pages]

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [N, K, H, D] each, sharing the pool's memory."""
        return self._pages[layer]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores [T, H, D] keys and values at int64 [T] slots (block_id * block_size + offset)."""
        k_rows, v_rows = self._rows[layer]
        k_rows.index_copy_(0, slots, k)
        v_rows.index_copy_(0, slots, v)

    def copy_blocks(self, copies: torch.Tensor) -> None:
        """Copies whole blocks of all layers: int64 [C, 2] of source and target. All are read before one is written."""
        sources, targets = copies.unbind(dim=1)
        self.pool.index_copy_(2, targets, self.pool.index_select(2, sources))
