"""The tensors that a checkpoint must have by its `ModelConfig`: their names and whole shapes. Loads no torch.

They are those that the classes in `engine.models.decoder` read; a test holds the two equal. Left to these alone: what
transformers' own code computes, latent attention, layers with a recurrent state, experts stacked in one tensor, and the
linear layers of a quantized checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.model_folder import gguf_file
from engine.json_fields import Fields, read_json
from engine.models.config import ModelConfig
from engine.models.experts import ExpertNames, ExpertsConfig
from engine.models.folder import is_foreign, read_model
from engine.models.registry import read_config
from engine.tensor_files import TensorFiles

Tensor = tuple[str, tuple[int, ...]]
"""A name and a shape."""


def check_folder(folder: Path, model_impl: str = "auto") -> None:
    """Raises CheckpointError for a configuration that is not served, naming the key and what is supported, and for a
    declared tensor that is missing, in two files or of another shape, naming the file and the tensor. Reads no weights;
    of a GGUF file, only what it says of the configuration."""
    fields = Fields(read_json(folder / "config.json"), "config.json")
    is_other = is_foreign(fields, model_impl)
    if gguf_file(folder) is not None:
        read_config(fields)
        return
    config = None if is_other else read_model(folder, "native")
    with TensorFiles(folder) as files:
        for name, shape in declared_tensors(config) if config is not None else ():
            files.find(name, shape)


def declared_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Yields each tensor of the model that is declared here, with its shape in the checkpoint."""
    hidden, is_plain = config.hidden_size, config.packing is None
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if is_plain and not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in _layer(config, layer, is_plain))


def _layer(config: ModelConfig, layer: int, is_plain: bool) -> Iterator[Tensor]:
    yield from ((f"{name}.weight", (config.hidden_size,)) for name in config.norms.names)
    if config.latent is None and layer not in config.state_layers:
        yield from _attention_vectors(config)
        if is_plain:
            yield from _attention(config)
    if not is_plain:
        return
    if config.experts is not None and config.experts.layers[layer]:
        yield from _experts(config.experts, config.hidden_size)
    else:
        yield from _mlp(config)


def _attention_vectors(config: ModelConfig) -> Iterator[Tensor]:
    attended, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    if config.qk_norm or config.projection_norm:
        query, key = (config.head_dim, config.head_dim) if config.qk_norm else (attended, kv)
        yield "self_attn.q_norm.weight", (query,)
        yield "self_attn.k_norm.weight", (key,)
    if config.attention_sinks:
        yield "self_attn.sinks", (config.num_attention_heads,)


def _attention(config: ModelConfig) -> Iterator[Tensor]:
    attended, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    columns, hidden = (attended * (1 + config.attention_gate), kv, kv), config.hidden_size
    yield from _fused("self_attn", config.tensors.qkv, columns, hidden, config.attention_bias)
    yield from _fused("self_attn", ("o_proj",), (hidden,), attended, config.attention_output_bias)


def _mlp(config: ModelConfig) -> Iterator[Tensor]:
    inner, hidden = config.intermediate_size, config.hidden_size
    yield from _fused("mlp", config.tensors.gate_up, (inner, inner), hidden, config.mlp_bias)
    yield from _fused("mlp", ("down_proj",), (hidden,), inner, config.mlp_bias)


def _fused(
    block: str, names: tuple[str, ...], columns: tuple[int, ...], num_inputs: int, has_bias: bool
) -> Iterator[Tensor]:
    """Projections of one input; under one name, they are the rows of one tensor."""
    for name, num_outputs in zip(names, columns if len(names) > 1 else (sum(columns),), strict=True):
        yield f"{block}.{name}.weight", (num_outputs, num_inputs)
        if has_bias:
            yield f"{block}.{name}.bias", (num_outputs,)


def _experts(experts: ExpertsConfig, hidden: int) -> Iterator[Tensor]:
    block, count = experts.names.block, experts.num_experts
    yield f"{block}.{experts.names.router}.weight", (count, hidden)
    if experts.has_biases:
        yield f"{block}.{experts.names.router}.bias", (count,)
    if experts.routing is not None and experts.routing.has_bias:
        yield f"{block}.gate.e_score_correction_bias", (count,)
    if not experts.is_interleaved:
        for number in range(count):
            yield from _expert(f"{block}.experts.{number}", experts.names, experts.intermediate_size, hidden)
    if shared := experts.shared_intermediate_size:
        yield from _expert(f"{block}.{experts.names.shared}", ExpertNames(), shared, hidden)
        if experts.has_shared_gate:
            yield f"{block}.shared_expert_gate.weight", (1, hidden)


def _expert(block: str, names: ExpertNames, inner: int, hidden: int) -> Iterator[Tensor]:
    yield from _fused(block, (names.gate, names.up), (inner, inner), hidden, has_bias=False)
    yield from _fused(block, (names.down,), (hidden,), inner, has_bias=False)
