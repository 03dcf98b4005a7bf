"""Sampling on a CUDA device that is not there (`fake_cuda`): what is launched, and that nobody waits before tokens are
read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import DEVICE, Launches, fake_cuda
from torch._subclasses.fake_tensor import DataDependentOutputException

from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.sampler import Sampler

VOCAB_SIZE = 50
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "biased": {"logit_bias": {1: 2.0}},
    "few allowed": {"allowed_token_ids": (3, 4)},
    "stop banned": {"min_output_tokens": 9, "stop_token_ids": frozenset({2})},
    "repetition": {"repetition_penalty": 1.2},
    "presence and frequency": {"presence_penalty": 0.1, "frequency_penalty": 0.2},
}


def row(**fields: Any) -> SampleRow:
    return SampleRow(SamplingParams(**fields), 0, (1, 2), [5, 6])


def test_a_copy_that_waits_for_the_device_is_found() -> None:
    with fake_cuda(), Launches() as launches:
        there = torch.zeros(3, device=DEVICE)
        queued = torch.ones(3).pin_memory()
        queued.to(DEVICE, non_blocking=True)
        there.copy_(queued, non_blocking=True)
        assert not launches.blocking
        queued.to(DEVICE)
        torch.ones(3).to(DEVICE, non_blocking=True)
        there.copy_(torch.ones(3), non_blocking=True)
        torch.tensor([1.0], device=DEVICE)
        there.cpu()
    assert launches.blocking == {"aten::_to_copy": 4, "aten::copy_": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_to_the_device_is_waited_for_before_tokens_are_read(kind: str) -> None:
    """Rows of one kind, and of this one among greedy ones, in two steps."""
    sampler = Sampler(VOCAB_SIZE)
    with fake_cuda(), Launches() as launches:
        for rows in ([row(**KINDS[kind])], [row(**KINDS[kind]), row(temperature=0.0)]):
            logits = torch.zeros(len(rows), VOCAB_SIZE, device=DEVICE)
            for _ in range(2):
                with pytest.raises(DataDependentOutputException):  # tokens are read
                    sampler.sample(logits, rows)
    assert launches.names["aten::argmax"] >= 4
    assert not launches.blocking
