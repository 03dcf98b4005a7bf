"""Owns the choice of the next token: logits in, one token for each row out, whole batches in a few tensor ops.

Order: logit rules (bias, allowed ids, constraint, stop ban, penalties), temperature, top-k, top-p within top-k, min-p,
then Gumbel-max with `engine.sampling.rng`. A row's token depends on its own logits, params, sequence index and position
alone, never on the rest of the batch. Holds no state but the plan of the latest batch. Knows nothing of text or blocks.

Legend: R rows, S rows that sample (the others are greedy), V vocabulary, I indices of one rule over all its rows.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.copies import upload
from engine.sampling.constraint import Words
from engine.sampling.params import SampledToken, SampleRow, SamplingParams
from engine.sampling.rng import gumbel, row_keys
from engine.sampling.rules import LogitRules, mask_rows, most_likely
from engine.sampling.samples import Logprobs, Samples
from engine.triton.target import obstacle


class Chooser(Protocol):
    """Implemented by `TorchChooser`, and on GPUs by `engine.triton.sampler.TritonChooser`."""

    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> Samples:
        """One row or more."""
        ...

    def reserve(self, most: int) -> RecordedChooser | None:
        """Memory for recordings of up to `most` rows; None where it does not choose in recordings. Called once."""
        ...


class RecordedChooser(Protocol):
    """A choice of tokens that is part of recorded steps (`engine.cuda_graphs`): it takes no memory and reads what lies
    in fixed places. Implemented by `engine.triton.sampler.TritonChooser`."""

    def record(self, logits: Tensor, token_ids: Tensor) -> None:
        """Launches the choice from float32 logits [n, V] for those rows that are placed, into int32 [n]."""
        ...

    def place(self, rows: Sequence[SampleRow]) -> bool:
        """The recordings that run from now on choose tokens of these rows, the first ones of the batch. False where
        they cannot: they then choose none, as for no rows."""
        ...

    def samples(self, token_ids: Tensor) -> Samples:
        """The tokens of the rows that are placed, which a recording that was launched writes there: int32 [R]."""
        ...


class Sampler:
    """Samples from models of one vocabulary."""

    def __init__(self, vocab_size: int, kernels: str = "auto") -> None:
        """`kernels` is the engine's: `torch` leaves those in Triton out on GPUs."""
        self.vocab_size = vocab_size
        self._kernels = kernels
        self._choosers: dict[torch.device, Chooser] = {}

    def warm_up(self, device: torch.device) -> None:
        """Compiles kernels that the first token would otherwise wait for."""
        if device.type != "cpu":
            row = SampleRow(SamplingParams(), 0, (0,), ())
            self.sample(torch.zeros((1, self.vocab_size), device=device), [row])

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
        return self._chooser(logits.device).launch(logits, rows)

    @torch.inference_mode()
    def reserve(self, device: torch.device, most: int) -> RecordedChooser | None:
        """Takes memory to choose tokens in recorded steps of up to `most` rows; None where no kernels of that device
        can. What is chosen outside of recordings is chosen with what they have counted."""
        return self._chooser(device).reserve(most)

    def _chooser(self, device: torch.device) -> Chooser:
        if device not in self._choosers:
            has_kernels = self._kernels != "torch" and not obstacle(device)
            kind = importlib.import_module("engine.triton.sampler").TritonChooser if has_kernels else TorchChooser
            self._choosers[device] = kind(self.vocab_size, device)
        return self._choosers[device]


class TorchChooser:
    """On any device, in plain torch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._plan: _Plan | None = None

    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> Samples:
        plan = self._plan_of([row.params for row in rows])
        token_ids = plan.choose(*plan.rules.apply(logits, rows), rows)  # [R]
        logprobs = plan.logprobs(token_ids, logits) if plan.logprob_rows else None
        wanted = [(r, rows[r].params.top_logprobs or 0) for r in plan.logprob_rows]
        return Samples(token_ids, wanted, logprobs, plan.rules.problems)

    def reserve(self, most: int) -> None:
        """Cannot be recorded: what a step does depends on what its rows want."""

    def _plan_of(self, batch: list[SamplingParams]) -> _Plan:
        plan = self._plan
        if plan is None or not plan.is_for(batch):
            self._plan = plan = _Plan(batch, self._vocab_size, self._device)
        return plan


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

    def is_for(self, batch: list[SamplingParams]) -> bool:
        return len(self.batch) == len(batch) and all(map(is_, self.batch, batch))

    def choose(self, logits: Tensor, kept: Mapping[int, Words], rows: Sequence[SampleRow]) -> Tensor:
        """Token ids, int64 [R], in some rows among those that are kept."""
        if not self._sampling_rows:
            return most_likely(logits, kept)
        if len(self._sampling_rows) == len(rows):
            return self._draw(logits, kept, rows)
        kept_of_drawn = {s: kept[r] for s, r in enumerate(self._sampling_rows) if r in kept}
        drawn = self._draw(logits[self._sampling_index], kept_of_drawn, [rows[r] for r in self._sampling_rows])
        return most_likely(logits, kept).index_copy_(0, self._sampling_index, drawn)

    def _draw(self, logits: Tensor, kept: Mapping[int, Words], rows: Sequence[SampleRow]) -> Tensor:
        """Gumbel-max over [S, V]. Subtracting the maximum first keeps the smallest temperature from overflowing."""
        keys = row_keys(self._seeds, [r.sequence_index for r in rows], [r.position for r in rows])
        best = logits.gather(1, most_likely(logits, kept).unsqueeze(1)) if kept else logits.amax(-1, keepdim=True)
        tempered = (logits - best).div_(self._temperature)
        if kept:
            mask_rows(tempered, kept)
        scores = gumbel(upload(keys, self.device, np.int32), self._token_ids).add_(tempered)
        return scores.argmax(-1) if self._filter is None else self._filter.choose(tempered, scores)

    def logprobs(self, token_ids: Tensor, logits: Tensor) -> Logprobs:
        """Returns those of the rows that asked, in the model's raw distribution."""
        logprobs = logits[self._logprob_index].log_softmax(-1)
        own = logprobs.gather(1, token_ids[self._logprob_index].unsqueeze(1))
        ranks = (logprobs > own).sum(-1) + 1
        top = logprobs.topk(self._num_top, dim=-1)
        return Logprobs(own[:, 0], ranks, top.indices, top.values)


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
