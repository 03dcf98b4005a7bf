"""Orders copies of pages among the streams of a GPU, by events: no thread waits for a gather, and none for a step.

    a gather     begins when the step, or the layer, that writes its pages has ended
    a send       begins when the gather into its slot has ended
    a step       begins when the gathers launched before it have ended: it may write pages that they still read
    a scatter    begins when those have ended, and the steps that its command names

So pages may be released, and a slot offered, as soon as a gather is launched. Each pair copies on a stream of its own.
On the CPU there are no streams, and what has returned has ended. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CopyStreams:
    """The streams of one rank. `compute` writes and reads the pages; None on the CPU."""

    def __init__(self, device: torch.device, compute: Any) -> None:
        self._device = device
        self._compute = compute
        self._gathers: list[Any] = []
        """Events of gathers that may not have ended."""
        self._lock = threading.Lock()

    def new_stream(self) -> Any:
        """A stream for one pair; None on the CPU."""
        new: Any = torch.cuda.Stream
        return None if self._compute is None else new(self._device)

    @contextmanager
    def gathering(self, stream: Any, ready: Any) -> Iterator[Any]:
        """Launches what the block does on the pair's stream; yields the event of its end, None on the CPU.

        `ready` is the event of what writes the pages; None: all that was launched so far does.
        """
        if stream is None:
            yield None
            return
        new: Any = torch.cuda.Event
        ended = new(blocking=True)
        with torch.cuda.device(self._device):
            stream.wait_event(self._compute.record_event() if ready is None else ready)
            try:
                with torch.cuda.stream(stream):
                    yield ended
            finally:
                ended.record(stream)
                with self._lock:
                    self._gathers.append(ended)

    @contextmanager
    def scattering(self, stream: Any, ready: Any) -> Iterator[None]:
        """When the block has ended, what it does has ended, on a GPU too. `ready`: as of a gather."""
        if stream is None:
            yield
            return
        with torch.cuda.device(self._device):
            stream.wait_event(self._compute.record_event() if ready is None else ready)
            for gather in self._unended():
                stream.wait_event(gather)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()

    def before_step(self) -> None:
        """A step is about to be launched."""
        if self._gathers:
            for gather in self._unended():
                self._compute.wait_event(gather)

    def _unended(self) -> list[Any]:
        with self._lock:
            self._gathers = [gather for gather in self._gathers if not gather.query()]
            return list(self._gathers)
