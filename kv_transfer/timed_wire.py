"""The receiving link of a worker whose KV stands for a larger model's: chunks land no sooner than that would.

The link carries one chunk after another, whichever pair they belong to. Of chunks that come right behind one another
only the first takes the latency: the others were on their way at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TimedWire:
    """Holds chunks back. Safe from any thread."""

    def __init__(
        self,
        bytes_per_cell: float,
        bytes_per_s: float | None,
        latency_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`bytes_per_cell`: of one token in one layer of the larger model. `bytes_per_s` None: no limit."""
        self._cell_s = 0.0 if bytes_per_s is None else bytes_per_cell / bytes_per_s
        self._latency_s = latency_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0
        """When the last chunk has landed."""

    def carry(self, num_cells: int) -> None:
        """Returns when a chunk of so many tokens times layers, whose bytes are here, would have landed."""
        with self._lock:
            now = self._clock()
            is_behind = now - self._free_at <= self._latency_s
            begins_at = self._free_at if is_behind else now + self._latency_s
            due = self._free_at = begins_at + num_cells * self._cell_s
        if due > now:
            self._sleep(due - now)
