"""DeepSeek V2, V3 and R1 (arXiv 2405.04434, 2412.19437): latent attention, and experts that are chosen within groups,
beside some that every token takes. Moonlight and other models of DeepSeek's architecture are among them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cluster.errors import CheckpointError
from engine.json_fields import Fields
from engine.models.config import ModelConfig, RopeConfig
from engine.models.experts import ExpertNames, ExpertsConfig, Routing, expert_numbers
from engine.models.family import MOST_LAYERS, ModelFamily, read_decoder, read_num_layers
from engine.models.latent import LatentConfig


def _deepseek_v2(fields: Fields) -> ModelConfig:
    has_groups = _one_of(fields, "topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    _one_of(fields, "scoring_func", "softmax")
    if fields.flag("norm_topk_prob"):
        raise CheckpointError("config.json: norm_topk_prob true is not supported for DeepSeek V2; only false is")
    if fields.flag("mlp_bias"):
        raise CheckpointError("config.json: mlp_bias true is not supported for DeepSeek V2; only false is")
    routing = Routing(
        scores="softmax",
        has_bias=False,
        num_groups=fields.size("n_group") if has_groups else 1,
        num_chosen_groups=fields.size("topk_group") if has_groups else 1,
        num_summed=1,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    experts = read_experts(fields, routing, normalizes=False, num_dense=fields.count("first_k_dense_replace", 0))
    return _with_latents(fields, experts, is_interleaved=True)


def _deepseek_v3(fields: Fields) -> ModelConfig:
    _one_of(fields, "topk_method", "noaux_tc")
    _one_of(fields, "scoring_func", "sigmoid")
    experts = read_experts(
        fields,
        biased_routing(fields, num_groups=8, num_chosen_groups=4, scale=2.5),
        normalizes=fields.flag("norm_topk_prob", True),
        num_dense=fields.count("first_k_dense_replace", 3),
    )
    return _with_latents(fields, experts, is_interleaved=fields.flag("rope_interleave", True))


def biased_routing(fields: Fields, *, num_groups: int, num_chosen_groups: int, scale: float) -> Routing:
    """Sigmoids, and a bias that balances the experts' load (arXiv 2408.15664); the numbers are defaults."""
    return Routing(
        scores="sigmoid",
        has_bias=True,
        num_groups=fields.size("n_group", num_groups),
        num_chosen_groups=fields.size("topk_group", num_chosen_groups),
        num_summed=2,
        scale=fields.number("routed_scaling_factor", scale),
    )


def _with_latents(fields: Fields, experts: ExpertsConfig | None, *, is_interleaved: bool) -> ModelConfig:
    config, has_bias = read_decoder(fields), fields.flag("attention_bias")
    rope = replace(config.rope, is_interleaved=is_interleaved)
    if config.num_key_value_heads != config.num_attention_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads {config.num_key_value_heads} must be num_attention_heads "
            f"{config.num_attention_heads}: all heads are made of one latent"
        )
    latent = read_latent(fields)
    if has_bias and latent.q_lora_rank is None:
        raise CheckpointError("config.json: attention_bias true is not supported where q_lora_rank is null")
    return replace(
        config,
        num_key_value_heads=1,
        head_dim=latent.width,
        rope=rope,
        latent=latent,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        attention_scale=latent.qk_head_dim**-0.5 * _temperature(rope) ** 2,
        experts=experts,
        left_out=predicting_layers(fields),
    )


def read_latent(fields: Fields) -> LatentConfig:
    """Reads the sizes of latent attention."""
    return LatentConfig(
        q_lora_rank=None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        kv_lora_rank=fields.size("kv_lora_rank", 512),
        qk_nope_head_dim=fields.size("qk_nope_head_dim", 128),
        qk_rope_head_dim=fields.size("qk_rope_head_dim", 64),
        v_head_dim=fields.size("v_head_dim", 128),
    )


def _temperature(rope: RopeConfig) -> float:
    """The factor on queries, and on keys, by which yarn with `mscale_all_dim` sharpens attention over long contexts."""
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def predicting_layers(fields: Fields) -> tuple[str, ...]:
    """Layers behind the model's own that predict further tokens (DeepSeek V3, section 2.2)."""
    first, count = read_num_layers(fields), fields.count("num_nextn_predict_layers", 0)
    return tuple(f"model.layers.{first + n}." for n in range(min(count, MOST_LAYERS)))


def read_experts(fields: Fields, routing: Routing, *, normalizes: bool, num_dense: int) -> ExpertsConfig | None:
    """Reads the experts of all layers but the first `num_dense`. Raises CheckpointError naming the field."""
    _one_of(fields, "moe_layer_freq", 1)
    num_layers = read_num_layers(fields)
    if num_dense >= num_layers:
        return None
    num_experts, num_per_token = expert_numbers(fields, "n_routed_experts")
    _check_groups(routing, num_experts, num_per_token)
    width = fields.size("moe_intermediate_size")
    return ExpertsConfig(
        layers=tuple(layer >= num_dense for layer in range(num_layers)),
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=width,
        normalizes=normalizes,
        shared_intermediate_size=width * fields.count("n_shared_experts", 1),
        has_shared_gate=False,
        routing=routing,
        names=ExpertNames(shared="shared_experts"),
    )


def _check_groups(routing: Routing, num_experts: int, num_per_token: int) -> None:
    groups, chosen = routing.num_groups, routing.num_chosen_groups
    size = num_experts // groups
    if num_experts % groups or chosen > groups or num_per_token > chosen * size or routing.num_summed > size:
        raise CheckpointError(
            f"config.json: n_group {groups} and topk_group {chosen} leave no {num_per_token} of n_routed_experts "
            f"{num_experts} to choose: groups must be of equal size, of {routing.num_summed} experts at least, and "
            "those that are chosen must have num_experts_per_tok together"
        )


def _one_of(fields: Fields, name: str, *choices: object) -> object:
    """Reads a field that has one of the choices; where it is absent or null, the first of them."""
    value = fields.get(name)
    if value is None:
        return choices[0]
    if value not in choices:
        raise CheckpointError(
            f"config.json: {name} {value!r} is not supported; Baton computes {', '.join(map(repr, choices))}"
        )
    return value


FAMILIES = (
    ModelFamily("DeepSeek-V2", "DeepseekV2ForCausalLM", _deepseek_v2),
    ModelFamily("DeepSeek-V3 and R1", "DeepseekV3ForCausalLM", _deepseek_v3),
)
