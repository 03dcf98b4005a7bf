"""Owns the rules that change logits before temperature: bias, allowed ids, constraints, the ban on stopping early,
penalties. What each of them means for one row is here, too, for those who apply them by other means.

Legend: R rows, V vocabulary, I indices of one rule over all its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.copies import upload
from engine.native import Native, native
from engine.sampling.constraint import ConstraintFailed, Words
from engine.sampling.params import SampleRow, SamplingParams


class LogitRules:
    """Changes logits before temperature: bias, allowed ids, constraints, the ban on stopping early, penalties.

    Built for one batch; rows that use none of them cost nothing, and the others are handled together, through indices
    into the flat [R * V] logits. Raises ValueError for a token id outside the vocabulary.
    """

    def __init__(self, batch: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        for p in batch:
            check_rules(p, vocab_size)
        bias = [(r * vocab_size + t, b) for r, p in enumerate(batch) for t, b in p.logit_bias.items()]
        self._bias_indices = upload([index for index, _ in bias], device, np.int64)
        self._bias_values = upload([value for _, value in bias], device, np.float32)
        self._allowed = [
            (r, upload(p.allowed_token_ids, device, np.int64)) for r, p in enumerate(batch) if p.allowed_token_ids
        ]
        self._constrained = [r for r, p in enumerate(batch) if p.constraint is not None]
        self.problems: dict[int, str] = {}
        """Rows of the latest step whose constraint cannot be followed any further, and why."""
        self._banned_until = [
            (r, p.min_output_tokens, stops_to_ban(p, vocab_size))
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

    def apply(self, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Mapping[int, Words]]:
        """Returns the changed logits [R, V]; the very same tensor when no rule changes them in this step. Beside them,
        the tokens that rows are still to be held to: constraints alone need no copy where kernels read their words."""
        allowed = self._follow_constraints(rows)
        banned = [
            r * self._vocab_size + token_id
            for r, minimum, stops in self._banned_until
            if rows[r].position < minimum and (r not in allowed or can_do_without(stops, allowed[r]))
            for token_id in stops
        ]
        if not (self._is_static or banned) and (not allowed or _kernels(self._device) is not None):
            return logits, allowed
        logits = logits.clone()
        flat = logits.view(-1)
        if self._bias_indices.numel():
            flat.index_add_(0, self._bias_indices, self._bias_values)
        for r, token_ids in self._allowed:
            logits[r] = torch.full_like(logits[r], -torch.inf).index_copy_(0, token_ids, logits[r, token_ids])
        if allowed:
            mask_rows(logits, allowed)
        if banned:
            flat.index_fill_(0, upload(banned, self._device, np.int64), -torch.inf)
        if self._repetition:
            self._penalize_repetition(flat, rows)
        if self._output:
            self._penalize_output(flat, rows)
        return logits, {}

    def _follow_constraints(self, rows: Sequence[SampleRow]) -> dict[int, Words]:
        """The tokens that may follow each constrained row; rows with a problem are left out."""
        allowed, self.problems = follow_constraints(rows, self._constrained)
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
        return upload(flat, self._device, np.int64)  # [I]

    def _spread(self, values: Sequence[float], tokens: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        spread = np.repeat(np.array(values, dtype=np.float32), [len(t) for t in tokens])
        return upload(spread, self._device, np.float32)  # [I]


def _tokens(*sequences: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.array(s, dtype=np.int64) for s in sequences])


def follow_constraints(
    rows: Sequence[SampleRow], constrained: Iterable[int]
) -> tuple[dict[int, Words], dict[int, str]]:
    """The tokens that may follow each of the rows named, until their next step; and of rows whose constraint cannot be
    followed any further, why."""
    allowed, problems = {}, {}
    for r in constrained:
        row = rows[r]
        assert row.params.constraint is not None, f"row {r} has no constraint"
        try:
            allowed[r] = row.params.constraint.allowed(
                row.sequence_index, row.output_token_ids, row.params.stop_token_ids
            )
        except ConstraintFailed as failure:
            problems[r] = f"the output cannot be constrained any further: {failure}"
    return allowed, problems


def _kernels(device: torch.device) -> Native | None:
    return native()[0] if device.type == "cpu" else None


def mask_rows(logits: Tensor, allowed: Mapping[int, Words]) -> None:
    """Leaves those tokens to the rows of [R, V], in place."""
    device = logits.device
    if (kernels := _kernels(device)) is not None:
        kernels.mask_rows(logits, allowed)
        return
    words = upload(np.stack(list(allowed.values())), device).unsqueeze(-1)  # [C, W, 1]
    bits = (words >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    is_ruled_out = bits.flatten(1)[:, : logits.shape[1]] == 0
    index = upload(list(allowed), device, np.int64)
    logits[index] = logits[index].masked_fill_(is_ruled_out, -torch.inf)


def most_likely(logits: Tensor, allowed: Mapping[int, Words]) -> Tensor:
    """The first of the largest of each row of [R, V], in those named of these tokens, which takes a kernel: int64 [R].
    On the CPU, numpy is six times as fast at it as torch."""
    kernels = _kernels(logits.device)
    if allowed:
        assert kernels is not None, "masks are applied to a copy where no kernel reads them"
        return kernels.largest_kept(logits, allowed)
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def can_do_without(stops: Sequence[int], allowed: Words) -> bool:
    """Whether a constraint allows more than those."""
    return bool(without(stops, allowed).any())


def without(stops: Sequence[int], allowed: Words) -> Words:
    """A copy that leaves those tokens out."""
    rest = allowed.copy()
    for token_id in stops:
        rest.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
    return rest


def allows(words: Words, token_id: int) -> bool:
    """Whether a token is among those."""
    return bool(words[token_id >> 5] >> (token_id & 31) & 1)


def stops_to_ban(params: SamplingParams, vocab_size: int) -> list[int]:
    """Stop tokens that the model can produce; none when a ban would leave nothing to choose."""
    stops = [t for t in sorted(params.stop_token_ids) if 0 <= t < vocab_size]
    if params.allowed_token_ids:
        return stops if set(params.allowed_token_ids).difference(stops) else []
    return stops if len(stops) < vocab_size else []


def check_rules(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for a token id outside the vocabulary."""
    for name, token_ids in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids)):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name}: token id {token_id} is outside the vocabulary; use 0 to {vocab_size - 1}")
