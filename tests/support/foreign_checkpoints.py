"""Small random checkpoints of models that Baton has no family for and that transformers' own code computes.

`FOREIGN` names those that are served, by transformers' model_type, with what their configs need beside the sizes that
all of them have; `REFUSED` those that are not, with a part of the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 16}
_WINDOW = {"sliding_window": 24}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}

FOREIGN: dict[str, dict[str, Any]] = {
    "afmoe": {**_HEADS, **_EXPERTS, **_WINDOW},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 6, "moe_topk": 2},
    "beam": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {**_WINDOW},
    "cohere2_moe": {**_HEADS, **_WINDOW, "num_experts": 6, "num_experts_per_tok": 2},
    "ctrl": {"dff": 128},
    "cwm": {**_HEADS, **_WINDOW},
    "dots1": {
        **_HEADS,
        **_EXPERTS,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "ernie4_5": {**_HEADS},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "exaone4": {**_WINDOW},
    "exaone_moe": {**_WINDOW, **_EXPERTS},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
    "flint": {**_HEADS, **_EXPERTS},
    "gemma": {**_HEADS},
    "glm": {**_HEADS},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {"num_key_value_heads": 8},
    "granite_swa": {**_WINDOW, "attention_multiplier": 0.25},
    "granitemoe": {**_LOCAL_EXPERTS},
    "granitemoe_swa": {**_LOCAL_EXPERTS, **_WINDOW},
    "granitemoeshared": {**_LOCAL_EXPERTS, "shared_intermediate_size": 32},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {**_HEADS},
    "hunyuan_v1_moe": {**_HEADS, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {**_HEADS, **_EXPERTS},
    "hyperclovax": {},
    "jais2": {},
    "kolibri1": {**_HEADS, **_EXPERTS, **_WINDOW},
    "laguna": {**_HEADS, **_EXPERTS},
    "mellum": {**_HEADS, **_EXPERTS, **_WINDOW},
    "minimax_m2": {**_HEADS, **_LOCAL_EXPERTS, "rotary_dim": 8},
    "ministral": {**_HEADS, **_WINDOW},
    "ministral3": {**_HEADS},
    "modernbert-decoder": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phimoe": {"num_local_experts": 6},
    "seed_oss": {**_HEADS},
    "solar_open": {**_HEADS, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "starcoder2": {**_WINDOW},
    "vaultgemma": {**_HEADS, **_WINDOW},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({}, "it does not take attention from outside"),
    "codegen": ({"rotary_dim": 4}, "it does not take attention from outside"),
    "diffllama": ({}, "4 layers call for attention 8 times"),
    "doge": ({}, "is not served"),
    "falcon": ({}, "it does not take attention from outside"),
    "gptj": ({"rotary_dim": 4}, "it does not take attention from outside"),
    "jetmoe": ({}, "is not served"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "its layer_types has conv"),
    "llama4_text": ({**_HEADS, "intermediate_size_mlp": 64}, "chunked_attention"),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "n_groups": 1}, "it does not take attention from outside"),
    "minicpm3": ({}, "the sizes of its heads differ"),
    "minimax": ({**_HEADS, **_LOCAL_EXPERTS}, "its layer_types has linear_attention"),
    "mpt": ({}, "it does not take attention from outside"),
    "recurrent_gemma": ({}, "is not served"),
    "stablelm": ({}, "it does not take attention from outside"),
    "youtu": ({}, "the sizes of its heads differ"),
    "zaya": ({}, "is not served"),
}


def make_foreign(model_type: str, folder: Path, *, dtype: str = "float32", **overrides: Any) -> Path:
    """Writes a random model into `folder`, as transformers saves it, and returns that."""
    from transformers import AutoModelForCausalLM  # slow to import

    torch.manual_seed(0)  # for what is not a parameter of two dimensions
    model = AutoModelForCausalLM.from_config(foreign_config(model_type, **overrides), dtype=torch.float32)
    _randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def foreign_config(model_type: str, **overrides: Any) -> Any:
    """transformers' config of a model in `FOREIGN` or `REFUSED`, or of another that needs nothing else."""
    from transformers import AutoConfig

    own = FOREIGN.get(model_type, REFUSED.get(model_type, ({}, ""))[0])
    return AutoConfig.for_model(model_type, **{**_SIZES, **own, **overrides})


def architecture_of(model_type: str) -> str:
    """The name of a model in config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _randomize(model: torch.nn.Module) -> None:
    """Weights far from their small initial values: attention is sharp, norms and biases are not trivial."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_((0.2 if "norm" in name else 0.3) * noise)
            elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise * 1.3 / parameter.shape[-1] ** 0.5)
