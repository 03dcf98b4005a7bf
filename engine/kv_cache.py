"""The paged KV pool as one tensor. Who owns which block is the block manager's affair, who writes one the layers'.

A pool holds heads as they are computed, or rounded to int8: then the D values of each head are followed by the four
bytes of the float32 that each of them is to be multiplied with, so that blocks stay plain bytes to whoever moves them.

Legend: L layers, N blocks, K block_size, H KV heads of this rank, D head_dim, C copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
KV_CACHE_DTYPES = ("auto", "int8")


class KvCache:
    """`pool` is [L, 2, N, K, H, D], keys before values; of int8, [L, 2, N, K, H, D + 4].

    The system zeroes it lazily: an unused page costs nothing.
    """

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
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, cell_size(head_dim, dtype))
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self._pages = [(layer[0], layer[1]) for layer in self.pool]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [N, K, H, D] each, sharing the pool's memory."""
        return self._pages[layer]

    def copy_blocks(self, copies: Tensor) -> None:
        """Copies whole blocks of all layers: int64 [C, 2] of source and target. All are read before one is written."""
        sources, targets = copies.unbind(dim=1)
        self.pool.index_copy_(2, targets, self.pool.index_select(2, sources))


def cell_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one head of one token in a pool of this type."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def encode(heads: Tensor) -> Tensor:
    """[..., D] of any floating type as int8 [..., D + 4]."""
    values = heads.float()
    scales = values.abs().amax(-1, keepdim=True).clamp_(min=1e-30) / 127
    codes = (values / scales).round_().to(torch.int8)
    return torch.cat([codes, scales.contiguous().view(torch.int8)], dim=-1)


def decode(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """What `encode` gave, as [..., D]."""
    scales = cells[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (cells[..., :-SCALE_BYTES] * scales).to(dtype)
