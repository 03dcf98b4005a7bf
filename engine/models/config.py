"""The one object of a model's sizes and features, with Hugging Face's own field names.

A family's file beside this one makes it of a config.json; `engine.models.decoder` computes what it says. It knows
nothing of files, weights, devices or serving, and loads no torch.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from cluster.errors import CheckpointError, ConfigError
from cluster.kv_groups import KvGroup, group_layers
from engine.models.delta_net import DeltaNetConfig
from engine.models.experts import ExpertsConfig
from engine.models.latent import LatentConfig
from engine.models.transformers_sizes import ForeignModel

if TYPE_CHECKING:
    from engine.quantization.stored import Stored

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPES = ("float32", "bfloat16", "float16")
_COMMON = frozenset(
    {
        *("architecture", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope"),
        *("tie_word_embeddings", "dtype", "eos_token_ids", "packing", "tensors", "left_out"),
    }
)
"""Fields of `ModelConfig` that every model has; each of the others is a feature."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `rope_type` is one of ROPE_TYPES, or `none`; fields that a type does not use keep their
    defaults."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()
    """The waves are longer by these, one for each pair of dimensions (longrope)."""
    partial_rotary_factor: float = 1.0
    """The share of a head's dimensions, the first ones, that is turned."""
    is_interleaved: bool = False
    """Dimension 2i of a checkpoint's heads pairs with 2i + 1, not i with i plus half of those that are turned."""

    def check(self) -> None:
        """Raises CheckpointError for parameters by which a formula would divide by zero."""
        if self.rope_type == "yarn" and self.rope_theta <= 1:
            raise CheckpointError(f"config.json: rope_theta must be more than 1 with yarn (got {self.rope_theta})")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"config.json: high_freq_factor must be more than low_freq_factor {self.low_freq_factor} (got "
                f"{self.high_freq_factor})"
            )
        if self.rope_type == "longrope" and self.original_max_position_embeddings < 2:
            raise CheckpointError("config.json: original_max_position_embeddings must be at least 2 with longrope")

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many dimensions of a head are turned."""
        return int(head_dim * self.partial_rotary_factor)

    def head_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Returns the dimension of a checkpoint's head that stands at each place of a head here; None: the same one.

        Here dimension i always pairs with i + head_dim / 2, and pairs that are not turned stand behind those that are.
        In this order queries and keys have the same product.
        """
        turned, rest = self.rotary_dim(head_dim), (head_dim - self.rotary_dim(head_dim)) // 2
        first, second = range(turned // 2), range(turned // 2, turned)
        if self.is_interleaved:
            first, second = range(0, turned, 2), range(1, turned, 2)
        passed = range(turned, head_dim)
        order = (*first, *passed[:rest], *second, *passed[rest:])
        return None if order == tuple(range(head_dim)) else order


NO_ROPE = RopeConfig(rope_type="none")
"""The rope of layers that know no positions."""


@dataclass(frozen=True)
class LayerNorms:
    """Where a layer's norms stand, by the names of their tensors below `model.layers.N`; None: there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """The norm of attention's output, before it is added to the residual."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of the norms that there are."""
        every = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [name for name in every if name is not None]


@dataclass(frozen=True)
class TensorNames:
    """A checkpoint's names of the projections that are fused here, below `self_attn` and `mlp`: one tensor for each,
    or one for all, of which each has its rows."""

    qkv: tuple[str, str, str] | tuple[str] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, str] | tuple[str] = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are of the whole model, not of one tensor-parallel rank.

    What not every model computes is a feature: a field that says so by a value other than its default, None, False or
    a tuple of None, and that any family may set beside any other. Code that computes a model in a way of its own, as
    the kernels' decode step does, names the `features` that it knows, and leaves other models to
    `engine.models.decoder`.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    """For each layer, how many tokens a token sees, itself included; None: all before it."""
    layer_ropes: tuple[RopeConfig, ...] = ()
    """For each layer, its rope, where it is not `rope` in all of them."""
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each query and key head before rope."""
    attention_gate: bool = False
    """Each query head has as many gates beside it, by whose sigmoid attention's output is multiplied."""
    projection_norm: bool = False
    """RMSNorm on all query heads together, and on all key heads, before rope."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The gate's activation: gelu_tanh is gelu by its approximation with tanh."""
    norms: LayerNorms = LayerNorms()
    has_offset_norms: bool = False
    """The weights of norms are stored as how far they are from 1."""
    embedding_scale: float | None = None
    """The embedding's rows are multiplied by it, rounded to the model's type."""
    residual_scale: float | None = None
    """The outputs of attention and MLP are multiplied by it before they are added to the residual."""
    attention_scale: float | None = None
    """Attention's scores are multiplied by it; None: by one over the root of head_dim."""
    attention_softcap: float | None = None
    """Attention's scores are bounded by it: c * tanh(score / c)."""
    attention_sinks: bool = False
    """Each query head has a score of its own that takes its share of attention's softmax and adds no value."""
    logit_divisor: float | None = None
    """Logits are divided by it."""
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    delta_net: DeltaNetConfig | None = None
    """Layers that keep a recurrent state; their `layer_windows` are `cluster.kv_groups.STATE_WINDOW`."""
    packing: Stored | None = None
    """The way its checkpoint stores the linear layers; None: as plain weights."""
    latent: LatentConfig | None = None
    """None: attention keeps keys and values. Else `num_key_value_heads` is 1 and `head_dim` the latent's width."""
    tensors: TensorNames = TensorNames()
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not loaded: layers that predict several tokens."""
    foreign: ForeignModel | None = None
    """The sizes of a model that transformers' own modelling code computes; None: `engine.models.decoder` does."""

    def check_heads(self) -> None:
        """Raises CheckpointError for heads that nothing here computes."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"config.json: num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        key = "head_dim" if self.latent is None else "qk_rope_head_dim"
        if self.roped_dim % 2:
            raise CheckpointError(f"config.json: {key} {self.roped_dim} is odd; rotary embeddings need an even one")
        if self.latent is not None and self.latent.kv_lora_rank % 2:
            raise CheckpointError(f"config.json: kv_lora_rank {self.latent.kv_lora_rank} is odd; Baton keeps even ones")
        for rope in self.ropes:
            if (turned := rope.rotary_dim(self.roped_dim)) % 2:
                raise CheckpointError(
                    f"config.json: partial_rotary_factor {rope.partial_rotary_factor} turns {turned} of "
                    f"{self.roped_dim} dimensions of a head; rotary embeddings need an even number"
                )
            rope.check()

    @cached_property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The groups of layers whose KV lies in blocks of their own."""
        return group_layers(self.layer_windows, self.state_layers)

    def group_of(self, layer: int) -> int:
        """Returns the place in `kv_groups` of the group that a layer belongs to."""
        return next(place for place, group in enumerate(self.kv_groups) if layer in group.layers)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a recurrent state."""
        return () if self.delta_net is None else tuple(i for i, is_one in enumerate(self.delta_net.layers) if is_one)

    @property
    def roped_dim(self) -> int:
        """The width of the heads, or of the part of each, that rope is for."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def num_kv_planes(self) -> int:
        """Rows of `head_dim` values that each KV head keeps of a token: a key and a value, or a latent."""
        return 2 if self.latent is None else 1

    @property
    def num_token_shares(self) -> int:
        """Ranks that each keep a part of every block's tokens; 1: each rank keeps all of them."""
        return 1 if self.latent is None else self.latent.num_shares

    @property
    def features(self) -> frozenset[str]:
        """The names of the fields by which this model computes something that not every model does."""
        special = [field for field in fields(self) if field.name not in _COMMON]
        values = {field.name: getattr(self, field.name) for field in special}
        defaults = {field.name: field.default for field in special if field.default is not MISSING}
        return frozenset(name for name, value in values.items() if _is_used(value) and value != defaults.get(name))

    @property
    def softmax_scale(self) -> float:
        """The factor on attention's scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes that some layer has and that are computed here, each once."""
        if self.foreign is not None:
            return ()
        return tuple(dict.fromkeys(self.layer_ropes or (self.rope,)))

    def rope_of(self, layer: int) -> int:
        """The place of a layer's rope in `ropes`."""
        return self.ropes.index(self.layer_ropes[layer] if self.layer_ropes else self.rope)

    @property
    def attention_extras(self) -> tuple[str, ...]:
        """The needs of the model, in words, that not every attention backend meets."""
        needs = {
            "soft caps": self.attention_softcap is not None,
            "attention sinks": self.attention_sinks,
            "latents": self.latent is not None,
            "split latents": self.num_token_shares > 1,
        }
        return tuple(name for name, is_needed in needs.items() if is_needed)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The first layer of each kind that the model has."""
        has_experts = self.experts.layers if self.experts else (False,) * self.num_hidden_layers
        others = self.foreign.layer_kinds if self.foreign else map(self.rope_of, range(self.num_hidden_layers))
        has_state = [layer in self.state_layers for layer in range(self.num_hidden_layers)]
        first: dict[tuple[object, ...], int] = {}
        for layer, kind in enumerate(zip(self.layer_windows, has_state, has_experts, others, strict=True)):
            first.setdefault(kind, layer)
        return tuple(first.values())

    def allows_tp_size(self, tp_size: int) -> bool:
        """Whether query heads and MLP columns split evenly, and KV heads split or replicate evenly."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        splits_kv = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
        slices = tp_size if self.experts is None else -(-tp_size // self.experts.num_groups)
        splits_mlps = not any(size % tp_size for size in self._inner_sizes())
        splits_mlps = splits_mlps and (self.experts is None or self.experts.intermediate_size % slices == 0)
        splits_states = self.delta_net is None or self.delta_net.num_key_heads % tp_size == 0
        return heads % tp_size == 0 and splits_kv and splits_states and splits_mlps

    def with_expert_parallel(self, num_groups: int, tp_size: int) -> ModelConfig:
        """Returns the model with its experts divided among groups of the ranks. Raises ConfigError."""
        if self.foreign is not None and num_groups != 1:
            raise ConfigError(
                f"expert_parallel: {num_groups}, and transformers' own code computes {self.architecture}; use 1"
            )
        if self.experts is None:
            if num_groups != 1:
                raise ConfigError(f"expert_parallel: {num_groups}, and {self.architecture} has no experts; use 1")
            return self
        return replace(self, experts=self.experts.in_groups(num_groups, tp_size))

    def with_split_latents(self, num_ranks: int) -> ModelConfig:
        """Returns the model with the tokens of a block of latents divided among so many ranks. Raises ConfigError."""
        if self.latent is None:
            raise ConfigError(f"split_latents: {self.architecture} keeps no latents; use false")
        return replace(self, latent=replace(self.latent, num_shares=num_ranks))

    def divided(self, tp_size: int, expert_parallel: int, split_latents: bool) -> ModelConfig:
        """Returns the model as so many ranks divide it. Raises ConfigError."""
        config = self.with_expert_parallel(expert_parallel, tp_size)
        config.check_tp_size(tp_size)
        return config.with_split_latents(tp_size) if split_latents else config

    def _inner_sizes(self) -> list[int]:
        """Sizes of the MLPs that every rank has a slice of."""
        if self.foreign is not None:
            return list(self.foreign.divided_sizes)
        experts = self.experts
        if experts is None:
            return [self.intermediate_size]
        dense = [] if all(experts.layers) else [self.intermediate_size]
        return [*dense, experts.shared_intermediate_size]

    def check_tp_size(self, tp_size: int) -> None:
        """Raises ConfigError naming the sizes that work."""
        if tp_size > 1 and self.foreign is not None and self.foreign.tp_obstacle:
            raise ConfigError(f"tensor_parallel: {self.architecture}: {self.foreign.tp_obstacle}; use 1")
        if self.allows_tp_size(tp_size):
            return
        sizes = [str(n) for n in range(1, self.num_attention_heads + 1) if self.allows_tp_size(n)]
        routed = [self.experts.intermediate_size] if self.experts else []
        inner = ", ".join(str(size) for size in [*self._inner_sizes(), *routed] if size)
        choices = " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
        states = "" if self.delta_net is None else f", {self.delta_net.num_key_heads} key heads of states"
        raise ConfigError(
            f"tensor_parallel: {tp_size} does not divide {self.num_attention_heads} attention heads, "
            f"{self.num_key_value_heads} KV heads{states} and MLPs of {inner}; use {choices}"
        )

    def check_deterministic(self) -> None:
        """Raises ConfigError where a token's logits depend on what else is computed in its step."""
        if self.latent is not None:
            raise ConfigError(
                "engine.deterministic: latent attention computes a prompt's tokens in another way than generated ones; "
                "set it to false"
            )
        if self.delta_net is not None:
            raise ConfigError(
                f"engine.deterministic: {self.architecture} has layers with a recurrent state, which takes in one "
                "token by other products than several; set it to false"
            )
        if self.foreign is not None:
            raise ConfigError(
                f"engine.deterministic: transformers' own code computes {self.architecture}, and a row's bits depend "
                "on the rest of its step there; set it to false"
            )

    def kv_head_range(self, tp_rank: int, tp_size: int) -> range:
        """The KV heads that a rank holds: an equal slice, or one replicated head where ranks outnumber heads."""
        kv_heads = self.num_key_value_heads
        if tp_size > kv_heads:
            head = tp_rank * kv_heads // tp_size
            return range(head, head + 1)
        count = kv_heads // tp_size
        return range(tp_rank * count, (tp_rank + 1) * count)


def _is_used(value: object) -> bool:
    return any(map(_is_used, value)) if isinstance(value, tuple) else value is not None and value is not False
