"""Copies a range of tokens between a paged KV cache and a contiguous buffer.

Addresses are token positions, mapped through a block table; nothing outside the range is read or written. It knows
neither ranks nor transports. It runs on the tensors' device, in the current stream, and does not synchronize.

Shapes: L layers, 2 (key, value), N blocks in the pool, B tokens in a block, H KV heads of this rank, D head size,
T = token_end - token_start, h heads wanted. kv is [L, 2, N, B, H, D], a buffer is contiguous [L, 2, T, h, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather(kv: Tensor, block_table: Sequence[int], token_start: int, token_end: int, heads: slice, out: Tensor) -> None:
    """Copies tokens [token_start, token_end) of the local heads `heads` into `out`. Raises ValueError."""
    with torch.inference_mode():
        tokens = _token_rows(kv, heads)
        rows = row_index(kv, block_table, token_start, token_end)
        _check_buffer(tokens, rows, out)
        torch.index_select(tokens, 2, rows, out=out)


def scatter(
    kv: Tensor, block_table: Sequence[int], token_start: int, token_end: int, heads: slice, source: Tensor
) -> None:
    """Copies `source` to tokens [token_start, token_end) of the local heads `heads`. Raises ValueError."""
    with torch.inference_mode():
        tokens = _token_rows(kv, heads)
        rows = row_index(kv, block_table, token_start, token_end)
        _check_buffer(tokens, rows, source)
        tokens.index_copy_(2, rows, source)


def row_index(kv: Tensor, block_table: Sequence[int], token_start: int, token_end: int) -> Tensor:
    """Row block_id * B + offset of each token of the range, int64 [T], on kv's device. Raises ValueError."""
    num_blocks, block_size = kv.shape[2], kv.shape[3]
    if not 0 <= token_start < token_end:
        raise ValueError(f"tokens [{token_start}, {token_end}) are no range; give 0 <= token_start < token_end")
    first, last = token_start // block_size, (token_end - 1) // block_size
    if last >= len(block_table):
        raise ValueError(
            f"tokens [{token_start}, {token_end}) need {last + 1} blocks of {block_size}, "
            f"but the block table has {len(block_table)}"
        )
    blocks = torch.tensor([int(block) for block in block_table[first : last + 1]], dtype=torch.int64)
    if int(blocks.min()) < 0 or int(blocks.max()) >= num_blocks:
        raise ValueError(f"block table {blocks.tolist()} names a block outside the pool of {num_blocks}")
    rows = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    skipped = first * block_size
    return rows[token_start - skipped : token_end - skipped].to(kv.device)


def _token_rows(kv: Tensor, heads: slice) -> Tensor:
    # [L, 2, N*B, h, D], a view: index_copy_ on it writes the cache itself.
    layers, two, num_blocks, block_size, num_heads, head_dim = kv.shape
    return kv.view(layers, two, num_blocks * block_size, num_heads, head_dim)[:, :, :, heads]


def _check_buffer(tokens: Tensor, rows: Tensor, buffer: Tensor) -> None:
    expected = (*tokens.shape[:2], len(rows), *tokens.shape[3:])
    if tuple(buffer.shape) != expected or not buffer.is_contiguous():
        raise ValueError(f"the buffer is {tuple(buffer.shape)}, stride {buffer.stride()}; give a contiguous {expected}")
    if buffer.dtype != tokens.dtype or buffer.device != tokens.device:
        raise ValueError(
            f"the buffer is {buffer.dtype} on {buffer.device}, the cache {tokens.dtype} on {tokens.device}; "
            "both must agree"
        )
