"""Operations of a decoder layer other than matrix products and attention, in plain torch or by Baton's kernels.

Baton's kernels keep transformers' order of rounding, so that a model in bfloat16 generates what it would generate
there. Plain torch does, too, but for RMSNorm, which rounds once, after the weight.

Legend: T tokens, E hidden_size, W width of the MLP, Hq/H query/KV heads, D head_dim, N blocks, K block_size.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.errors import ConfigError
from engine.kv.pool import store
from engine.layers.rope import rotate
from engine.native import DTYPES, MAX_HEAD_DIM, Native, native
from engine.quantization.fp8 import round_to_fp8
from engine.quantization.interface import Kernels, RoundedRows, Rows, TritonProducts
from engine.triton.target import obstacle

KERNELS_NAMES = ("auto", "native", "torch")
Pages = tuple[Tensor, Tensor]
"""Keys and values of a layer, [N, K, H, D] each, or [N, K, H, D + 4] where they are rounded."""


class Ops(Protocol):
    """Implemented by `TorchOps`, on the CPU by `engine.native.Native`, on GPUs by `engine.triton.fused.TritonOps`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, rounds: bool = False) -> Rows:
        """x [T, E] over its root mean square (arXiv 1910.07467), times `weight`. With `add`: x += add first.

        `rounds`: rounded to fp8 for the product that comes next, here and below.
        """
        ...

    def silu_mul(self, gate_up: Tensor, rounds: bool = False) -> Rows:
        """SwiGLU's middle (arXiv 2002.05202): silu(gate) * up of [T, 2 W]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up of [T, 2 W], gelu by its approximation with tanh (arXiv 1606.08415)."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        head_norm: Tensor | None,
        eps: float,
        rope_rows: tuple[Tensor, Tensor],
        slots: Tensor,
        pages: Pages,
        num_heads: int,
    ) -> Tensor:
        """Query heads [T, Hq, D] of [T, Hq + 2 H, D], normalised and turned; keys and values go to their slots.

        `head_norm` is [Hq + H, D] or None, `rope_rows` cos and sin of [T, 1, D], `slots` int64 [T]. May change `qkv`.
        """
        ...


class TorchOps:
    """On any device, in any floating type."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, rounds: bool = False) -> Rows:
        if add is not None:
            x.add_(add)
        out = F.rms_norm(x, weight.shape, weight, eps)
        return RoundedRows(*round_to_fp8(out), out.dtype) if rounds else out

    def silu_mul(self, gate_up: Tensor, rounds: bool = False) -> Rows:
        width = gate_up.shape[1] // 2
        out = F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])
        return RoundedRows(*round_to_fp8(out), out.dtype) if rounds else out

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        return F.gelu(gate_up[:, :width], approximate="tanh").mul_(gate_up[:, width:])

    def rotate_and_store(
        self,
        qkv: Tensor,
        head_norm: Tensor | None,
        eps: float,
        rope_rows: tuple[Tensor, Tensor],
        slots: Tensor,
        pages: Pages,
        num_heads: int,
    ) -> Tensor:
        num_turned = (qkv.shape[1] + num_heads) // 2
        qk = qkv[:, :num_turned]
        if head_norm is not None:
            qk = F.rms_norm(qk, (qk.shape[-1],), eps=eps) * head_norm
        qk = rotate(qk, rope_rows)
        store(pages, (qk[:, num_heads:], qkv[:, num_turned:]), slots)
        return qk[:, :num_heads]


def clamped_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1) of [T, 2 W], with gate at most `limit` and up from -limit to limit."""
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width].clamp(max=limit), gate_up[:, width:].clamp(-limit, limit)
    return (gate * torch.sigmoid(gate * alpha)).mul_(up + 1)


def choose_native(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Native | None, str]:
    """Baton's own kernels and their origin; or None, and why they are not used.

    `wanted` is `auto`, `native` or `torch`. Raises ConfigError when `native` cannot be used, or for another name.
    """
    if wanted not in KERNELS_NAMES:
        raise ConfigError(f"kernels: {wanted!r} is unknown; use {', '.join(KERNELS_NAMES)}")
    if wanted == "torch":
        return None, "not wanted"
    kernels, reason = _usable_native(device, dtype, head_dim)
    if wanted == "native" and kernels is None:
        raise ConfigError(f"kernels: native cannot be used: {reason}; or set kernels to auto")
    return kernels, reason


def choose_kernels(
    wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False
) -> tuple[Kernels | None, str]:
    """The kernels that multiply matrices, and their origin; or None where torch's do, and why.

    `wanted` and what is raised are `choose_native`'s; `auto` takes Baton's kernels in Triton on a GPU. `deterministic`:
    fixed ones; raises ConfigError where there are none.
    """
    native, reason = choose_native(wanted, device, dtype, head_dim)
    if native is not None:
        return native.fixed() if deterministic else native, reason
    if wanted != "torch" and device.type != "cpu":
        reason = obstacle(device) or (_misfit(head_dim) if deterministic else "")
        if not reason:
            return TritonProducts(deterministic), "in Triton"
    if deterministic:
        raise ConfigError(
            f"engine.deterministic needs Baton's own kernels, which are not used: {reason}; set it to false"
        )
    return None, reason


def choose_ops(
    wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False
) -> tuple[Ops, Kernels | None, str]:
    """The operations to use; the kernels of `choose_kernels`; and where the operations come from, or why they are
    torch's."""
    kernels, reason = choose_kernels(wanted, device, dtype, head_dim, deterministic)
    if isinstance(kernels, Native):
        return kernels, kernels, reason
    if kernels is None or (misfit := _misfit(head_dim)):
        return TorchOps(), kernels, reason if kernels is None else misfit
    return importlib.import_module("engine.triton.fused").TritonOps(), kernels, reason


def _misfit(head_dim: int) -> str:
    return "" if head_dim % 4 == 0 else f"Triton's kernels need heads of a multiple of 4 dimensions, not of {head_dim}"


def _usable_native(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Native | None, str]:
    if device.type != "cpu":
        return None, f"they are for the CPU, this is {device.type}"
    if dtype not in DTYPES:
        return None, f"they compute in float32 and bfloat16, this is {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM:
        return None, f"heads of {head_dim} dimensions are too wide for them"
    return native()
