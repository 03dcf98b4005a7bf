"""The tensors that a checkpoint must have by its `ModelConfig`: their names and whole shapes. Loads no torch.

They are those that the classes in `engine.models.decoder` read; a test holds the two equal. Left to these alone is what
transformers' own code computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.gguf_files import open_tensor_files
from engine.models.config import ModelConfig
from engine.models.delta_net import DeltaNetConfig
from engine.models.experts import MXFP4_GROUP, ExpertNames, ExpertsConfig
from engine.models.folder import check_foreign, is_foreign, read_fields, read_model
from engine.models.latent import LatentConfig
from engine.quantization.stored import Microscaling
from engine.tensor_files import CODE_TYPES, FLOAT_TYPES, NamedShape, TensorFiles


def check_folder(folder: Path, model_impl: str = "auto", *, needs_weights: bool = True) -> ModelConfig | None:
    """Returns the model, or None where transformers' own code is to compute it. Reads no weights.

    Raises CheckpointError for a configuration that is not served, naming the key and what is supported, and for a
    tensor that is missing, in two files, of another shape or type or without a place in the model, naming the file and
    the tensor."""
    fields, config = read_fields(folder), None
    if is_foreign(fields, model_impl):
        check_foreign(folder, fields)
    else:
        config = read_model(folder, "native")
    if needs_weights:
        with open_tensor_files(folder) as files:
            if config is not None:
                _check_tensors(config, files)
    return config


def _check_tensors(config: ModelConfig, files: TensorFiles) -> None:
    packing = config.packing
    types = FLOAT_TYPES if packing is None else (*FLOAT_TYPES, *CODE_TYPES)
    for name, shape in declared_tensors(config):
        is_matrix = len(shape) == 2 and name.endswith(".weight")
        for stored in packing.tensors_of(name, shape, files) if packing and is_matrix else [(name, shape)]:
            files.find(*stored, types)
    # Some writers add biases of zeros to packed layers: whether they are, only their data say.
    zeros = () if packing is None else (".bias",)
    files.check_all_read(unused_endings(config) + zeros, config.left_out)


def unused_endings(config: ModelConfig) -> tuple[str, ...]:
    """Returns endings of tensors that a checkpoint may carry for no use: what is computed here instead, a head that is
    the embedding, what its `quantization_config` says as well."""
    tied = ("lm_head.weight",) if config.foreign is None and config.tie_word_embeddings else ()
    return ("rotary_emb.inv_freq", *tied, *(() if config.packing is None else config.packing.unused_tensors))


def declared_tensors(config: ModelConfig) -> Iterator[NamedShape]:
    """Yields each tensor of the model with its shape in a plain checkpoint, but for experts in MXFP4."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer(config, layer):
            yield f"model.layers.{layer}.{name}", shape


def _layer(config: ModelConfig, layer: int) -> Iterator[NamedShape]:
    yield from ((f"{name}.weight", (config.hidden_size,)) for name in config.norms.names)
    if config.delta_net is not None and config.delta_net.layers[layer]:
        yield from _states(config.delta_net, config.hidden_size)
    elif config.latent is not None:
        yield from _latents(config, config.latent)
    else:
        yield from _attention(config)
    if config.experts is not None and config.experts.layers[layer]:
        yield from _experts(config.experts, config.hidden_size, isinstance(config.packing, Microscaling))
    else:
        yield from _mlp(config)


def _states(net: DeltaNetConfig, hidden: int) -> Iterator[NamedShape]:
    yield "linear_attn.conv1d.weight", (net.num_key_heads * net.head_channels, 1, net.conv_kernel)
    yield "linear_attn.A_log", (net.num_value_heads,)
    yield "linear_attn.dt_bias", (net.num_value_heads,)
    yield "linear_attn.norm.weight", (net.value_head_dim,)
    values, gates = net.num_value_heads * net.value_head_dim, 2 * net.num_value_heads
    yield "linear_attn.in_proj_qkvz.weight", (net.num_key_heads * net.head_channels + values, hidden)
    yield "linear_attn.in_proj_ba.weight", (gates, hidden)
    yield "linear_attn.out_proj.weight", (hidden, values)


def _latents(config: ModelConfig, latent: LatentConfig) -> Iterator[NamedShape]:
    yield "self_attn.kv_a_layernorm.weight", (latent.kv_lora_rank,)
    if latent.q_lora_rank is not None:
        yield "self_attn.q_a_layernorm.weight", (latent.q_lora_rank,)
    heads, hidden, rank = config.num_attention_heads, config.hidden_size, latent.q_lora_rank
    queries, made = heads * latent.qk_head_dim, heads * latent.made_dim
    names = ("q_proj" if rank is None else "q_a_proj", "kv_a_proj_with_mqa")
    yield from _fused("self_attn", names, (rank or queries, latent.width), hidden, config.attention_bias)
    if rank is not None:
        yield "self_attn.q_b_proj.weight", (queries, rank)
    yield "self_attn.kv_b_proj.weight", (made, latent.kv_lora_rank)
    inner = heads * latent.v_head_dim
    yield from _fused("self_attn", ("o_proj",), (hidden,), inner, config.attention_output_bias)


def _attention(config: ModelConfig) -> Iterator[NamedShape]:
    attended, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    if config.qk_norm or config.projection_norm:
        query, key = (config.head_dim, config.head_dim) if config.qk_norm else (attended, kv)
        yield "self_attn.q_norm.weight", (query,)
        yield "self_attn.k_norm.weight", (key,)
    if config.attention_sinks:
        yield "self_attn.sinks", (config.num_attention_heads,)
    columns, hidden = (attended * (1 + config.attention_gate), kv, kv), config.hidden_size
    yield from _fused("self_attn", config.tensors.qkv, columns, hidden, config.attention_bias)
    yield from _fused("self_attn", ("o_proj",), (hidden,), attended, config.attention_output_bias)


def _mlp(config: ModelConfig) -> Iterator[NamedShape]:
    inner, hidden = config.intermediate_size, config.hidden_size
    yield from _fused("mlp", config.tensors.gate_up, (inner, inner), hidden, config.mlp_bias)
    yield from _fused("mlp", ("down_proj",), (hidden,), inner, config.mlp_bias)


def _fused(
    block: str, names: tuple[str, ...], columns: tuple[int, ...], num_inputs: int, has_bias: bool
) -> Iterator[NamedShape]:
    """Projections of one input; under one name, they are the rows of one tensor."""
    for name, num_outputs in zip(names, columns if len(names) > 1 else (sum(columns),), strict=True):
        yield f"{block}.{name}.weight", (num_outputs, num_inputs)
        if has_bias:
            yield f"{block}.{name}.bias", (num_outputs,)


def _experts(experts: ExpertsConfig, hidden: int, has_mxfp4: bool) -> Iterator[NamedShape]:
    block, count = experts.names.block, experts.num_experts
    yield f"{block}.{experts.names.router}.weight", (count, hidden)
    if experts.has_biases:
        yield f"{block}.{experts.names.router}.bias", (count,)
    if experts.routing is not None and experts.routing.has_bias:
        yield f"{block}.gate.e_score_correction_bias", (count,)
    if experts.is_interleaved:
        yield from _stacked_experts(f"{block}.experts", experts, hidden, has_mxfp4)
    else:
        for number in range(count):
            yield from _expert(f"{block}.experts.{number}", experts.names, experts.intermediate_size, hidden)
    if shared := experts.shared_intermediate_size:
        yield from _expert(f"{block}.{experts.names.shared}", ExpertNames(), shared, hidden)
        if experts.has_shared_gate:
            yield f"{block}.shared_expert_gate.weight", (1, hidden)


def _stacked_experts(block: str, experts: ExpertsConfig, hidden: int, has_mxfp4: bool) -> Iterator[NamedShape]:
    """All experts of a layer in one tensor of each kind: inputs before outputs, or in MXFP4 outputs before inputs."""
    count, inner = experts.num_experts, experts.intermediate_size
    for name, num_outputs, num_inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        if has_mxfp4:
            groups = num_inputs // MXFP4_GROUP
            yield f"{block}.{name}_blocks", (count, num_outputs, groups, MXFP4_GROUP // 2)
            yield f"{block}.{name}_scales", (count, num_outputs, groups)
        else:
            yield f"{block}.{name}", (count, num_inputs, num_outputs)
        if experts.has_biases:
            yield f"{block}.{name}_bias", (count, num_outputs)


def _expert(block: str, names: ExpertNames, inner: int, hidden: int) -> Iterator[NamedShape]:
    yield from _fused(block, (names.gate, names.up), (inner, inner), hidden, has_bias=False)
    yield from _fused(block, (names.down,), (hidden,), inner, has_bias=False)
