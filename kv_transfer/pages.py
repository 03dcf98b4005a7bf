"""Copies a range of tokens and layers between a paged KV cache and a contiguous buffer, casting where dtypes differ.

Addresses are token positions, mapped through a block table; nothing outside the range is read or written. It knows
neither ranks nor transports. It runs on the tensors' device, in the current stream, and does not synchronize.

On a GPU a range is one kernel: `engine.triton.page_copies`, where the worker has passed it on and it takes the range,
else torch's index operations. On the CPU it is one strided copy for each run of tokens that lie side by side in the
pool: numpy's, with a token's heads as one element, because torch copies short rows at half the speed; torch's own where
values are cast. Either lets other threads run Python meanwhile.

Shapes: L layers, P planes (keys and values, or latents), N blocks in the pool, B tokens in a block, H KV heads of this
rank, D head size, l, T and h the layers, tokens and heads of the range. kv is [L, P, N, B, H, D], a buffer is
contiguous [l, P, T, h, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kv_transfer.actions import Range
from kv_transfer.shares import Places

PageKernel = Callable[[Tensor, Sequence[int], int, slice, slice, Tensor, bool], bool]
"""`engine.triton.page_copies.copy_range`; returns False, and has done nothing, for a range that it does not take."""
PoolKernel = Callable[[Tensor, Sequence[int], Tensor, Sequence[int], int, int, slice], bool]
"""`engine.triton.page_copies.copy_between`; as PageKernel."""
HELD_GIL_ELEMENTS = 500
"""numpy keeps the GIL while it copies so few elements, whatever their size."""


def gather(
    kv: Tensor,
    block_table: Sequence[int],
    what: Range,
    heads: slice,
    out: Tensor,
    kernel: PageKernel | None = None,
    places: Places | None = None,
) -> None:
    """Copies the range, of the local heads `heads`, into `out`; with `places`, int64 [T], these tokens of it. Raises
    ValueError."""
    with torch.inference_mode():
        tokens = _token_rows(kv, block_table, what, heads, out, places)
        if places is not None:
            found = tokens.index_select(2, _rows_of(kv, block_table, places))
            out.copy_(found)
            return
        if out.dtype == kv.dtype and _copied_by(kernel, kv, block_table, what, heads, out, is_gather=True):
            return
        if kv.is_cuda:
            rows = _row_index(kv, block_table, what)
            if out.dtype == kv.dtype:
                torch.index_select(tokens, 2, rows, out=out)
            else:
                out.copy_(tokens.index_select(2, rows))
            return
        for pool, buffer in _copies(tokens, block_table, what, kv.shape[3], out):
            buffer[...] = pool


def scatter(
    kv: Tensor,
    block_table: Sequence[int],
    what: Range,
    heads: slice,
    source: Tensor,
    kernel: PageKernel | None = None,
    places: Places | None = None,
) -> None:
    """Copies `source` to the range, of the local heads `heads`; with `places`, int64 [T], to these tokens of it. Raises
    ValueError."""
    with torch.inference_mode():
        tokens = _token_rows(kv, block_table, what, heads, source, places)
        if places is not None:
            tokens.index_copy_(2, _rows_of(kv, block_table, places), source.to(kv.dtype))
            return
        if kernel is not None or kv.is_cuda:
            source = source.to(kv.dtype)
        if _copied_by(kernel, kv, block_table, what, heads, source, is_gather=False):
            return
        if kv.is_cuda:
            tokens.index_copy_(2, _row_index(kv, block_table, what), source)
            return
        for pool, buffer in _copies(tokens, block_table, what, kv.shape[3], source):
            pool[...] = buffer


def copy_across(
    source: Tensor,
    source_blocks: Sequence[int],
    kv: Tensor,
    block_table: Sequence[int],
    what: Range,
    kernel: PoolKernel | None = None,
) -> None:
    """Copies the range, all heads, from another pool that differs in its number of blocks alone.

    `source_blocks`: those of its blocks that hold the range's tokens, in order. Raises ValueError.
    """
    block_size = kv.shape[3]
    first, offset = divmod(what.token_start, block_size)
    blocks = block_table[first : (what.token_end - 1) // block_size + 1]
    within = Range(offset, offset + what.num_tokens, what.layer_start, what.layer_end)
    check_range(kv, blocks, within)
    check_range(source, source_blocks, within)
    with torch.inference_mode():
        layers = slice(what.layer_start, what.layer_end)
        if kernel is not None and kernel(source, source_blocks, kv, blocks, offset, what.num_tokens, layers):
            return
        theirs, ours = (pool[layers].flatten(2, 3) for pool in (source, kv))  # [l, P, N*B, H, D]
        if kv.is_cuda:
            rows = theirs.index_select(2, _row_index(source, source_blocks, within))
            ours.index_copy_(2, _row_index(kv, blocks, within), rows)
            return
        to, at = _elements(ours, block_size), _elements(theirs, block_size)
        for own_rows, places in _runs(blocks, within, block_size):
            run = Range(offset + places.start, offset + places.stop, what.layer_start, what.layer_end)
            for their_rows, inner in _runs(source_blocks, run, block_size):
                to[:, :, own_rows.start + inner.start : own_rows.start + inner.stop] = at[:, :, their_rows]


def check_range(kv: Tensor, block_table: Sequence[int], what: Range, num_shares: int = 1) -> None:
    """Raises ValueError unless the cache has the layers, and the block table the tokens in blocks that exist. `kv` has
    one of `num_shares` of each block's tokens."""
    num_layers, num_blocks, block_size = kv.shape[0], kv.shape[2], kv.shape[3] * num_shares
    if not 0 <= what.layer_start < what.layer_end <= num_layers:
        raise ValueError(f"layers [{what.layer_start}, {what.layer_end}) are no range of {num_layers} layers")
    if not 0 <= what.token_start < what.token_end:
        raise ValueError(
            f"tokens [{what.token_start}, {what.token_end}) are no range; give 0 <= token_start < token_end"
        )
    first, last = what.token_start // block_size, (what.token_end - 1) // block_size
    if last >= len(block_table):
        raise ValueError(
            f"tokens [{what.token_start}, {what.token_end}) need {last + 1} blocks of {block_size}, "
            f"but the block table has {len(block_table)}"
        )
    blocks = block_table[first : last + 1]
    if min(blocks) < 0 or max(blocks) >= num_blocks:
        raise ValueError(f"block table {list(blocks)} names a block outside the pool of {num_blocks}")


def _copied_by(
    kernel: PageKernel | None,
    kv: Tensor,
    block_table: Sequence[int],
    what: Range,
    heads: slice,
    buffer: Tensor,
    *,
    is_gather: bool,
) -> bool:
    """Whether there is a kernel, and it has copied the range."""
    if kernel is None:
        return False
    first, offset = divmod(what.token_start, kv.shape[3])
    blocks = block_table[first : (what.token_end - 1) // kv.shape[3] + 1]
    return kernel(kv, blocks, offset, slice(what.layer_start, what.layer_end), heads, buffer, is_gather)


def _token_rows(
    kv: Tensor, block_table: Sequence[int], what: Range, heads: slice, buffer: Tensor, places: Places | None
) -> Tensor:
    """[l, P, N*B, h, D], a view: writing to it writes the cache itself. Raises ValueError."""
    check_range(kv, block_table, what)
    layers, planes, num_blocks, block_size, num_heads, head_dim = kv.shape
    rows = kv.view(layers, planes, num_blocks * block_size, num_heads, head_dim)
    rows = rows[what.layer_start : what.layer_end, :, :, heads]
    expected = (len(rows), planes, what.num_tokens if places is None else len(places), *rows.shape[3:])
    if tuple(buffer.shape) != expected or not buffer.is_contiguous():
        raise ValueError(f"the buffer is {tuple(buffer.shape)}, stride {buffer.stride()}; give a contiguous {expected}")
    if buffer.device != kv.device:
        raise ValueError(f"the buffer is on {buffer.device}, the cache on {kv.device}; both must agree")
    return rows


def _copies(
    tokens: Tensor, block_table: Sequence[int], what: Range, block_size: int, buffer: Tensor
) -> Iterator[tuple[Any, Any]]:
    """Yields for each run of tokens its part of the pool and its part of the buffer: numpy arrays, or tensors to be
    cast."""
    pool: Any = tokens
    flat: Any = buffer
    if tokens.dtype == buffer.dtype:
        pool, flat = _elements(tokens, block_size), _elements(buffer, block_size)
    for rows, places in _runs(block_table, what, block_size):
        yield pool[:, :, rows], flat[:, :, places]


def _runs(block_table: Sequence[int], what: Range, block_size: int) -> Iterator[tuple[slice, slice]]:
    """Rows block_id * B + offset of tokens that lie side by side in the pool, and their places in the buffer."""
    token = what.token_start
    while token < what.token_end:
        block = token // block_size
        row = block_table[block] * block_size + token % block_size
        end = min((block + 1) * block_size, what.token_end)
        while end < what.token_end and block_table[end // block_size] == block_table[end // block_size - 1] + 1:
            end = min(end + block_size, what.token_end)
        yield slice(row, row + end - token), slice(token - what.token_start, end - what.token_start)
        token = end


def _elements(rows: Tensor, block_size: int) -> np.ndarray[Any, Any]:
    """[l, P, rows, h, D] as [l, P, rows, 1 or more] opaque elements of numpy in the same memory.

    An element is all of a token's heads, cut in halves while a block has too few to let other threads run.
    """
    layers, planes, num_rows, heads, head_dim = rows.shape
    size, num_elements = heads * head_dim * rows.element_size(), layers * planes * block_size
    while num_elements <= HELD_GIL_ELEMENTS and size % 2 == 0:
        size, num_elements = size // 2, num_elements * 2
    raw = rows.view(layers, planes, num_rows, heads * head_dim).view(torch.uint8).numpy()
    return raw.view(np.dtype((np.void, size)))


def _row_index(kv: Tensor, block_table: Sequence[int], what: Range) -> Tensor:
    """Row block_id * B + offset of each token of the range, int64 [T], on kv's GPU; waits for nothing."""
    block_size = kv.shape[3]
    first, last = what.token_start // block_size, (what.token_end - 1) // block_size
    blocks = torch.tensor([int(block) for block in block_table[first : last + 1]], dtype=torch.int64)
    rows = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    skipped = first * block_size
    rows = rows[what.token_start - skipped : what.token_end - skipped]
    return rows.pin_memory().to(kv.device, non_blocking=True)


def _rows_of(kv: Tensor, block_table: Sequence[int], places: Places) -> Tensor:
    """Rows of tokens that do not lie one behind the other, likewise; on kv's device."""
    block_size = kv.shape[3]
    blocks = np.asarray(block_table, dtype=np.int64)[places // block_size]
    rows = torch.from_numpy(blocks * block_size + places % block_size)
    return rows.pin_memory().to(kv.device, non_blocking=True) if kv.is_cuda else rows
