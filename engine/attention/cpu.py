"""Attention on CPUs, and in plain torch on GPUs where no FlashAttention kernel fits (float32, say).

Baton's own kernels read sequences with one new token where they lie, and those with several as well where the processor
has AVX512-VNNI (in bfloat16, AVX512-BF16). Where there are none, sequences with one new token are gathered into a few
groups of similar length, and each group is one call of scaled_dot_product_attention; longer ones (prefill) are computed
one by one. Query heads that share a KV head are laid side by side, so that no key is copied for grouped-query
attention. Gathered pages go to memory that is kept between calls: fresh pages from the system cost more than the
attention itself.

Legend: n sequences of a group, M keys (padded), Q queries and J keys of one sequence, H KV heads, G query heads of
each, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.interface import AttentionBatch
from engine.kv.pool import decode, is_rounded
from engine.native import Native

IntegerArray = np.typing.NDArray[np.integer[Any]]
_SMALLEST_BUCKET = 8  # blocks; below this, padding costs less than another call
_ROWS_AT_ONCE = 256  # queries whose scores are laid out whole
_MAX_GATHERED = 2048  # blocks of one group, which bounds the kept memory
_LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences of one new token each, padded to one length."""

    rows: torch.Tensor  # int64 [n] of the batch's tokens
    is_whole_batch: bool
    blocks: torch.Tensor  # int64 [n * width]
    mask: torch.Tensor  # [n, 1, 1, M] 0 or -inf
    size: int


@dataclass(frozen=True)
class _Alone:
    """Tokens that the kernel computes one by one: those of sequences with one new token, or all."""

    rows: torch.Tensor  # int64 [n] of the batch's tokens
    tables: torch.Tensor  # int32 [n, B]
    lengths: torch.Tensor  # int32 [n]


@dataclass(frozen=True)
class _Prompt:
    """One sequence of several new tokens, for the kernel."""

    start: int
    stop: int
    num_keys: int
    table: torch.Tensor  # int32


@dataclass(frozen=True)
class _Prefill:
    """One sequence of several new tokens. `mask` None: plain causal over as many keys as queries."""

    start: int
    stop: int
    num_keys: int
    blocks: torch.Tensor  # int64
    mask: torch.Tensor | None  # [Q, J] 0 or -inf


@dataclass(frozen=True)
class _Scoring:
    """The way from a product of a query and a key to a score, as `CpuAttention` is asked."""

    scale: float
    soft_cap: float
    sinks: torch.Tensor | None  # [Hq]

    def sinks_of(self, num_kv_heads: int) -> torch.Tensor | None:
        """[H, G, 1]"""
        return None if self.sinks is None else self.sinks.view(num_kv_heads, -1, 1)


class CpuAttention:
    """See the module's docstring; runs on any device and in any floating type. Not to be shared between threads."""

    name = "cpu"
    block_size = 16

    def __init__(self, kernels: Native | None = None) -> None:
        """`kernels` as `engine.layers.ops.choose_native` gives them for the type that is to be computed in. Where they
        are fixed, a prompt's tokens are computed like generated ones, each by itself, which takes longer."""
        self._kernels = kernels
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def static_obstacle(self, block_size: int, kv_dtype: torch.dtype) -> str:
        return "attention in plain torch is laid out anew for each step"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: AttentionBatch,
        *,
        softmax_scale: float,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        log_sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`soft_cap`: scores become soft_cap * tanh(score / soft_cap), 0: they stay. `sinks`, float32 [Hq]: a score of
        each head that takes its share of the softmax and adds no value (arXiv 2309.17453). `log_sums`, float32
        [T, Hq], gets the logarithm of the sum of each softmax, for `engine.attention.interface.merge`; a sequence with
        one new token may have no keys then, and its row is zeros."""
        window, scoring = (window_size[0], 0 if causal else window_size[1]), _Scoring(softmax_scale, soft_cap, sinks)
        if self._kernels is not None and window[1] == 0:
            return self._attend_in_place(self._kernels, q, (k, v), batch, scoring, window, log_sums)
        groups = batch.once(("cpu decode", window), lambda: _decode_groups(batch, window, q.dtype))
        if len(groups) == 1 and groups[0].is_whole_batch:
            return self._attend_group(q, k, v, groups[0], scoring, log_sums)
        out = torch.empty_like(q)
        for group in groups:
            own = None if log_sums is None else log_sums.new_empty((group.size, q.shape[1]))
            result = self._attend_group(q.index_select(0, group.rows), k, v, group, scoring, own)
            out.index_copy_(0, group.rows, result)
            if log_sums is not None and own is not None:
                log_sums.index_copy_(0, group.rows, own)
        self._attend_prefills(q, k, v, batch, scoring, window, out, log_sums)
        return out

    def _attend_in_place(
        self,
        kernels: Native,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        scoring: _Scoring,
        window: tuple[int, int],
        log_sums: torch.Tensor | None,
    ) -> torch.Tensor:
        options = scoring.scale, window[0], scoring.soft_cap, scoring.sinks
        out = torch.empty(q.shape, dtype=q.dtype)
        alone = batch.once("cpu alone", lambda: _alone(batch, is_every=kernels.is_fixed))
        if alone is not None:
            kernels.paged_attention(q, pages, alone.tables, alone.lengths, alone.rows, out, *options, log_sums)
        if kernels.is_fixed:
            return out
        if log_sums is not None or not kernels.computes_prompts(q.dtype, q.shape[2]):
            self._attend_prefills(q, *pages, batch, scoring, window, out, log_sums)
            return out
        for prompt in batch.once("cpu prompts", lambda: _prompts(batch)):
            rows = slice(prompt.start, prompt.stop)
            kernels.prompt_attention(q[rows], pages, prompt.table, prompt.num_keys, out[rows], *options)
        return out

    def _attend_prefills(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: AttentionBatch,
        scoring: _Scoring,
        window: tuple[int, int],
        out: torch.Tensor,
        log_sums: torch.Tensor | None,
    ) -> None:
        for one in batch.once(("cpu prefill", window), lambda: _prefills(batch, window, q.dtype)):
            rows = slice(one.start, one.stop)
            own = None if log_sums is None else log_sums[rows]
            out[rows] = self._attend_one(q[rows], k, v, one, scoring, own)

    def _attend_group(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: _DecodeGroup,
        scoring: _Scoring,
        log_sums: torch.Tensor | None,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = k.shape[2], q.shape[2]
        shape = (group.size, -1, num_kv_heads, head_dim)
        keys, values = (
            t.view(shape).transpose(1, 2) for t in self._gather(k, v, group.blocks, q.dtype)
        )  # [n, H, M, D]
        queries = q.view(group.size, num_kv_heads, -1, head_dim)  # [n, H, G, D]
        totals = None if log_sums is None else log_sums.view(queries.shape[:3])
        out = _attend(queries, keys, values, group.mask, scoring, scoring.sinks_of(num_kv_heads), totals)
        return out.reshape(q.shape)

    def _attend_one(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        one: _Prefill,
        scoring: _Scoring,
        log_sums: torch.Tensor | None,
    ) -> torch.Tensor:
        num_queries, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[2]
        group = num_heads // num_kv_heads
        queries = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [H, G, Q, D]
        shared = (num_kv_heads, group, one.num_keys, head_dim)
        keys, values = (
            pages.flatten(0, 1)[: one.num_keys].transpose(0, 1).unsqueeze(1).expand(shared)
            for pages in self._gather(k, v, one.blocks, q.dtype)
        )
        sinks = scoring.sinks_of(num_kv_heads)
        totals = None if log_sums is None else log_sums.view(num_queries, num_kv_heads, group).permute(1, 2, 0)
        out = _attend(queries, keys, values, one.mask, scoring, None if sinks is None else sinks.unsqueeze(-1), totals)
        return out.permute(2, 0, 1, 3).reshape(q.shape)

    def _gather(
        self, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of keys and values in the order of `blocks`, as floating numbers; valid until the next call."""
        count = blocks.shape[0]
        if self._kept is None or self._kept[0].shape[0] < count or self._kept[0].shape[1:] != k.shape[1:]:
            self._kept = (k.new_empty((count, *k.shape[1:])), v.new_empty((count, *v.shape[1:])))
        keys, values = self._kept[0][:count], self._kept[1][:count]
        torch.index_select(k, 0, blocks, out=keys)
        torch.index_select(v, 0, blocks, out=values)
        if is_rounded(k.dtype):
            return decode(keys, dtype), decode(values, dtype)
        return keys, values


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: _Scoring,
    sinks: torch.Tensor | None,
    log_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """[.., Q, D] of [.., J, D]; without a mask each of the Q sees those up to its own of as many. `sinks` is
    [.., Q or 1, 1]; `log_sums`, [.., Q], is filled."""
    soft_cap = scoring.soft_cap
    if not soft_cap and sinks is None and log_sums is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale)
    if not soft_cap and sinks is not None and log_sums is None and _is_fused(q, v):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        seen, totals = fused(q, k, v, is_causal=mask is None, attn_mask=mask, scale=scoring.scale)
        out: torch.Tensor = (seen * torch.sigmoid(totals - sinks.squeeze(-1)).unsqueeze(-1)).to(q.dtype)
        return out
    pieces = []
    for first in range(0, q.shape[-2], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        scores = q[..., rows, :] @ k.transpose(-1, -2) * scoring.scale
        if soft_cap:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        if mask is None:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(first + 1)
            scores = scores.masked_fill_(later, float("-inf"))
        else:
            scores = scores + (mask[..., rows, :] if mask.shape[-2] > 1 else mask)
        if sinks is not None:
            of_rows = sinks[..., rows, :] if sinks.shape[-2] > 1 else sinks
            scores = torch.cat([scores.float(), of_rows.expand(*scores.shape[:-1], 1)], dim=-1)
        if log_sums is None:
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        else:
            scores = scores.float()
            totals = torch.logsumexp(scores, dim=-1, keepdim=True)
            log_sums[..., rows] = totals.squeeze(-1)
            weights = torch.exp(scores - totals.clamp(min=_LEAST))  # of no keys zeros, not NaN
        pieces.append(weights[..., : k.shape[-2]].to(q.dtype) @ v)
    return torch.cat(pieces, dim=-2)


def _is_fused(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch has one kernel that tells the logarithm of each softmax' sum, too: what a sink leaves of it."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16) and q.shape[-1] == v.shape[-1]


def _alone(batch: AttentionBatch, *, is_every: bool) -> _Alone | None:
    """`is_every`: also the tokens of sequences with several new ones."""
    step, counts = batch.step, batch.seqlens_q
    members = np.flatnonzero(counts > 0 if is_every else counts == 1)
    if not len(members):
        return None
    sequences = members.repeat(counts[members])
    rows = np.arange(len(step.token_ids)) if is_every else step.cu_seqlens_q[members].astype(np.int64)
    behind = step.cu_seqlens_q[sequences + 1] - 1 - rows  # tokens of the same sequence
    return _Alone(
        rows=torch.from_numpy(rows),
        tables=torch.from_numpy(step.block_tables[sequences]),
        lengths=torch.from_numpy((step.seqlens_k[sequences] - behind).astype(np.int32)),
    )


def _prompts(batch: AttentionBatch) -> list[_Prompt]:
    step = batch.step
    ends = step.cu_seqlens_q.tolist()
    return [
        _Prompt(ends[s], ends[s + 1], int(step.seqlens_k[s]), torch.from_numpy(step.block_tables[s].copy()))
        for s in np.flatnonzero(batch.seqlens_q > 1)
    ]


def _decode_groups(batch: AttentionBatch, window: tuple[int, int], dtype: torch.dtype) -> list[_DecodeGroup]:
    """Groups by the power of two of the table length: at worst half of what is gathered is padding."""
    step = batch.step
    sequences = np.flatnonzero(batch.seqlens_q == 1)
    num_blocks = -(-step.seqlens_k[sequences] // batch.block_size)
    buckets = np.ceil(np.log2(np.maximum(num_blocks, _SMALLEST_BUCKET)))
    groups = []
    for bucket in np.unique(buckets):
        members = sequences[buckets == bucket]
        width = int(num_blocks[buckets == bucket].max())
        at_once = max(1, _MAX_GATHERED // width)
        groups += [
            _decode_group(batch, members[i : i + at_once], width, window, dtype)
            for i in range(0, len(members), at_once)
        ]
    return groups


def _decode_group(
    batch: AttentionBatch, members: IntegerArray, width: int, window: tuple[int, int], dtype: torch.dtype
) -> _DecodeGroup:
    step = batch.step
    last = step.seqlens_k[members, None] - 1
    keys = np.arange(width * batch.block_size)[None, :]
    visible = _visible(last, keys, window) & (keys <= last)
    return _DecodeGroup(
        rows=batch.to_device(step.cu_seqlens_q[members].astype(np.int64)),
        is_whole_batch=len(members) == len(batch.seqlens_q),
        blocks=batch.to_device(step.block_tables[members, :width].astype(np.int64).reshape(-1)),
        mask=_as_mask(batch, visible, dtype)[:, None, None, :],
        size=len(members),
    )


def _prefills(batch: AttentionBatch, window: tuple[int, int], dtype: torch.dtype) -> list[_Prefill]:
    step = batch.step
    plans = []
    for sequence in np.flatnonzero(batch.seqlens_q > 1):
        start, stop = int(step.cu_seqlens_q[sequence]), int(step.cu_seqlens_q[sequence + 1])
        num_queries, num_keys = stop - start, int(step.seqlens_k[sequence])
        blocks = step.block_tables[sequence, : -(-num_keys // batch.block_size)].astype(np.int64)
        is_plain = num_queries == num_keys and window[1] == 0 and not 0 <= window[0] < num_keys - 1
        mask = None
        if not is_plain:
            at = np.arange(num_keys - num_queries, num_keys)[:, None]
            mask = _as_mask(batch, _visible(at, np.arange(num_keys)[None, :], window), dtype)
        plans.append(_Prefill(start, stop, num_keys, batch.to_device(blocks), mask))
    return plans


def _visible(at: IntegerArray, keys: IntegerArray, window: tuple[int, int]) -> np.typing.NDArray[np.bool_]:
    """Which keys a query at position `at` sees."""
    left, right = window
    visible = np.ones(np.broadcast_shapes(at.shape, keys.shape), dtype=np.bool_)
    if left >= 0:
        visible &= keys >= at - left
    if right >= 0:
        visible &= keys <= at + right
    return visible


def _as_mask(batch: AttentionBatch, visible: np.typing.NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
    """Added to the scores: 0 where visible, else -inf."""
    hidden = batch.to_device(~visible)
    return torch.zeros(hidden.shape, dtype=dtype, device=batch.device).masked_fill_(hidden, float("-inf"))
