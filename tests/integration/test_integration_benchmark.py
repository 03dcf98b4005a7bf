"""The benchmark of the hand-off, run as others run it, with sizes that say nothing but take seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MARK = "BATON_TEST_BENCHMARK"
SMALL = (
    *("--runs", "2", "--tokens", "64", "--passes", "1", "--chunk-tokens", "16", "--chunk-tokens", "64"),
    *("--prompt-tokens", "24", "--prompt-tokens", "100", "--commits", "3", "--cancels", "6"),
)


def run(*arguments: str) -> tuple[subprocess.CompletedProcess[str], list[psutil.Process]]:
    """What it said, and which of its processes it left behind."""
    mark = uuid.uuid4().hex
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ended, [process for process in psutil.process_iter() if _has(process, mark)]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model"))


def test_prints_one_json_object_with_the_promised_keys_and_leaves_no_process(model: Path) -> None:
    ended, left = run("benchmarks/kv_transfer.py", "--json", "--model-dir", str(model), *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert left == []
    told = json.loads(ended.stdout)
    for key in ("shm.of_memcpy", "gloo.of_socket", "commit_ms_p50", "cancel_ms_p50", "cancel_ms_p99"):
        assert told[key] > 0, key
    assert list(told["exposed_share"]) == ["24", "100"]
    assert told["commits"] == 3
    assert sum(some["count"] for some in told["cancels"].values()) == 6
    for rates in told["cpu_gb_s"].values():
        assert list(rates) == ["16", "64"]
        assert all(rate > 0 for rate in rates.values())


def test_as_a_module_it_shows_tables(model: Path) -> None:
    ended, left = run("-m", "benchmarks.kv_transfer", "--part", "bandwidth", *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert left == []
    assert "KV between two ranks" in ended.stdout
    assert "of_memcpy" in ended.stdout
    assert "cancel" not in ended.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        ("--runs", "0"),
        ("--part", "weather"),
        ("--tokens", "100"),
        ("--tokens", "64", "--chunk-tokens", "128"),
        ("--cancels", "0"),
        ("--prompt-tokens", "100000"),
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_measured_is_refused_at_once(model: Path, wrong: tuple[str, ...]) -> None:
    ended, left = run("benchmarks/kv_transfer.py", "--json", "--model-dir", str(model), *wrong)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert wrong[-2] in ended.stderr
    assert left == []


def test_a_worker_that_cannot_start_is_shown_with_what_it_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    arguments = ("--json", "--model-dir", str(tmp_path), "--part", "exposed", *SMALL)
    ended, left = run("benchmarks/kv_transfer.py", *arguments)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "python -m worker" in ended.stderr
    assert "safetensors" in ended.stderr
    assert left == []
