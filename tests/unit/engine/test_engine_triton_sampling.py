"""Sampling in Triton, interpreted (or on a GPU, if there is one), against the sampler in plain torch: the same tokens,
step after step, whoever comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted_kernels import DEVICE
from triton_sampling import LARGE_VOCAB, VOCAB, KeptChooser, by_torch, check, grown, random_logits, row

from engine.sampling.constraint import ConstraintFailed
from engine.sampling.params import SampledToken, SampleRow, SamplingParams
from engine.sampling.rng import gumbel as expected_gumbel
from engine.sampling.rng import row_keys, sequence_keys
from engine.triton.sampler import TritonChooser
from engine.triton.sampling_batch import FIELDS, mask_of
from engine.triton.sampling_tiles import gumbel, key_of

WIDE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 1.7},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 3.0},
    {"top_k": 50},
    {"top_k": 5, "temperature": 8.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 4000, "top_p": 0.7, "temperature": 2.0},
    {"top_k": 9000, "top_p": 0.5, "temperature": 4.0},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_p": 0.9, "top_k": 300},
    {"top_logprobs": 20, "temperature": 2.0},
]


@pytest.mark.parametrize("fields", WIDE, ids=str)
def test_a_vocabulary_of_several_tiles_is_chosen_from_by_the_same_rules(fields: dict[str, Any]) -> None:
    rows = [row(seed=seed, output=[seed] * seed, **fields) for seed in range(3)]
    logits = random_logits(3, LARGE_VOCAB)
    check(KeptChooser(LARGE_VOCAB)(logits, rows), by_torch(logits, rows))


def test_groups_grow_with_the_vocabulary() -> None:
    vocab_size = 32 * 4096 + 7
    rows = [row(seed=1, top_k=20, top_p=0.8, top_logprobs=3), row(temperature=0.0)]
    logits = random_logits(2, vocab_size)
    check(KeptChooser(vocab_size)(logits, rows), by_torch(logits, rows))


@pytest.mark.parametrize(
    "fields", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.6}, {"temperature": 0.0}], ids=str
)
def test_equal_tokens_are_kept_by_their_ids(fields: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 0.0, 1.0, 1.0, -5.0]]).repeat(12, VOCAB // 8)
    rows = [row(seed=seed, **fields) for seed in range(12)]
    check(KeptChooser(VOCAB)(logits, rows), by_torch(logits, rows))


def test_a_row_alone_and_among_128_has_the_same_bits() -> None:
    fields: dict[int, dict[str, Any]] = {
        0: {"top_p": 0.9, "top_logprobs": 5},
        77: {"top_k": 300, "top_p": 0.9, "temperature": 2.0, "top_logprobs": 2},
        127: {"min_p": 0.01, "top_logprobs": 1, "repetition_penalty": 1.2},
    }
    rows = [row(seed=seed, prompt=[4], **fields.get(seed, {"temperature": 0.0})) for seed in range(128)]
    logits = random_logits(128, LARGE_VOCAB)
    together = KeptChooser(LARGE_VOCAB)(logits, rows)
    for r in fields:
        (alone,) = KeptChooser(LARGE_VOCAB)(logits[r : r + 1], rows[r : r + 1])
        assert alone == together[r]


def test_sequences_that_come_go_and_return_are_penalised_for_their_own_tokens() -> None:
    """Among them one that leaves for a step, and one whose token became another."""
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1.6, "temperature": 0.0},
        {"frequency_penalty": 1.5, "seed": 5},
        {"presence_penalty": 2.0, "seed": 6, "logit_bias": {3: 2.0}},
        {"min_output_tokens": 4, "stop_token_ids": frozenset(range(20)), "seed": 7},
        {"seed": 8, "allowed_token_ids": tuple(range(9)), "frequency_penalty": 0.5},
    ]
    rows = [row(prompt=range(i), index=i, **each) for i, each in enumerate(fields)]
    chooser, generator = KeptChooser(VOCAB), np.random.default_rng(2)
    for step, present in enumerate([[0, 1], [0, 1, 2], [2, 1, 3], [3, 4, 0, 2], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1]]):
        logits = random_logits(len(present), VOCAB, step)
        batch = [rows[r] for r in present]
        sampled = chooser(logits, batch)
        check(sampled, by_torch(logits, batch))
        for r, chosen in zip(present, sampled, strict=True):
            is_replaced = generator.random() < 0.2
            rows[r] = grown(rows[r], int(generator.integers(VOCAB)) if is_replaced else chosen.token_id)


def test_the_next_step_is_chosen_before_the_tokens_of_the_last_one_are_read() -> None:
    params = [SamplingParams(seed=1, frequency_penalty=1.0), SamplingParams(temperature=0.0, repetition_penalty=1.7)]
    rows = [SampleRow(p, 0, (1, 2), ()) for p in params]
    logits = [random_logits(2, VOCAB, step) for step in range(4)]
    expected: list[list[SampledToken]] = []
    for each in logits:
        expected.append(by_torch(each, rows))
        rows = [grown(r, s.token_id) for r, s in zip(rows, expected[-1], strict=True)]
    chooser = TritonChooser(VOCAB, DEVICE)
    outputs: list[list[int]] = [[], []]
    unread = [
        chooser.launch(logits[0].to(DEVICE), [SampleRow(p, 0, (1, 2), o) for p, o in zip(params, outputs, strict=True)])
    ]
    for step in range(1, 4):
        ahead = [SampleRow(p, 0, (1, 2), tuple(o), num_unread=1) for p, o in zip(params, outputs, strict=True)]
        unread.append(chooser.launch(logits[step].to(DEVICE), ahead))
        tokens = unread.pop(0).read()
        check(tokens, expected[step - 1])
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token.token_id)
    check(unread[0].read(), expected[3])


@dataclass
class Even:
    """A constraint that allows even tokens, and no more after three."""

    allowed_ids: tuple[int, ...] = tuple(range(0, VOCAB, 2))

    def allowed(self, sequence_index: int, output_token_ids: Sequence[int], ends: Any) -> Any:
        if len(output_token_ids) == 3:
            raise ConstraintFailed("enough")
        mask = np.zeros(VOCAB, dtype=np.bool_)
        mask[list(self.allowed_ids)] = True
        return mask_of(mask)


def test_a_constraint_is_followed_until_it_cannot_be() -> None:
    stops: dict[str, Any] = {"min_output_tokens": 2, "stop_token_ids": frozenset(range(30))}
    constraint: Any = Even()
    rows = [
        row(constraint=constraint, temperature=0.0),
        row(seed=4),
        row(constraint=constraint, seed=2, allowed_token_ids=(2, 3, 4, 5), repetition_penalty=1.3),
        row(constraint=constraint, seed=3, top_p=0.9, **stops),
        row(constraint=Even((2, 4)), seed=3, **stops),  # type: ignore[arg-type]
    ]
    chooser = KeptChooser(VOCAB)
    for step in range(4):
        logits = random_logits(5, VOCAB, step)
        expected = by_torch(logits, rows)
        check(chooser(logits, rows), expected)
        assert (step == 3) == (expected[0].problem or "").endswith("enough")
        rows = [grown(r, s.token_id) for r, s in zip(rows, expected, strict=True)]


def test_a_row_of_nan_ends_and_harms_no_other_row() -> None:
    logits = random_logits(4, VOCAB)
    rows = [row(seed=s, top_p=0.5, top_k=7, top_logprobs=2) for s in range(3)] + [row(temperature=0.0)]
    expected = KeptChooser(VOCAB)(logits, rows)
    logits[1] = torch.nan
    sampled = KeptChooser(VOCAB)(logits, rows)
    assert (sampled[0], *sampled[2:]) == (expected[0], *expected[2:])
    assert 0 <= sampled[1].token_id < VOCAB


def test_rows_may_lie_apart() -> None:
    wide = random_logits(3, 64)
    logits, rows = wide[:, :VOCAB], [row(seed=seed, top_k=5, top_logprobs=2) for seed in range(3)]
    check(TritonChooser(VOCAB, DEVICE).launch(wide.to(DEVICE)[:, :VOCAB], rows).read(), by_torch(logits, rows))


@pytest.mark.parametrize("fields", [{"logit_bias": {30: 1.0}}, {"allowed_token_ids": (3, -1)}], ids=str)
def test_a_rule_for_a_token_outside_the_vocabulary_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is outside the vocabulary; use 0 to 29"):
        KeptChooser(30)(torch.zeros(1, 30), [row(**fields)])


@triton.jit
def noise_of(table, out, SIZE: tl.constexpr):
    tokens = tl.arange(0, SIZE)
    low, high = key_of(table)
    tl.store(out + tokens, gumbel(low, high, tokens))


@pytest.mark.parametrize(("seed", "index", "position"), [(0, 0, 0), (2**64 - 1, 15, 100_000), (7, 3, 1)])
def test_the_noise_is_that_of_the_cpu(seed: int, index: int, position: int) -> None:
    table = torch.zeros(len(FIELDS), dtype=torch.int32)
    key = sequence_keys([seed], [index])[0].tolist()
    for name, value in zip(("key_low", "key_high", "position"), (*key, position), strict=True):
        table[FIELDS.index(name)] = value
    out = torch.empty(1 << 16, device=DEVICE)
    noise_of[(1,)](table.to(DEVICE), out, 1 << 16)

    keys = torch.from_numpy(row_keys([seed], [index], [position]))
    expected = expected_gumbel(keys, torch.arange(1 << 16, dtype=torch.int32))[0]
    torch.testing.assert_close(out.cpu(), expected, rtol=3e-6, atol=1e-6)
