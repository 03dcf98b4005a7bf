"""How much a step computes and moves on one rank, told from the model's shape: what MFU and MBU are made of.

Counted is what the model needs, not what a kernel happens to do: two operations for each weight and token of a matrix
product, the head for the rows that want logits alone, attention for the pairs of a token and a key that it sees; of
bytes, each weight once in the form it is kept in, the keys and values that are seen once for each sequence, and those
that are written. Left out, as they are small beside it: norms, rope, activations, the embedding's rows, sampling.

Legend: T tokens, S sequences, R rows with logits, P scored rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from engine.memory import (
    WeightForm,
    head_elements,
    head_multiplied_bytes,
    kv_bytes_per_token,
    layer_elements,
    layers_multiplied_bytes,
)
from engine.models.config import ModelConfig
from engine.step_input import StepInput

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepFlops:
    """Of one step on one rank."""

    num_tokens: int
    flops: float
    """Floating point operations, a multiplication and an addition counted as two."""
    size_bytes: float
    """Read from and written to the device's memory."""
    has_prompt: bool
    """At least one sequence has several new tokens."""
    has_decode: bool
    """At least one has a single one."""


@dataclass(frozen=True)
class ModelFlops:
    """One model as one rank of `tp_size` computes it."""

    layers_flops: int
    """Of one token in all layers, attention's products of queries, keys and values left out."""
    head_flops: int
    """Of one row."""
    layers_bytes: int
    """Of all layers' matrices."""
    head_bytes: int
    pair_flops: int
    """Of one token and one key in one layer, all query heads of the rank."""
    kv_layer_bytes: int
    """Of one token's keys and values in one layer."""
    windows: tuple[tuple[int | None, int], ...]
    """How many tokens a token sees (None: all before it), and how many layers are so."""

    @classmethod
    def of(cls, config: ModelConfig, tp_size: int, form: WeightForm, kv_dtype: str) -> Self:
        """`kv_dtype`: the pool's type, as `engine.memory.resolve_kv_dtype` gives it."""
        num_layers = config.num_hidden_layers
        return cls(
            layers_flops=2 * num_layers * layer_elements(config, tp_size),
            head_flops=2 * head_elements(config, tp_size),
            layers_bytes=layers_multiplied_bytes(config, tp_size, form),
            head_bytes=head_multiplied_bytes(config, tp_size, form),
            pair_flops=4 * config.num_attention_heads // tp_size * config.head_dim,
            kv_layer_bytes=kv_bytes_per_token(config, tp_size, kv_dtype) // num_layers,
            windows=tuple(Counter(config.layer_windows).items()),
        )

    def of_step(self, step: StepInput) -> StepFlops:
        """A step of no tokens only copies blocks, which is not counted."""
        num_tokens, num_rows = len(step.token_ids), len(step.logits_indices) + len(step.scored)
        if not num_tokens:
            return StepFlops(0, 0.0, 0.0, has_prompt=False, has_decode=False)
        has_prompt = num_tokens > len(step.seqlens_k)  # each sequence has one at least
        has_decode = not has_prompt or bool((np.diff(step.cu_seqlens_q) == 1).any())
        num_pairs = num_read = 0  # summed over layers
        for window, num_layers in self.windows:
            pairs, read = _seen(step, window, has_prompt=has_prompt)
            num_pairs += num_layers * pairs
            num_read += num_layers * read
        written = num_tokens * sum(num_layers for _, num_layers in self.windows)
        flops = num_tokens * self.layers_flops + num_rows * self.head_flops + num_pairs * self.pair_flops
        size_bytes = self.layers_bytes + (self.head_bytes if num_rows else 0)
        size_bytes += (num_read + written) * self.kv_layer_bytes
        return StepFlops(num_tokens, float(flops), float(size_bytes), has_prompt, has_decode)


def _seen(step: StepInput, window: int | None, *, has_prompt: bool) -> tuple[int, int]:
    """In one layer: pairs of a token and a key that it sees, itself included; and keys that are seen at all."""
    if not has_prompt:
        seen = step.seqlens_k if window is None else np.minimum(step.seqlens_k, window)
        count = int(seen.sum(dtype=np.int64))
        return count, count
    new: Lengths = np.diff(step.cu_seqlens_q).astype(np.int64)
    last: Lengths = step.seqlens_k.astype(np.int64)
    first = last - new + 1  # keys that the first new token would see without a window, as `last` of the last one
    if window is None:
        return int((first + last) @ new) // 2, int(last.sum())
    within = np.clip(window, first - 1, last)
    pairs = (within * (within + 1) - (first - 1) * first) // 2 + (last - within) * window
    return int(pairs.sum()), int(np.minimum(last, new - 1 + window).sum())
