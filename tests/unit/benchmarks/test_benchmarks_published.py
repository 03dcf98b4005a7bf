"""The commands that hold published profiles against published results, on a few rows in the same formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.published import app

MACHINES = {"h100-80gb": ((128, 48, 35.7), (2048, 252, 36.7)), "a100-80gb": ((128, 80, 47.6), (2048, 536, 50.2))}


def coefficients(times: float) -> dict[str, object]:
    return {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [14.0 * times, 0.06 * times, 2e-6 * times],
        "decoding_smallbs": [13.0 * times, 3e-4 * times, 0.06 * times],
        "decoding_largebs": [10.0 * times, 3e-4 * times, 0.08 * times],
    }


@pytest.fixture
def profile(tmp_path: Path) -> str:
    columns = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time"
    rows = [
        f"bloom-176b,{name},8,{tokens},1,128,{prompt_ms},{token_ms}"
        for name, points in MACHINES.items()
        for tokens, prompt_ms, token_ms in points
    ]
    (tmp_path / "perf_model.csv").write_text("\n".join([columns, *rows]))
    return str(tmp_path / "perf_model.csv")


def run(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_an_example_is_run_on_one_machine_and_on_two(profile: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_timestamp,prompt_size,token_size\n1,2048,2\n")
    found = run("example", "--profile", profile, "--trace", str(tmp_path / "trace.csv"))
    assert found == {"h100": [["0.252000", "0.287634"]], "h100, a100": [["0.252000", "0.337709"]]}


def test_pools_are_sized_for_a_trace(profile: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("at_s,prompt_tokens,output_tokens\n0,2048,3\n1,2048,3\n")
    found = run("pools", "--profile", profile, "--trace", str(tmp_path / "trace.csv"), "--machines=3", "--seconds=9")
    assert (found["prompt_machines"], found["token_machines"]) == (2, 1)


def test_placements_are_ranked_and_the_largest_model_goes_on_from_the_smaller_ones(tmp_path: Path) -> None:
    profile, kv = tmp_path / "profile.json", tmp_path / "kv.csv"
    by_model = {
        "facebook/opt-13b": {"4": coefficients(1)},
        "facebook/opt-66b": {"3": coefficients(2), "4": coefficients(2)},
    }
    profile.write_text(json.dumps(by_model))
    kv.write_text("model,tp,pp,max_num_tokens\n" + "".join(f"facebook/opt-175b,{tp},3,126160\n" for tp in (3, 4)))
    found = run("placement", "--profile", str(profile), "--kv", str(kv), "--model=facebook/opt-175b", "--num=30")
    rows = found["facebook/opt-175b"]
    assert isinstance(rows, dict) and rows["published"]["devices"] == 21 and rows["placements"] == 4
    rates = [row["rate_per_device"] for row in rows["best"]]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0
