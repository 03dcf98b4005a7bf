"""Sampling in Triton of any rows, with any parameters together, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis", reason="a machine that only checks its GPU need not have it")

from hypothesis import given, settings
from hypothesis import strategies as st
from triton_sampling import VOCAB, KeptChooser, by_torch, check, grown, random_logits

from engine.sampling.params import SampleRow, SamplingParams

TOKEN_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 17, 39, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.7]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.25]), max_size=4),
    allowed_token_ids=TOKEN_IDS.map(tuple),
    min_output_tokens=st.integers(0, 6),
    stop_token_ids=TOKEN_IDS.map(frozenset),
    top_logprobs=st.sampled_from([None, 0, 3, 60]),
)
ROWS = st.lists(st.builds(SampleRow, PARAMS, st.integers(0, 15), TOKEN_IDS, TOKEN_IDS), min_size=1, max_size=4)


@settings(max_examples=8, derandomize=True, database=None)
@given(rows=ROWS, seed=st.integers(0, 1000), num_steps=st.integers(1, 3))
def test_every_batch_chooses_what_plain_torch_chooses_in_one_step_after_another(
    rows: list[SampleRow], seed: int, num_steps: int
) -> None:
    chooser = KeptChooser(VOCAB)
    for step in range(num_steps):
        logits = random_logits(len(rows), VOCAB, seed + step)
        expected = by_torch(logits, rows)
        check(chooser(logits, rows), expected)
        rows = [grown(r, s.token_id) for r, s in zip(rows, expected, strict=True)]
