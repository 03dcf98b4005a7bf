"""Random models in Hugging Face's own format: as slow as real ones of their size, and of no other use.

    python benchmarks/make_model.py {S,M,L,MHA,MOE,GEMMA} DIR

S, M and L are Llamas whose query heads share key heads. MHA is one whose heads share nothing, as in the caches that
`kv_bandwidth` moves: of its size, the model with the most KV. MOE is a Qwen3 with experts, GEMMA a Gemma 3, of whose
layers five of six have a window. The tokenizer knows bytes and made-up words.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.program import ExitCode


class Shape(StrEnum):
    """What can be made."""

    S = "S"
    M = "M"
    L = "L"
    MHA = "MHA"
    MOE = "MOE"
    GEMMA = "GEMMA"


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_SHAPES: dict[Shape, dict[str, int]] = {
    shape: dict(zip((*_SIZES, *_HEADS), values, strict=True))
    for shape, values in {
        Shape.S: (8192, 384, 2304, 6, 6, 2),  # 25 million parameters
        Shape.M: (32000, 1024, 2304, 10, 16, 4),  # 160 million
        Shape.L: (32000, 2048, 5632, 22, 32, 4),  # 1.1 billion
        Shape.MHA: (32000, 768, 3072, 12, 12, 12),  # 160 million
        Shape.MOE: (32000, 1024, 2304, 16, 16, 4),  # 1 billion, of which a token takes 200 million
        Shape.GEMMA: (32000, 1024, 2304, 12, 4, 1),  # 150 million
    }.items()
}
_EXPERTS = {"num_experts": 36, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}
_ARCHITECTURES: dict[Shape, dict[str, Any]] = {
    Shape.MOE: {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64} | _EXPERTS,
    Shape.GEMMA: {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "tie_word_embeddings": True,
    },
}
"""What config.json of a shape that is no Llama has beside, or instead of, a Llama's."""
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")


def make_model(shape: Shape, folder: Path, vocab_size: int | None = None) -> Path:
    """Writes the model into `folder`, which is made; one that lies there already is kept. Raises OSError."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(shape) | ({} if vocab_size is None else {"vocab_size": vocab_size})
    generator = torch.Generator().manual_seed(0)
    norm = 0.0 if shape == Shape.GEMMA else 1.0  # Gemma's are offsets from 1
    weights = {name: _random(size, generator, norm) for name, size in _tensors(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    unfinished = folder / "config.json.part"  # a folder with a config is whole
    unfinished.write_text(json.dumps(config, indent=2))
    os.replace(unfinished, folder / "config.json")
    return folder


def _config(shape: Shape) -> dict[str, Any]:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    return _SHAPES[shape] | llama | _ARCHITECTURES.get(shape, {})


def _random(shape: tuple[int, ...], generator: torch.Generator, norm: float) -> torch.Tensor:
    """Products keep the size of their inputs; norms, whose weights are `norm`, change nothing."""
    if len(shape) == 1:
        return torch.full(shape, norm, dtype=torch.bfloat16)
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(torch.bfloat16)


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, num_heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim = config.get("head_dim", hidden // num_heads)
    is_gemma = "sliding_window" in config
    attended, num_kv = num_heads * head_dim, head_dim * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, num_outputs in {"q": attended, "k": num_kv, "v": num_kv}.items():
            yield f"{prefix}.self_attn.{name}_proj.weight", (num_outputs, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, attended)
        if is_gemma or "num_experts" in config:
            yield from ((f"{prefix}.self_attn.{name}_norm.weight", (head_dim,)) for name in "qk")
        if "num_experts" in config:
            yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            yield from _mlp(f"{prefix}.mlp", hidden, inner)
        norms = ["input", "post_attention", *(("pre_feedforward", "post_feedforward") if is_gemma else ())]
        yield from ((f"{prefix}.{name}_layernorm.weight", (hidden,)) for name in norms)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("gate", "up"):
        yield f"{prefix}.{name}_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE over made-up words; it may know fewer tokens than the model, never more."""
    choices = random.Random(0)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnprstvwxz" for vowel in "aeiou"]
    words = sorted({"".join(choices.choices(syllables, k=3)) for _ in range(vocab_size)})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f" {word}" for word in words), trainer)
    return tokenizer


def main(
    shape: Annotated[
        Shape, typer.Argument(help="25 M, 160 M, 1.1 B parameters; MHA: 160 M, much KV; MOE: experts; GEMMA: windows.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; a model that is there is kept.")],
    vocab_size: Annotated[int | None, typer.Option(help="Another vocabulary than the shape's.")] = None,
) -> None:
    """Makes a random model."""
    is_there = (folder / "config.json").exists()
    try:
        make_model(shape, folder, vocab_size)
    except OSError as error:
        typer.echo(f"error: {folder} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    size = (folder / "model.safetensors").stat().st_size
    typer.echo(f"{folder} {'is there already' if is_there else 'made'}: {size / 1e6:,.0f} MB of weights")


if __name__ == "__main__":
    typer.run(main)
