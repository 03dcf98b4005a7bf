"""Loads: traces keep what they say, generated ones have the rates and lengths that they were asked for."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from simulate.workload import (
    DayShape,
    RequestShape,
    SharedPrefixes,
    arrivals,
    at_mean_rate,
    at_rate,
    empirical,
    lognormal,
    over_a_day,
    random_shapes,
    read_trace,
    scaled,
    uniform,
    until,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": %s}'


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_an_azure_trace_begins_at_zero_and_may_be_cut_short(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,1,9\n"
    file = written(tmp_path, "trace.csv", AZURE + rows)
    first, second = read_trace(file)
    assert first == RequestShape(0.0, 374, 44) and second == RequestShape(pytest.approx(1.0), 1, 9)
    assert read_trace(file, 1) == [first]


@pytest.mark.parametrize(
    "text",
    [
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,0,1.5,1,9,3\n",
        "at_s,prompt_tokens,output_tokens\n-2.5,9,3\n",
        "output_tokens,at_s,prompt_tokens\n3,1e3,9\n",
    ],
)
def test_other_tables_are_known_by_their_columns(tmp_path: Path, text: str) -> None:
    assert read_trace(written(tmp_path, "trace.csv", text)) == [RequestShape(0.0, 9, 3)]


def test_a_mooncake_trace_keeps_its_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 3]},
    ]
    read = read_trace(written(tmp_path, "trace.jsonl", "\n".join(map(json.dumps, lines))))
    first, second = scaled(read, speed=4.0, length_share=0.5, most_tokens=800)
    assert (first.at, second.at) == (0.0, 0.5)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (600, 25)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (550, 250), "longer than what is allowed: cut"
    one, other = (shape.prompt(900, 0, number) for number, shape in enumerate((first, second)))
    assert len(one) == 600 and len(other) == 550
    assert one[:512] == other[:512] and one[512:550] != other[512:550]


def test_a_trace_out_of_order_is_sorted(tmp_path: Path) -> None:
    file = written(tmp_path, "trace.jsonl", "".join(MOONCAKE % (at, 1, 1) + "\n" for at in (3e3, 1e3, 2e3)))
    shapes = read_trace(file)
    assert [shape.at for shape in shapes] == [0.0, 1.0, 2.0]
    assert [shape.at for shape in until(shapes, 1.5)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.csv", AZURE + "2023-11-16 18:15:46,9,9\n2023-11-16 18:15:46,many,44\n", r"3: ContextTokens .*got 'many'"),
        ("b.csv", AZURE + "2023-11-16 18:15:46,0,44\n", "2: ContextTokens must be a whole number of at least 1"),
        ("c.csv", AZURE + "2023-11-16 18:15:46,4,-1\n", "2: GeneratedTokens must be a whole number of at least 0"),
        (
            "d.csv",
            AZURE + "2023-11-16 18:15:46,4\n",
            "2: ends before GeneratedTokens; a row has TIMESTAMP, ContextTokens, GeneratedTokens",
        ),
        ("e.csv", AZURE + "yesterday,4,4\n", "2: TIMESTAMP must be a time .*got 'yesterday'"),
        ("f.csv", AZURE + "2023-11-16 18:15:46,4,4,4\n", "2: has more fields"),
        ("g.csv", "time,in,out\n", "1: its columns are time, in, out; a trace has TIMESTAMP, ContextTokens"),
        ("h.csv", "at_s,prompt_tokens,output_tokens\nnan,4,4\n", "2: at_s must be a time .*got nan"),
        (
            "y.csv",
            "at_s,prompt_tokens,output_tokens\n0,4,4\n1e9,4,4\n",
            r"last request comes 1e\+09 s after its first",
        ),
        ("i.csv", AZURE + '2023-11-16 18:15:46,"4' + "4" * 200_000, "field larger than field limit"),
        ("j.csv", "", "1: its columns are ;"),
        ("k.csv", AZURE, ": holds no request"),
        ("a.jsonl", "", ": holds no request"),
        ("b.jsonl", MOONCAKE % (0, 1, 1) + "\nno", "2: is not JSON"),
        ("c.jsonl", "[]", "1: is no object"),
        ("d.jsonl", "{}", "1: has no timestamp; a request has timestamp, input_length, output_length"),
        ("e.jsonl", MOONCAKE % ("NaN", 1, 1), "1: timestamp"),
        ("f.jsonl", MOONCAKE % ("Infinity", 1, 1), "1: timestamp"),
        ("g.jsonl", MOONCAKE % (1, "Infinity", 1), "1: input_length"),
        ("h.jsonl", MOONCAKE % (1, 1, 1.5), "1: output_length .*got 1.5"),
        ("i.jsonl", MOONCAKE % (1, "true", 1), "1: input_length"),
        ("j.jsonl", MOONCAKE % (1, 1, '1, "hash_ids": [1, "a"]'), "1: hash_ids must be a list of whole numbers"),
        ("k.jsonl", "[" * 100_000, "1: is not JSON"),
        ("l.jsonl", MOONCAKE % ("9" * 5000, 1, 1), "1: is not JSON"),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_row_is_named_with_its_line_and_column(tmp_path: Path, name: str, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*{wanted}"):
        read_trace(written(tmp_path, name, text))


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (25.0, 0.2)])
def test_arrivals_have_their_rate_and_their_bursts(burstiness: float, spread: float) -> None:
    shapes = at_rate([RequestShape(0, 1, 1)] * 20_000, 5.0, burstiness, 0)
    gaps = [after.at - before.at for before, after in pairwise(shapes)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(spread, rel=0.1)


def test_arrivals_follow_a_rate_that_changes() -> None:
    times = arrivals(lambda at: 100.0 if at < 50 else 300.0, 1.0, random.Random(0))
    counts = [0, 0]
    while (at := next(times)) < 100:
        counts[at >= 50] += 1
    assert counts == [pytest.approx(5000, rel=0.05), pytest.approx(15000, rel=0.05)]


def test_lognormal_lengths_have_their_mean_and_their_90th_percentile() -> None:
    shapes = random_shapes(50_000, lognormal((755, 1600), (200, 200)), 0)
    prompts = sorted(shape.num_prompt_tokens for shape in shapes)
    assert statistics.fmean(prompts) == pytest.approx(755, rel=0.03)
    assert prompts[45_000] == pytest.approx(1600, rel=0.03)
    assert {shape.num_output_tokens for shape in shapes} == {200}
    cut = random_shapes(1000, lognormal((755, 1600), (200, 400), most_tokens=900), 0)
    assert max(max(shape.num_prompt_tokens, shape.num_output_tokens) for shape in cut) == 900


@pytest.mark.parametrize(("mean", "p90"), [(100, 99), (100, 228), (0, 0), (-1, 1), (100, math.nan)])
def test_a_mean_and_a_percentile_that_no_lognormal_has_are_refused(mean: float, p90: float) -> None:
    with pytest.raises(ValueError, match="no lognormal has the mean"):
        lognormal((mean, p90), (1, 1))


def test_empirical_lengths_keep_pairs_together() -> None:
    shapes = random_shapes(200, empirical([RequestShape(0, 1, 2), RequestShape(9, 30, 40)]), 0)
    assert {(shape.num_prompt_tokens, shape.num_output_tokens) for shape in shapes} == {(1, 2), (30, 40)}


def test_prompts_begin_with_one_of_the_shared_prefixes_the_first_most_often() -> None:
    shapes = random_shapes(2000, uniform(5, 1), 0, SharedPrefixes(7, num=3, skew=1.0))
    starts = [tuple(shape.prompt(500, 0, number)[:7]) for number, shape in enumerate(shapes)]
    counts = sorted((starts.count(start) for start in set(starts)), reverse=True)
    assert [count / 2000 for count in counts] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.04)
    assert {shape.num_prompt_tokens for shape in shapes} == {12}


def test_a_day_has_its_peak_its_trough_and_its_drift() -> None:
    day = DayShape(mean_rate=2.0, day_s=20_000, peak_to_trough=3.0, peak_at=0.25, ratio_swing=3.0, ratio_period_s=8000)
    shapes = over_a_day(day, uniform(1000, 100), 0, SharedPrefixes(50))
    assert len(shapes) == pytest.approx(40_000, rel=0.03)
    peak, trough = ([s for s in shapes if abs(s.at - at) < 500] for at in (5000, 15_000))
    assert len(peak) / len(trough) == pytest.approx(3.0, rel=0.1)
    high, low = ([s for s in shapes if abs(s.at - at) < 50] for at in (2000, 6000))
    ratios = [statistics.fmean((s.num_prompt_tokens - 50) / s.num_output_tokens for s in some) for some in (high, low)]
    assert ratios[0] / ratios[1] == pytest.approx(3.0, rel=0.03)
    assert shapes == over_a_day(day, uniform(1000, 100), 0, SharedPrefixes(50)) != over_a_day(day, uniform(9, 9), 1)


@pytest.mark.parametrize("rate", [0.7, 12.5])
def test_another_mean_rate_keeps_the_ups_and_downs(rate: float) -> None:
    quiet = at_rate(random_shapes(400, uniform(100, 10, 0.5), 1), 2.0, 1.0, 1)
    busy = [replace(shape, at=quiet[-1].at + shape.at / 3) for shape in quiet]
    shapes = at_mean_rate([*quiet, *busy], rate, seed=1)
    assert len(shapes) / shapes[-1].at == pytest.approx(rate, rel=0.1)
    assert all(one.at <= other.at for one, other in pairwise(shapes)) and shapes[0].at >= 0
    num_quiet = sum(shape.at < quiet[-1].at for shape in shapes)
    assert num_quiet == pytest.approx(len(shapes) / 2, rel=0.15)
    assert {shape.num_prompt_tokens for shape in shapes} <= {shape.num_prompt_tokens for shape in quiet}
