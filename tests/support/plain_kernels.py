"""What the FlashAttention functions compute, written out in plain torch, so that their callers run without a GPU.

`varlen_attn` changes from one version of torch to the next; there is one function here for each kind.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any
) -> torch.Tensor:
    _check_bounds(cu_q, cu_k, max_q, max_k)
    window = (options["window_size"][0], 0 if options["causal"] else options["window_size"][1])
    if (table := options.get("block_table")) is not None:
        k, v = (_unpage(pages, table, cu_k) for pages in (k, v))
    return _packed_attention(q, k, v, cu_q, cu_k, options["softmax_scale"], window)


def varlen_attn_with_splits(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """As of torch 2.12: where it may split the keys although queries are not alike, all but the first are lost."""
    options = {"seqused_k": seqused_k, "block_table": block_table, "enable_gqa": enable_gqa}
    out = _varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, **options)
    shares_heads = block_table is not None and max_q == 1 and q.shape[1] > k.shape[2]
    if block_table is not None and num_splits != 1 and not (shares_heads and window_size == (-1, -1)):
        out[int(cu_q[1]) :] = math.nan
    return out


def varlen_attn_with_pages(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Any = None,
    block_table: Any = None,
) -> torch.Tensor:
    options = {"seqused_k": seqused_k, "block_table": block_table, "enable_gqa": enable_gqa}
    return _varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, **options)


def varlen_attn_that_refuses_pages(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Any = None,
    block_table: Any = None,
) -> torch.Tensor:
    if block_table is not None:
        raise RuntimeError("block_table is not supported by this kernel")
    return _varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, enable_gqa=enable_gqa)


def varlen_attn_with_wrong_pages(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Any = None,
    block_table: Any = None,
) -> torch.Tensor:
    options = {"seqused_k": seqused_k, "enable_gqa": enable_gqa}
    if block_table is not None:
        options["block_table"] = block_table.flip(0)
    return _varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, **options)


def varlen_attn_without_pages(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    return _varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, enable_gqa=enable_gqa)


def varlen_attn_without_groups(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    if k.shape[1] != q.shape[1]:
        raise RuntimeError("q and k must have as many heads")
    return _varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size)


def varlen_attn_of_2_11(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Its kernel takes heads that share keys, which nothing says."""
    return _varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, enable_gqa=True)


def _varlen_attn(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    scale: float,
    window_size: tuple[int, int],
    **options: Any,
) -> torch.Tensor:
    _check_bounds(cu_q, cu_k, max_q, max_k)
    if (table := options.get("block_table")) is not None:
        assert torch.equal(options["seqused_k"], cu_k[1:] - cu_k[:-1])
        k, v = (_unpage(pages, table, cu_k) for pages in (k, v))
    assert options.get("enable_gqa") or k.shape[1] == q.shape[1]
    return _packed_attention(q, k, v, cu_q, cu_k, scale, window_size)


def _check_bounds(cu_q: Any, cu_k: Any, max_q: int, max_k: int) -> None:
    assert max_q >= int((cu_q[1:] - cu_q[:-1]).max()) and max_k >= int((cu_k[1:] - cu_k[:-1]).max())


def _packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    window: tuple[int, int],
) -> torch.Tensor:
    """What FlashAttention computes of sequences laid one after another, without a GPU."""
    out = torch.empty_like(q)
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        keys, values = (t[c:d].repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        at = torch.arange(d - c - (b - a), d - c)[:, None]
        j = torch.arange(d - c)[None, :]
        seen = (j >= at - window[0] if window[0] >= 0 else j >= 0) & (j <= at + window[1] if window[1] >= 0 else j >= 0)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), values)
    return out


def _unpage(pages: torch.Tensor, table: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    lengths = (cu_k[1:] - cu_k[:-1]).tolist()
    return torch.cat([pages[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lengths, strict=True)])
