"""Reads a GGUF file's weights as if they were a Hugging Face checkpoint: by its names, shapes and order of rows.

llama.cpp keeps the two halves of each query and key head of Llama interleaved, and Gemma's norms with the one added
that transformers adds; both are taken back here. Blocks become numbers by the `gguf` package; `raw_blocks` gives them
as they are.
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
from cluster.gguf.config import ROPE_FACTORS, model_config
from cluster.gguf.header import GgufHeader, StoredTensor, read_header
from cluster.model_folder import gguf_file
from engine.checkpoint import Checkpoint, TensorSlice
from engine.weight_stream import WeightStream

Bytes = npt.NDArray[np.uint8]

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ELEMENTS_AT_ONCE = 1 << 22
"""That are decoded in one go, as float32."""


def open_checkpoint(path: Path, stream: WeightStream | None = None) -> Checkpoint:
    """Opens a folder of safetensors, or a GGUF file. Raises CheckpointError."""
    file = gguf_file(path)
    return Checkpoint(path, stream) if file is None else GgufCheckpoint(file, stream)


def name_in_folder(stored: str, *, is_gemma: bool = False) -> str:
    """Returns the name that a tensor has in a Hugging Face checkpoint; its own where it has none there."""
    name, _, ending = stored.rpartition(".")
    if name in _WHOLE:
        return f"{_WHOLE[name]}.{ending}"
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    known = {**_OF_LAYER, **_OF_GEMMA} if is_gemma else _OF_LAYER
    return f"model.layers.{layer}.{known[part]}.{ending}" if block == "blk" and part in known else stored


class GgufCheckpoint(Checkpoint):
    """An open GGUF file. Slices are of the types that its tensors have; whatever is read becomes numbers."""

    def _open_files(self) -> None:
        file = self._folder
        self._header: GgufHeader = read_header(file)
        config = model_config(self._header)
        architecture = config["architectures"][0]
        is_gemma = architecture.startswith("Gemma")
        self._has_offset_norms = is_gemma
        self._half_head = config["head_dim"] // 2 if architecture == "LlamaForCausalLM" else 0
        """Rows of half a head, where halves are interleaved."""
        self._content: Bytes = np.memmap(file, dtype=np.uint8, mode="r")
        self._tensors: dict[str, StoredTensor] = {}
        for stored, tensor in self._header.tensors.items():
            name = name_in_folder(stored, is_gemma=is_gemma)
            if name in self._tensors:
                raise CheckpointError(f"{file}: tensors {self._tensors[name].name} and {stored} are both {name}")
            self._tensors[name] = tensor
            self._file_of_tensor[name] = file.name
        self._unread.update(self._tensors.keys() - {ROPE_FACTORS})

    @property
    def files(self) -> tuple[str, ...]:
        return (self._folder.name,)

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
        """The type of a tensor that is there."""
        return self._tensors[name].kind.name

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def discard_zeros(self, ending: str) -> None:
        """Nothing: who writes these files adds none."""

    def _take(self, part: TensorSlice) -> StoredTensor:
        tensor = self._tensors.get(part.name)
        if tensor is None:
            raise CheckpointError(f"{self._folder}: tensor {part.name} is missing (expected shape {list(part.shape)})")
        if tensor.shape != part.shape:
            raise CheckpointError(
                f"{self.describe(part.name)} ({tensor.name}) has shape {list(tensor.shape)}, but the file's metadata "
                f"ask for {list(part.shape)}"
            )
        self._unread.discard(part.name)
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
        """Float32, exact, along the last dimension."""
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
        """As a Hugging Face checkpoint has them."""
        is_offset = self._has_offset_norms and name.endswith("norm.weight")
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
