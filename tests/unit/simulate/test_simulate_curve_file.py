"""Step curves of files: tables are interpolated, logs are fitted, and wrong rows are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.step_cost import StepCost, StepSize
from simulate.curve_file import read_curve

HEAD = "prompt_tokens,tokens_before,sequences,kv_tokens,seconds\n"


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_table_is_interpolated_between_the_medians_of_its_steps(tmp_path: Path) -> None:
    prompts = "100,0,0,0,0.010\n100,0,0,0,0.090\n100,0,0,0,0.020\n300,0,0,0,0.060\n"
    decodes = "0,0,1,10,0.001\n0,0,1,20,0.002\n0,0,3,10,0.003\n0,0,3,20,0.004\n"
    found = read_curve(written(tmp_path, "curve.csv", HEAD + prompts + decodes))
    assert (found.kind, found.error.p90) == ("interpolated", 0.0)
    assert found.curve.seconds(StepSize.of_prompt(200)) == pytest.approx(0.040)
    assert found.curve.seconds(StepSize(num_sequences=2, num_kv_tokens=30)) == pytest.approx(0.0025)


def test_steps_of_a_log_are_fitted(tmp_path: Path) -> None:
    cost = StepCost(5e-3, 2e-5, 1e-9, 3e-5, 1e-8)
    rows = [(512, 0, 3, 700), (256, 512, 0, 0), (0, 0, 64, 900), (0, 0, 2, 100), (900, 0, 9, 50), (17, 40, 30, 2000)]
    steps = []
    for prompt, before, sequences, kv in rows:
        size = StepSize.of_prompt(prompt, before) + StepSize(num_sequences=sequences, num_kv_tokens=sequences * kv)
        step = {"prompt_tokens": prompt, "tokens_before": before, "sequences": sequences, "kv_tokens": kv}
        steps.append(step | {"seconds": cost.of(size)})
    for document in (steps, {"steps": steps}):
        found = read_curve(written(tmp_path, "curve.json", json.dumps(document)))
        assert found.kind == "fitted" and found.error.p90 < 1e-6
        assert found.curve.seconds(StepSize.of_prompt(300)) == pytest.approx(cost.of(StepSize.of_prompt(300)))


def test_a_linear_cost_is_an_object_of_its_parts(tmp_path: Path) -> None:
    found = read_curve(written(tmp_path, "curve.json", '{"fixed_s": 0.004, "sequence_s": 1e-3}'))
    assert found.kind == "linear" and found.curve.seconds(StepSize(num_sequences=2)) == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.csv", HEAD + "1,0,0,0,0.1\n1,0,0,0,0\n", r":3: seconds must be a number above 0 \(got '0'"),
        ("b.csv", HEAD + "1,0,0,0,nan\n", ":2: seconds"),
        ("c.csv", HEAD + "1,0,0,0\n", r":2: seconds must be .*got ''"),
        ("d.csv", HEAD + "-1,0,0,0,1\n", r":2: prompt_tokens must be a whole number of at least 0 \(got '-1'"),
        (
            "e.csv",
            "prompt_tokens,kv_tokens,seconds\n1,0,1\n",
            r":1: has no column sequences; its columns are prompt_tokens, kv_tokens, seconds, and steps have",
        ),
        ("i.csv", "", ":1: has no column prompt_tokens, sequences, kv_tokens, seconds; its columns are none"),
        ("j.csv", HEAD + "1,0,0,0,1,7\n", ":2: has more fields than the header"),
        ("k.csv", HEAD + "1,,0,0,1\n", r":2: tokens_before must be .*got ''"),
        ("f.csv", HEAD + "0,0,0,0,1\n", ":2: computes nothing"),
        ("g.csv", HEAD, "holds no step"),
        ("h.csv", HEAD + "1,0,0,0,1\n2,0,0,0,0.5\n", "h.csv: the curve falls: a prompt of 1 tokens"),
        ("a.json", "{", "is neither CSV"),
        ("b.json", "3", "must be a list of steps"),
        ("c.json", "[3]", "step 1 is no object with prompt_tokens"),
        (
            "d.json",
            '[{"prompt_tokens": 1.5, "sequences": 0, "kv_tokens": 0, "seconds": 1}]',
            r"step 1: prompt_.*got 1.5",
        ),
        (
            "h.json",
            '[{"prompt_tokens": 1, "seconds": 1}]',
            "step 1 has no sequences, kv_tokens; a step has prompt_tokens",
        ),
        ("e.json", '{"fixed": 1}', "fixed is no part of a cost; those are fixed_s, prompt_token_s"),
        ("f.json", '{"fixed_s": -1}', "fixed_s must be a number of at least 0"),
        ("g.json", "{}", "nothing is no part"),
    ],
)
def test_a_bad_step_is_named_with_its_row_and_column(tmp_path: Path, name: str, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        read_curve(written(tmp_path, name, text))
