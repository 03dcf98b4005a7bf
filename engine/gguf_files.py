"""Which tensors a GGUF file holds, by the names that a Hugging Face checkpoint has for them. Loads no torch.

Owns llama.cpp's names; `engine.gguf_checkpoint` reads the data.
"""

from __future__ import annotations

from pathlib import Path

from cluster.errors import CheckpointError
from cluster.gguf.config import ROPE_FACTORS, model_config
from cluster.gguf.header import GgufHeader, StoredTensor, read_header
from cluster.model_folder import gguf_file
from engine.tensor_files import TensorFiles

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


def open_tensor_files(path: Path) -> TensorFiles:
    """Opens the headers of a folder's safetensors, or of a GGUF file. Raises CheckpointError."""
    file = gguf_file(path)
    return TensorFiles(path) if file is None else GgufFile(file)


def name_in_folder(stored: str, *, is_gemma: bool = False) -> str:
    """Returns the name that a tensor has in a Hugging Face checkpoint; its own where it has none there."""
    name, _, ending = stored.rpartition(".")
    if name in _WHOLE:
        return f"{_WHOLE[name]}.{ending}"
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    known = {**_OF_LAYER, **_OF_GEMMA} if is_gemma else _OF_LAYER
    return f"model.layers.{layer}.{known[part]}.{ending}" if block == "blk" and part in known else stored


class GgufFile(TensorFiles):
    """One file and its header."""

    def _open_files(self) -> None:
        self._header: GgufHeader = read_header(self._folder)
        self._architecture = str(model_config(self._header)["architectures"][0])
        self._tensors: dict[str, StoredTensor] = {}
        for stored, tensor in self._header.tensors.items():
            name = name_in_folder(stored, is_gemma=self._is_gemma)
            if name in self._tensors:
                both = f"{self._tensors[name].name} and {stored}"
                raise CheckpointError(f"{self._folder}: tensors {both} are both {name}")
            self._tensors[name] = tensor
            self._file_of_tensor[name] = self._folder.name
        self._unread.update(self._tensors.keys() - {ROPE_FACTORS})

    @property
    def _is_gemma(self) -> bool:
        return self._architecture.startswith("Gemma")

    @property
    def files(self) -> tuple[str, ...]:
        return (self._folder.name,)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Returns where a tensor lies; raises CheckpointError if it is missing or has another shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing (expected shape {list(shape)})")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self.describe(name)} ({tensor.name}) has shape {list(tensor.shape)}, but the file's metadata ask "
                f"for {list(shape)}"
            )
        self._unread.discard(name)
        return tensor
