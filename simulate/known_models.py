"""Shapes of well-known models, so that they can be planned for without their files.

Each entry has the fields of the model's config.json on huggingface.co that `simulate.shapes` reads, from the repository
named as its source. Facts of the shape only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "tie_word_embeddings": False}
_LLAMA_31 = {**_LLAMA, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}


def _decoder(hidden: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "torch_dtype": "float16",
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    # huggingface.co/meta-llama/Llama-3.1-8B, -70B, -405B
    "llama-3.1-8b": {**_LLAMA_31, **_decoder(4096, 14336, 32, 32)},
    "llama-3.1-70b": {**_LLAMA_31, **_decoder(8192, 28672, 80, 64)},
    "llama-3.1-405b": {**_LLAMA_31, **_decoder(16384, 53248, 126, 128)},
    # huggingface.co/meta-llama/Llama-2-70b-hf
    "llama-2-70b": {
        **_LLAMA,
        **_decoder(8192, 28672, 80, 64),
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    },
    # huggingface.co/mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x7b": {
        **_decoder(4096, 14336, 32, 32),
        "architectures": ["MixtralForCausalLM"],
        "torch_dtype": "bfloat16",
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    # huggingface.co/Qwen/Qwen3-32B
    "qwen3-32b": {
        **_decoder(5120, 25600, 64, 64),
        "architectures": ["Qwen3ForCausalLM"],
        "torch_dtype": "bfloat16",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    # huggingface.co/Qwen/Qwen3-235B-A22B
    "qwen3-235b-a22b": {
        **_decoder(4096, 12288, 94, 64),
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    # huggingface.co/deepseek-ai/DeepSeek-V3; its multi-token prediction module (14 B) is not loaded to serve
    "deepseek-v3": {
        **_decoder(7168, 18432, 61, 128),
        "architectures": ["DeepseekV3ForCausalLM"],
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
    },
    # huggingface.co/facebook/opt-13b, opt-66b; the paper's table 1 for 175B (arXiv 2205.01068)
    "opt-13b": _opt(5120, 40, 40),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    # huggingface.co/bigscience/bloom
    "bloom-176b": {
        "architectures": ["BloomForCausalLM"],
        "torch_dtype": "bfloat16",
        "n_embed": 14336,
        "n_layer": 70,
        "num_attention_heads": 112,
        "vocab_size": 250880,
        "seq_length": 2048,
        "tie_word_embeddings": True,
    },
}
"""Configurations of models by the names that `baton plan --model` takes."""
