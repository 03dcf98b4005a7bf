"""`benchmarks.engine --either-code` steps one model by Baton's code and by transformers', in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from checkpoints import make_checkpoint
from typer.testing import CliRunner

from benchmarks import engine

APP = typer.Typer()
APP.command()(engine.main)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def either_code(folder: Path, *sizes: str) -> Any:
    return CliRunner().invoke(APP, ["--either-code", "--threads", "1", "--model", str(folder), "--rounds", "1", *sizes])


def test_each_code_steps_the_model_and_the_ratio_is_of_their_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[tuple[str, bool]] = []
    for name in ("decode", "prefill"):
        monkeypatch.setattr(engine.Bench, name, counted(name, getattr(engine.Bench, name), stepped))
    ended = either_code(folder, "--batch", "2", "--prompt", "20")
    assert ended.exit_code == 0, ended.output
    rows = json.loads(ended.stdout)
    assert list(rows) == ["decode of 2", "prefill of 20"]
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["native_ms"] / row["transformers_ms"], rel=0.1, abs=0.01)
    in_turn = [False, True] * 2  # once unmeasured, then the round
    assert stepped == [(name, foreign) for name in ("decode", "prefill") for foreign in in_turn]


def counted(name: str, original: Any, stepped: list[tuple[str, bool]]) -> Any:
    def call(bench: engine.Bench, *args: Any) -> Any:
        stepped.append((name, bench.runner.config.foreign is not None))
        return original(bench, *args)

    return call


def test_a_prompt_longer_than_the_model_takes_is_refused_before_it_is_loaded(folder: Path) -> None:
    ended = either_code(folder, "--batch", "1", "--prompt", "100000")
    assert ended.exit_code == 2 and "--prompt 100000: this model takes at most" in ended.output
