"""Sampling on a CUDA device that is not there (`fake_cuda`): what is launched in a step, and that nobody waits before
tokens are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import DEVICE, Launches, Waited, fake_cuda

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
    "scored": {"top_logprobs": 3},
}
FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
}
KERNELS = ["auto", "torch"]
pytest.importorskip("triton", reason="triton has no build for this platform")


def row(**fields: Any) -> SampleRow:
    return SampleRow(SamplingParams(**fields), 0, (1, 2), [5, 6])


def next_of(rows: list[SampleRow]) -> list[SampleRow]:
    return [replace(r, num_unread=r.num_unread + 1) for r in rows]


def launch(sampler: Sampler, rows: list[SampleRow]) -> Launches:
    logits = torch.zeros(len(rows), VOCAB_SIZE, device=DEVICE)
    with Launches() as launches:
        samples = sampler.launch(logits, rows)
    assert samples.token_ids.shape == (len(rows),) and samples.token_ids.device == torch.device(DEVICE)
    assert not launches.blocking
    with pytest.raises(Waited):
        samples.read()
    return launches


def test_a_copy_that_waits_for_the_device_is_found() -> None:
    with fake_cuda(), Launches() as launches:
        there = torch.zeros(3, device=DEVICE)
        queued, back = torch.ones(3).pin_memory(), torch.empty(3, pin_memory=True)
        queued.to(DEVICE, non_blocking=True)
        there.copy_(queued, non_blocking=True)
        back.copy_(there, non_blocking=True)
        assert not launches.blocking
        queued.to(DEVICE)
        torch.ones(3).to(DEVICE, non_blocking=True)
        there.copy_(torch.ones(3), non_blocking=True)
        torch.tensor([1.0], device=DEVICE)
        there.cpu()
        back.copy_(there)
    assert launches.blocking == {"aten::_to_copy": 4, "aten::copy_": 2}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_waits_for_the_device_before_tokens_are_read(kind: str, kernels: str) -> None:
    """Rows of one kind, and of this one among greedy ones, in two steps."""
    sampler = Sampler(VOCAB_SIZE, kernels)
    with fake_cuda():
        for rows in ([row(**KINDS[kind])], [row(**KINDS[kind]), row(temperature=0.0)]):
            launch(sampler, rows)
            launch(sampler, next_of(rows))


@pytest.mark.parametrize("kind", [*KINDS, *FILTERS])
def test_a_step_after_the_first_is_three_launches_and_the_copy_of_its_tokens(kind: str, record_property: Any) -> None:
    """Two where all rows are greedy; logprobs come in four more copies."""
    sampler, rows = Sampler(VOCAB_SIZE), [row(**(KINDS | FILTERS)[kind]) for _ in range(3)]
    with fake_cuda():
        launch(sampler, rows)
        names = launch(sampler, next_of(rows)).names
    expected = Counter({"triton::find_largest": 1, "triton::settle": 1, "aten::copy_": 1})
    expected["triton::draw"] = int(kind != "greedy")
    expected["aten::copy_"] += 4 * (kind == "scored")
    record_property("launches", names.total())
    assert names == +expected


def test_a_constraint_adds_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    class Anything:
        def allowed(self, *_: Any) -> Any:
            return np.full(-(-VOCAB_SIZE // 32), -1, dtype=np.int32)

    sampler, rows = Sampler(VOCAB_SIZE), [row(constraint=Anything()), row(constraint=Anything())]
    with fake_cuda():
        launch(sampler, rows)
        names = launch(sampler, next_of(rows)).names
    assert names["aten::_to_copy"] == 1 and names.total() == 5


@pytest.mark.parametrize("kind", [*KINDS, *FILTERS])
def test_a_recorded_choice_is_three_launches_of_its_recording_and_nothing_before_it(kind: str) -> None:
    """Once a batch is placed, a step adds the copy of its tokens. Nobody waits, not when it is placed either."""
    rows = [row(**(KINDS | FILTERS)[kind]) for _ in range(3)]
    with fake_cuda(), torch.inference_mode():
        chooser = Sampler(VOCAB_SIZE).reserve(torch.device(DEVICE), 4)
        assert chooser is not None
        logits, token_ids = torch.zeros(4, VOCAB_SIZE, device=DEVICE), torch.zeros(4, device=DEVICE).int()
        with Launches() as recorded:
            chooser.record(logits, token_ids)
        with Launches() as launches:
            assert chooser.place(rows)
            samples = chooser.samples(token_ids[:3])
        assert not launches.blocking and samples.token_ids.device == torch.device(DEVICE)
        with pytest.raises(Waited):
            samples.read()
        with Launches() as launches:
            assert chooser.place(next_of(rows))
        assert launches.names.total() == 0
        with Launches() as launches:
            chooser.samples(token_ids[:3])
        assert launches.names == {"aten::copy_": 1 + 4 * (kind == "scored")}
    assert recorded.names == {"triton::find_largest": 1, "triton::draw": 1, "triton::settle": 1}


def test_plain_torch_cannot_be_recorded() -> None:
    with fake_cuda():
        assert Sampler(VOCAB_SIZE, "torch").reserve(torch.device(DEVICE), 4) is None
