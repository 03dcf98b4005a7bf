"""Steps that overlap and choose their tokens in recordings: a router is told the same, by one rank and by two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_kernels
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner
from interpreted_kernels import DEVICE
from pipeline_bench import assert_equal, joined_ranks, told_by
from triton_sampling import Recordings

from engine.attention.flash import FlashAttention
from engine.model_runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.tp import SingleGroup, TPGroup
from engine.triton.sampler import TritonChooser

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="with a GPU, tests/gpu generates by graphs")

REQUESTS: list[dict[str, Any]] = [
    {"num_prompt_tokens": 9, "most": 9},
    {"num_prompt_tokens": 30, "most": 20, "params": {"temperature": 1.0, "seed": 3}, "top_logprobs": 2},
    {"most": 20, "params": {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.7, "repetition_penalty": 1.3}},
    {"num_prompt_tokens": 5, "most": 6, "params": {"temperature": 1.2, "n": 3, "top_k": 30, "top_p": 0.8}},
    {"most": 15, "params": {"temperature": 1.0, "seed": 9}, "stopping": {"stop_token_ids": list(range(0, 320, 5))}},
    {
        "most": 20,
        "params": {"temperature": 1.0, "presence_penalty": 1.0},
        "stopping": {"stop_token_ids": list(range(0, 320, 3)), "min_output_tokens": 4},
    },
    {"num_prompt_tokens": 1, "most": 4, "params": {"temperature": 1.0, "seed": 2, "n": 2}},
    {"num_prompt_tokens": 70, "most": 3, "prompt_logprobs": 1, "top_logprobs": 0},
]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.battery)])
def test_what_is_chosen_in_recordings_is_what_steps_one_by_one_lead_to(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    folder, sizes = make_checkpoint("llama", tmp_path), {"num_blocks": 16, "block_size": 256, "kernels": "torch"}
    recordings, sampler = Recordings(monkeypatch), Sampler(VOCAB_SIZE)
    sampler._choosers[torch.device("cpu")] = TritonChooser(VOCAB_SIZE, torch.device("cpu"))

    def make(tp: TPGroup) -> ModelRunner:
        if tp.rank:  # only rank 0 chooses
            return make_runner(folder, tp=tp, **sizes, graphs_up_to=12, capture=lambda work: (work(), work)[1])
        return make_runner(folder, tp=tp, **sizes, graphs_up_to=12, capture=recordings, sampler=sampler)

    runners = [make(SingleGroup())] if num_ranks == 1 else joined_ranks(make)
    one_by_one = told_by([make_runner(folder, **sizes)], False, 16, requests=REQUESTS)
    overlapping = told_by(runners, True, 16, sampler, REQUESTS)

    assert_equal([one_by_one, overlapping])
    assert recordings.num_replays > 10
