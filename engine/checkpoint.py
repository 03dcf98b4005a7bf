"""Reads a checkpoint folder: slices of its safetensors, no more than is asked for.

Owns how their data is read, and whether all of it was: a tensor that nobody asked for is refused. Which tensors there
are, `engine.tensor_files` knows. It knows no layers and no ranks.

On the CPU a slice is copied out of the mapped file; `engine.weight_stream` takes it to a GPU.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.errors import CheckpointError
from engine.tensor_files import CODE_TYPES, FLOAT_TYPES, TensorFiles
from engine.weight_stream import FileRuns, WeightStream

_LENGTH_BYTES = 8
"""Bytes that a safetensors file begins with: the length of its header."""
_FLOAT_TYPES = dict(zip(FLOAT_TYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
_CODE_TYPES = dict(zip((torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn), CODE_TYPES, strict=True))
"""Types of what stands for a weight, which are read as they are."""


@dataclass(frozen=True)
class TensorSlice:
    """Rows `start:stop` along `dim` of tensor `name`, whose whole shape must be `shape`. `stop` None: to the end."""

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    stop: int | None = None
    stack: tuple[int, int] | None = None
    """The number of this tensor and of all, where one tensor stacks them along another dimension before the first."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return self.shape if self.stack is None else (self.stack[1], *self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        if not self.shape:  # a single number
            return ()
        stop = self.shape[self.dim] if self.stop is None else self.stop
        return (*self.shape[: self.dim], stop - self.start, *self.shape[self.dim + 1 :])


class Checkpoint(TensorFiles):
    """A folder's open safetensors files, of which slices are read."""

    _framework = "pt"

    def __init__(self, folder: str | Path, stream: WeightStream | None = None) -> None:
        """`stream`, which is closed here, takes what goes to its device; without it, one is made for a GPU."""
        self._stream = stream
        self._streamed: dict[str, tuple[int, dict[str, int]]] = {}
        """The descriptor of each file that a stream reads, and where the bytes of each of its tensors begin."""
        self.bytes_read = 0
        """Bytes of tensor data that were asked for, in the files' own types."""
        super().__init__(folder)

    def close(self) -> None:
        """Unmaps and closes the files. Idempotent."""
        super().close()
        if self._stream is not None:
            self._stream.close()
        streamed, self._streamed = self._streamed, {}
        for descriptor, _ in streamed.values():
            os.close(descriptor)

    def read(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Copies one slice into `out` (of `part.local_shape`), converting its type if that is of floating point.

        On a GPU `out` is contiguous, and what is launched next on the current stream finds it written. Raises
        CheckpointError when the tensor is missing, has another shape, is not of floating point (where `out` is of
        integers or fp8: not of that type), or when the file cannot be read.
        """
        types = {_CODE_TYPES[out.dtype]: out.dtype} if out.dtype in _CODE_TYPES else _FLOAT_TYPES
        source = self.find(part.name, part.stored_shape, tuple(types))
        if not math.prod(part.local_shape):
            return
        dtype = types[source.get_dtype()]
        self.bytes_read += math.prod(part.local_shape) * dtype.itemsize
        if self._stream is None and out.is_cuda:
            self._stream = WeightStream(out.device)
        if self._stream is None or self._stream.device != out.device:
            before = () if part.stack is None else (slice(part.stack[0], part.stack[0] + 1),)
            rows = (*before, *(slice(None),) * part.dim, slice(part.start, part.stop))
            found_rows = source[rows if part.shape else ...]
            out.copy_(found_rows.view(part.local_shape))
        else:
            self._read_through(self._stream, part, dtype, out)

    def _read_through(self, stream: WeightStream, part: TensorSlice, dtype: torch.dtype, out: torch.Tensor) -> None:
        file = self._file_of_tensor[part.name]
        try:
            if file not in self._streamed:
                self._streamed[file] = _open_for_streaming(self._folder / file)
            descriptor, begins = self._streamed[file]
            inner_bytes = math.prod(part.shape[part.dim + 1 :]) * dtype.itemsize
            before = 0 if part.stack is None else part.stack[0] * math.prod(part.shape) * dtype.itemsize
            runs = FileRuns(
                file=descriptor,
                start=begins[part.name] + before + part.start * inner_bytes,
                run_bytes=part.local_shape[part.dim] * inner_bytes,
                stride=part.shape[part.dim] * inner_bytes,
                num_runs=math.prod(part.shape[: part.dim]),
            )
            stream.read(runs, dtype, out)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.describe(part.name)} cannot be read: {error}; fetch the file again") from None

    def leave(self, prefix: str, numbers: Iterable[int]) -> None:
        """Takes tensors `prefix.N.*` with these numbers for read: another rank reads them."""
        left, start = {str(number) for number in numbers}, len(prefix) + 1
        under = {name for name in self._unread if name.startswith(f"{prefix}.")}
        self._unread -= {name for name in under if name[start:].partition(".")[0] in left}

    def discard_zeros(self, ending: str) -> None:
        """Counts tensors with this ending as read where they are nothing but zeros: adding them would do nothing."""
        for name in [name for name in self._unread if name.endswith(ending)]:
            data = self._handles[self._file_of_tensor[name]].get_tensor(name)
            if not data.count_nonzero():
                self._unread.discard(name)

    def discard(self, patterns: Sequence[re.Pattern[str]]) -> None:
        """Counts tensors in whose names one of the patterns is found as read."""
        self._unread = {name for name in self._unread if not any(pattern.search(name) for pattern in patterns)}


def _open_for_streaming(path: Path) -> tuple[int, dict[str, int]]:
    """The descriptor, and where the bytes of each tensor begin; `safe_open` has checked the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    begins = {name: _LENGTH_BYTES + size + tensor["data_offsets"][0] for name, tensor in header.items()}
    return os.open(path, os.O_RDONLY), begins
