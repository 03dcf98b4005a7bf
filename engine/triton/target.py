"""Where Triton's kernels run, for which GPU they are compiled, and how a kernel is registered.

Only the modules with kernels import triton, and only who launches one imports those: a process without a CUDA device
never loads it.

A module of this package holds kernels and the functions that launch them. Its function `cases()` yields a `Case` for
every variant that the engine launches (types, head sizes, quantizations): a call of the launching function itself, on
small CPU tensors of the types and strides in question. `python -m engine.triton.compile_report` finds the modules that
have such a function, compiles what each case launches for every GPU wanted, without a device, and prints registers,
spills and shared memory; a test holds the spills against the case's limit. There is no other list.

A launching function asks `capability(tensor.device)` where tiles depend on the GPU. Values are tested under
TRITON_INTERPRET=1, set before triton is imported, with CPU tensors. Three things to know there: a kernel's module must
not import `annotations` from __future__; the interpreter computes bfloat16 wrongly in all but casts, loads and stores,
so that products take `DOT` = float32 (`dot_type`); and a value assigned in a kernel becomes a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec

import torch

OLDEST = 80
"""Compute capability 8.0 (A100): bfloat16 products, and copies to shared memory that threads need not wait for."""
_WITHOUT_DEVICE = 90
_compiled_for: ContextVar[int | None] = ContextVar("_compiled_for", default=None)


@dataclass(frozen=True)
class Case:
    """One variant of a kernel, or of several that are launched together."""

    name: str
    launch: Callable[[], object]
    max_spilled: int = 0
    """Bytes of a thread's registers that may spill to memory."""


def obstacle(device: torch.device) -> str:
    """Why no Triton kernel can run on this device; empty if one can."""
    if device.type != "cuda":
        return f"Triton's kernels need a CUDA device, this is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed; it comes with torch's CUDA builds for Linux"
    if capability(device) < OLDEST:
        return "Triton's kernels need compute capability 8.0 or newer"
    return ""


def capability(device: torch.device) -> int:
    """The compute capability that kernels are compiled for, ten times: 80 is an A100, 90 an H100.

    Of a CPU's tensors: the one that is compiled for without a device, or 90 in the interpreter.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return _compiled_for.get() or _WITHOUT_DEVICE


@contextmanager
def compiling_for(arch: int) -> Iterator[None]:
    """Within it, `capability` of a CPU's tensors is `arch`."""
    token = _compiled_for.set(arch)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def is_interpreted() -> bool:
    """Whether kernels are run by Triton's interpreter, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"
