"""Tokens that are chosen in recordings of decode steps, by kernels in Triton, interpreted: those of plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_kernels
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import generate, make_runner
from interpreted_kernels import DEVICE
from triton_sampling import VOCAB, Recordings, by_torch, check, grown, random_logits, row

from engine.attention.flash import FlashAttention
from engine.sampling.params import SampledToken, SampleRow
from engine.sampling.sampler import Sampler
from engine.triton import sampler as kernels
from engine.triton.sampler import TritonChooser

MOST = 6
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 5, "frequency_penalty": 1.5},
    {"seed": 6, "presence_penalty": 2.0, "logit_bias": {3: 2.0}, "top_logprobs": 4},
    {"seed": 7, "min_output_tokens": 3, "stop_token_ids": frozenset(range(20)), "top_k": 9, "top_p": 0.7},
    {"seed": 8, "allowed_token_ids": tuple(range(9)), "repetition_penalty": 1.3},
    {"seed": 9, "top_p": 0.8, "top_logprobs": 20},
]


class Recorded:
    """A chooser with recordings of two sizes, over logits and tokens that stay where they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chooser = TritonChooser(VOCAB, DEVICE)
        self.chooser.reserve(MOST)
        self.logits = torch.full((MOST, VOCAB), 7.0, device=DEVICE)
        self.token_ids = torch.full((MOST,), -1, dtype=torch.int32, device=DEVICE)
        recordings = Recordings(monkeypatch)
        self._replays = {size: recordings(lambda size=size: self._record(size)) for size in (2, MOST)}  # type: ignore[misc]

    def _record(self, size: int) -> None:
        self.chooser.record(self.logits[:size], self.token_ids[:size])

    def replay(self, logits: torch.Tensor) -> None:
        self.token_ids.fill_(-1)
        self.logits[: len(logits)] = logits.to(DEVICE)
        self._replays[2 if len(logits) <= 2 else MOST]()

    def choose(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        assert self.chooser.place(rows)
        self.replay(logits)
        assert (self.token_ids[len(rows) :] == -1).all(), "tokens were chosen for rows that nobody wants"
        return self.chooser.samples(self.token_ids[: len(rows)]).read()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def test_sequences_come_go_and_are_chosen_for_elsewhere_in_between(recorded: Recorded) -> None:
    """As when a prompt is computed among them: what was counted in a recording counts outside, and the other way."""
    rows = [row(prompt=range(i), index=i, **fields) for i, fields in enumerate(FIELDS)]
    batches = [
        [0],
        [0],
        [0, 1],
        [0, 1, 2],
        [2, 1, 3],
        [2, 1, 3],
        [3, 4, 0, 2],
        [5, 4, 3, 2, 1, 0],
        [5, 4, 3, 2, 1, 0],
        [1],
    ]
    for step, present in enumerate(batches):
        logits, batch = random_logits(len(present), VOCAB, step), [rows[r] for r in present]
        if step in (1, 5, 6):
            sampled = recorded.chooser.launch(logits.to(DEVICE), batch).read()
        else:
            sampled = recorded.choose(logits, batch)
        check(sampled, by_torch(logits, batch))
        for r, chosen in zip(present, sampled, strict=True):
            rows[r] = grown(rows[r], chosen.token_id)


def test_a_recording_chooses_before_the_tokens_of_the_last_one_are_read(recorded: Recorded) -> None:
    rows = [row(prompt=(1, 2), index=i, **fields) for i, fields in enumerate(FIELDS)]
    expected, logits = [], [random_logits(MOST, VOCAB, step) for step in range(4)]
    behind = rows
    for each in logits:
        expected.append(by_torch(each, behind))
        behind = [grown(r, s.token_id) for r, s in zip(behind, expected[-1], strict=True)]
    unread = []
    for step, each in enumerate(logits):
        assert recorded.chooser.place([replace(r, num_unread=min(step, 1)) for r in rows])
        recorded.replay(each)
        unread.append(recorded.chooser.samples(recorded.token_ids))
        if step:
            tokens = unread.pop(0).read()
            check(tokens, expected[step - 1])
            rows = [grown(r, token.token_id) for r, token in zip(rows, tokens, strict=True)]
    check(unread[0].read(), expected[3])


def test_what_a_recording_cannot_choose_is_chosen_outside_and_recordings_choose_none(recorded: Recorded) -> None:
    class Anything:
        def allowed(self, *_: Any) -> Any:
            return torch.ones(VOCAB, dtype=torch.bool).numpy()

    rows = [row(prompt=(4,), **FIELDS[1])]
    logits = random_logits(2, VOCAB)
    for step, other in enumerate([row(constraint=Anything()), row(top_logprobs=21), row()]):
        batch = [*rows, other]
        if step < 2:
            assert not recorded.chooser.place(batch)
            recorded.replay(logits)
            assert (recorded.token_ids == -1).all()
            sampled = recorded.chooser.launch(logits.to(DEVICE), batch).read()
        else:
            sampled = recorded.choose(logits, batch)
        check(sampled[:1], by_torch(logits[:1], rows))
        rows = [grown(rows[0], sampled[0].token_id)]
    batch = [*rows, grown(other, sampled[1].token_id)]
    assert not recorded.chooser.place([])
    recorded.replay(logits)
    assert (recorded.token_ids == -1).all()
    check(recorded.chooser.launch(logits.to(DEVICE), batch).read(), by_torch(logits, batch))


def test_numbers_that_have_moved_are_read_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences with penalties than there is memory for: they have moved for good, others have nothing there."""
    monkeypatch.setattr(kernels, "_MOST_KEPT", 2)
    recorded = Recorded(monkeypatch)
    rows = [row(index=i, frequency_penalty=1.0) for i in range(3)]
    logits = random_logits(3, VOCAB)
    check(recorded.choose(logits[:2], rows[:2]), by_torch(logits[:2], rows[:2]))
    assert not recorded.chooser.place(rows) and not recorded.chooser.place(rows[:1])
    check(recorded.chooser.launch(logits.to(DEVICE), rows).read(), by_torch(logits, rows))
    plain = [row(seed=3), row(temperature=0.0)]
    check(recorded.choose(logits[:2], plain), by_torch(logits[:2], plain))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="with a GPU, tests/gpu generates by graphs")
def test_a_model_generates_the_same_tokens_with_their_choice_in_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FlashAttention(plain_kernels.flash_attn_varlen_func)
    monkeypatch.setattr("engine.model_runner.choose_attention", lambda *_: (backend, "for this test"))
    folder, sizes = make_checkpoint("llama", tmp_path), {"num_blocks": 8, "block_size": 256, "kernels": "torch"}
    recordings, sampler = Recordings(monkeypatch), Sampler(VOCAB_SIZE)
    sampler._choosers[torch.device("cpu")] = TritonChooser(VOCAB_SIZE, torch.device("cpu"))
    recorded = make_runner(folder, **sizes, graphs_up_to=4, capture=recordings, sampler=sampler)
    prompts = [[5, 6, 7], [8] * 9, [11, 12]]

    expected = generate(make_runner(folder, **sizes), prompts, 8, overlaps=False)

    assert recorded.graphs_reason == "3 sizes of decode steps, up to 4 sequences, with the choice of their tokens"
    for overlaps in (False, True):
        assert generate(recorded, prompts, 8, overlaps) == expected
    assert recordings.num_replays == 16
