"""Reads a GGUF file's weights as if they were a Hugging Face checkpoint: by its names, shapes and order of rows.

llama.cpp keeps the two halves of each query and key head of Llama and Mixtral interleaved, and Gemma's norms with the
one added that transformers adds; both are taken back here. Blocks become numbers by the `gguf` package; `raw_blocks`
gives them as they are.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import CheckpointError
from cluster.gguf.config import model_config
from cluster.gguf.header import StoredTensor
from cluster.model_folder import gguf_file
from engine.checkpoint import Checkpoint, TensorSlice
from engine.gguf_files import GgufFile
from engine.weight_stream import WeightStream

Bytes = npt.NDArray[np.uint8]

_INTERLEAVED = ("LlamaForCausalLM", "MixtralForCausalLM")
_ELEMENTS_AT_ONCE = 1 << 22
"""Elements that are decoded in one go, as float32."""


def open_checkpoint(path: Path, stream: WeightStream | None = None) -> Checkpoint:
    """Opens a folder of safetensors, or a GGUF file. Raises CheckpointError."""
    file = gguf_file(path)
    return Checkpoint(path, stream) if file is None else GgufCheckpoint(file, stream)


class GgufCheckpoint(GgufFile, Checkpoint):
    """An open GGUF file. Slices are of the types that its tensors have; whatever is read becomes numbers."""

    def _open_files(self) -> None:
        super()._open_files()
        head_dim = model_config(self._header)["head_dim"]
        self._half_head = head_dim // 2 if self._architecture in _INTERLEAVED else 0
        """Rows of half a head, where halves are interleaved."""
        self._content: Bytes = np.memmap(self._folder, dtype=np.uint8, mode="r")

    def close(self) -> None:
        super().close()
        self._content = np.empty(0, np.uint8)

    def read(self, part: TensorSlice, out: torch.Tensor) -> None:
        tensor = self._take(part)
        if not out.is_floating_point() or out.dtype.itemsize < 2:
            raise CheckpointError(f"{self.describe(part.name)} has type {tensor.kind.name}, not {out.dtype}")
        if not math.prod(part.local_shape):
            return
        rows = self._rows(part)
        if len(tensor.shape) == 1:
            values = self._decode(tensor, self._row_bytes(tensor)[None])[0][rows]
            out.copy_(self._as_stored(part.name, values))
            return
        first, stop, offset = _cover(tensor, part)
        num_columns = part.local_shape[1]
        at_once = max(1, _ELEMENTS_AT_ONCE // tensor.shape[1])
        for start in range(0, len(rows), at_once):
            some = self._row_bytes(tensor)[rows[start : start + at_once], first:stop]
            values = self._decode(tensor, some)[:, offset : offset + num_columns]
            out[start : start + at_once].copy_(self._as_stored(part.name, values))

    def raw_blocks(self, part: TensorSlice) -> tuple[Bytes, int]:
        """Returns the blocks around a slice of a matrix, [rows, blocks, bytes of a block], and the place of the slice's
        first column in the first of them. Raises as `read`."""
        tensor = self._take(part)
        first, stop, offset = _cover(tensor, part)
        raw = self._row_bytes(tensor)[self._rows(part), first:stop]
        return raw.reshape(len(raw), -1, tensor.kind.size_bytes), offset

    def type_of(self, name: str) -> str:
        """Returns the type of a tensor that is there."""
        return self._tensors[name].kind.name

    def discard_zeros(self, ending: str) -> None:
        """Does nothing: who writes these files adds none."""

    def _take(self, part: TensorSlice) -> StoredTensor:
        tensor = self.find(part.name, part.shape)
        self.bytes_read += math.prod(part.local_shape) * tensor.kind.size_bytes // tensor.kind.num_elements
        return tensor

    def _rows(self, part: TensorSlice) -> npt.NDArray[np.int64]:
        """The rows of the file that a slice takes, in the order in which it has them."""
        start, stop = (part.start, part.stop) if part.dim == 0 else (0, None)
        rows = np.arange(start, part.shape[0] if stop is None else stop)
        if self._half_head and part.name.rpartition(".")[0].endswith(("self_attn.q_proj", "self_attn.k_proj")):
            head, within = np.divmod(rows, 2 * self._half_head)
            half, place = np.divmod(within, self._half_head)
            rows = head * 2 * self._half_head + 2 * place + half
        return rows

    def _row_bytes(self, tensor: StoredTensor) -> Bytes:
        """[rows, bytes of a row], or [bytes] of a vector."""
        whole = self._content[tensor.start : tensor.start + tensor.size_bytes]
        return whole if len(tensor.shape) == 1 else whole.reshape(tensor.shape[0], tensor.row_bytes)

    def _decode(self, tensor: StoredTensor, raw: Bytes) -> npt.NDArray[np.float32]:
        """Decodes rows along the last dimension to float32, exactly."""
        raw, kind = np.ascontiguousarray(raw), tensor.kind.name
        if kind == "F32":
            return raw.view(np.float32)
        if kind == "F16":
            return raw.view(np.float16).astype(np.float32)
        if kind == "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        package = _package(f"{self._folder}: tensor {tensor.name} in {kind}")
        values: npt.NDArray[np.float32] = package.dequantize(raw, package.GGMLQuantizationType[kind])
        return values

    def _as_stored(self, name: str, values: npt.NDArray[Any]) -> torch.Tensor:
        """Returns values as a Hugging Face checkpoint has them."""
        is_offset = self._is_gemma and name.endswith("norm.weight")
        return torch.from_numpy(values - 1 if is_offset else np.array(values))


def _package(needed_by: str) -> Any:
    """The package that knows all blocks, which a machine that serves no GGUF need not have."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise CheckpointError(f"{needed_by}: cannot be decoded without the package gguf ({error})") from None


def _cover(tensor: StoredTensor, part: TensorSlice) -> tuple[int, int, int]:
    """The bytes [first, stop) of each row that hold whole blocks around a slice's columns, and the place of the first
    column in them."""
    start, stop = (part.start, part.stop) if part.dim == 1 else (0, None)
    stop = tensor.shape[1] if stop is None else stop
    block = tensor.kind.num_elements
    first = start // block
    return first * tensor.kind.size_bytes, -(-stop // block) * tensor.kind.size_bytes, start - first * block
