"""The paged KV pool as one tensor. The block manager owns its blocks, the layers write them.

A pool holds heads as they are computed, or rounded to int8 or fp8: then the D values of each head are followed by the
four bytes of their float32 scale, so that blocks can be moved as plain bytes. fp8 is float8_e4m3fn, held as uint8,
which torch can index on every device.

Legend: L layers of a block, P planes, N blocks, K block_size, H KV heads of this rank, D head_dim, C copies.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cluster.kv_groups import KvGroup, StateShape, num_rows
from engine.kv.states import StatePages
from engine.triton.target import obstacle

SCALE_BYTES = 4
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
POOL_DTYPES = {"int8": "int8", "fp8": "uint8"}
"""The torch type of a rounded pool, by the name of its format."""
_LARGEST = {torch.int8: 127.0, torch.uint8: torch.finfo(torch.float8_e4m3fn).max}


class KvCache:
    """`pool` is [L, P, N, K, H, D]; rounded, [L, P, N, K, H, D + 4]. Of two planes keys lie in the first and values in
    the second; a model that keeps latents has one, and a head's first values are those of its key as well.

    A block holds tokens of one group of layers (`cluster.kv_groups`), of which the i-th writes `pool[i]`. The system
    zeroes the pool lazily: an unused page costs nothing.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Callable[[int], Tensor] | None = None,
        num_planes: int = 2,
        states: tuple[StateShape, int] | None = None,
    ) -> None:
        """`memory` gives so many bytes of zeros, uint8, for the pool to lie in; None: the device's. `states`: the shape
        of those that groups have, and the heads of this rank."""
        shape = (num_rows(groups), num_planes, num_blocks, block_size, num_kv_heads, cell_size(head_dim, dtype))
        if memory is None:
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.pool = memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        rows = {layer: self.pool[row] for group in groups for row, layer in enumerate(group.layers)}
        with_state = {layer for group in groups if group.has_state for layer in group.layers}
        assert states is not None or not with_state, "layers keep a state that has no shape"
        self._states = {layer: StatePages(rows[layer], *states) for layer in with_state} if states else {}
        self._pages = {layer: (row[0], row[-1]) for layer, row in rows.items()}

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [N, K, H, D] each, sharing the pool's memory; of one plane the same twice."""
        return self._pages[layer]

    def states(self, layer: int) -> StatePages:
        """The states of a layer that keeps them, sharing the pool's memory."""
        return self._states[layer]

    def copy_blocks(self, copies: Tensor) -> None:
        """Copies whole blocks: int64 [C, 2] of source and target. All are read before one is written."""
        sources, targets = copies.unbind(dim=1)
        self.pool.index_copy_(2, targets, self.pool.index_select(2, sources))


def choose_page_copies(kernels: str, device: torch.device) -> Callable[..., bool] | None:
    """`engine.triton.page_copies.copy_range`; None where it cannot run, or `kernels` is `torch`."""
    return _page_copies(kernels, device, "copy_range")


def choose_pool_copies(kernels: str, device: torch.device) -> Callable[..., bool] | None:
    """`engine.triton.page_copies.copy_between`; None as above."""
    return _page_copies(kernels, device, "copy_between")


def _page_copies(kernels: str, device: torch.device, name: str) -> Callable[..., bool] | None:
    if kernels == "torch" or obstacle(device):
        return None
    copies: Callable[..., bool] = getattr(importlib.import_module("engine.triton.page_copies"), name)
    return copies


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether a pool of this type holds rounded heads."""
    return dtype in _LARGEST


def cell_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one head of one token in a pool of this type."""
    return head_dim + SCALE_BYTES if is_rounded(dtype) else head_dim


def store(pages: Sequence[Tensor], heads: Sequence[Tensor], slots: Tensor) -> None:
    """Writes [T, H, D] to slots, int64 [T], of each plane of a layer's pages, [N, K, H, D], rounded where they are."""
    for rows, new in zip(pages, heads, strict=True):
        rows.flatten(0, 1).index_copy_(0, slots, encode(new, rows.dtype) if is_rounded(rows.dtype) else new)


def encode(heads: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """[..., D] of any floating type as [..., D + 4] of a rounded pool's type."""
    values = heads.float()
    scales = values.abs().amax(-1, keepdim=True).clamp_(min=1e-30) / _LARGEST[dtype]
    values = values / scales
    codes = values.round_().to(torch.int8) if dtype == torch.int8 else values.to(torch.float8_e4m3fn)
    return torch.cat([codes.view(dtype), scales.contiguous().view(dtype)], dim=-1)


def decode(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`: [..., D]."""
    scales = cells[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    codes = cells[..., :-SCALE_BYTES]
    if cells.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn).float()
    return (codes * scales).to(dtype)
