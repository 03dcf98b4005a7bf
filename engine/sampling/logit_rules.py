"""Owns what changes logits before temperature: bias, allowed ids, constraints, the ban on stopping early, penalties.

Built once for a list of SamplingParams and used for as many steps as the batch keeps them. Rows that ask for none of
this cost nothing; those that do are handled together, through indices into the flat [R * V] logits.

Legend: R rows, V vocabulary, I indices of one rule over all its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.constraint import ConstraintFailed
from engine.sampling.params import SampleRow, SamplingParams


class LogitRules:
    """The rules of one batch, in the order in which they apply. ValueError: a token id outside the vocabulary."""

    def __init__(self, batch: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        for p in batch:
            _require_in_vocabulary("logit_bias", p.logit_bias, vocab_size)
            _require_in_vocabulary("allowed_token_ids", p.allowed_token_ids, vocab_size)
        bias = [(r * vocab_size + t, b) for r, p in enumerate(batch) for t, b in p.logit_bias.items()]
        self._bias_indices = torch.tensor([index for index, _ in bias], dtype=torch.int64, device=device)
        self._bias_values = torch.tensor([value for _, value in bias], dtype=torch.float32, device=device)
        self._allowed = [
            (r, torch.tensor(p.allowed_token_ids, dtype=torch.int64, device=device))
            for r, p in enumerate(batch)
            if p.allowed_token_ids
        ]
        self._constrained = [(r, p.constraint) for r, p in enumerate(batch) if p.constraint is not None]
        self.problems: dict[int, str] = {}
        """Rows of the latest step whose constraint cannot be followed any further, and why."""
        self._banned_until = [
            (r, p.min_output_tokens, _stops_to_ban(p, vocab_size))
            for r, p in enumerate(batch)
            if p.min_output_tokens > 0
        ]
        self._repetition = [(r, p.repetition_penalty) for r, p in enumerate(batch) if p.repetition_penalty != 1]
        self._output = [
            (r, p.presence_penalty, p.frequency_penalty)
            for r, p in enumerate(batch)
            if p.presence_penalty != 0 or p.frequency_penalty != 0
        ]
        self._is_static = bool(bias or self._allowed or self._repetition or self._output)

    def apply(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Returns the changed logits [R, V]; the very same tensor when no rule holds in this step."""
        allowed = self._follow_constraints(rows)
        banned = [
            r * self._vocab_size + token_id
            for r, minimum, stops in self._banned_until
            if len(rows[r].output_token_ids) < minimum and (r not in allowed or _is_more_than(allowed[r], stops))
            for token_id in stops
        ]
        if not (self._is_static or banned or allowed):
            return logits
        logits = logits.clone()
        flat = logits.view(-1)
        if self._bias_indices.numel():
            flat.index_add_(0, self._bias_indices, self._bias_values)
        for r, token_ids in self._allowed:
            logits[r] = torch.full_like(logits[r], -torch.inf).index_copy_(0, token_ids, logits[r, token_ids])
        for r, may_follow in allowed.items():
            logits[r].masked_fill_(torch.from_numpy(~may_follow).to(self._device), -torch.inf)
        if banned:
            flat.index_fill_(0, torch.tensor(banned, device=self._device), -torch.inf)
        if self._repetition:
            self._penalize_repetition(flat, rows)
        if self._output:
            self._penalize_output(flat, rows)
        return logits

    def _follow_constraints(self, rows: Sequence[SampleRow]) -> dict[int, npt.NDArray[np.bool_]]:
        """The tokens that may follow each constrained row, bool [V]; rows with a problem are left out."""
        self.problems = {}
        allowed = {}
        for r, constraint in self._constrained:
            row = rows[r]
            try:
                allowed[r] = constraint.allowed(row.sequence_index, row.output_token_ids, row.params.stop_token_ids)
            except ConstraintFailed as failure:
                self.problems[r] = str(failure)
        return allowed

    def _penalize_repetition(self, flat: Tensor, rows: Sequence[SampleRow]) -> None:
        tokens = [_tokens(rows[r].prompt_token_ids, rows[r].output_token_ids) for r, _ in self._repetition]
        indices = self._flatten([r for r, _ in self._repetition], tokens)
        penalty = self._spread([penalty for _, penalty in self._repetition], tokens)
        values = flat[indices]  # a token seen twice is here twice, and written twice with one value
        flat[indices] = torch.where(values > 0, values / penalty, values * penalty)

    def _penalize_output(self, flat: Tensor, rows: Sequence[SampleRow]) -> None:
        tokens = [_tokens(rows[r].output_token_ids) for r, _, _ in self._output]
        indices = self._flatten([r for r, _, _ in self._output], tokens)
        presence = self._spread([presence for _, presence, _ in self._output], tokens)
        frequency = self._spread([frequency for _, _, frequency in self._output], tokens)
        flat[indices] = flat[indices] - presence
        flat.index_add_(0, indices, frequency, alpha=-1)  # accumulates: once for each time a token is there

    def _flatten(self, row_of: Sequence[int], tokens: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        flat = np.concatenate([t + r * self._vocab_size for r, t in zip(row_of, tokens, strict=True)])
        return torch.from_numpy(flat).to(self._device)  # [I]

    def _spread(self, values: Sequence[float], tokens: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        spread = np.repeat(np.array(values, dtype=np.float32), [len(t) for t in tokens])
        return torch.from_numpy(spread).to(self._device)  # [I]


def _tokens(*sequences: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.array(s, dtype=np.int64) for s in sequences])


def _is_more_than(allowed: npt.NDArray[np.bool_], token_ids: Sequence[int]) -> bool:
    return bool(allowed.sum() > allowed[list(token_ids)].sum())


def _stops_to_ban(params: SamplingParams, vocab_size: int) -> list[int]:
    """Stop tokens that the model can produce; none when a ban would leave nothing to choose."""
    stops = [t for t in sorted(params.stop_token_ids) if 0 <= t < vocab_size]
    if params.allowed_token_ids:
        return stops if set(params.allowed_token_ids).difference(stops) else []
    return stops if len(stops) < vocab_size else []


def _require_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name}: token id {token_id} is outside the vocabulary; use 0 to {vocab_size - 1}")
