"""A random model of 160 million parameters in Hugging Face's own format: as slow as a real one, and of no other use.

Twelve layers of 12 heads, as in the caches that `kv_bandwidth` moves. It has no tokenizer; prompts are token ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, VOCAB_SIZE = 768, 3072, 12, 12, 32000

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def make_random_model(folder: Path) -> Path:
    """Writes the model (325 MB) into `folder`, which is made; one that lies there already is kept."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {name: _random(shape, generator) for name, shape in _shapes()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    unfinished = folder / "config.json.part"  # a folder with a config is whole
    unfinished.write_text(json.dumps(CONFIG, indent=2))
    os.replace(unfinished, folder / "config.json")
    return folder


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Products keep the size of their inputs; norms change nothing."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(torch.bfloat16)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            yield f"{prefix}.self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB_SIZE, HIDDEN)
