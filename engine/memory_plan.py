"""One rank's memory as a sum: what is free, what weights and activations take, and the KV pool that fits in the rest.

Pure arithmetic over a `MemoryDemand`. It is done twice: before a start, with an estimate of the activations
(`baton config explain`), and by a worker once its weights are there, with what `engine.profiling` has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.errors import ConfigError
from engine.memory import WeightForm, kv_bytes_per_token, largest_matrix_elements, weight_bytes
from engine.models.config import ModelConfig
from engine.sampling.prompt_logprobs import rows_of_slice

CPU_DEFAULT_REQUESTS = 4
"""Where nothing is said, a CPU's pool holds so many requests of max_model_len: memory is not the worker's alone."""
_GPU_RESERVE_BYTES = 1 << 30  # CUDA graphs, communicators, slots of hand-offs, the allocator's slack
_SAMPLING_COPIES = 10  # of float32 logits: the rules', the tempered ones, weights, noise, scores, masks
_SCORING_COPIES = 4  # of float32 logits of prompt tokens: their own, what is above the token's, counted in int64


@dataclass(frozen=True)
class MemoryDemand:
    """What a rank is to hold. Types and device are resolved names (`engine.memory`)."""

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
    def reserved_bytes(self) -> int:
        """The table of rotary positions, and on a GPU what is taken while serving beside activations and pool, the
        block with which graphs pad their steps among it."""
        rope = 2 * self.config.max_position_embeddings * self.config.head_dim * self.form.element_type.itemsize
        if not self.device.startswith("cuda"):
            return rope
        return rope + _GPU_RESERVE_BYTES + self.block_size * self.kv_bytes_per_token

    @property
    def largest_step(self) -> StepLimits:
        """Chunks of prompts that fill it up, all sequences, and prompt tokens that are scored."""
        num_tokens = min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)
        num_scored = min(num_tokens, rows_of_slice(self.config.vocab_size))
        return StepLimits(num_tokens, min(self.max_num_seqs, num_tokens), num_scored)


@dataclass(frozen=True)
class StepLimits:
    """How much there is to compute in one step."""

    num_tokens: int
    num_seqs: int
    """Each of them samples a token."""
    num_scored: int
    """Rows whose logits are made at a time, to score prompt tokens."""


@dataclass(frozen=True)
class Activations:
    """What the largest step takes beside weights and pool."""

    size_bytes: int
    is_measured: bool
    why: str
    """How it was measured, or why it is an estimate."""


@dataclass(frozen=True)
class MemoryPlan:
    """The sum, of one rank: budget = weights + activations + reserve + what is left for the pool."""

    free_bytes: int
    """Before the weights are loaded."""
    budget_bytes: int
    """The share of that which may be taken."""
    weight_bytes: int
    activation_bytes: int
    activations_are_measured: bool
    activations_why: str
    """How they were measured, or why they are an estimate."""
    reserved_bytes: int
    left_bytes: int
    """For the pool; negative where memory is too small already."""
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    decided_by: str
    """What the pool's size comes from: `kv_cache_tokens`, `memory`, or `requests` (of max_model_len, on a CPU)."""
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_tokens * self.kv_bytes_per_token

    @property
    def tokens_that_fit(self) -> int:
        """Whole blocks of them in what is left, whatever the pool takes of it."""
        return _fitting(self.left_bytes, self.kv_bytes_per_token, self.block_size) * self.block_size

    def num_requests(self, num_tokens: int) -> int:
        """How many requests of so many tokens, prompt and output together, the pool holds at a time."""
        return self.num_blocks // -(-num_tokens // self.block_size)


def plan_memory(demand: MemoryDemand, *, free_bytes: int, activations: Activations) -> MemoryPlan:
    """`free_bytes`: of this rank, before its weights.

    Raises ConfigError, naming the tokens that fit, when memory cannot hold the pool or the pool cannot hold one
    request of max_model_len.
    """
    budget = int(free_bytes * demand.memory_utilization)
    left = budget - demand.weight_bytes - activations.size_bytes - demand.reserved_bytes
    num_blocks, decided_by = _decide(demand, _fitting(left, demand.kv_bytes_per_token, demand.block_size))
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
        block_size=demand.block_size,
        num_blocks=num_blocks,
        decided_by=decided_by,
        max_model_len=demand.max_model_len,
    )


def estimate_activations(demand: MemoryDemand, why: str) -> Activations:
    """From the shapes alone."""
    return Activations(estimate_bytes(demand, demand.largest_step), is_measured=False, why=why)


def estimate_bytes(demand: MemoryDemand, step: StepLimits) -> int:
    """Of a step's activations: the widest moment of a layer, and what follows the layers, which finds the heap in
    pieces."""
    config, num_tokens = demand.config, step.num_tokens
    size = demand.form.element_type.itemsize
    heads = config.num_attention_heads * config.head_dim // demand.tp_size
    kv = len(config.kv_head_range(0, demand.tp_size)) * config.head_dim
    inner = config.intermediate_size // demand.tp_size
    streams = 3 * config.hidden_size  # the residual, what is added to it, and its norm
    attention = num_tokens * (2 * heads + 2 * kv + 2 * config.head_dim) + 2 * demand.max_model_len * kv
    mlp = num_tokens * (3 * inner + config.hidden_size)
    layer = (num_tokens * streams + max(attention, mlp)) * size
    if demand.form.quantization != "none" and not demand.form.is_tiled:  # unpacked whole for a product
        layer += largest_matrix_elements(config, demand.tp_size) * size
    sampling, scoring = step.num_seqs * _SAMPLING_COPIES, step.num_seqs + step.num_scored * _SCORING_COPIES
    return layer + max(sampling, scoring) * config.vocab_size * torch.float32.itemsize


def _fitting(left_bytes: int, kv_bytes_per_token: int, block_size: int) -> int:
    return max(0, left_bytes // kv_bytes_per_token) // block_size


def _decide(demand: MemoryDemand, fitting: int) -> tuple[int, str]:
    """The pool's blocks, and what decided."""
    tokens, block_size, max_model_len = demand.kv_cache_tokens, demand.block_size, demand.max_model_len
    if tokens is not None:
        wanted, decided_by = tokens // block_size, "kv_cache_tokens"
    elif demand.device.startswith("cuda"):
        wanted, decided_by = fitting, "memory"
    else:
        wanted, decided_by = -(-CPU_DEFAULT_REQUESTS * max_model_len // block_size), "requests"
        if wanted > fitting:
            wanted, decided_by = fitting, "memory"
    if wanted > fitting:
        raise ConfigError(
            f"kv_cache_tokens: {tokens} do not fit in memory beside the weights; "
            f"{fitting * block_size} would: lower kv_cache_tokens, or raise tensor_parallel"
        )
    if wanted * block_size < max_model_len:
        cause = "memory" if tokens is None else f"kv_cache_tokens {tokens}"
        raise ConfigError(
            f"max_model_len: one request of {max_model_len} tokens does not fit in the KV pool; {cause} with blocks of "
            f"{block_size} holds {wanted * block_size}: set max_model_len to at most {wanted * block_size}, or "
            f"kv_cache_tokens to at least {-(-max_model_len // block_size) * block_size}"
        )
    return wanted, decided_by
