"""The shapes of the matrices and vectors that a rank holds of a model, by its `ModelConfig`. Loads no torch.

They are those of the classes in `engine.models.decoder`, which load them; a test holds the two equal.
`engine.model_cost` makes bytes and operations of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.config import ModelConfig
from engine.models.latent import LatentConfig
from engine.models.transformers_sizes import ForeignMatrix

_PLAIN_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_ROUNDED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}
_LEAST_BYTES = 0.5
"""Bytes of a weight of four bits, the fewest that are kept."""
_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_OUT, _DOWN = ("self_attn.o_proj.weight",), ("mlp.down_proj.weight",)
_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


@dataclass(frozen=True)
class MatrixShape:
    """Matrices of one size on one rank, as they are fused above."""

    num_outputs: int
    num_inputs: int
    count: int = 1
    """The number that the rank holds, in all layers."""
    is_packed: bool = False
    """Whether a packed checkpoint has it in codes."""
    num_ranks: int = 1
    """Ranks among which its inputs are divided."""
    is_expert: bool = False
    """Whether a token is multiplied with those of its experts only."""
    is_rounded: bool = True
    """Whether `model.quantization` rounds it."""
    parts: tuple[str, ...] = ()
    """Names of the weights that are fused in it, below `model.layers.N`, without the numbers of experts."""
    is_laid_out: bool = True
    """Whether it is laid out for the kernels that multiply with it; else it stays as it is read."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs

    @property
    def num_elements(self) -> int:
        """Elements of one of them."""
        return self.num_outputs * self.num_inputs


def layer_matrices(config: ModelConfig, tp_size: int) -> list[MatrixShape]:
    """The matrices of all layers on one rank."""
    if config.foreign is not None:
        return [_foreign_matrix(matrix, tp_size) for matrix in config.foreign.matrices]
    hidden, num_layers, experts = config.hidden_size, config.num_hidden_layers, config.experts
    matrices = _attention_matrices(config, tp_size)
    net, num_states = config.delta_net, len(config.state_layers)
    if net is not None:
        outputs, inner = net.num_key_heads * net.head_outputs, net.num_value_heads * net.value_head_dim
        matrices.append(MatrixShape(outputs // tp_size, hidden, num_states, is_packed=True))
        matrices.append(MatrixShape(hidden, inner // tp_size, num_states, is_packed=True, num_ranks=tp_size))
    if num_dense := num_layers - (experts.num_layers if experts else 0):
        gate_up, down = _mlp_matrices(config.intermediate_size, num_dense, config, tp_size)
        matrices += [replace(gate_up, parts=_GATE_UP), replace(down, parts=_DOWN)]
    if experts is None:
        return matrices
    count = experts.num_layers
    slices = tp_size // experts.num_groups
    routed = _mlp_matrices(experts.intermediate_size, count * experts.most_held, config, slices)
    names = experts.names
    block, gates = f"{names.block}.experts", (names.gate, names.up)
    parts = (tuple(f"{block}.{gate}.weight" for gate in gates), (f"{block}.{names.down}.weight",))
    matrices += [replace(each, is_expert=True, parts=own) for each, own in zip(routed, parts, strict=True)]
    matrices.append(MatrixShape(experts.num_experts, hidden, count, is_rounded=False))
    if shared := experts.shared_intermediate_size:
        block = f"{names.block}.{names.shared}"
        parts = (tuple(f"{block}.{gate}_proj.weight" for gate in ("gate", "up")), (f"{block}.down_proj.weight",))
        both = zip(_mlp_matrices(shared, count, config, tp_size), parts, strict=True)
        matrices += [replace(each, parts=own) for each, own in both]
        if experts.has_shared_gate:
            matrices.append(MatrixShape(1, hidden, count, is_rounded=False))
    return matrices


def _attention_matrices(config: ModelConfig, tp_size: int) -> list[MatrixShape]:
    hidden, num_layers = config.hidden_size, config.num_hidden_layers - len(config.state_layers)
    if config.latent is not None:
        return _latent_matrices(config, config.latent, tp_size)
    attended, kv = _head_widths(config, tp_size)
    return [
        MatrixShape(attended * (1 + config.attention_gate) + 2 * kv, hidden, num_layers, is_packed=True, parts=_QKV),
        MatrixShape(hidden, attended, num_layers, is_packed=True, num_ranks=tp_size, parts=_OUT),
    ]


def _latent_matrices(config: ModelConfig, latent: LatentConfig, tp_size: int) -> list[MatrixShape]:
    hidden, count, num_heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads // tp_size
    queries, made = num_heads * latent.qk_head_dim, num_heads * latent.made_dim
    first = [MatrixShape((latent.q_lora_rank or queries) + latent.width, hidden, count, is_packed=True)]
    if latent.q_lora_rank is not None:
        first.append(MatrixShape(queries, latent.q_lora_rank, count, is_packed=True))
    return [
        *first,
        MatrixShape(made, latent.kv_lora_rank, count, is_rounded=False, is_laid_out=False),
        MatrixShape(hidden, num_heads * latent.v_head_dim, count, is_packed=True, num_ranks=tp_size),
    ]


def _foreign_matrix(matrix: ForeignMatrix, tp_size: int) -> MatrixShape:
    return MatrixShape(
        matrix.num_outputs // (tp_size if matrix.split == "outputs" else 1),
        matrix.num_inputs // (tp_size if matrix.split == "inputs" else 1),
        matrix.count,
        is_packed=matrix.is_linear,
        num_ranks=tp_size if matrix.split == "inputs" else 1,
        is_expert=matrix.is_expert,
        is_rounded=matrix.is_linear,
    )


def _mlp_matrices(inner: int, count: int, config: ModelConfig, num_ranks: int) -> list[MatrixShape]:
    """Returns the matrices of `count` MLPs whose middle is `inner` wide on as many ranks together."""
    width, hidden = inner // num_ranks, config.hidden_size
    return [
        MatrixShape(2 * width, hidden, count, is_packed=True),
        MatrixShape(hidden, width, count, is_packed=True, num_ranks=num_ranks),
    ]


def vocabulary_matrix(config: ModelConfig, tp_size: int) -> MatrixShape:
    """One rank's rows of the embedding, and of the head."""
    return MatrixShape(-(-config.vocab_size // tp_size), config.hidden_size)


def least_weight_bytes(config: ModelConfig, tp_size: int, dtype: str, quantization: str) -> int:
    """Returns the bytes that one rank's matrices take at least, in whatever form kernels want them. `dtype` and
    `quantization` are those of `model`, the first resolved."""
    plain = _PLAIN_BYTES[dtype]
    rounded = min(plain, _ROUNDED_BYTES.get(quantization, plain))
    head = vocabulary_matrix(config, tp_size).num_elements
    total = head * plain + (0 if config.tie_word_embeddings else head * rounded)
    for matrix in layer_matrices(config, tp_size):
        is_kept = config.packing is not None and (matrix.is_packed or matrix.is_expert)
        each = _LEAST_BYTES if is_kept else rounded if matrix.is_rounded else plain
        total += matrix.count * matrix.num_elements * each
    return int(total)


def layer_vector_elements(config: ModelConfig, tp_size: int) -> int:
    """Elements of the norms and biases of one attending layer on one rank."""
    count = len(config.norms.names) * config.hidden_size
    if config.latent is not None:
        latent = config.latent
        biases = (latent.q_lora_rank or 0) + latent.width if config.attention_bias else 0
        count += (latent.q_lora_rank or 0) + latent.kv_lora_rank + biases
        return count + (config.hidden_size if config.attention_output_bias else 0)
    attended, kv = _head_widths(config, tp_size)
    if config.qk_norm or config.projection_norm:
        count += attended + kv
    if config.attention_bias:
        count += attended * (1 + config.attention_gate) + 2 * kv
    if config.attention_output_bias:
        count += config.hidden_size
    if config.mlp_bias:
        count += 2 * config.intermediate_size // tp_size + config.hidden_size
    return count


def state_vector_bytes(config: ModelConfig, tp_size: int, element_bytes: int) -> int:
    """Bytes of what all layers with a recurrent state have beside their matrices, on one rank: norms in the model's
    type; convolutions, decays and the norms of the heads in float32."""
    net = config.delta_net
    if net is None:
        return 0
    heads = net.num_key_heads // tp_size * (net.head_channels * net.conv_kernel + 2 * net.values_per_key)
    norms = len(config.norms.names) * config.hidden_size * element_bytes
    return net.num_layers * (norms + (heads + net.value_head_dim) * 4)


def expert_vector_elements(config: ModelConfig, tp_size: int) -> int:
    """Elements of the biases of all layers' routers and experts on one rank."""
    experts = config.experts
    if experts is None or not experts.has_biases:
        return 0
    of_expert = 2 * experts.intermediate_size * experts.num_groups // tp_size + config.hidden_size
    return experts.num_layers * (experts.num_experts + experts.most_held * of_expert)


def _head_widths(config: ModelConfig, tp_size: int) -> tuple[int, int]:
    """Elements of one token's query heads, and of its keys, on one rank."""
    num_kv_heads = len(config.kv_head_range(0, tp_size))
    return config.num_attention_heads * config.head_dim // tp_size, num_kv_heads * config.head_dim
