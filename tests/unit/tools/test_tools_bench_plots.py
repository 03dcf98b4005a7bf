"""What `baton bench` draws: the data of each picture, the pictures themselves, and what is said without matplotlib."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from scripted_router import baton

from tools.bench.figures import (
    GoodputPoint,
    PlotBucket,
    details_of,
    figures_of,
    goodput_by_rate,
    itl_over_time,
    pictures,
    ttft_by_prompt,
)
from tools.bench.workload import Sample


def sample(sent_at: float, *told: float, num_prompt_tokens: int = 10, error: str = "") -> Sample:
    return Sample(num_prompt_tokens, sent_at, list(told), len(told), ended_at=max(told, default=sent_at), error=error)


def run(samples: list[Sample], rate: float | None = None, goodput_ms: float | None = None) -> dict[str, Any]:
    """A document as `baton bench --detailed` makes it."""
    objectives = {} if goodput_ms is None else {"ttft": goodput_ms}
    return {"request_rate": rate, **figures_of(samples, 10.0, objectives), "details": details_of(samples)}


def test_details_are_of_what_completed_in_the_order_of_sending() -> None:
    samples = [
        sample(103.0, 103.5, 104.0, num_prompt_tokens=30),
        sample(101.0, error="refused"),
        sample(100.0, 100.25, 100.5, 101.5),
    ]
    assert details_of(samples) == {
        "input_lens": [10, 30],
        "output_lens": [3, 2],
        "start_times": [0.0, 3.0],
        "ttfts": [0.25, 0.5],
        "itls": [[0.25, 1.0], [0.5]],
    }
    assert details_of([]) == {"input_lens": [], "output_lens": [], "start_times": [], "ttfts": [], "itls": []}


def test_first_tokens_and_times_between_messages_are_those_that_clients_saw() -> None:
    document = run([sample(0, 0.5, 1.0, 2.0), sample(0, 1.0, 4.0, num_prompt_tokens=70), sample(0, 0.1)])
    assert ttft_by_prompt(document) == [(10, 500.0), (70, 1000.0), (10, 100.0)]
    # Messages after a first one came at 1.0, 2.0 and 4.0 s, the last of which ends the last part.
    assert itl_over_time(document, num_buckets=4) == [
        PlotBucket(0.5, math.nan, math.nan),
        PlotBucket(1.5, 500.0, 500.0),
        PlotBucket(2.5, 1000.0, 1000.0),
        PlotBucket(3.5, 3000.0, 3000.0),
    ]
    assert itl_over_time(run([sample(0, 0.1)])) == []


def test_goodput_is_drawn_of_runs_with_a_rate_and_objectives_from_the_lowest_rate_on() -> None:
    fast, slow = sample(0, 0.1, 0.2), sample(0, 2.0, 3.0)
    runs = [run([fast, slow], 8.0, 500), run([fast, fast], 2.0, 500), run([fast], 4.0), run([fast], None, 500)]
    assert goodput_by_rate(runs) == [GoodputPoint(2.0, 0.2, 0.2), GoodputPoint(8.0, 0.2, 0.1)]
    (axes,) = pictures({str(number): each for number, each in enumerate(runs)})["goodput"].axes
    drawn = {str(line.get_label()): list(map(float, line.get_ydata())) for line in axes.get_lines()}
    assert drawn == {"offered": [2.0, 8.0], "completed": [0.2, 0.2], "in time (goodput)": [0.2, 0.1]}


def test_a_picture_without_data_is_left_out_and_none_at_all_is_a_mistake(tmp_path: Path) -> None:
    bare = run([sample(0, 0.1, 0.2)], 2.0, 500)
    del bare["details"]
    assert list(pictures({"a": bare})) == ["goodput"]
    (tmp_path / "all-at-once.json").write_text(json.dumps({**bare, "request_rate": None}))
    done = baton("bench", "plot", str(tmp_path / "out"), str(tmp_path / "all-at-once.json"))
    assert done.exit_code == 3
    assert "nothing to draw: keep one with --detailed" in " ".join(done.stderr.split())


def test_runs_are_drawn_together_into_files(tmp_path: Path) -> None:
    for rate in (1.0, 2.0):
        samples = [sample(n, n + 0.1 * rate, n + 0.5, n + 0.7, num_prompt_tokens=10 * n + 1) for n in range(20)]
        (tmp_path / f"at-{rate:g}.json").write_text(json.dumps(run(samples, rate, 150)))
    done = baton("bench", "plot", str(tmp_path / "out"), str(tmp_path / "at-1.json"), str(tmp_path / "at-2.json"))
    assert done.exit_code == 0, done.stderr
    files = [tmp_path / "out" / f"{name}.png" for name in ("ttft", "itl", "goodput")]
    assert done.stderr.splitlines() == [str(file) for file in files]
    for file in files:
        pixels = image.imread(file)
        assert pixels.shape[:2] == (540, 960)
        # Two colours of two runs, or of two lines, beside the black and grey of axes.
        colours = np.unique((10 * pixels[:, :, :3]).round().reshape(-1, 3), axis=0)
        assert np.sum(np.ptp(colours, axis=1) > 4) >= 2, file


def test_a_run_has_its_name_and_with_its_folder_where_two_are_called_the_same(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "run.json")
        paths[-1].write_text(json.dumps(run([sample(0, 0.1, 0.2), sample(1, 1.5, 1.7)])))
    assert baton("bench", "plot", str(tmp_path), *map(str, paths)).exit_code == 0
    legend = pictures({str(path): json.loads(path.read_text()) for path in paths})["ttft"].axes[0].get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == [str(path) for path in paths]


@pytest.mark.parametrize("arguments", [("--plots", "DIR", "--address", "127.0.0.1:1"), ("plot", "DIR", "run.json")])
def test_without_matplotlib_it_is_named_before_anything_is_sent(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(run([sample(0, 0.1)])))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = baton("bench", *arguments)
    assert done.exit_code == 3
    assert "plots need matplotlib, which is not installed; pip install 'matplotlib>=3.9'" in done.stderr
    assert not (tmp_path / "DIR").exists()


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = baton("bench", "--plots", str(tmp_path / "file" / "in"), "--address", "127.0.0.1:1")
    assert done.exit_code == 3
    assert f"{tmp_path / 'file' / 'in'}: cannot be written: Not a directory" in " ".join(done.stderr.split())
