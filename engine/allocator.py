"""What the C library does with memory that was freed.

glibc gives large blocks back to the kernel at once, and each long step asks for the same ones again: a prompt of 4,096
tokens touched 90,000 fresh pages, a twentieth of its time. A process that computes keeps them instead.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT_BYTES = 128 << 20
_MOST_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Blocks of up to 128 MiB are kept when they are freed, as long as no more than 512 MiB lie free at the end of the
    heap. False where the C library is another one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = {_MMAP_THRESHOLD: _LARGEST_KEPT_BYTES, _TRIM_THRESHOLD: _MOST_KEPT_BYTES}
    return all(mallopt(parameter, value) for parameter, value in wanted.items())
