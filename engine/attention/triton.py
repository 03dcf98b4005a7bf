"""Attention by Baton's own kernels in Triton (`engine.triton`): over pages of any block size, rounded ones included.

Sequences with one new token are computed by the kernels of `paged_decode`, whatever else is in the step, and all others
by that of `paged_prefill`: each row to the same bits in any batch and chunk. Where kernels are fixed, those of
`paged_fixed` compute both, so that a token has the same bits generated and as a part of a prompt.
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
    return FixedTritonAttention() if kernels is not None and kernels.is_fixed else TritonAttention()


class TritonAttention:
    """Loads Triton when it is made. Models that need them pass `soft_cap` and `sinks`, as `paged_decode` takes them."""

    name = "triton"
    block_size = 16

    def __init__(self) -> None:
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
        options = {"scale": softmax_scale, "soft_cap": soft_cap, "sinks": sinks}
        if paged.max_seqlen_q > 1:
            self._prefill(q, k, v, paged, out, window=(left, right), **options)
        if _has_generated(batch):
            self._decode(q, k, v, paged, out, left=left, **options)
        return out


class FixedTritonAttention:
    """A token to the same bits generated and as a part of a prompt; causal only."""

    name = "triton"
    block_size = 16

    def __init__(self) -> None:
        self._attend = importlib.import_module("engine.triton.paged_fixed").paged_fixed

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
        assert causal or window_size[1] == 0, "no token sees later ones here"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        options = {"scale": softmax_scale, "soft_cap": soft_cap, "sinks": sinks}
        has_generated = _has_generated(batch)
        self._attend(q, k, v, batch.paged, out, left=window_size[0], has_generated=has_generated, **options)
        return out


def _has_generated(batch: AttentionBatch) -> bool:
    """Whether a sequence has one new token."""
    return batch.paged.max_seqlen_q == 1 or bool((batch.seqlens_q == 1).any())
