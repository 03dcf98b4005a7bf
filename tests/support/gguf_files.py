"""Writes Hugging Face checkpoints as GGUF files, by the `gguf` package's writer, as llama.cpp's converter does.

Blocks of Q4_K and Q6_K, which the package only reads, are packed here one field at a time and with none of the code
that is tested. What each block says is the package's `dequantize`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
TypeOf = Callable[[str], str]
"""From a tensor's name in the file to the name of its type."""

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: Path, target: Path, kind: str | TypeOf = "F32", replaced: dict[str, Any] | None = None) -> Path:
    """Writes a folder's model into the file `target`. `kind`: the type of matrices. `replaced`: metadata that are
    added, or take the place of what the model says."""
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(target, architecture)
    _add_config(writer, config, architecture)
    writer.add_string("tokenizer.huggingface.json", (folder / "tokenizer.json").read_text())
    writer.add_array("tokenizer.ggml.tokens", _tokens(folder))
    template = folder / "tokenizer_config.json"
    if template.exists() and (text := json.loads(template.read_text()).get("chat_template")):
        writer.add_chat_template(text)
    end = config.get("eos_token_id")
    if isinstance(end, int):
        writer.add_eos_token_id(end)
        writer.add_bos_token_id(end)
    for key, value in (replaced or {}).items():
        for values in writer.kv_data:
            values.pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    type_of = kind if callable(kind) else lambda name: kind
    for name, tensor in stored_tensors(folder).items():
        is_plain = tensor.ndim == 1 or "ffn_gate_inp" in name
        wanted = "F32" if is_plain else _that_fits(type_of(name), tensor.shape[-1])
        raw = encode(tensor, wanted)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[wanted])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def stored_tensors(folder: Path) -> dict[str, Floats]:
    """The weights in float32 by their names in a GGUF file, in the order that llama.cpp gives to rows."""
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["architectures"][0]]
    tensors: dict[str, Floats] = {}
    of_layers: dict[str, dict[int, Floats]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            values = tensor.float().numpy()
            if architecture == "llama" and ".self_attn.q_proj." in name:
                values = _interleave(values, config["num_attention_heads"])
            if architecture == "llama" and ".self_attn.k_proj." in name:
                values = _interleave(values, config["num_key_value_heads"])
            if architecture.startswith("gemma") and name.endswith("norm.weight"):
                values = values + 1
            tensors[stored_name(name, architecture)] = values
            if (expert := _EXPERT.search(name)) is not None:
                of_layers.setdefault(stored_name(name, architecture), {})[int(expert[1])] = values
            elif name.endswith("shared_expert_gate.weight"):
                tensors[stored_name(name, architecture)] = values[0]
    stacked = {name: np.stack([values[n] for n in range(len(values))]) for name, values in of_layers.items()}
    return tensors | stacked


def decoded_folder(folder: Path, file: Path, target: Path) -> Path:
    """Writes the folder that says what the file's blocks say, in float32: what a reader is held against."""
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["architectures"][0]]
    decoded = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}
    for path in sorted(target.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(path).items():
            if (stored := stored_name(name, architecture)) not in decoded:
                continue
            expert = _EXPERT.search(name)
            values = decoded[stored] if expert is None else decoded[stored][int(expert[1])]
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
            which = name.split(".")[-2]
            if architecture == "llama" and which in heads:
                values = _separate(values, config[heads[which]])
            if architecture.startswith("gemma") and name.endswith("norm.weight"):
                values = values - 1
            tensors[name] = torch.from_numpy(np.array(values, dtype=np.float32)).view(tensor.shape)
        save_file(tensors, path, metadata={"format": "pt"})
    config["torch_dtype"] = config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config))
    return target


def stored_name(name: str, architecture: str) -> str:
    """The name that a tensor has in a GGUF file."""
    stem, _, ending = _EXPERT.sub(".experts.", name).rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    known = _LAYER | _NORMS["gemma" if architecture.startswith("gemma") else "llama"]
    return f"blk.{layer}.{known[part]}.{ending}"


def encode(values: Floats, kind: str) -> Any:
    """[.., rows, columns] in blocks of a type."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if kind in ("Q4_K", "Q6_K"):
        blocks = values.reshape(-1, 256)
        packed = np.stack([(_q4_k if kind == "Q4_K" else _q6_k)(block) for block in blocks])
        return packed.reshape(*values.shape[:-1], -1)
    return values if kind == "F32" else gguf.quantize(values, gguf.GGMLQuantizationType[kind])


def _that_fits(kind: str, num_columns: int) -> str:
    """The type that llama.cpp takes instead, where rows are no whole blocks of 256."""
    return {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}.get(kind, kind) if num_columns % 256 else kind


def _q4_k(block: Floats) -> Bytes:
    """256 values: eight groups, each with a scale and a minimum of six bits."""
    groups = block.reshape(8, 32)
    least = np.minimum(groups.min(axis=1), 0)
    scales, minima = (groups.max(axis=1) - least) / 15, -least
    of_scales, of_minima = np.float16(scales.max() / 63), np.float16(minima.max() / 63)
    factors = _steps(scales, of_scales, 63)
    offsets = _steps(minima, of_minima, 63)
    codes = np.zeros((8, 32), dtype=np.uint8)
    for group in range(8):
        scale = np.float32(of_scales) * factors[group]
        shifted = groups[group] + np.float32(of_minima) * offsets[group]
        codes[group] = _steps(shifted, scale, 15)
    packed = np.zeros(12, dtype=np.uint8)
    for group in range(4):
        packed[group] = factors[group] | factors[group + 4] >> 4 << 6
        packed[group + 4] = offsets[group] | offsets[group + 4] >> 4 << 6
        packed[group + 8] = factors[group + 4] & 15 | (offsets[group + 4] & 15) << 4
    halves = [codes[group] | codes[group + 1] << 4 for group in range(0, 8, 2)]
    head = np.array([of_scales, of_minima], dtype=np.float16).view(np.uint8)
    return np.concatenate([head, packed, *halves])


def _q6_k(block: Floats) -> Bytes:
    """256 values: sixteen groups with a signed scale of eight bits; codes of six bits, four low and two high."""
    groups = block.reshape(16, 16)
    scales = np.abs(groups).max(axis=1) / 31
    of_scales = np.float16(scales.max() / 127)
    factors = _steps(scales, of_scales, 127).astype(np.int8)
    codes = np.zeros((16, 16), dtype=np.uint8)
    for group in range(16):
        step = np.float32(of_scales) * factors[group]
        whole = np.zeros(16) if step == 0 else np.rint(groups[group] / step)
        codes[group] = np.clip(whole, -32, 31) + 32
    flat = codes.reshape(2, 4, 32)  # halves of 128, each four runs of 32
    low = [flat[half, run] & 15 | (flat[half, run + 2] & 15) << 4 for half in range(2) for run in range(2)]
    high = [sum((flat[half, run] >> 4).astype(np.uint8) << 2 * run for run in range(4)) for half in range(2)]
    tail = np.array([of_scales], dtype=np.float16).view(np.uint8)
    return np.concatenate([*low, *high, factors.view(np.uint8), tail]).astype(np.uint8)


def _steps(values: Floats, step: Any, top: int) -> Bytes:
    if np.float32(step) == 0:
        return np.zeros(values.shape, dtype=np.uint8)
    return np.clip(np.rint(values / np.float32(step)), 0, top).astype(np.uint8)


def _interleave(values: Floats, heads: int) -> Floats:
    """Rows of the two halves of each head in turn."""
    return np.ascontiguousarray(values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape))


def _separate(values: Floats, heads: int) -> Floats:
    return np.ascontiguousarray(values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape))


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if count := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole["rope_theta"])
    if whole.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(whole["rope_type"]))
        writer.add_rope_scaling_factor(whole["factor"])
    if whole.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(whole, head_dim))
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
        if config.get("layer_types"):
            slides = [kind == "sliding_attention" for kind in config["layer_types"]]
            writer.add_array(f"{architecture}.attention.sliding_window_pattern", slides)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Floats:
    """What frequencies are divided by, from transformers' own function."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {"hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim, "rope_parameters": rope}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**fields), torch.device("cpu"))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return np.asarray((plain / scaled).numpy(), dtype=np.float32)


def _tokens(folder: Path) -> list[str]:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return [token for token, _ in sorted(vocabulary.items(), key=lambda entry: entry[1])]
