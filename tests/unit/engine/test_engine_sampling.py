"""The sampler against a slow and plain one in numpy, against the distribution it promises, and against itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import Finish, SampledToken, SampleRow, SamplingParams, check_finish
from engine.sampling.rng import gumbel, row_keys
from engine.sampling.sampler import Sampler

FloatArray = npt.NDArray[np.float64]


def row(params: SamplingParams, output: Sequence[int] = (), prompt: Sequence[int] = (), index: int = 0) -> SampleRow:
    return SampleRow(params, index, tuple(prompt), tuple(output))


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def choose(logits: Sequence[float], output: Sequence[int] = (), prompt: Sequence[int] = (), **fields: Any) -> int:
    tensor = torch.tensor([list(logits)], dtype=torch.float32)
    return Sampler(len(logits)).sample(tensor, [row(SamplingParams(**fields), output, prompt)])[0].token_id


def support(logits: Sequence[float], draws: int = 300, **fields: Any) -> set[int]:
    """Which tokens ever come up."""
    tensor = torch.tensor(list(logits), dtype=torch.float32).expand(draws, -1)
    rows = [row(SamplingParams(seed=seed, **fields)) for seed in range(draws)]
    return {s.token_id for s in Sampler(len(logits)).sample(tensor, rows)}


def reference_logits(logits: FloatArray, r: SampleRow) -> FloatArray:
    """Rules before temperature, one token at a time."""
    p, out = r.params, logits.copy()
    for token, bias in p.logit_bias.items():
        out[token] += bias
    stops = p.stop_token_ids if len(r.output_token_ids) < p.min_output_tokens else frozenset()
    choices = set(p.allowed_token_ids or range(len(out)))
    choices = choices - stops or choices
    for token in range(len(out)):
        if token not in choices:
            out[token] = -math.inf
        if token in r.prompt_token_ids or token in r.output_token_ids:
            out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        times = list(r.output_token_ids).count(token)
        out[token] -= p.frequency_penalty * times + (p.presence_penalty if times else 0)
    return out


def reference_kept(tempered: FloatArray, p: SamplingParams) -> set[int]:
    """Tokens that the filters keep, by sorting. `top_p` counts mass within `top_k`."""
    order = sorted(range(len(tempered)), key=lambda t: (-tempered[t], t))
    order = [t for t in order if tempered[t] > -math.inf][: p.top_k or None]
    weights = np.exp(tempered[order] - tempered[order[0]])
    probabilities = weights / weights.sum()
    kept: list[int] = []
    mass = 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if kept and (mass >= p.top_p or probability < p.min_p * probabilities[0]):
            break
        kept.append(token)
        mass += probability
    return set(kept)


def reference_choice(logits: torch.Tensor, r: SampleRow) -> int:
    values = reference_logits(logits.double().numpy(), r)
    if r.params.temperature == 0:
        return int(values.argmax())
    tempered = values / r.params.temperature
    keys = torch.from_numpy(row_keys([r.params.seed], [r.sequence_index], [len(r.output_token_ids)]))
    drawn = gumbel(keys, torch.arange(len(values), dtype=torch.int32))[0].double().numpy()
    return max(reference_kept(tempered, r.params), key=lambda token: tempered[token] + drawn[token])


VOCAB = 40
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
    top_logprobs=st.sampled_from([None, 0, 3]),
)
ROWS = st.lists(st.builds(SampleRow, PARAMS, st.integers(0, 15), TOKEN_IDS, TOKEN_IDS), min_size=1, max_size=5)


@settings(max_examples=150, derandomize=True, database=None)
@given(rows=ROWS, seed=st.integers(0, 1000))
def test_every_batch_chooses_what_the_plain_reference_chooses(rows: list[SampleRow], seed: int) -> None:
    logits = random_logits(len(rows), VOCAB, seed)
    before = logits.clone()
    sampled = Sampler(VOCAB).sample(logits, rows)
    assert [s.token_id for s in sampled] == [reference_choice(logits[i], r) for i, r in enumerate(rows)]
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.6, "top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.7},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(fields: dict[str, Any]) -> None:
    """Chi-square over 20,000 positions; the bound is exceeded once in 100,000 by chance, and the seed is fixed."""
    draws, vocab_size = 20_000, 24
    params = SamplingParams(seed=99, **fields)
    logits = random_logits(1, vocab_size, seed=5)[0] / 2
    tempered = logits.double().numpy() / params.temperature
    kept = sorted(reference_kept(tempered, params))
    probabilities = np.exp(tempered[kept]) / np.exp(tempered[kept]).sum()
    rows = [row(params, range(position), index=3) for position in range(200)]
    counts = np.zeros(vocab_size)
    for seed in range(draws // len(rows)):
        batch = [replace_seed(r, seed) for r in rows]
        sampled = Sampler(vocab_size).sample(logits.expand(len(rows), -1), batch)
        counts += np.bincount([s.token_id for s in sampled], minlength=vocab_size)
    assert counts.sum() == counts[kept].sum() == draws
    expected = probabilities * draws
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    assert statistic < freedom + 4.3 * math.sqrt(2 * freedom) + 12


def replace_seed(r: SampleRow, seed: int) -> SampleRow:
    return replace(r, params=replace(r.params, seed=seed))


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert choose([1, 5, 5, 2], temperature=0) == 1
    assert choose([1, 5, 5, 2], top_k=1, seed=8) == 1
    assert support([1, 5, 5, 2], top_k=1) == {1}


def test_top_k_keeps_k_tokens_even_among_equals() -> None:
    assert support([0, 0, 0, 0, 0], top_k=3) == {0, 1, 2}
    assert support([0, 1, 0, 2, 0], top_k=3) == {3, 1, 0}
    assert support([0, 0, 0], top_k=7) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.4)]
    assert support(logits, top_p=0.49) == {1}
    assert support(logits, top_p=0.51) == {1, 2}
    assert support(logits, top_p=0.89) == {1, 2}
    assert support(logits, top_p=0.91) == {0, 1, 2}
    assert support([0, 0, 0, 0], top_p=0.5) == {0, 1}


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_top_p_keeps_at_least_one_token(top_p: float) -> None:
    assert support([0.0, 0.1, 0.0], top_p=top_p) == {1}


def test_top_p_counts_mass_within_top_k() -> None:
    logits = [math.log(p) for p in (0.3, 0.25, 0.25, 0.2)]
    assert support(logits, top_p=0.5) == {0, 1}
    assert support(logits, top_k=2, top_p=0.5) == {0}  # 0.3 of 0.55


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    logits = [math.log(p) for p in (0.6, 0.25, 0.1, 0.05)]
    assert support(logits, min_p=0.4) == {0, 1}
    assert support(logits, min_p=0.15) == {0, 1, 2}
    assert support(logits, min_p=1.0) == {0}


def test_the_filters_look_at_the_tempered_distribution() -> None:
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    assert support(logits, top_p=0.8) == {0, 1}
    assert support(logits, top_p=0.8, temperature=10.0) == {0, 1, 2}
    assert support(logits, min_p=0.4, temperature=10.0) == {0, 1, 2}


def test_the_smallest_temperature_is_greedy_and_not_nan() -> None:
    assert choose([3.0, 3.1, -2.0], temperature=1e-38, top_p=0.9) == 1
    assert choose([3.0, 3.1, -2.0], temperature=1e-38) == 1


def test_a_logit_bias_can_force_and_forbid_a_token() -> None:
    assert choose([0, 0, 9], temperature=0, logit_bias={0: 100.0}) == 0
    assert choose([0, 1, 9], temperature=0, logit_bias={2: -100.0}) == 1


def test_only_allowed_tokens_are_chosen() -> None:
    assert support([9, 9, 0, 0], allowed_token_ids=(2, 3)) == {2, 3}
    assert choose([9, 8, 1, 2], temperature=0, allowed_token_ids=(2, 3), logit_bias={0: 100.0}) == 3


def test_a_stop_token_is_not_chosen_before_its_time() -> None:
    fields: dict[str, Any] = {"temperature": 0, "stop_token_ids": frozenset({2, 700}), "min_output_tokens": 2}
    assert choose([0, 1, 9], output=[], **fields) == 1
    assert choose([0, 1, 9], output=[1], **fields) == 1
    assert choose([0, 1, 9], output=[1, 1], **fields) == 2


def test_a_stop_token_that_alone_is_allowed_is_chosen_at_any_time() -> None:
    assert choose([5, 0, 1], temperature=0, allowed_token_ids=(2,), stop_token_ids={2}, min_output_tokens=4) == 2
    assert choose([0, 1], temperature=0, stop_token_ids={0, 1}, min_output_tokens=4) == 1


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert choose([4.0, 3.0], prompt=[0], temperature=0, repetition_penalty=1.5) == 1
    assert choose([4.0, 3.0], prompt=[0], temperature=0, repetition_penalty=1.3) == 0
    assert choose([-2.0, -3.0], output=[0], temperature=0, repetition_penalty=1.6) == 1
    assert choose([4.0, 3.0], prompt=[0], output=[0, 0], temperature=0, repetition_penalty=1.3) == 0  # once, not thrice


def test_frequency_counts_output_tokens_and_presence_does_not() -> None:
    assert choose([2.0, 1.0], output=[0, 0], temperature=0, frequency_penalty=0.6) == 1
    assert choose([2.0, 1.0], output=[0], temperature=0, frequency_penalty=0.6) == 0
    assert choose([2.0, 1.0], output=[0, 0], temperature=0, presence_penalty=0.6) == 0
    assert choose([2.0, 1.0], output=[0], temperature=0, presence_penalty=1.1) == 1
    assert choose([2.0, 1.0], prompt=[0, 0, 0], temperature=0, presence_penalty=9.0, frequency_penalty=9.0) == 0


def test_a_bias_comes_before_the_penalties() -> None:
    """-1 + 5 is halved to 2. The other way round, -1 would become -2 + 5 = 3."""
    assert choose([-1.0, 2.5], output=[0], temperature=0, logit_bias={0: 5.0}, repetition_penalty=2.0) == 1


def mixed_rows() -> list[SampleRow]:
    settings_of_rows: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.7, "top_logprobs": 2},
        {"top_k": 5, "repetition_penalty": 1.4},
        {"min_p": 0.05, "frequency_penalty": 0.5},
        {"temperature": 0.0, "top_logprobs": 0},
        {"logit_bias": {3: 4.0}, "top_k": 4, "top_p": 0.9},
        {"min_output_tokens": 9, "stop_token_ids": frozenset(range(50))},
    ]
    return [
        row(SamplingParams(seed=seed, **fields), output=range(seed), prompt=[1, 2], index=seed % 3)
        for seed, fields in enumerate(settings_of_rows)
    ]


def test_a_row_gives_the_same_token_alone_among_others_and_reordered() -> None:
    rows, logits = mixed_rows(), random_logits(8, 100)
    together = Sampler(100).sample(logits, rows)
    for i, r in enumerate(rows):
        (alone,) = Sampler(100).sample(logits[i : i + 1], [r])
        assert_same(alone, together[i])
    order = [5, 2, 7, 0, 3, 1, 6, 4]
    for i, sampled in zip(order, Sampler(100).sample(logits[order], [rows[i] for i in order]), strict=True):
        assert_same(sampled, together[i])


def assert_same(a: SampledToken, b: SampledToken) -> None:
    assert (a.token_id, a.rank) == (b.token_id, b.rank)
    assert a.logprob == pytest.approx(b.logprob)
    assert a.top == b.top or [t for t, _ in a.top] == [t for t, _ in b.top]


def test_one_sampler_serves_batches_that_change() -> None:
    """The plan of a batch is cached; joining, leaving and growing must not use a stale one."""
    rows, logits, sampler = mixed_rows(), random_logits(8, 100), Sampler(100)
    for chosen in ([0, 1, 2, 3], [0, 1, 2, 4], [4], [0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5]):
        for extra in range(2):
            grown = [replace(rows[i], output_token_ids=(*rows[i].output_token_ids, *[9] * extra)) for i in chosen]
            assert sampler.sample(logits[chosen], grown) == Sampler(100).sample(logits[chosen], grown)


@pytest.mark.parametrize("change", ["seed", "sequence_index", "position"])
def test_seed_sequence_and_position_each_change_the_choice(change: str) -> None:
    logits = torch.zeros(20, 1000)
    numbers = {"seed": [5] * 20, "sequence_index": [0] * 20, "position": [0] * 20, change: list(range(20))}
    rows = [
        row(
            SamplingParams(seed=numbers["seed"][i]),
            output=[0] * numbers["position"][i],
            index=numbers["sequence_index"][i],
        )
        for i in range(20)
    ]
    assert len({s.token_id for s in Sampler(1000).sample(logits, rows)}) >= 19


def test_the_same_seed_repeats_its_tokens() -> None:
    logits, rows = random_logits(8, 100), mixed_rows()
    assert Sampler(100).sample(logits, rows) == Sampler(100).sample(logits.clone(), mixed_rows())


def test_logprobs_are_of_the_raw_model_distribution() -> None:
    logits = random_logits(1, 50)
    params = SamplingParams(
        temperature=0.0, logit_bias={7: 100.0}, top_k=3, top_logprobs=4, presence_penalty=2.0, allowed_token_ids=(7, 8)
    )
    (sampled,) = Sampler(50).sample(logits, [row(params, output=[1, 7])])
    expected = logits[0].log_softmax(-1)
    order = logits[0].argsort(descending=True).tolist()
    assert sampled.token_id == 7
    assert sampled.logprob == pytest.approx(expected[7].item(), abs=1e-5)
    assert sampled.rank == order.index(7) + 1
    assert [token for token, _ in sampled.top] == order[:4]
    assert [value for _, value in sampled.top] == pytest.approx(expected[order[:4]].tolist(), abs=1e-5)


def test_logprobs_come_only_to_rows_that_ask_and_as_many_as_they_ask() -> None:
    rows = [row(SamplingParams(temperature=0, top_logprobs=k)) for k in (None, 0, 2, 90)]
    plain, own, two, many = Sampler(30).sample(random_logits(4, 30), rows)
    assert plain == SampledToken(plain.token_id) and plain.logprob is None and plain.rank is None
    assert own.rank == 1 and own.logprob is not None and own.top == ()
    assert (len(two.top), len(many.top)) == (2, 30)


def test_a_vocabulary_of_200_000_is_sampled_by_the_same_rules() -> None:
    logits = random_logits(4, 200_000) / 3
    params = [
        SamplingParams(seed=1),
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(min_p=0.2),
    ]
    sampled = Sampler(200_000).sample(logits, [row(p) for p in params])
    assert [s.token_id for s in sampled] == [reference_choice(logits[i], row(p)) for i, p in enumerate(params)]


def test_a_row_of_nan_ends_and_harms_no_other_row() -> None:
    logits = random_logits(3, 50)
    rows = [row(SamplingParams(seed=s, top_p=0.5, top_k=7)) for s in range(3)]
    expected = Sampler(50).sample(logits, rows)
    logits[1] = torch.nan
    sampled = Sampler(50).sample(logits, rows)
    assert (sampled[0], sampled[2]) == (expected[0], expected[2])
    assert 0 <= sampled[1].token_id < 50


@pytest.mark.parametrize("fields", [{"logit_bias": {30: 1.0}}, {"allowed_token_ids": (3, -1)}], ids=str)
def test_a_rule_for_a_token_outside_the_vocabulary_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is outside the vocabulary; use 0 to 29"):
        Sampler(30).sample(torch.zeros(1, 30), [row(SamplingParams(**fields))])


def test_an_empty_batch_has_no_tokens() -> None:
    assert Sampler(30).sample(torch.zeros(0, 30), []) == []


def test_a_sequence_ends_at_a_stop_token_or_at_its_length() -> None:
    params = SamplingParams(max_output_tokens=3, stop_token_ids=frozenset({7}))
    assert check_finish(params, []) is None
    assert check_finish(params, [7, 1]) is None
    assert check_finish(params, [1, 7]) == Finish("stop", 7)
    assert check_finish(params, [1, 2, 7]) == Finish("stop", 7)
    assert check_finish(params, [1, 2, 3]) == Finish("length")


def test_a_stop_token_counts_only_after_the_least_length() -> None:
    params = SamplingParams(max_output_tokens=9, min_output_tokens=2, stop_token_ids=frozenset({7}))
    assert check_finish(params, [1, 7]) is None
    assert check_finish(params, [1, 1, 7]) == Finish("stop", 7)
