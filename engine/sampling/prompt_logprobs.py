"""Logprobs of the tokens of a prompt, each given the tokens before it.

The logits of a chunk are many times larger than what is kept of them, so they are made and read some rows at a time: at
most `SLICE_BYTES` of them are there at once, however long the chunk and large the vocabulary. Knows no sequence.

Legend: P scored rows, R rows of one slice, V vocabulary, K most alternatives that any row wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.copies import upload
from engine.sampling.params import SampledToken
from engine.step_input import IntArray

SLICE_BYTES = 16 << 20


@dataclass(frozen=True)
class PromptScores:
    """Scores of the tokens that follow a step's scored rows, on the device until they are read."""

    scored: IntArray  # [P, 3] as in StepInput
    logprobs: Tensor  # [P]
    ranks: Tensor  # [P]
    top_ids: Tensor  # [P, K]
    top_logprobs: Tensor  # [P, K]

    def tokens(self) -> list[SampledToken]:
        """One for each scored row, in their order."""
        own = zip(self.scored.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        others = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [
            SampledToken(token_id, logprob, rank, tuple(zip(ids[:num_top], values[:num_top], strict=True)))
            for ((_, token_id, num_top), logprob, rank), (ids, values) in zip(own, others, strict=True)
        ]


def rows_of_slice(vocab_size: int) -> int:
    """Most rows whose logits are there at once."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


def score_rows(
    scored: IntArray, logits_of: Callable[[Tensor], Tensor], vocab_size: int, device: torch.device
) -> PromptScores:
    """`logits_of` returns float32 logits [R, V] of rows [R] of the flat batch. For the same `scored` it is called with
    the same rows in the same order, as tensor-parallel ranks need."""
    rows, targets = (upload(scored[:, column], device, np.int64) for column in (0, 1))
    most = min(vocab_size, int(scored[:, 2].max()))
    step = rows_of_slice(vocab_size)
    parts = [
        _score(logits_of(rows[start : start + step]), targets[start : start + step], most)
        for start in range(0, len(scored), step)
    ]
    return PromptScores(scored, *(torch.cat(column) for column in zip(*parts, strict=True)))


def _score(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs [R], 1-based ranks [R], and the most likely ids and their logprobs [R, K]."""
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, targets.unsqueeze(1))
    ranks = (logits > own).sum(-1) + 1
    top = logits.topk(num_top, dim=-1)
    return (own - total)[:, 0], ranks, top.indices, top.values - total
