"""Small random checkpoints in Hugging Face's own format, complete with tokenizer, for every test that needs a model.

Written by transformers itself, so that the folders look as real ones do. The weights are far from their usual small
initial values: attention is sharp, biases and norms are not trivial, so that a wrong rope, mask or bias shows.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB_SIZE = 320
EOS_TOKEN_ID = 0
KINDS = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3")
LATENT_KINDS = ("deepseek-v2", "deepseek-v3")
GEMMA_KINDS = ("gemma2", "gemma3")
"""With layers that have a window between others, and much else."""

_CLASSES = {
    "llama": "Llama",
    "llama3-rope": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen2-moe": "Qwen2Moe",
    "qwen3-moe": "Qwen3Moe",
    "deepseek-v2": "DeepseekV2",
    "deepseek-v3": "DeepseekV3",
    "glm4-moe": "Glm4Moe",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "qwen3-next": "Qwen3Next",
    "gpt-oss": "GptOss",
    "phi3": "Phi3",
    "granite": "Granite",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "glm": "Glm",
    "glm4": "Glm4",
    "smollm3": "SmolLM3",
}
"""What transformers' classes begin with."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

_LATENTS = {
    "head_dim": None,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}

_KIND_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3-rope": {"rope_parameters": _LLAMA3_ROPE},
    "mistral": {"sliding_window": 24},
    "qwen2": {"head_dim": None, "hidden_size": 128, "tie_word_embeddings": True},
    "qwen3": {},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
    "qwen2-moe": {
        "head_dim": None,
        "hidden_size": 128,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
    },
    "qwen3-moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3-next": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "gpt-oss": {
        "sliding_window": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
    },
    "deepseek-v2": _LATENTS
    | {
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
    },
    "glm4-moe": {
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
    },
    "deepseek-v3": _LATENTS | {"q_lora_rank": 24, "routed_scaling_factor": 2.5, "n_shared_experts": 1},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "gemma3": {"sliding_window": 24, "query_pre_attn_scalar": 24, "num_hidden_layers": 7, "sliding_window_pattern": 3},
    "phi3": {"head_dim": None, "pad_token_id": EOS_TOKEN_ID, "sliding_window": 24},
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 4.0,
    },
    "olmo2": {"pad_token_id": EOS_TOKEN_ID},
    "olmo3": {"pad_token_id": EOS_TOKEN_ID, "sliding_window": 24},
    "glm": {"pad_token_id": EOS_TOKEN_ID},
    "glm4": {"pad_token_id": EOS_TOKEN_ID},
    "smollm3": {"pad_token_id": EOS_TOKEN_ID},
}

_WIDE_HEADS = {"head_dim": 32}
"""More than the hidden size over the number of heads."""
_ONE_KV_HEAD = {"num_key_value_heads": 1}
_SHORT_WINDOW = {"sliding_window": 5}
"""Shorter than a block of 16 tokens."""
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 2.5, 5.0],
}

FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama odd": ("llama", {**_WIDE_HEADS, **_ONE_KV_HEAD, "tie_word_embeddings": True}),
    "llama biased": ("llama3-rope", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral odd": ("mistral", {**_WIDE_HEADS, **_ONE_KV_HEAD, **_SHORT_WINDOW}),
    "mixtral": ("mixtral", {}),
    "mixtral odd": ("mixtral", {**_WIDE_HEADS, **_ONE_KV_HEAD, **_SHORT_WINDOW, "num_local_experts": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2 odd": ("qwen2", {**_ONE_KV_HEAD, **_SHORT_WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-moe": ("qwen2-moe", {}),
    "qwen2-moe odd": ("qwen2-moe", {**_ONE_KV_HEAD, "tie_word_embeddings": True, "num_experts": 7}),
    "qwen3": ("qwen3", {}),
    "qwen3 odd": ("qwen3", {**_WIDE_HEADS, **_ONE_KV_HEAD, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe odd": ("qwen3-moe", {**_WIDE_HEADS, **_ONE_KV_HEAD, "tie_word_embeddings": True}),
    "qwen3-next": ("qwen3-next", {}),
    # Its head is not tied: logits would be 2.5 times as large, and so their rounding, up to 1.3e-4 from float64 in
    # Baton and in transformers alike. Where what a state reads nearly vanishes, the norm behind it multiplies rounding
    # by up to 1,000 (eps 1e-6).
    "qwen3-next odd": ("qwen3-next", {**_ONE_KV_HEAD, "head_dim": 64, "num_experts": 5}),  # a block holds a state
    "gemma2": ("gemma2", {}),
    "gemma2 odd": ("gemma2", {**_WIDE_HEADS, **_ONE_KV_HEAD, **_SHORT_WINDOW, "tie_word_embeddings": False}),
    "gemma3": ("gemma3", {}),
    "gemma3 odd": ("gemma3", {**_WIDE_HEADS, **_ONE_KV_HEAD, **_SHORT_WINDOW, "attention_bias": True}),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss odd": ("gpt-oss", {**_WIDE_HEADS, **_ONE_KV_HEAD, **_SHORT_WINDOW}),
    "phi3": ("phi3", {}),
    "phi3 odd": ("phi3", {**_ONE_KV_HEAD, **_SHORT_WINDOW, "tie_word_embeddings": True}),
    "phi3 partial": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3 longrope": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 1200,
            "max_position_embeddings": 4800,
            "rope_parameters": _LONGROPE,
        },
    ),
    "granite": ("granite", {}),
    "granite odd": (
        "granite",
        {**_WIDE_HEADS, **_ONE_KV_HEAD, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 odd": ("olmo2", {**_WIDE_HEADS, **_ONE_KV_HEAD, "tie_word_embeddings": True, "attention_bias": True}),
    "olmo3": ("olmo3", {}),
    "olmo3 odd": (
        "olmo3",
        {
            **_WIDE_HEADS,
            **_ONE_KV_HEAD,
            **_SHORT_WINDOW,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm": ("glm", {}),
    "glm odd": ("glm", {**_WIDE_HEADS, **_ONE_KV_HEAD, "tie_word_embeddings": True, "attention_bias": False}),
    "glm4": ("glm4", {}),
    "glm4 odd": ("glm4", {**_WIDE_HEADS, **_ONE_KV_HEAD, "tie_word_embeddings": True}),
    "glm4-moe": ("glm4-moe", {}),
    "glm4-moe odd": ("glm4-moe", {**_WIDE_HEADS, **_ONE_KV_HEAD, "use_qk_norm": False, "n_routed_experts": 7}),
    "deepseek-v2": ("deepseek-v2", {}),
    "deepseek-v2 odd": ("deepseek-v2", {"topk_method": "greedy", "q_lora_rank": 24, "first_k_dense_replace": 0}),
    "deepseek-v3": ("deepseek-v3", {}),
    "deepseek-v3 odd": ("deepseek-v3", {"rope_interleave": False, "q_lora_rank": None, "v_head_dim": 40}),
    "smollm3": ("smollm3", {}),
    "smollm3 odd": (
        "smollm3",
        {
            **_WIDE_HEADS,
            **_ONE_KV_HEAD,
            **_SHORT_WINDOW,
            "use_sliding_window": True,
            "tie_word_embeddings": False,
            "no_rope_layers": [0, 1, 1, 0],
        },
    ),
}
"""A kind and what is changed in it, for each family the usual first: what is served is compared with transformers on
them (`tests/unit/engine/test_engine_families.py`), and is listed so in docs/models.md."""


def make_checkpoint(
    kind: str, folder: str | Path, *, seed: int = 0, dtype: str = "float32", shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Writes a random model of `kind` (of KINDS, GEMMA_KINDS or FAMILY_CASES) into `folder` and returns it.

    `overrides` are fields of the transformers config class; `shard_size` such as `"200KB"` splits the weights into
    several files with an index.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    fields = {**_COMMON, **_KIND_FIELDS[kind], **overrides}
    if fields["head_dim"] is None:  # a config class that derives it
        del fields["head_dim"]
    config_class, model_class = _classes(kind)
    model = model_class(config_class(**fields)).to(getattr(torch, dtype))
    _randomize(model, seed)
    model.save_pretrained(target, max_shard_size=shard_size)
    _make_tokenizer().save(str(target / "tokenizer.json"))
    return target


def make_revision(folder: Path, target: Path, seed: int = 1) -> Path:
    """Copies a checkpoint into `target`, with each weight a little different, and returns that."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(target.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(file).items():
            factor = 1 + 0.1 * torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() * factor).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def _classes(kind: str) -> tuple[Any, Any]:
    import transformers  # slow to import, so only where a checkpoint is made

    name = _CLASSES[kind]
    config = "Gemma3TextConfig" if kind == "gemma3" else f"{name}Config"
    return getattr(transformers, config), getattr(transformers, f"{name}ForCausalLM")


def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                is_offset = type(model).__name__.startswith(("Gemma", "Qwen3Next")) and "linear_attn" not in name
                value = 0.2 * noise if is_offset else 1.0 + 0.2 * noise
            elif name.endswith("A_log"):
                value = noise - 1.0
            elif name.endswith("bias"):
                value = 0.3 * noise
            elif name.endswith("sinks"):
                value = 2.0 * noise
            elif name.endswith(("gate_up_proj", "down_proj")):  # of stacked experts, inputs before outputs
                value = noise * 3.0 / parameter.shape[-2] ** 0.5
            elif "embed" in name:
                value = 0.4 * noise
            else:
                scale = 0.8 if "linear_attn" in name else 1.3  # states add up what they are given
                value = noise * scale / parameter.shape[-1] ** 0.5
            parameter.copy_(value)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def _make_tokenizer() -> Any:
    """Byte-level BPE of VOCAB_SIZE ids: the end-of-text token, the 256 bytes, and merges for the ids that are left."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshr"
    merges = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - 1 - len(alphabet)]
    pieces = ["<|endoftext|>", *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer
