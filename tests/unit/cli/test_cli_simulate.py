"""`baton simulate`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cli.main import app

LOAD = ("--model", "llama-3.1-8b", "--num-prompts", "20", "--request-rate", "20", "--output-len", "8")


def test_a_simulated_load_is_reported() -> None:
    result = CliRunner().invoke(app, ["simulate", *LOAD, "--ratio", "1:2", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["outcomes"] == {"finished": 20} and report["kept_share"] == 1.0
    assert set(report["utilization"]) == {"prefill", "decode"}


def test_it_prints_a_table() -> None:
    result = CliRunner().invoke(app, ["simulate", *LOAD])
    assert result.exit_code == 0 and "TTFT" in result.stdout and "20 finished" in result.stdout


def test_the_controller_moves_workers_where_it_is_asked_for() -> None:
    load = ("--model", "llama-3.1-8b", "--num-prompts", "300", "--request-rate", "25", "--output-len", "1")
    auto = ("--input-len", "4000", "--ratio", "1:3", "--ttft-ms", "150", "--auto", "--fidelity", "fast")
    splits = json.loads(CliRunner().invoke(app, ["simulate", *load, *auto, "--json"]).stdout)["splits"]
    assert splits["0.0"] == "1:3" and len(splits) > 1
    assert "splits      1:3 at 0.0 s" in CliRunner().invoke(app, ["simulate", *LOAD, "--ratio", "1:3", "--auto"]).stdout


def test_programs_on_one_machine_wait_for_its_cores() -> None:
    firsts = []
    for cores in ((), ("--cores", "16"), ("--cores", "1")):
        result = CliRunner().invoke(app, ["simulate", *LOAD, "--ratio", "2:2", *cores, "--json"])
        firsts.append(json.loads(result.stdout)["ttft_s"]["mean"])
    assert firsts[0] == pytest.approx(firsts[1], rel=0.05) and firsts[2] > 1.2 * firsts[1]


def test_where_there_is_no_number_it_says_so() -> None:
    """One token each has no time per token."""
    table = CliRunner().invoke(app, ["simulate", *LOAD, "--output-len", "1"]).stdout
    assert "nan" not in table and "–" in table
    document = CliRunner().invoke(app, ["simulate", *LOAD, "--output-len", "1", "--json"]).stdout
    assert "NaN" not in document and json.loads(document)["tpot_s"]["mean"] is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("--input-len", "200000"), "request 1 has 200008 tokens, and a worker holds"),
        (("--ratio", "1:0"), "--ratio: '1:0' is not of the form P:D, with at least 1 decode worker"),
        (("--auto", "--bare"), "--auto: a bare engine has no controller"),
        (("--cores", "2", "--fidelity", "fast"), "--cores: shared cores need the full fidelity"),
        (("--first-s", "0"), "--first-s: no request comes in the first 0 s"),
    ],
)
def test_what_cannot_be_simulated_is_refused(wrong: tuple[str, ...], named: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *LOAD, *wrong])
    assert result.exit_code != 0 and named in result.output
