"""One rank's memory: its types and device, what is free, and how weights, activations and KV pool share it.

The plan is arithmetic over a `MemoryDemand`. It is made twice: before a start, with an estimate of the activations
(`baton config explain`), and by a worker once its weights are loaded, with what `engine.profiling` has measured. Only
`resolve_*` and `available_bytes` look at the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cluster.errors import ConfigError
from cluster.kv_groups import STATE_VALUE_BYTES, KvGroup, slot_bytes_of
from cluster.program import free_memory_bytes
from cluster.text import format_bytes
from engine.kv.pool import KV_CACHE_DTYPES, POOL_DTYPES
from engine.model_cost import (
    WeightForm,
    kv_block_bytes,
    kv_bytes_per_token,
    kv_layer_bytes,
    largest_matrix_elements,
    weight_bytes,
)
from engine.models.config import DTYPES, ModelConfig
from engine.sampling.prompt_logprobs import rows_of_slice
from engine.sequence import most_blocks

CPU_DEFAULT_REQUESTS = 4
"""Requests of max_model_len that a CPU's pool holds by default: other processes need memory too."""
_GPU_RESERVE_BYTES = 1 << 30  # CUDA graphs but for their logits, communicators, slots of hand-offs, slack
_GRAPH_LOGITS = 2  # float32 of each sequence: those that stay, and what a graph computes them from
_SAMPLING_COPIES = 10  # of float32 logits: the rules', the tempered ones, weights, noise, scores, masks
_SCORING_COPIES = 4  # of float32 logits of prompt tokens: their own, what is above the token's, counted in int64


def resolve_device(wanted: str) -> str:
    """`auto` becomes `cuda` where there is one. Raises ConfigError for a device that is not there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = wanted.split(":", 1)[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device: {wanted!r} is unknown; use auto, cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {wanted} is not available here; use cpu, or a torch build and driver with CUDA")
    return wanted


def resolve_dtype(config: ModelConfig, wanted: str, device: str) -> str:
    """`auto` becomes the checkpoint's. Raises ConfigError for a type that the device cannot compute in."""
    name = config.dtype if wanted == "auto" else wanted
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    if name == "bfloat16" and device.startswith("cuda") and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype: this GPU cannot compute in bfloat16; use float16 or float32")
    return name


def resolve_kv_dtype(wanted: str, dtype: str, device: str) -> str:
    """The KV pool's type, as torch names it: `auto` becomes the one that is computed in. Raises ConfigError."""
    if wanted not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype: {wanted!r} is unknown; use {', '.join(KV_CACHE_DTYPES)}")
    if wanted == "fp8" and device.startswith("cpu"):
        raise ConfigError("kv_cache_dtype: fp8 is for GPUs; use int8 on a CPU, which is as small and nearer")
    return POOL_DTYPES.get(wanted, dtype)


def resolve_block_size(config: ModelConfig, tp_size: int, kv_dtype: str, wanted: int | None, preferred: int) -> int:
    """Tokens of one block: None becomes `preferred`, what suits the attention, or the least multiple of it that has
    room for the recurrent state of a layer, or that ranks divide which share a block's tokens. Raises ConfigError where
    the wanted has not, or is not divided."""
    shares = config.num_token_shares
    if wanted is not None and wanted % shares:
        raise ConfigError(
            f"block_size: {wanted} tokens are not divided by tensor_parallel {shares}, and with split_latents each "
            f"rank keeps an equal part of a block; use auto, or a multiple of {shares}"
        )
    if config.delta_net is None:
        return wanted or -(-preferred // shares) * shares
    token_bytes = kv_layer_bytes(config, tp_size, kv_dtype)
    state_bytes = config.delta_net.state.size_bytes(config.delta_net.num_key_heads // tp_size)
    least = -(-state_bytes // token_bytes)
    if wanted is None:
        return -(-least // preferred) * preferred
    if wanted < least or wanted * token_bytes // 2 % STATE_VALUE_BYTES:
        least = -(-least // STATE_VALUE_BYTES) * STATE_VALUE_BYTES
        raise ConfigError(
            f"block_size: {wanted} tokens of {token_bytes} bytes have no room for the recurrent state of a layer, "
            f"{state_bytes} bytes; use auto, or a multiple of {STATE_VALUE_BYTES} from {least} on"
        )
    return wanted


def resolve_max_model_len(config: ModelConfig, wanted: int | None) -> int:
    """None becomes max_position_embeddings, which is also the largest value allowed."""
    most = config.max_position_embeddings
    if wanted is None:
        return most
    if not 1 <= wanted <= most:
        raise ConfigError(
            f"max_model_len: {wanted} is not between 1 and the checkpoint's max_position_embeddings {most}"
        )
    return wanted


def available_bytes(device: str, tp_size: int = 1) -> int:
    """Memory that one rank can still take, as the driver, or the system and the container, report it.

    The ranks of a worker share a machine's memory, and have a GPU each. What torch's allocator keeps of freed memory,
    after weights were loaded, say, goes back to the driver first.
    """
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return free_memory_bytes() // tp_size


@dataclass(frozen=True)
class MemoryDemand:
    """A rank's model and limits. Types and device are resolved names."""

    config: ModelConfig
    form: WeightForm
    tp_size: int
    kv_dtype: str
    block_size: int
    kv_cache_tokens: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_utilization: float
    """Share of the free memory that may be taken."""
    kv_host_bytes: int = 0
    """Host memory of all ranks together for KV that the pool evicts."""
    kv_disk_bytes: int = 0
    """Room on a disk of all ranks together for KV that host memory gives up."""

    @property
    def device(self) -> str:
        return self.form.device

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.config, self.tp_size, self.form)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.config, self.tp_size, self.kv_dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, which holds one group of layers."""
        return kv_block_bytes(self.config, self.tp_size, self.kv_dtype, self.block_size)

    @property
    def reserved_bytes(self) -> int:
        """The tables of rotary positions, and on a GPU what is taken while serving beside activations and pool, the
        block with which graphs pad their steps among it."""
        table = 2 * self.config.max_position_embeddings * self.config.roped_dim * self.form.element_type.itemsize
        rope = len(self.config.ropes) * table
        if not self.device.startswith("cuda"):
            return rope
        logits = _GRAPH_LOGITS * self.max_num_seqs * self.config.vocab_size * torch.float32.itemsize
        return rope + logits + _GPU_RESERVE_BYTES + self.block_bytes

    @property
    def largest_step(self) -> StepLimits:
        """A step full of prompt chunks, with all sequences and with prompt tokens that are scored."""
        num_tokens = min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)
        num_scored = min(num_tokens, rows_of_slice(self.config.vocab_size))
        return StepLimits(num_tokens, min(self.max_num_seqs, num_tokens), num_scored)


@dataclass(frozen=True)
class StepLimits:
    """The size of one step."""

    num_tokens: int
    num_seqs: int
    """Each of them samples a token."""
    num_scored: int
    """Rows whose logits are made at a time, to score prompt tokens."""


@dataclass(frozen=True)
class Activations:
    """The memory that the largest step takes beside weights and pool."""

    size_bytes: int
    is_measured: bool
    why: str
    """The method of measurement, or the reason for an estimate."""


@dataclass(frozen=True)
class MemoryPlan:
    """One rank's memory: budget = weights + activations + reserve + what is left for the pool."""

    free_bytes: int
    """Free before the weights are loaded."""
    budget_bytes: int
    """The share of it that may be taken."""
    weight_bytes: int
    activation_bytes: int
    activations_are_measured: bool
    activations_why: str
    """The method of measurement, or the reason for an estimate."""
    reserved_bytes: int
    left_bytes: int
    """For the pool; negative where memory is too small already."""
    kv_bytes_per_token: int
    """Rounded up, where ranks share tokens."""
    block_bytes: int
    block_size: int
    num_blocks: int
    decided_by: str
    """The source of the pool's size: `kv_cache_tokens`, `memory`, or `requests` (of max_model_len, on a CPU)."""
    max_model_len: int
    groups: tuple[KvGroup, ...]
    num_host_blocks: int = 0
    """Blocks that are kept in host memory when the pool evicts them."""
    num_disk_blocks: int = 0
    """Blocks that are kept on a disk when host memory gives them up."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds, in sequences of max_model_len where windows make that more."""
        return self._tokens_in(self.num_blocks)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that the rank takes below its pool."""
        return self.num_host_blocks * self.block_bytes

    @property
    def disk_bytes(self) -> int:
        """Room on a disk that it takes when it is full, headers included."""
        return self.num_disk_blocks * slot_bytes_of(self.block_bytes)

    @property
    def tokens_that_fit(self) -> int:
        """Whole blocks of them in what is left, whatever the pool takes of it."""
        return self._tokens_in(max(0, self.left_bytes // self.block_bytes))

    def num_requests(self, num_tokens: int) -> int:
        """Requests of so many tokens, prompt and output together, that the pool holds at a time."""
        return self.num_blocks // most_blocks(self.groups, num_tokens, self.block_size)

    def _tokens_in(self, num_blocks: int) -> int:
        if all(group.window is None for group in self.groups):
            return num_blocks * self.block_size
        per_request = most_blocks(self.groups, self.max_model_len, self.block_size)
        return num_blocks * self.max_model_len // per_request // self.block_size * self.block_size


def plan_memory(demand: MemoryDemand, *, free_bytes: int, activations: Activations) -> MemoryPlan:
    """`free_bytes`: of this rank, before its weights.

    Raises ConfigError, naming the tokens that fit, when memory cannot hold the pool or the pool cannot hold one
    request of max_model_len.
    """
    budget = int(free_bytes * demand.memory_utilization)
    left = budget - demand.weight_bytes - activations.size_bytes - demand.reserved_bytes
    if demand.weight_bytes + demand.reserved_bytes > budget:
        raise ConfigError(_too_large(demand, budget))
    num_blocks, decided_by = _decide(demand, max(0, left // demand.block_bytes))
    return MemoryPlan(
        free_bytes=free_bytes,
        budget_bytes=budget,
        weight_bytes=demand.weight_bytes,
        activation_bytes=activations.size_bytes,
        activations_are_measured=activations.is_measured,
        activations_why=activations.why,
        reserved_bytes=demand.reserved_bytes,
        left_bytes=left,
        kv_bytes_per_token=demand.kv_bytes_per_token,
        block_bytes=demand.block_bytes,
        block_size=demand.block_size,
        num_blocks=num_blocks,
        decided_by=decided_by,
        max_model_len=demand.max_model_len,
        groups=demand.config.kv_groups,
        num_host_blocks=_num_host_blocks(demand),
        num_disk_blocks=demand.kv_disk_bytes // demand.tp_size // slot_bytes_of(demand.block_bytes),
    )


def _num_host_blocks(demand: MemoryDemand) -> int:
    """Raises ConfigError for host memory that is not there, or too little for one block."""
    wanted, each = demand.kv_host_bytes, demand.block_bytes * demand.tp_size
    free = free_memory_bytes()
    if wanted > free:
        raise ConfigError(f"kv_host_bytes: {wanted} bytes, and this machine has {free} free; set it to less, or to 0")
    if 0 < wanted < each:
        raise ConfigError(f"kv_host_bytes: {wanted} bytes hold no KV block of {each} bytes; set at least that, or 0")
    return wanted // each


def _too_large(demand: MemoryDemand, budget: int) -> str:
    """Says what would hold the model: on GPUs, of which each rank has one, the tensor_parallel."""
    taken = demand.weight_bytes + demand.reserved_bytes
    what = (
        f"model.path: weights of {format_bytes(demand.weight_bytes)}, and {format_bytes(demand.reserved_bytes)} beside "
        f"them, do not fit in the {format_bytes(budget)} that each rank may take, with tensor_parallel "
        f"{demand.tp_size} and engine.memory_utilization {demand.memory_utilization:g}"
    )
    if not demand.device.startswith("cuda"):
        return f"{what}: free {format_bytes(taken - budget)} more, or set model.quantization"
    for tp_size in range(demand.tp_size + 1, demand.config.num_attention_heads + 1):
        more = replace(demand, tp_size=tp_size)
        if demand.config.allows_tp_size(tp_size) and more.weight_bytes + more.reserved_bytes <= budget:
            return f"{what}: set tensor_parallel to at least {tp_size}, or model.quantization"
    return f"{what}: no tensor_parallel holds it on such GPUs; set model.quantization, or use larger ones"


def estimate_activations(demand: MemoryDemand, why: str) -> Activations:
    """Estimates from shapes alone."""
    return Activations(estimate_bytes(demand, demand.largest_step), is_measured=False, why=why)


def estimate_bytes(demand: MemoryDemand, step: StepLimits) -> int:
    """Bytes of a step's activations: the widest moment of a layer plus sampling or scoring, which the fragmented heap
    cannot place in the same memory."""
    config, num_tokens = demand.config, step.num_tokens
    size = demand.form.element_type.itemsize
    heads = config.num_attention_heads * config.head_dim // demand.tp_size
    kv = len(config.kv_head_range(0, demand.tp_size)) * config.head_dim
    streams = 3 * config.hidden_size  # the residual, what is added to it, and its norm
    attention = num_tokens * (2 * heads + 2 * kv + 2 * config.head_dim) + 2 * demand.max_model_len * kv
    if config.latent is not None:  # keys and values of some heads, by way of both together and of both padded
        width, num_heads = config.latent.expanded_dim, config.num_attention_heads // demand.tp_size
        attention += 4 * demand.max_model_len * width * config.latent.heads_at_once(demand.max_model_len, num_heads)
    if config.num_token_shares > 1:  # queries of all ranks, what they find, and its parts; latents of all ranks
        attention += 4 * step.num_seqs * config.num_attention_heads * config.head_dim
        attention += 2 * demand.max_model_len * config.head_dim
    mlp = num_tokens * (_mlp_elements(config, demand.tp_size) + config.hidden_size)
    layer = (num_tokens * streams + max(attention, mlp)) * size
    if demand.form.is_unpacked:  # whole for a product, by way of float32
        layer += largest_matrix_elements(config, demand.tp_size) * (torch.float32.itemsize + size)
    sampling, scoring = step.num_seqs * _SAMPLING_COPIES, step.num_seqs + step.num_scored * _SCORING_COPIES
    return layer + max(sampling, scoring) * config.vocab_size * torch.float32.itemsize


def _mlp_elements(config: ModelConfig, tp_size: int) -> int:
    """Elements of one token that its widest MLP makes: gate, up and their product, and of experts what goes into each
    that it chooses, and comes out."""
    experts = config.experts
    dense = 0 if experts and all(experts.layers) else 3 * config.intermediate_size // tp_size
    if experts is None:
        return dense
    routed = experts.num_per_token * experts.intermediate_size * experts.num_groups
    inner = (routed + experts.shared_intermediate_size) // tp_size
    return max(dense, 3 * inner + 2 * experts.num_per_token * config.hidden_size)


def _decide(demand: MemoryDemand, fitting: int) -> tuple[int, str]:
    """The pool's blocks, and what decided."""
    tokens, block_size, max_model_len = demand.kv_cache_tokens, demand.block_size, demand.max_model_len
    groups = demand.config.kv_groups
    count, needed = len(groups), most_blocks(groups, max_model_len, block_size)
    if tokens is not None:
        wanted, decided_by = tokens // block_size * count, "kv_cache_tokens"
    elif demand.device.startswith("cuda"):
        wanted, decided_by = fitting, "memory"
    else:
        wanted, decided_by = CPU_DEFAULT_REQUESTS * needed, "requests"
        if wanted > fitting:
            wanted, decided_by = fitting, "memory"
    if wanted > fitting:
        raise ConfigError(
            f"kv_cache_tokens: {tokens} do not fit in memory beside the weights; "
            f"{fitting // count * block_size} would: lower kv_cache_tokens, or raise tensor_parallel"
        )
    if wanted < needed:
        lengths = range(max_model_len, 0, -1)
        most = next((n for n in lengths if most_blocks(groups, n, block_size) <= wanted), 0)
        cause = "memory" if tokens is None else f"kv_cache_tokens {tokens}"
        raise ConfigError(
            f"max_model_len: one request of {max_model_len} tokens does not fit in the KV pool; {cause} with blocks of "
            f"{block_size} holds {most}: set max_model_len to at most {most}, or "
            f"kv_cache_tokens to at least {-(-needed // count) * block_size}"
        )
    return wanted, decided_by
