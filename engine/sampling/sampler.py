"""Owns the choice of the next token: logits in, one token for each row out, whole batches in a few tensor ops.

Order: logit rules (bias, allowed ids, constraint, stop ban, penalties), temperature, top-k, top-p within top-k, min-p,
then Gumbel-max with `engine.sampling.rng`. A row's token depends on its own logits, params, sequence index and position
alone, never on the rest of the batch. Holds no state but the plan of the latest batch. Knows nothing of text or blocks.

Legend: R rows, S rows that sample (the others are greedy), V vocabulary, I indices of one rule over all its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.constraint import ConstraintFailed
from engine.sampling.params import SampledToken, SampleRow, SamplingParams
from engine.sampling.rng import gumbel, row_keys
from engine.upload import upload


class Sampler:
    """Samples from models of one vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._plan: _Plan | None = None

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Chooses a token for each row of float32 logits [R, V], which stay as they are, and waits for it."""
        return self.launch(logits, rows).read()

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> Samples:
        """Sets `sample` off. The logits may change once all that was launched on their stream before is done."""
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} for {len(rows)} rows"
        assert logits.dtype == torch.float32, logits.dtype
        if not rows:
            return Samples(torch.empty(0, dtype=torch.int64, device=logits.device))
        plan = self._plan_of([row.params for row in rows], logits.device)
        token_ids = plan.choose(plan.rules.apply(logits, rows), rows)  # [R]
        logprobs = plan.logprobs(token_ids, logits) if plan.logprob_rows else None
        return Samples(token_ids, logprobs, plan.rules.problems)

    def _plan_of(self, batch: list[SamplingParams], device: torch.device) -> _Plan:
        plan = self._plan
        if plan is None or not plan.is_for(batch, device):
            self._plan = plan = _Plan(batch, self.vocab_size, device)
        return plan


@dataclass(frozen=True)
class _Logprobs:
    """Logprobs of L rows of a batch, on the device."""

    wanted: list[tuple[int, int]]
    """Each row and how many of the most likely tokens it asked for."""
    own: Tensor  # [L] of the chosen tokens
    ranks: Tensor  # [L]
    top_ids: Tensor  # [L, K]
    top_logprobs: Tensor  # [L, K]


@dataclass(frozen=True)
class Samples:
    """The tokens of one batch, on the device until they are read."""

    token_ids: Tensor
    """int64 [R]; anything where there is a problem."""
    _logprobs: _Logprobs | None = None
    _problems: Mapping[int, str] = field(default_factory=dict)

    def read(self) -> list[SampledToken]:
        """Waits for the device."""
        sampled = [SampledToken(token_id) for token_id in self.token_ids.tolist()]
        if (logprobs := self._logprobs) is not None:
            own = zip(logprobs.wanted, logprobs.own.tolist(), logprobs.ranks.tolist(), strict=True)
            others = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
            for ((r, num_top), logprob, rank), (top_ids, top_values) in zip(own, others, strict=True):
                alternatives = tuple(zip(top_ids[:num_top], top_values[:num_top], strict=True))
                sampled[r] = SampledToken(sampled[r].token_id, logprob, rank, alternatives)
        for r, problem in self._problems.items():
            sampled[r] = SampledToken(-1, problem=problem)
        return sampled


class _Plan:
    """A batch's params as tensors; valid for every step until a sequence joins or leaves."""

    def __init__(self, batch: list[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self.batch = batch
        self.device = device
        self.rules = LogitRules(batch, vocab_size, device)
        self.logprob_rows = [r for r, p in enumerate(batch) if p.top_logprobs is not None]
        self._num_top = min(vocab_size, max((batch[r].top_logprobs or 0 for r in self.logprob_rows), default=0))
        self._logprob_index = upload(self.logprob_rows, device, np.int64)
        self._sampling_rows = [r for r, p in enumerate(batch) if not p.is_greedy]
        self._sampling_index = upload(self._sampling_rows, device, np.int64)
        sampling = [batch[r] for r in self._sampling_rows]
        self._seeds = [p.seed for p in sampling]
        self._temperature = upload([p.temperature for p in sampling], device, np.float32).unsqueeze(1)  # [S, 1]
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        is_filtered = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in sampling)
        self._filter = _Filter(sampling, vocab_size, device) if is_filtered else None

    def is_for(self, batch: list[SamplingParams], device: torch.device) -> bool:
        return self.device == device and len(self.batch) == len(batch) and all(map(is_, self.batch, batch))

    def choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Token ids, int64 [R]."""
        if not self._sampling_rows:
            return _most_likely(logits)
        if len(self._sampling_rows) == len(rows):
            return self._draw(logits, rows)
        drawn = self._draw(logits[self._sampling_index], [rows[r] for r in self._sampling_rows])
        return _most_likely(logits).index_copy_(0, self._sampling_index, drawn)

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Gumbel-max over [S, V]. Subtracting the maximum first keeps the smallest temperature from overflowing."""
        keys = row_keys(self._seeds, [r.sequence_index for r in rows], [r.position for r in rows])
        tempered = (logits - logits.amax(-1, keepdim=True)).div_(self._temperature)
        scores = gumbel(upload(keys, self.device, np.int32), self._token_ids).add_(tempered)
        return scores.argmax(-1) if self._filter is None else self._filter.choose(tempered, scores)

    def logprobs(self, token_ids: Tensor, logits: Tensor) -> _Logprobs:
        """Returns those of the rows that asked, in the model's raw distribution."""
        logprobs = logits[self._logprob_index].log_softmax(-1)
        own = logprobs.gather(1, token_ids[self._logprob_index].unsqueeze(1))
        ranks = (logprobs > own).sum(-1) + 1
        top = logprobs.topk(self._num_top, dim=-1)
        wanted = [(r, self.batch[r].top_logprobs or 0) for r in self.logprob_rows]
        return _Logprobs(wanted, own[:, 0], ranks, top.indices, top.values)


def _most_likely(logits: Tensor) -> Tensor:
    """int64 [R]; on the CPU by numpy, which is six times as fast at it as torch."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


class _Filter:
    """top_k, top_p and min_p without a sort, exactly (the pivoting idea of FlashInfer's sampling kernels).

    The token with the best score is either kept by the filters, and then it is the answer, or it is not, and then
    nothing that is less likely is kept either: only the tokens ahead of it stay in the running. "Ahead" is: more
    likely, or as likely with a lower id. A few rounds settle every row; rows that are settled leave the batch.
    """

    def __init__(self, sampling: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in sampling]
        self._top_k = upload(top_k, device, np.int64)
        self._top_p = upload([p.top_p if p.top_p < 1 else math.inf for p in sampling], device, np.float32)
        floor = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in sampling]
        self._floor = upload(floor, device, np.float32)
        self._token_ids = torch.arange(vocab_size, device=device)
        nested = [s for s, p in enumerate(sampling) if p.top_p < 1 and top_k[s] < vocab_size]
        self._nested = upload(nested, device, np.int64)  # rows whose top_p counts within top_k
        self._nested_last = upload([top_k[s] - 1 for s in nested], device, np.int64).unsqueeze(1)
        self._nested_width = max((top_k[s] for s in nested), default=0)

    def choose(self, tempered: Tensor, scores: Tensor) -> Tensor:
        """Best score among the kept tokens of each row: [S, V], [S, V] -> int64 [S]. Tempered logits have maximum 0."""
        weights = tempered.exp()
        state = [tempered, weights, scores, self._mass_wanted(weights), self._top_k, self._floor]
        waiting = torch.arange(len(tempered), device=tempered.device)
        chosen = torch.empty_like(waiting)
        while True:
            tempered, weights, scores, mass_wanted, top_k, floor = state
            token = scores.argmax(-1, keepdim=True)
            pivot = tempered.gather(1, token)
            ahead = (tempered > pivot).logical_or_((tempered == pivot).logical_and_(self._token_ids < token))
            num_ahead = ahead.sum(-1)
            mass_ahead = (weights * ahead).sum(-1)
            kept = (mass_ahead < mass_wanted) & (num_ahead < top_k) & (pivot[:, 0] >= floor) | (num_ahead == 0)
            chosen.index_copy_(0, waiting, token[:, 0])
            rejected = kept.logical_not_().nonzero()[:, 0]
            if not rejected.numel():
                return chosen
            waiting = waiting[rejected]
            state = [part[rejected] for part in state]
            state[2].masked_fill_(ahead[rejected].logical_not_(), -math.inf)

    def _mass_wanted(self, weights: Tensor) -> Tensor:
        """top_p of the weight there is; where there is a top_k as well, of the weight of those k. [S]"""
        total = weights.sum(-1)
        if self._nested_width:
            best = weights[self._nested].topk(self._nested_width, dim=-1).values
            total.index_copy_(0, self._nested, best.cumsum(-1).gather(1, self._nested_last)[:, 0])
        return total.mul_(self._top_p)


class LogitRules:
    """Changes logits before temperature: bias, allowed ids, constraints, the ban on stopping early, penalties.

    Built for one batch; rows that use none of them cost nothing, and the others are handled together, through indices
    into the flat [R * V] logits. Raises ValueError for a token id outside the vocabulary.
    """

    def __init__(self, batch: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        for p in batch:
            _require_in_vocabulary("logit_bias", p.logit_bias, vocab_size)
            _require_in_vocabulary("allowed_token_ids", p.allowed_token_ids, vocab_size)
        bias = [(r * vocab_size + t, b) for r, p in enumerate(batch) for t, b in p.logit_bias.items()]
        self._bias_indices = upload([index for index, _ in bias], device, np.int64)
        self._bias_values = upload([value for _, value in bias], device, np.float32)
        self._allowed = [
            (r, upload(p.allowed_token_ids, device, np.int64)) for r, p in enumerate(batch) if p.allowed_token_ids
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
            if rows[r].position < minimum and (r not in allowed or _is_more_than(allowed[r], stops))
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
            logits[r].masked_fill_(upload(~may_follow, self._device, np.bool_), -torch.inf)
        if banned:
            flat.index_fill_(0, upload(banned, self._device, np.int64), -torch.inf)
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
        return upload(flat, self._device, np.int64)  # [I]

    def _spread(self, values: Sequence[float], tokens: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        spread = np.repeat(np.array(values, dtype=np.float32), [len(t) for t in tokens])
        return upload(spread, self._device, np.float32)  # [I]


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
