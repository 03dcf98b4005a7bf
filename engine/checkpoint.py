"""Reads a checkpoint folder: slices of its safetensors, no more than is asked for.

Owns the files while they are open, and every way in which a checkpoint can be wrong: a truncated file, a missing
tensor, a wrong shape, a tensor that nobody asked for. It knows no layers and no ranks.

On the CPU a slice is copied out of the mapped file; `engine.weight_stream` takes it to a GPU.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import CheckpointError
from engine.weight_stream import FileRuns, WeightStream

INDEX_NAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
"""What a safetensors file begins with: the length of its header."""
_FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CODE_TYPES = {torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}
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
    """Which of how many such tensors, where one has them all along another dimension before the first."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return self.shape if self.stack is None else (self.stack[1], *self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what is read."""
        if not self.shape:  # a single number
            return ()
        stop = self.shape[self.dim] if self.stop is None else self.stop
        return (*self.shape[: self.dim], stop - self.start, *self.shape[self.dim + 1 :])


class Checkpoint:
    """A folder's open safetensors files. Opening reads the headers of all of them, so truncation shows at once."""

    def __init__(self, folder: str | Path, stream: WeightStream | None = None) -> None:
        """`stream`, which is closed here, takes what goes to its device; without it, one is made for a GPU."""
        self._folder = Path(folder)
        self._stream = stream
        self._streamed: dict[str, tuple[int, dict[str, int]]] = {}
        """The descriptor of each file that a stream reads, and where the bytes of each of its tensors begin."""
        self._file_of_tensor: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        self._unread: set[str] = set()
        self.bytes_read = 0
        """Bytes of tensor data that were asked for, in the files' own types."""
        self._open_files()

    def _open_files(self) -> None:
        """Learns which tensors there are, and where."""
        index = self._read_index()
        for name in sorted(set(index.values())) if index else self._single_files():
            self._open(name)
        for tensor, file in index.items():
            if self._file_of_tensor.get(tensor) != file:
                raise CheckpointError(
                    f"{self._folder / file}: tensor {tensor} is missing; {INDEX_NAME} places it there"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps and closes the files. Idempotent."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.__exit__(None, None, None)
        if self._stream is not None:
            self._stream.close()
        streamed, self._streamed = self._streamed, {}
        for descriptor, _ in streamed.values():
            os.close(descriptor)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of_tensor

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that are open."""
        return tuple(self._handles)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._file_of_tensor)

    @property
    def num_tensors(self) -> int:
        return len(self._file_of_tensor)

    def read(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Copies one slice into `out` (of `part.local_shape`), converting its type if that is of floating point.

        On a GPU `out` is contiguous, and what is launched next on the current stream finds it written. Raises
        CheckpointError when the tensor is missing, has another shape, is not of floating point (where `out` is of
        integers or fp8: not of that type), or when the file cannot be read.
        """
        file = self._file_of_tensor.get(part.name)
        if file is None:
            raise CheckpointError(
                f"{self._describe_files()}: tensor {part.name} is missing (expected shape {list(part.stored_shape)})"
            )
        source = self._handles[file].get_slice(part.name)
        where = self.describe(part.name)
        found = tuple(source.get_shape())
        if found != part.stored_shape:
            wanted = list(part.stored_shape)
            raise CheckpointError(f"{where} has shape {list(found)}, but config.json asks for {wanted}")
        types = {_CODE_TYPES[out.dtype]: out.dtype} if out.dtype in _CODE_TYPES else _FLOAT_TYPES
        if source.get_dtype() not in types:
            raise CheckpointError(f"{where} has type {source.get_dtype()}; Baton reads {', '.join(types)}")
        self._unread.discard(part.name)
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

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return tuple(self._handles[self._file_of_tensor[name]].get_slice(name).get_shape())

    def describe(self, name: str) -> str:
        """A tensor that is there and its file, to begin an error with."""
        return f"{self._folder / self._file_of_tensor[name]}: tensor {name}"

    def leave(self, prefix: str) -> None:
        """Takes tensors whose names begin so for read: another rank reads them."""
        self._unread = {name for name in self._unread if not name.startswith(prefix)}

    def discard_zeros(self, ending: str) -> None:
        """Counts tensors with this ending as read where they are nothing but zeros: adding them would do nothing."""
        for name in [name for name in self._unread if name.endswith(ending)]:
            data = self._handles[self._file_of_tensor[name]].get_tensor(name)
            if not data.count_nonzero():
                self._unread.discard(name)

    def discard(self, patterns: Sequence[re.Pattern[str]]) -> None:
        """Counts tensors in whose names one of the patterns is found as read."""
        self._unread = {name for name in self._unread if not any(pattern.search(name) for pattern in patterns)}

    def num_unread(self, beginnings: tuple[str, ...]) -> int:
        """Returns how many tensors with these beginnings of names were never read."""
        return sum(name.startswith(beginnings) for name in self._unread)

    def check_all_read(self, ignored: tuple[str, ...], left_out: tuple[str, ...] = ()) -> None:
        """Raises when a tensor was never read: the model would be computed without it.

        `ignored` are endings of names that a checkpoint may carry for no use, `left_out` beginnings of names of what is
        left out on purpose.
        """
        kept = [name for name in self._unread if not name.startswith(left_out)]
        left = sorted(name for name in kept if not name.endswith(ignored))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            file = self._folder / self._file_of_tensor[left[0]]
            raise CheckpointError(
                f"{file}: tensor {left[0]}{more} has no place in the architecture that config.json names"
            )

    def _read_index(self) -> dict[str, str]:
        path = self._folder / INDEX_NAME
        if not path.exists():
            return {}
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read as an index of tensors: {error!r}") from None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: weight_map must name a file for each tensor")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{path}: weight_map names {file!r}; it must be a file in the same folder")
        return weight_map

    def _single_files(self) -> list[str]:
        names = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(
                f"{self._folder}: holds no *.safetensors; other weight formats are not read, convert them"
            )
        return ["model.safetensors"] if "model.safetensors" in names else names

    def _open(self, file: str) -> None:
        path = self._folder / file
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file, but {INDEX_NAME} places tensors there")
        try:
            handle: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or not a safetensors file ({error}); fetch it again") from None
        self._handles[file] = handle
        names: list[str] = handle.keys()
        for name in names:
            if name in self._file_of_tensor:
                other = self._file_of_tensor[name]
                raise CheckpointError(f"{path}: tensor {name} is in {other} as well; remove one of the two files")
            self._file_of_tensor[name] = file
            self._unread.add(name)

    def _describe_files(self) -> str:
        files = sorted(self._handles)
        return str(self._folder / files[0]) if len(files) == 1 else f"{self._folder} ({len(files)} safetensors files)"


def _open_for_streaming(path: Path) -> tuple[int, dict[str, int]]:
    """The descriptor, and where the bytes of each tensor begin; `safe_open` has checked the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    begins = {name: _LENGTH_BYTES + size + tensor["data_offsets"][0] for name, tensor in header.items()}
    return os.open(path, os.O_RDONLY), begins
