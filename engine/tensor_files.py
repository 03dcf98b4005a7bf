"""Which tensors a checkpoint folder's safetensors files hold, and where: names, shapes and types, read off the headers.

Owns the files while they are open, and what can be wrong with them before any data is read: no file, a truncated one,
an index that is wrong, a tensor in two files, one that is missing or has another shape. Loads no torch;
`engine.checkpoint` reads the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from cluster.errors import CheckpointError
from cluster.model_folder import read_model_json

INDEX_NAME = "model.safetensors.index.json"
FLOAT_TYPES = ("F32", "BF16", "F16")
"""The types of weights that are no codes, as the headers name them."""
CODE_TYPES = ("I32", "I8", "U8", "F8_E4M3")
"""The types of what stands for a weight."""
_LONGEST_NAME = 255
NamedShape = tuple[str, tuple[int, ...]]
"""A tensor's name and its whole shape."""


class TensorFiles:
    """A folder's open safetensors files. Opening reads the headers of all of them, so truncation shows at once."""

    _framework = "numpy"
    """The library whose arrays slices of tensors would be."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._file_of_tensor: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        self._unread: set[str] = set()
        """The tensors that nobody asked for."""
        self._open_files()

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

    def find(self, name: str, shape: tuple[int, ...], types: Sequence[str]) -> Any:
        """Returns a tensor's slice of `safe_open`; raises CheckpointError if it is missing, or has another shape or
        none of the types."""
        file = self._file_of_tensor.get(name)
        if file is None:
            raise CheckpointError(f"{self._describe_files()}: tensor {name} is missing (expected shape {list(shape)})")
        source = self._handles[file].get_slice(name)
        found = tuple(source.get_shape())
        if found != shape:
            raise CheckpointError(
                f"{self.describe(name)} has shape {list(found)}, but config.json asks for {list(shape)}"
            )
        if (kind := source.get_dtype()) not in types:
            raise CheckpointError(f"{self.describe(name)} has type {kind}; Baton reads {', '.join(types)}")
        self._unread.discard(name)
        return source

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that is there."""
        return tuple(self._handles[self._file_of_tensor[name]].get_slice(name).get_shape())

    def describe(self, name: str) -> str:
        """Names a tensor that is there and its file, to begin an error with."""
        return f"{self._folder / self._file_of_tensor[name]}: tensor {name}"

    def num_unread(self, beginnings: tuple[str, ...]) -> int:
        """Returns how many tensors with these beginnings of names were never asked for."""
        return sum(name.startswith(beginnings) for name in self._unread)

    def check_all_read(self, ignored: tuple[str, ...], left_out: tuple[str, ...] = ()) -> None:
        """Raises CheckpointError when a tensor was never asked for: the model would be computed without it.

        `ignored` are endings of names that a checkpoint may carry for no use, `left_out` beginnings of names of what is
        left out on purpose.
        """
        kept = [name for name in self._unread if not name.startswith(left_out)]
        left = sorted(name for name in kept if not name.endswith(ignored))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(
                f"{self.describe(left[0])}{more} has no place in the architecture that config.json names"
            )

    def _read_index(self) -> dict[str, str]:
        path = self._folder / INDEX_NAME
        if not path.exists():
            return {}
        weight_map = read_model_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: weight_map must name a file for each tensor")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file or len(file) > _LONGEST_NAME:
                raise CheckpointError(f"{path}: weight_map names {file!r:.100}; it must be a file in the same folder")
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
        try:
            if not path.is_file():
                raise CheckpointError(f"{path}: no such file; {INDEX_NAME} or a broken link names it, or it is no file")
            handle: Any = safe_open(path, framework=self._framework)
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
