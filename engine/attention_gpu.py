"""FlashAttention on CUDA: the flash-attn package, and torch's own `varlen_attn`.

Both read pages through a block table when the pool's block_size is a multiple of 256 (their kernels' requirement);
else the keys of the batch are gathered first. Which arguments torch's function takes depends on its version
(2.11 has no block_table everywhere), so its signature is read once. `*_backend` return a reason where they can't run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from engine.attention import Attention, AttentionBatch

_PAGE_MULTIPLE = 256


def flash_attn_backend() -> Attention | str:
    """The flash-attn package's backend, or why there is none."""
    try:
        module = importlib.import_module("flash_attn")
    except ImportError as error:
        return f"flash-attn cannot be imported ({error})"
    return FlashAttention(module.flash_attn_varlen_func)


def varlen_backend() -> Attention | str:
    """The backend over torch's varlen_attn, or why there is none."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError as error:
        return f"this torch has no varlen_attn ({error})"
    parameters = frozenset(inspect.signature(module.varlen_attn).parameters)
    if "window_size" not in parameters:
        return f"varlen_attn of torch {torch.__version__} takes no window_size; install torch 2.11 or newer"
    return VarlenAttention(module.varlen_attn, parameters)


class FlashAttention:
    """`flash_attn.flash_attn_varlen_func`."""

    name = "flash_attn"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

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
    ) -> torch.Tensor:
        is_paged = batch.block_size % _PAGE_MULTIPLE == 0
        out: torch.Tensor = self._function(
            q,
            k if is_paged else batch.gather(k),
            v if is_paged else batch.gather(v),
            batch.cu_seqlens_q,
            batch.cu_seqlens_k,
            batch.max_seqlen_q,
            batch.max_seqlen_k,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            block_table=batch.block_table if is_paged else None,
        )
        return out


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn`, called with the arguments that its version has."""

    name = "varlen"

    def __init__(self, function: Callable[..., Any], parameters: frozenset[str]) -> None:
        self._function = function
        self._has_pages = {"block_table", "seqused_k"} <= parameters
        self._has_gqa = "enable_gqa" in parameters

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
    ) -> torch.Tensor:
        options: dict[str, Any] = {}
        if self._has_pages and batch.block_size % _PAGE_MULTIPLE == 0:
            options = {"block_table": batch.block_table, "seqused_k": batch.seqlens_k}
        else:
            k, v = batch.gather(k), batch.gather(v)
        if self._has_gqa:
            options["enable_gqa"] = True
        elif q.shape[1] != k.shape[-2]:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[-2], dim=-2) for t in (k, v))
        out: torch.Tensor = self._function(
            q,
            k,
            v,
            batch.cu_seqlens_q,
            batch.cu_seqlens_k,
            batch.max_seqlen_q,
            batch.max_seqlen_k,
            scale=softmax_scale,
            window_size=(window_size[0], 0 if causal else window_size[1]),
            **options,
        )
        return out
