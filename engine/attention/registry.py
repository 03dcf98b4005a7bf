"""The attention backends, by the names that `cluster.config.choices` has for them, and the choice of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cluster.errors import ConfigError
from engine.attention.cpu import CpuAttention
from engine.attention.flash import flash_attn_backend, varlen_backend
from engine.attention.interface import Attention, AttentionBatch, unfixed
from engine.attention.triton import triton_backend
from engine.native import Native
from engine.quantization.interface import Kernels
from engine.step_input import SequenceSlice, build_step

_TRIALS = ((16, 1, 4096), (1, 2048, 4096))
"""Sequences, new tokens of each, all tokens of each: a decode step, and a chunk of a prompt. For 8 heads of 128 in 16
bits their pages are 268 MB, more than a cache holds."""
_ROUNDS = 5
"""Timed ones of a trial, of which the fastest counts; one before them compiles what is compiled at its first call."""


@dataclass(frozen=True)
class Heads:
    """Heads of one layer that one rank computes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


Make = Callable[[torch.device, torch.dtype, Kernels | None], Attention | str]
"""Makes a backend for a device and a type, or returns why there is none. The kernels are those of
`engine.layers.ops.choose_kernels`; where they are fixed, a row must have the same bits in any step."""

ATTENTION_BACKENDS: dict[str, Make] = {
    "flash_attn": flash_attn_backend,
    "triton": triton_backend,
    "varlen": varlen_backend,
    "cpu": lambda device, dtype, kernels: _cpu_backend(kernels),
}
"""In the order in which `auto` prefers them where it does not time them; the last one runs everywhere."""
TAKES_EXTRAS = {
    "triton": ("soft caps", "attention sinks"),
    "cpu": ("soft caps", "attention sinks", "latents", "split latents"),
}
"""Extras that only some models need, by the backends that take them. Latents are heads too wide for other kernels; for
split ones a backend takes `log_sums`."""


def choose_attention(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels | None = None,
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
    heads: Heads | None = None,
    extras: Sequence[str] = (),
) -> tuple[Attention, str]:
    """A backend and, in a few words, why it is this one. `block_size` is the pool's, by default the one that suits the
    backend; `kv_dtype` as well, by default `dtype`. `extras`: in words, what the model needs that not all of them take.

    `auto` takes one that reads such pages where they lie, without which no decode step becomes a CUDA graph: of several
    the fastest for `heads`, timed here, or without `heads` the first. If none does, the first that works. Raises
    ConfigError when the wanted one cannot run, naming why and what to use.
    """
    if wanted != "auto":
        return _make(wanted, device, dtype, kernels, extras), "asked for"
    reasons: dict[str, None] = {}
    fitting: list[Attention] = []
    others: list[Attention] = []
    for name, make in ATTENTION_BACKENDS.items():
        backend = _misfit(name, extras) or make(device, dtype, kernels)
        if isinstance(backend, str):
            reasons[backend] = None
        elif obstacle := backend.static_obstacle(block_size or backend.block_size, kv_dtype or dtype):
            reasons[f"{name}: {obstacle}"] = None
            others.append(backend)
        elif heads is None:
            return backend, "; ".join([*reasons, "the first that reads the KV cache in place"])
        else:
            fitting.append(backend)
    if len(fitting) > 1 and heads is not None:
        chosen, why_fastest = _fastest(fitting, heads, block_size, dtype, device)
        return chosen, "; ".join([*reasons, why_fastest])
    if fitting:
        return fitting[0], "; ".join([*reasons, "the only one that reads the KV cache in place"])
    chosen = others[0]
    why = [reason for reason in reasons if not reason.startswith(f"{chosen.name}: ")]
    return chosen, "; ".join([*why, *(() if chosen.name == "cpu" else ("the fastest here",))])


def _fastest(
    backends: list[Attention], heads: Heads, block_size: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[Attention, str]:
    """The backend with the shortest trial; the first, if none gets through it."""
    trials: list[tuple[float, Attention]] = []
    failures: list[str] = []
    for backend in backends:
        try:
            size = block_size or backend.block_size
            seconds = sum(_trial_s(backend, heads, size, dtype, device, *trial) for trial in _TRIALS)
            trials.append((seconds, backend))
        except Exception as error:  # a kernel that does not compile, a full device: whatever it is, another may work
            failures.append(f"{backend.name} failed in a trial: {error}")
    trials.sort(key=lambda trial: trial[0])
    measured = ", ".join(f"{backend.name} {seconds * 1000:.2f} ms" for seconds, backend in trials)
    why = [*failures, *([f"the fastest in a trial ({measured})"] if trials else [])]
    return (trials[0][1] if trials else backends[0]), "; ".join(why)


def _trial_s(
    backend: Attention,
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_sequences: int,
    num_new: int,
    length: int,
) -> float:
    """Seconds of one layer's attention over unrounded KV, of sequences whose last `num_new` of `length` tokens are new.

    Raises what the backend raises, and torch's error where the pages do not fit.
    """
    width = -(-length // block_size)
    slices = [
        SequenceSlice((0,) * num_new, length - num_new, tuple(range(s * width, (s + 1) * width)), True)
        for s in range(num_sequences)
    ]
    batch = AttentionBatch(build_step(slices, block_size), block_size, device)
    of_head: dict[str, Any] = {"dtype": dtype, "device": device}
    q = torch.randn(num_sequences * num_new, heads.num_heads, heads.head_dim, **of_head)
    pages = torch.randn(2, num_sequences * width, block_size, heads.num_kv_heads, heads.head_dim, **of_head)
    times = []
    for _ in range(_ROUNDS + 1):
        begun = time.perf_counter()
        backend(q, pages[0], pages[1], batch, softmax_scale=heads.head_dim**-0.5)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def _cpu_backend(kernels: Kernels | None) -> Attention | str:
    if isinstance(kernels, Native):
        return CpuAttention(kernels)
    return unfixed(kernels) or CpuAttention()


def _misfit(name: str, extras: Sequence[str]) -> str:
    """Returns why a backend does not fit a model that needs `extras`; empty if it does."""
    missing = [extra for extra in extras if extra not in TAKES_EXTRAS.get(name, ())]
    return f"{name} takes no {' and no '.join(missing)}, which this model has" if missing else ""


def _make(
    name: str, device: torch.device, dtype: torch.dtype, kernels: Kernels | None, extras: Sequence[str]
) -> Attention:
    if name not in ATTENTION_BACKENDS:
        names = ", ".join(("auto", *ATTENTION_BACKENDS))
        raise ConfigError(f"attention: {name!r} is unknown; use {names}")
    backend = _misfit(name, extras) or ATTENTION_BACKENDS[name](device, dtype, kernels)
    if isinstance(backend, str):
        raise ConfigError(f"attention: {name} cannot run: {backend}; use auto or cpu")
    return backend
