"""Which tensors a GGUF file holds, by the names that a Hugging Face checkpoint has for them. Loads no torch.

Owns llama.cpp's names; `engine.gguf_checkpoint` reads the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_EXPERTS = ".experts."
_OF_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_SPECIAL = {"Gemma2ForCausalLM": _OF_GEMMA, "Gemma3ForCausalLM": _OF_GEMMA, "MixtralForCausalLM": _OF_MIXTRAL}
"""Names that an architecture has instead."""


def open_tensor_files(path: Path) -> TensorFiles:
    """Opens the headers of a folder's safetensors, or of a GGUF file. Raises CheckpointError."""
    file = gguf_file(path)
    return TensorFiles(path) if file is None else GgufFile(file)


def name_in_folder(stored: str, architecture: str) -> str:
    """Returns the name that a tensor has in a Hugging Face checkpoint; its own where it has none there. That of all
    experts of a layer leaves out their numbers."""
    name, _, ending = stored.rpartition(".")
    if name in _WHOLE:
        return f"{_WHOLE[name]}.{ending}"
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    known = {**_OF_LAYER, **_SPECIAL.get(architecture, {})}
    return f"model.layers.{layer}.{known[part]}.{ending}" if block == "blk" and part in known else stored


def _in_folder(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors that a Hugging Face checkpoint has in place of one of the file: each expert's matrix by
    itself, and the gate of a shared expert as a matrix."""
    if _EXPERTS in name and len(tensor.shape) == 3:
        block, _, part = name.partition(_EXPERTS)
        count, *shape = tensor.shape
        size = tensor.size_bytes // count
        for number in range(count):
            expert = replace(tensor, shape=tuple(shape), start=tensor.start + number * size)
            yield f"{block}{_EXPERTS}{number}.{part}", expert
    elif name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:
        yield name, replace(tensor, shape=(1, *tensor.shape))
    else:
        yield name, tensor


class GgufFile(TensorFiles):
    """One file and its header."""

    def _open_files(self) -> None:
        self._header: GgufHeader = read_header(self._folder)
        self._architecture = str(model_config(self._header)["architectures"][0])
        self._tensors: dict[str, StoredTensor] = {}
        for stored, whole in self._header.tensors.items():
            for name, tensor in _in_folder(name_in_folder(stored, self._architecture), whole):
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

    def find(self, name: str, shape: tuple[int, ...], types: Sequence[str] = ()) -> StoredTensor:
        """Returns where a tensor lies; raises CheckpointError if it is missing or has another shape.
        `types` is not looked at: headers are refused for types that are not read."""
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
