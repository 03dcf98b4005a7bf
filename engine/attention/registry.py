"""The attention backends, by the names that `cluster.config.choices` has for them, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cluster.errors import ConfigError
from engine.attention.cpu import CpuAttention
from engine.attention.flash import flash_attn_backend, varlen_backend
from engine.attention.interface import Attention
from engine.native import Native

Make = Callable[[torch.device, torch.dtype, Native | None], Attention | str]
"""Makes a backend for a device and a type, or returns why there is none. The kernels are those of
`engine.layers.ops.choose_native`."""

ATTENTION_BACKENDS: dict[str, Make] = {
    "flash_attn": flash_attn_backend,
    "varlen": varlen_backend,
    "cpu": lambda device, dtype, kernels: CpuAttention(kernels),
}
"""In the order in which `auto` prefers them; the last one runs everywhere."""


def choose_attention(
    wanted: str, device: torch.device, dtype: torch.dtype, kernels: Native | None = None
) -> tuple[Attention, str]:
    """A backend and, in a few words, why it is this one. `auto` takes the fastest that works here.

    Raises ConfigError when the wanted one cannot run, naming why and what to use.
    """
    if wanted != "auto" and wanted not in ATTENTION_BACKENDS:
        names = ", ".join(("auto", *ATTENTION_BACKENDS))
        raise ConfigError(f"attention: {wanted!r} is unknown; use {names}")
    reasons: dict[str, None] = {}
    for name, make in ATTENTION_BACKENDS.items():
        if wanted not in ("auto", name):
            continue
        backend = make(device, dtype, kernels)
        if isinstance(backend, str) and wanted == name:
            raise ConfigError(f"attention: {wanted} cannot run: {backend}; use auto or cpu")
        if not isinstance(backend, str):
            why = [*reasons, *(() if name == "cpu" else ("the fastest here",))]
            return backend, "asked for" if wanted == name else "; ".join(why)
        reasons[backend] = None
    raise AssertionError("no attention backend runs everywhere")
