"""Curves: a line fitted to steps, a measured table, and one computed from shapes; what is refused, by its point."""

from __future__ import annotations

import random

import pytest

from cluster.errors import ConfigError
from cluster.step_cost import StepCost, StepSize
from simulate.curves import (
    CurveError,
    LinearCurve,
    MeasuredCurve,
    MeasuredDecode,
    MeasuredPrompt,
    StepSample,
    fit_cost,
)
from simulate.devices import EAGER, GRAPHS, find_device
from simulate.model_files import find_shape
from simulate.roofline import ComputedCurve
from simulate.shapes import DeviceLayout

COST = StepCost(4e-3, 5e-5, 1e-9, 2e-5, 3e-8)


def steps(num: int = 200, seed: int = 0) -> list[StepSize]:
    draw = random.Random(seed)
    made = []
    for _ in range(num):
        prompt = StepSize.of_prompt(draw.randint(1, 2048), draw.randint(0, 4096)) if draw.random() < 0.5 else StepSize()
        count = draw.randint(1, 64)
        made.append(prompt + StepSize(0, 0, count, count * draw.randint(1, 4096)))
    return made


def test_a_linear_cost_is_found_in_what_it_says() -> None:
    samples = [StepSample(step, COST.of(step)) for step in steps()]
    found = fit_cost(samples)
    for name, value in vars(COST).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6)
    assert CurveError.of(LinearCurve(found), samples).p90 < 1e-6


def test_a_fit_with_noise_says_how_far_off_it_is() -> None:
    draw = random.Random(1)
    samples = [StepSample(step, COST.of(step) * draw.uniform(0.9, 1.1)) for step in steps()]
    error = CurveError.of(LinearCurve(fit_cost(samples)), samples)
    assert 0.03 < error.median < 0.07
    assert 0.07 < error.p90 < 0.11
    assert error.num_samples == 200


def test_no_part_of_a_fit_is_negative() -> None:
    falling = [StepSample(StepSize(0, 0, n, 100 * n), 0.01 - 1e-4 * n) for n in (1, 8, 16, 32, 64)]
    found = fit_cost(falling)
    assert min(vars(found).values()) >= 0
    assert found.fixed_s == pytest.approx(0.00758)  # of one constant: the mean


def test_steps_that_were_held_up_count_with_their_whole_time() -> None:
    draw = random.Random(2)
    samples = [StepSample(step, COST.of(step) * draw.choice((1, 1, 1, 1, 3))) for step in steps(1000)]
    fitted = LinearCurve(fit_cost(samples))
    total_s = sum(one.seconds for one in samples)
    assert sum(fitted.seconds(one.step) for one in samples) == pytest.approx(total_s, rel=0.01)


def measured() -> MeasuredCurve:
    prompts = [MeasuredPrompt(n, 0.01 + 1e-4 * n) for n in (1024, 128, 512)]
    decodes = [MeasuredDecode(n, kv, 0.005 + 1e-4 * n + 1e-8 * n * kv) for n in (1, 8, 64) for kv in (100, 1000)]
    return MeasuredCurve(prompts, decodes, attended_s=1e-9)


def test_a_measured_curve_goes_through_its_points_and_lines_between_and_beyond_them() -> None:
    curve = measured()
    assert curve.seconds(StepSize.of_prompt(512)) == pytest.approx(0.0612)
    assert curve.seconds(StepSize.of_prompt(2048)) == pytest.approx(0.01 + 0.2048)
    assert curve.seconds(StepSize.of_prompt(512, 1000)) == pytest.approx(0.0612 + 512_000e-9)
    assert curve.seconds(StepSize(0, 0, 8, 8 * 550)) == pytest.approx(0.005 + 8e-4 + 8 * 550e-8)
    assert curve.seconds(StepSize(0, 0, 128, 128 * 100)) == pytest.approx(0.005 + 128e-4 + 128 * 100e-8)
    assert curve.seconds(StepSize()) == 0.0
    both = curve.seconds(StepSize.of_prompt(512) + StepSize(0, 0, 8, 8 * 100))
    assert both == pytest.approx(0.0612 + 7e-4 + 7 * 100e-8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            [MeasuredPrompt(128, 0.02), MeasuredPrompt(512, 0.015)],
            "a prompt of 128 tokens took 20.00 ms, and a prompt of 512",
        ),
        ([MeasuredPrompt(128, 0.02), MeasuredPrompt(512, 0.0)], "a prompt of 512 tokens: took 0.0 s"),
        ([MeasuredPrompt(128, 0.02), MeasuredPrompt(128, 0.03)], "a prompt of 128 tokens: is there twice"),
        (
            [MeasuredDecode(1, 100, 0.01), MeasuredDecode(8, 100, 0.02), MeasuredDecode(8, 900, 0.02)],
            "1 sequences of 900",
        ),
        ([MeasuredDecode(8, 100, 0.01), MeasuredDecode(16, 100, 0.005)], "8 sequences of 100 KV tokens took 10.00 ms"),
        (
            [MeasuredDecode(8, 100, 0.01), MeasuredDecode(8, 900, 0.005)],
            "the curve falls: 8 sequences of 100 KV tokens",
        ),
    ],
)
def test_a_curve_that_falls_or_has_gaps_is_refused_by_its_point(
    change: list[MeasuredPrompt | MeasuredDecode], says: str
) -> None:
    prompts = [point for point in change if isinstance(point, MeasuredPrompt)]
    decodes = [point for point in change if isinstance(point, MeasuredDecode)]
    with pytest.raises(ConfigError) as caught:
        MeasuredCurve(prompts, decodes)
    assert says in str(caught.value)


def test_points_that_fall_no_more_than_measurements_differ_are_pooled_with_a_note() -> None:
    prompts = [MeasuredPrompt(128, 0.0200), MeasuredPrompt(256, 0.0195), MeasuredPrompt(512, 0.04)]
    decodes = [MeasuredDecode(2, 48, 6e-3, 5e-4), MeasuredDecode(4, 48, 4.8e-3, 4e-4), MeasuredDecode(8, 48, 7e-3)]
    curve = MeasuredCurve(prompts, decodes)
    assert curve.seconds(StepSize.of_prompt(256)) == curve.seconds(StepSize.of_prompt(128)) == pytest.approx(0.01975)
    assert curve.seconds(StepSize(0, 0, 2, 96)) == curve.seconds(StepSize(0, 0, 4, 192)) == pytest.approx(5.4e-3)
    assert curve.seconds(StepSize(0, 0, 8, 384)) == 7e-3
    prompt_note, decode_note = curve.notes
    assert prompt_note.startswith("a prompt of 128 tokens took 20.00 ms, and a prompt of 256 tokens 19.50 ms, no more")
    assert decode_note.startswith("2 sequences of 48 KV tokens took 6.00 ms, and 4 sequences of 48 KV tokens 4.80 ms")
    with pytest.raises(ConfigError, match=r"falls: 2 sequences of 48 KV tokens took 6\.00 ms, and 4 sequences of 48"):
        MeasuredCurve([], [MeasuredDecode(2, 48, 6e-3, 3e-4), MeasuredDecode(4, 48, 4.8e-3, 3e-4)])


def test_a_pooled_grid_rises_with_sequences_and_with_their_lengths() -> None:
    draw = random.Random(3)
    counts, lengths = (1, 2, 4, 8), (32, 256, 1024)
    noisy = {(n, kv): (1e-3 + 1e-5 * n + 1e-9 * n * kv) * draw.uniform(0.8, 1.2) for n in counts for kv in lengths}
    curve = MeasuredCurve([], [MeasuredDecode(n, kv, seconds, 0.2e-3) for (n, kv), seconds in noisy.items()])
    rows = [[curve.seconds(StepSize(0, 0, n, n * kv)) for kv in lengths] for n in counts]
    assert curve.notes
    for line in (*rows, *zip(*rows, strict=True)):
        assert sorted(line) == pytest.approx(list(line), rel=1e-9)
    assert sum(map(sum, rows)) == pytest.approx(sum(noisy.values()))  # means of pools, not their highest


def of(batch: int, prompt: int) -> StepSize:
    return StepSize(batch * prompt, batch * prompt * (prompt + 1) // 2)


@pytest.mark.parametrize(
    ("device", "tp", "step", "seconds"),
    [
        # Medians of splitwise-sim's perf_model.csv at 8f99e7d (MIT): Llama2-70B, H100 and A100 machines.
        ("h100", 2, of(1, 8192), 1.340),
        ("h100", 2, of(8, 512), 0.606),
        ("h100", 4, of(1, 2048), 0.201),
        ("h100", 8, of(1, 4096), 0.390),
        ("a100", 4, of(1, 2048), 0.403),
        ("h100", 2, StepSize(0, 0, 1, 576), 0.0372),
        ("h100", 8, StepSize(0, 0, 32, 32 * 576), 0.0386),
        ("h100", 4, StepSize(0, 0, 64, 64 * 576), 0.0524),
    ],
)
def test_steps_as_computed_are_within_a_third_of_published_measurements(
    device: str, tp: int, step: StepSize, seconds: float
) -> None:
    curve = ComputedCurve(find_shape("llama-2-70b"), find_device(device), DeviceLayout(tp), efficiency=EAGER)
    assert curve.seconds(step) == pytest.approx(seconds, rel=0.33)


def test_a_decode_step_reads_each_weight_once_and_a_prompt_computes() -> None:
    shape, device = find_shape("llama-3.1-8b"), find_device("h100")
    curve = ComputedCurve(shape, device, DeviceLayout())
    one, many = curve.seconds(StepSize(0, 0, 1, 1000)), curve.seconds(StepSize(0, 0, 64, 64_000))
    assert one == pytest.approx(15e9 / (0.65 * 3.35e12) + 32 * 10e-6 + 1.5e-3, rel=0.05)
    assert many == pytest.approx(one + 64_000 * 131072 / (0.65 * 3.35e12) + 63 * 5e-6, rel=0.02)
    prompt = curve.seconds(StepSize.of_prompt(8192))
    assert prompt == pytest.approx(2 * 7.5e9 * 8192 / (0.6 * 989e12), rel=0.2)


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-235b-a22b", "deepseek-v3"])
def test_more_work_never_takes_less_time(name: str) -> None:
    shape, device = find_shape(name), find_device("h200")
    layouts = [DeviceLayout(8)] + ([DeviceLayout(8, 8), DeviceLayout(1, 16)] if shape.experts else [])
    for layout in layouts:
        curve = ComputedCurve(shape, device, layout, shape.quantization, efficiency=GRAPHS)
        prompts = [curve.seconds(StepSize.of_prompt(n)) for n in (1, 64, 512, 4096)]
        assert prompts == sorted(prompts)
        decodes = [curve.seconds(StepSize(0, 0, n, n * kv)) for n in (1, 16, 256) for kv in (100, 10_000)]
        assert decodes[0] < decodes[1] < decodes[3] < decodes[5]


def test_few_tokens_read_few_experts() -> None:
    shape, device = find_shape("qwen3-235b-a22b"), find_device("h200")
    curve = ComputedCurve(shape, device, DeviceLayout(8))
    one, many = curve.seconds(StepSize(0, 0, 1, 100)), curve.seconds(StepSize(0, 0, 128, 12_800))
    assert many - one > 0.8 * shape.num_parameters * 2 / 8 / (0.65 * 4.8e12)


def test_fp8_weights_halve_what_is_read_and_computed() -> None:
    shape, device = find_shape("llama-3.1-70b"), find_device("h200")
    plain, rounded = (ComputedCurve(shape, device, DeviceLayout(1), name) for name in ("none", "fp8"))
    assert 1.8 < plain.seconds(StepSize(0, 0, 1, 1)) / rounded.seconds(StepSize(0, 0, 1, 1)) < 2
    assert 1.8 < plain.seconds(StepSize.of_prompt(4096)) / rounded.seconds(StepSize.of_prompt(4096)) < 2
