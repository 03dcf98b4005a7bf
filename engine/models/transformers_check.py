"""Whether a loaded model of transformers' own code computes a token alike however a step is cut.

A trial without weights shows how a model calls for attention, not what else it does. One that takes positions from a
token's place in its input, or mixes neighbouring tokens outside attention, computes other numbers for a prompt that
comes in parts beside another sequence; so that is tried once, with a few tokens, before anything is served.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.interface import Attention, AttentionBatch
from engine.copies import upload
from engine.kv.pool import KvCache
from engine.models.config import ModelConfig
from engine.models.decoder import StepContext
from engine.models.loading import Model
from engine.models.registry import refuse_foreign
from engine.step_input import SequenceSlice, StepInput, build_step

_NUM_TOKENS, _FIRST_PART = 12, 5
_NUM_SEQUENCES = 3
_TOLERANCE = 0.05
"""The relative error of a token's hidden state. Rounding, and experts that it has a token choose, may move some tokens
by more, but not most of them."""


@torch.inference_mode()
def check_steps(
    model: Model,
    config: ModelConfig,
    attention: Attention,
    kv_dtype: torch.dtype,
    block_size: int,
    device: torch.device,
) -> None:
    """Tries the model; all ranks call this at once. Raises CheckpointError."""
    num_groups, num_heads = len(config.kv_groups), len(config.kv_head_range(model.tp.rank, model.tp.size))
    width = -(-_NUM_TOKENS // block_size)
    size = (_NUM_SEQUENCES * width * num_groups, block_size, num_heads, config.head_dim)
    kv = KvCache(config.kv_groups, *size, kv_dtype, device)
    ids = [tuple((7919 * factor * (i + 1)) % config.vocab_size for i in range(_NUM_TOKENS)) for factor in (2, 3)]

    def run(*slices: tuple[int, tuple[int, ...], int]) -> torch.Tensor:
        """Hidden states of new tokens: each slice is the place of a sequence, its tokens, and the first one's place."""
        tables = [tuple(range(place * width * num_groups, (place + 1) * width * num_groups)) for place, _, _ in slices]
        parts = [SequenceSlice(new, at, table, True) for (_, new, at), table in zip(slices, tables, strict=True)]
        residual, add = model(*inputs(build_step(parts, block_size, num_groups=num_groups), kv))
        return residual if add is None else residual + add

    def inputs(step: StepInput, kv: KvCache) -> tuple[torch.Tensor, StepContext]:
        steps = [step] if num_groups == 1 else [step.of_group(place) for place in range(num_groups)]
        slots = upload(step.slot_mapping.astype(np.int64), device).chunk(num_groups)
        batches = tuple(AttentionBatch(one, block_size, device) for one in steps)
        context = StepContext(batches, slots, (), upload(step.positions, device), kv, attention)
        return upload(step.token_ids, device), context

    whole = run((0, ids[0], 0))[_FIRST_PART:]
    run((1, ids[0][:_FIRST_PART], 0))
    beside = run((2, ids[1][:3], 0), (1, ids[0][_FIRST_PART:], _FIRST_PART))[3:]
    errors = (whole - beside).float().norm(dim=-1) / whole.float().norm(dim=-1)
    if not bool((errors < _TOLERANCE).float().mean() >= 0.5):
        raise refuse_foreign(
            config.architecture,
            "it computes other numbers for a prompt that comes in parts: something beside attention looks at the "
            "tokens before, or at their places in a step",
        )
