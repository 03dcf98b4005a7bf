"""Rows to be sampled by kernels in Triton, and by plain torch, which must choose the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from interpreted_kernels import DEVICE

from engine.sampling.params import SampledToken, SampleRow, SamplingParams
from engine.sampling.sampler import TorchChooser
from engine.triton import sampler
from engine.triton.sampler import TritonChooser

VOCAB = 40
LARGE_VOCAB = 9001
"""Three tiles."""
CPU = torch.device("cpu")


def row(output: Sequence[int] = (), prompt: Sequence[int] = (), index: int = 0, **fields: Any) -> SampleRow:
    return SampleRow(SamplingParams(**fields), index, tuple(prompt), tuple(output))


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def by_torch(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    return TorchChooser(logits.shape[1], CPU).launch(logits, rows).read()


class KeptChooser:
    """The kernels, with what they keep from one batch to the next."""

    def __init__(self, vocab_size: int) -> None:
        self._chooser = TritonChooser(vocab_size, DEVICE)

    def __call__(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        there = logits.to(DEVICE, copy=True)
        sampled = self._chooser.launch(there, rows).read()
        assert torch.equal(there.cpu(), logits) or logits.isnan().any()
        return sampled


class Recordings:
    """An `engine.cuda_graphs.Capture` of work that ends with a choice by kernels. A replay launches these with the
    arguments that they had when they were recorded, as a graph does; what comes before them is run again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_replays = 0
        self._launches: list[Callable[[], None]] | None = None
        for name in ("find_largest", "draw", "settle"):
            monkeypatch.setattr(sampler, name, _Recorded(getattr(sampler, name), self))

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        launches = self._without_kernels(work)
        assert len(launches) == 3

        def replay() -> None:
            self.num_replays += 1
            self._without_kernels(work)
            for launch in launches:
                launch()

        return replay

    def _without_kernels(self, work: Callable[[], None]) -> list[Callable[[], None]]:
        """Runs the work, and returns the launches that it would have made."""
        self._launches = launches = []
        work()
        self._launches = None
        return launches

    def launch(self, kernel: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._launches is None:
            kernel(*args, **kwargs)
        else:
            self._launches.append(partial(kernel, *args, **kwargs))


class _Recorded:
    """A kernel that is launched through `Recordings`."""

    def __init__(self, kernel: Any, recordings: Recordings) -> None:
        self._kernel, self._recordings = kernel, recordings

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._recordings.launch, self._kernel[grid])


def check(ours: Sequence[SampledToken], expected: Sequence[SampledToken]) -> None:
    assert [s.token_id for s in ours] == [s.token_id for s in expected]
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine.rank, mine.problem, len(mine.top)) == (theirs.rank, theirs.problem, len(theirs.top))
        assert mine.logprob == (None if theirs.logprob is None else pytest.approx(theirs.logprob, abs=2e-5))
        assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=2e-5)


def grown(r: SampleRow, *token_ids: int) -> SampleRow:
    return replace(r, output_token_ids=(*r.output_token_ids, *token_ids))
