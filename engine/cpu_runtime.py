"""Settings of this process's C library and OpenMP, for computing on a CPU.

Memory: glibc returns large freed blocks to the kernel at once, and each long step allocates the same ones again: a
prompt of 4,096 tokens touched 90,000 fresh pages, a twentieth of its time. A process that computes keeps them instead.

Threads: each thread that computes in parallel has OpenMP helpers of its own, which spin a while waiting for its next
work. Where the helpers of several threads outnumber the cores, OpenMP lets none of them spin, and every parallel region
begins and ends in the kernel: a decode step of many short regions takes twice as long. So one thread computes all
steps, and one that has prepared for them ends its helpers. To end and start them with each step is no way out: a new
helper may share its creator's core for several milliseconds before the kernel moves it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT_BYTES = 128 << 20
_MAX_KEPT_BYTES = 512 << 20
_PAUSE_SOFT = 1


def keep_freed_memory() -> bool:
    """Keeps freed blocks of up to 128 MiB, as long as no more than 512 MiB lie free at the end of the heap.

    False where the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = {_MMAP_THRESHOLD: _LARGEST_KEPT_BYTES, _TRIM_THRESHOLD: _MAX_KEPT_BYTES}
    return all(mallopt(parameter, value) for parameter, value in wanted.items())


def return_freed_memory() -> None:
    """Returns freed memory to the system, where the C library can; kept, it would count as resident."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def compute_with(num_threads: int) -> None:
    """Makes the calling thread compute with `num_threads`, itself included."""
    torch.set_num_threads(num_threads)
    torch.get_num_threads()  # makes torch look once at what was set; later it would overwrite it


def compute_alone() -> None:
    """Makes the calling thread compute alone, whatever others do."""
    torch.get_num_threads()
    openmp = _openmp()
    if openmp is not None:
        openmp.omp_set_num_threads(1)


def end_helpers() -> None:
    """Ends the helpers of the calling thread, outside of parallel work. The next parallel work starts new ones."""
    openmp = _openmp()
    if openmp is not None:
        openmp.omp_pause_resource_all(_PAUSE_SOFT)


@cache
def _openmp() -> Any:
    """The OpenMP that torch is linked with; None where it cannot do this."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            library = ctypes.CDLL(str(path))
            return library if hasattr(library, "omp_pause_resource_all") else None
    return None
