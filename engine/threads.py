"""OpenMP's threads: how many a thread of this process computes with, and who has them.

Each thread that computes in parallel keeps helpers of its own, which wait for its next work by spinning a while. Where
helpers of several threads are more than the cores, OpenMP lets none of them spin, and every parallel region begins and
ends in the kernel: a decode step of many short regions takes twice as long. So whoever has computed and leaves the next
step to another thread gives its helpers back; they are made anew in a tenth of a millisecond.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

_PAUSE_SOFT = 1


def compute_with(num_threads: int) -> None:
    """The calling thread computes with so many, itself included."""
    torch.set_num_threads(num_threads)
    torch.get_num_threads()  # makes torch look once at what was set; later it would overwrite it


def compute_alone() -> None:
    """The calling thread computes by itself, whatever others do."""
    torch.get_num_threads()
    openmp = _openmp()
    if openmp is not None:
        openmp.omp_set_num_threads(1)


def give_back() -> None:
    """Ends the helpers of the calling thread, outside of any parallel work. The next parallel work makes new ones."""
    openmp = _openmp()
    if openmp is not None:
        openmp.omp_pause_resource_all(_PAUSE_SOFT)


@cache
def _openmp() -> Any:
    """The OpenMP that torch was linked with; None where it has none that can do this."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            library = ctypes.CDLL(str(path))
            return library if hasattr(library, "omp_pause_resource_all") else None
    return None
