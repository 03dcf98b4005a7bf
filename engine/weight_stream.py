"""Reads slices of files to a GPU through two page-locked buffers: one is filled while the other is copied.

So weights lie in the memory of the host for no longer than a copy takes, and come at the rate of the file or of the
bus, whichever is lower. Of each buffer there is a twin on the device:

    several threads fill a buffer      once the copy that left it before has ended
    a stream of its own copies it      once what its twin held before has been taken
    the caller's stream takes it       once it has been copied: to where it belongs, converted to its type

The host waits for a buffer alone; kernels that the caller has launched run while the next weights are on their way. It
knows bytes of files, neither names nor ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

BUFFER_BYTES = 16 << 20
"""What has been read should still lie in the processor's cache when it is copied."""
NUM_THREADS = 8
_LEAST_PART_BYTES = 1 << 20
"""Less is not worth a thread."""
_ROWS_BYTES = 1 << 20
"""Runs are read together with what lies between them while that is no more than this."""

Copy = Callable[[Tensor, Tensor], object]
"""Copies values of the second tensor to the first on the current stream, converting them."""


class FileRuns(NamedTuple):
    """Bytes of a file: `num_runs` runs of `run_bytes`, from the begin of one to that of the next `stride` bytes."""

    file: int
    """Its descriptor."""
    start: int
    run_bytes: int
    stride: int
    num_runs: int


class _Buffer:
    """Page-locked memory, its twin on the device, and when each may be written again."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        new_event: Any = torch.cuda.Event
        self.pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.copied = new_event(blocking=True)
        """For which the host waits, without spinning."""
        self.twin = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.taken = new_event()
        self.taken.record(torch.cuda.current_stream(device))  # whoever had this memory before was there


class WeightStream:
    """Used by one thread, with one current stream."""

    def __init__(
        self,
        device: torch.device,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        num_threads: int = NUM_THREADS,
        copy: Copy = lambda out, values: out.copy_(values, non_blocking=True),
    ) -> None:
        """`buffer_bytes` of each of the two buffers: a multiple of 8."""
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(device)
        buffers = [_Buffer(device, buffer_bytes) for _ in range(2)]
        self.device = buffers[0].twin.device
        """With its number, as of tensors."""
        self._buffers = itertools.cycle(buffers)
        self._buffer_bytes = buffer_bytes
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "weights")
        self._copy = copy

    def close(self) -> None:
        """Ends the threads. Copies go on; torch keeps the buffers until then."""
        self._threads.shutdown()

    def read(self, runs: FileRuns, dtype: torch.dtype, out: Tensor) -> None:
        """Reads values of `dtype` into `out`, contiguous, converting them; returns when the last copy is launched.

        Raises OSError, also where the file ends too early.
        """
        flat, total = out.view(-1), runs.run_bytes * runs.num_runs
        assert flat.numel() * dtype.itemsize == total, "the file's slice and the tensor differ in size"
        if runs.run_bytes == runs.stride:
            runs = FileRuns(runs.file, runs.start, total, total, 1)
        for begin in range(0, total, self._buffer_bytes):
            size = min(total - begin, self._buffer_bytes)
            buffer = next(self._buffers)
            buffer.copied.synchronize()
            self._fill(buffer.pinned.numpy().data[:size], runs, begin)
            self._launch(buffer, size, dtype, flat[begin // dtype.itemsize :][: size // dtype.itemsize])

    def _launch(self, buffer: _Buffer, size: int, dtype: torch.dtype, out: Tensor) -> None:
        """Copies what is in the buffer to its twin and from there to its place."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(buffer.taken)
            self._copy(buffer.twin[:size], buffer.pinned[:size])
            buffer.copied.record(self._stream)
        caller = torch.cuda.current_stream(self.device)
        caller.wait_event(buffer.copied)
        self._copy(out, buffer.twin[:size].view(dtype))
        buffer.taken.record(caller)

    def _fill(self, room: memoryview, runs: FileRuns, begin: int) -> None:
        """Reads what lies `begin` bytes behind the first run's begin, gaps left out, until the room is full."""
        size = max(_LEAST_PART_BYTES, -(-len(room) // self._num_threads))
        if len(room) <= size:
            _read_runs(runs, begin, room)
            return
        parts = [
            self._threads.submit(_read_runs, runs, begin + at, room[at : at + size]) for at in range(0, len(room), size)
        ]
        wait(parts)  # an error leaves no thread that writes to the buffer
        for part in parts:
            part.result()


def _read_runs(runs: FileRuns, at: int, room: memoryview) -> None:
    together = _ROWS_BYTES // runs.stride
    while room:
        number, inside = divmod(at, runs.run_bytes)
        offset = runs.start + number * runs.stride + inside
        count = 0 if inside else min(len(room) // runs.run_bytes, together)
        if count > 1:
            size = count * runs.run_bytes
            _read_rows(runs, offset, count, room[:size])
        else:
            size = min(len(room), runs.run_bytes - inside)
            _read_bytes(runs.file, offset, room[:size])
        room, at = room[size:], at + size


def _read_rows(runs: FileRuns, offset: int, count: int, room: memoryview) -> None:
    """Reads short runs and their gaps at once: a call for each would take longer, and a disk reads whole pages."""
    rows = np.empty((count - 1) * runs.stride + runs.run_bytes, np.uint8)
    _read_bytes(runs.file, offset, rows.data)
    wanted = np.lib.stride_tricks.as_strided(rows, (count, runs.run_bytes), (runs.stride, 1))
    np.frombuffer(room, np.uint8).reshape(wanted.shape)[:] = wanted


def _read_bytes(file: int, offset: int, room: memoryview) -> None:
    while room:
        num_read = os.preadv(file, [room], offset)
        if num_read == 0:
            raise OSError(f"it ends at byte {offset}")
        room, offset = room[num_read:], offset + num_read
