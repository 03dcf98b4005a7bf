"""The attention backends, by the names that `cluster.config.choices` has for them, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cluster.errors import ConfigError
from engine.attention.cpu import CpuAttention
from engine.attention.flash import flash_attn_backend, varlen_backend
from engine.attention.interface import Attention, unfixed
from engine.attention.triton import triton_backend
from engine.native import Native
from engine.quantization.interface import Kernels

Make = Callable[[torch.device, torch.dtype, Kernels | None], Attention | str]
"""Makes a backend for a device and a type, or returns why there is none. The kernels are those of
`engine.layers.ops.choose_kernels`; where they are fixed, a row must have the same bits in any step."""

ATTENTION_BACKENDS: dict[str, Make] = {
    "flash_attn": flash_attn_backend,
    "triton": triton_backend,
    "varlen": varlen_backend,
    "cpu": lambda device, dtype, kernels: _cpu_backend(kernels),
}
"""In the order in which `auto` prefers them; the last one runs everywhere."""


def choose_attention(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels | None = None,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Attention, str]:
    """A backend and, in a few words, why it is this one. `kv_dtype` is the pool's, by default `dtype`.

    `auto` takes the first that works here and reads such pages where they lie, without which no decode step becomes a
    CUDA graph; if none does, the first that works. Raises ConfigError when the wanted one cannot run, naming why and
    what to use.
    """
    if wanted != "auto":
        return _make(wanted, device, dtype, kernels), "asked for"
    reasons: dict[str, None] = {}
    others: list[Attention] = []
    for name, make in ATTENTION_BACKENDS.items():
        backend = make(device, dtype, kernels)
        if isinstance(backend, str):
            reasons[backend] = None
        elif obstacle := backend.static_obstacle(block_size, kv_dtype or dtype):
            reasons[f"{name}: {obstacle}"] = None
            others.append(backend)
        else:
            return backend, "; ".join([*reasons, "the first that reads the KV cache in place"])
    chosen = others[0]
    why = [reason for reason in reasons if not reason.startswith(f"{chosen.name}: ")]
    return chosen, "; ".join([*why, *(() if chosen.name == "cpu" else ("the fastest here",))])


def _cpu_backend(kernels: Kernels | None) -> Attention | str:
    if isinstance(kernels, Native):
        return CpuAttention(kernels)
    return unfixed(kernels) or CpuAttention()


def _make(name: str, device: torch.device, dtype: torch.dtype, kernels: Kernels | None) -> Attention:
    if name not in ATTENTION_BACKENDS:
        names = ", ".join(("auto", *ATTENTION_BACKENDS))
        raise ConfigError(f"attention: {name!r} is unknown; use {names}")
    backend = ATTENTION_BACKENDS[name](device, dtype, kernels)
    if isinstance(backend, str):
        raise ConfigError(f"attention: {name} cannot run: {backend}; use auto or cpu")
    return backend
