"""Reads the header of a GGUF file: its metadata, and where each tensor lies.

Nothing that a header claims is believed before the file is known to be as long: counts and lengths are held against the
bytes that are left, so that a damaged file is refused at once and allocates nothing. (The `gguf` package's own reader
makes several arrays for each string of a vocabulary, which takes seconds, and has no such limits.)

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from cluster.errors import CheckpointError

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata, as struct names them."""
_STRING_BYTES = 8
"""A string takes so many at least: its length."""
_MOST_DIMS = 4
_PAIR_BYTES, _TENSOR_BYTES = _STRING_BYTES + 4 + 1, _STRING_BYTES + 4 + 4 + 8
"""The least bytes of a pair of metadata and of a tensor's entry."""
_LARGEST_HEADER = 256 << 20
_MOST_ENTRIES = 100_000
"""Pairs of metadata, or tensors."""
_MOST_VALUES = 4 << 20
"""Values of all arrays together; the largest vocabularies come to a million. Each takes memory here."""
_ALIGNMENT = "general.alignment"
_KEPT = 4
"""Headers that stay in memory."""


@dataclass(frozen=True)
class TensorType:
    """A type of ggml: `num_elements` values of a row lie in a block of `size_bytes`."""

    name: str
    num_elements: int
    size_bytes: int


TENSOR_TYPES = {
    number: TensorType(name, num_elements, size_bytes)
    for number, name, num_elements, size_bytes in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2)),
        *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34)),
        *((10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176)),
        *((14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98)),
        *((19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
        *((23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
        *((39, "MXFP4", 32, 17),),
    )
}
"""The types that the `gguf` package makes numbers of, by ggml's numbers."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost first, as torch has it; the file has it the other way round."""
    kind: TensorType
    start: int
    """Its first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: the elements of the last dimension."""
        return self.shape[-1] // self.kind.num_elements * self.kind.size_bytes

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """The part of a file before its weights. To be read only: headers are shared."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]
    size_bytes: int
    """Bytes of the header."""


def read_header(path: Path) -> GgufHeader:
    """Reads a file's header, or gives it again while the file has not changed. Raises CheckpointError that names the
    file and what is wrong."""
    try:
        status = path.stat()
        return _read(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None


@lru_cache(maxsize=_KEPT)
def _read(path: Path, size: int, modified: int, inode: int) -> GgufHeader:
    if size < len(_MAGIC) + 4 + 8 + 8:
        raise CheckpointError(f"{path}: {size} bytes are no GGUF file; fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _Reader(path, content, size).header()


class _Reader:
    """Goes through a header from its first byte on."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        self._path, self._content, self._size = path, content, size
        self._end = min(size, _LARGEST_HEADER)
        self._at = 0
        self._num_values = 0

    def header(self) -> GgufHeader:
        if (magic := self._content[:4]) != _MAGIC:
            raise self._wrong(f"is no GGUF file (begins with {magic!r}, not {_MAGIC!r})")
        self._at = 4
        version = int(self._number("I"))
        if version not in _VERSIONS:
            swapped = " of the other byte order" if version & 0xFFFF == 0 else ""
            raise self._wrong(f"GGUF version {version}{swapped} is not supported; Baton reads 2 and 3, little-endian")
        num_tensors, num_pairs = int(self._number("Q")), int(self._number("Q"))
        self._check(num_pairs, _PAIR_BYTES, "pairs of metadata")
        self._check(num_tensors, _TENSOR_BYTES, "tensors")
        if max(num_tensors, num_pairs) > _MOST_ENTRIES:
            raise self._wrong(
                f"names {num_tensors:,} tensors and {num_pairs:,} pairs of metadata; at most {_MOST_ENTRIES:,} are read"
            )
        metadata: dict[str, Value] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in metadata:
                raise self._wrong(f"names {key} twice")
            metadata[key] = self._value(int(self._number("I")), key)
        self._check(num_tensors, _TENSOR_BYTES, "tensors")
        entries = [self._tensor() for _ in range(num_tensors)]
        tensors = self._placed(entries, metadata)
        return GgufHeader(self._path, metadata, tensors, self._at)

    def _placed(self, entries: list[StoredTensor], metadata: dict[str, Value]) -> dict[str, StoredTensor]:
        """The tensors at their places in the file."""
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"{_ALIGNMENT} must be a power of two (is {alignment!r})")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self._wrong(f"has two tensors {entry.name}")
            tensor = StoredTensor(entry.name, entry.shape, entry.kind, begin + entry.start)
            if (end := tensor.start + tensor.size_bytes) > self._size:
                raise self._wrong(
                    f"tensor {entry.name} ends at byte {end:,}, behind the file's {self._size:,}: fetch it again"
                )
            tensors[entry.name] = tensor
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for one, other in pairwise(in_order):
            if other.start < one.start + one.size_bytes:
                raise self._wrong(f"tensor {other.name} begins at byte {other.start:,}, within tensor {one.name}")
        return tensors

    def _tensor(self) -> StoredTensor:
        """A tensor whose `start` counts from the end of the header."""
        name = self._string()
        num_dims = int(self._number("I"))
        if not 1 <= num_dims <= _MOST_DIMS:
            raise self._wrong(f"tensor {name} has {num_dims} dimensions; there are 1 to {_MOST_DIMS}")
        shape = tuple(int(size) for size in reversed(self._numbers("Q", num_dims)))
        number = int(self._number("I"))
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise self._wrong(f"tensor {name} has ggml's type {number}, which is not supported; Baton reads {known}")
        if min(shape) < 1 or shape[-1] % kind.num_elements:
            raise self._wrong(
                f"tensor {name} has shape {list(shape)}, and {kind.name} has blocks of {kind.num_elements}"
            )
        return StoredTensor(name, shape, kind, int(self._number("Q")))

    def _value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self._wrong(f"{key} has type {kind} of metadata, which there is not")
        return self._number(_NUMBERS[kind])

    def _array(self, key: str) -> tuple[Scalar, ...]:
        kind, count = int(self._number("I")), int(self._number("Q"))
        if kind != _STRING and kind not in _NUMBERS:
            raise self._wrong(f"{key} is an array of type {kind}, which is not supported")
        least_bytes = _STRING_BYTES if kind == _STRING else struct.calcsize(f"<{_NUMBERS[kind]}")
        self._check(count, least_bytes, f"{'strings' if kind == _STRING else 'numbers'} of {key}")
        self._num_values += count
        if self._num_values > _MOST_VALUES:
            raise self._wrong(f"{key} brings arrays to {self._num_values:,} values; at most {_MOST_VALUES:,} are read")
        return tuple(self._string() for _ in range(count)) if kind == _STRING else self._numbers(_NUMBERS[kind], count)

    def _string(self) -> str:
        length = int(self._number("Q"))
        self._check(length, 1, "bytes of a string")
        raw = self._content[self._at : self._at + length]
        self._at += length
        # A vocabulary's pieces may be parts of characters.
        return raw.decode("utf-8", errors="replace")

    def _number(self, form: str) -> int | float | bool:
        return self._numbers(form, 1)[0]

    def _numbers(self, form: str, count: int) -> tuple[int | float | bool, ...]:
        self._check(count, struct.calcsize(f"<{form}"), "numbers")
        layout = f"<{count}{form}"
        values = struct.unpack_from(layout, self._content, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _check(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._end - self._at:
            raise self._wrong(
                f"truncated or damaged: names {count:,} {what} at byte {self._at:,}, and has {self._size:,} bytes; "
                "fetch it again"
            )

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}")
