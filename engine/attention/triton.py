"""Attention by Baton's own kernels in Triton (`engine.triton`): over pages of any block size, rounded ones included.

Sequences with one new token are computed by the kernels of `paged_decode`, whatever else is in the step, and all others
by that of `paged_prefill`: each row to the same bits in any batch and chunk. Where kernels are fixed, that of
`paged_prefill` computes all of them, so that a token has the same bits generated and as a part of a prompt.
"""

from __future__ import annotations

import importlib

import torch

from engine.attention.interface import Attention, AttentionBatch
from engine.quantization.interface import Kernels
from engine.triton.target import obstacle


def triton_backend(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Attention | str:
    """Baton's backend for GPUs, or why there is none."""
    if reason := obstacle(device):
        return reason
    return TritonAttention(is_fixed=kernels is not None and kernels.is_fixed)


class TritonAttention:
    """Loads Triton when it is made. Models that need them pass `soft_cap` and `sinks`, as `paged_decode` takes them."""

    name = "triton"

    def __init__(self, is_fixed: bool = False) -> None:
        self._fewest_tokens = 1 if is_fixed else 2
        self._decode = importlib.import_module("engine.triton.paged_decode").paged_decode
        self._prefill = importlib.import_module("engine.triton.paged_prefill").paged_prefill

    def static_obstacle(self, block_size: int, kv_dtype: torch.dtype) -> str:
        return ""

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
    ) -> torch.Tensor:
        paged, left, right = batch.paged, window_size[0], 0 if causal else window_size[1]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        fewest = self._fewest_tokens
        if paged.max_seqlen_q >= fewest:
            options = {"scale": softmax_scale, "soft_cap": soft_cap, "sinks": sinks}
            self._prefill(q, k, v, paged, out, window=(left, right), fewest=fewest, **options)
        if fewest > 1 and (paged.max_seqlen_q == 1 or (batch.seqlens_q == 1).any()):
            self._decode(q, k, v, paged, out, scale=softmax_scale, left=left, soft_cap=soft_cap, sinks=sinks)
        return out
