"""Pictures of runs: TTFT by prompt length, time between messages over the run, goodput by offered rate.

The data are computed apart from the drawing. Only `draw` loads matplotlib (the extra `plots`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.errors import ConfigError
from tools.bench.figures import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = Mapping[str, Any]
"""A document of `baton bench`; with `details`, if it was kept `--detailed`."""

NUM_BUCKETS = 60
"""Parts into which `itl_over_time` divides a run."""
_SIZE_INCHES = (8.0, 4.5)
_DPI = 120


class PlotBucket(NamedTuple):
    """Times between messages that came within one part of a run."""

    at_s: float
    """Its middle, since the first request was sent."""
    median_ms: float
    p99_ms: float


class GoodputPoint(NamedTuple):
    """One run, as a point."""

    rate: float
    throughput: float
    goodput: float


def prepare(folder: Path) -> None:
    """Makes the folder. Raises ConfigError, before a run, where nothing could be drawn into it afterwards."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "plots need matplotlib, which is not installed; pip install 'matplotlib>=3.9', or make setup "
            "EXTRAS=dev,plots"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def draw(runs: Mapping[str, Run], folder: Path) -> list[Path]:
    """Writes a PNG for each picture that the runs (by name) have data for; returns their files.

    Raises ConfigError without matplotlib, for a folder that cannot be written, and for runs with no data at all.
    """
    prepare(folder)
    pictures = figures(runs)
    if not pictures:
        raise ConfigError(
            "these runs have nothing to draw: keep one with --detailed, or with --request-rate and --goodput"
        )
    try:
        files = []
        for name, figure in pictures.items():
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], dpi=_DPI)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return files


def figures(runs: Mapping[str, Run]) -> dict[str, Figure]:
    """The pictures by name; one without data is left out."""
    detailed = {name: run for name, run in runs.items() if run.get("details", {}).get("ttfts")}
    pictures = {}
    if detailed:
        pictures["ttft"] = _ttft(detailed)
        pictures["itl"] = _itl(detailed)
    points = goodput_by_rate(runs.values())
    if points:
        pictures["goodput"] = _goodput(points)
    return pictures


def ttft_by_prompt(run: Run) -> list[tuple[int, float]]:
    """Prompt tokens and milliseconds of each request, in the order of sending."""
    details = run["details"]
    return [(num, 1000 * s) for num, s in zip(details["input_lens"], details["ttfts"], strict=True)]


def itl_over_time(run: Run, num_buckets: int = NUM_BUCKETS) -> list[PlotBucket]:
    """Buckets of equal length over the run; NaN where nothing came, so that no line is drawn across it."""
    details = run["details"]
    messages: list[tuple[float, float]] = []
    for start, ttft, itls in zip(details["start_times"], details["ttfts"], details["itls"], strict=True):
        later = list(accumulate(itls, initial=start + ttft))[1:]
        messages.extend(zip(later, itls, strict=True))
    if not messages:
        return []
    width = max(at for at, _ in messages) / num_buckets
    filled: list[list[float]] = [[] for _ in range(num_buckets)]
    for at, itl in messages:
        filled[min(num_buckets - 1, int(at / width))].append(1000 * itl)
    return [_bucket((number + 0.5) * width, sorted(itls)) for number, itls in enumerate(filled)]


def _bucket(at_s: float, ordered: Sequence[float]) -> PlotBucket:
    if not ordered:
        return PlotBucket(at_s, math.nan, math.nan)
    return PlotBucket(at_s, percentile(ordered, 0.5), percentile(ordered, 0.99))


def goodput_by_rate(runs: Iterable[Run]) -> list[GoodputPoint]:
    """The runs that had a rate and objectives, from the lowest rate to the highest."""
    return sorted(
        GoodputPoint(run["request_rate"], run["request_throughput"], run["request_goodput"])
        for run in runs
        if run.get("request_rate") and run.get("request_goodput") is not None
    )


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder}: cannot be written: {error.strerror}; name another folder")


def _ttft(runs: Mapping[str, Run]) -> Figure:
    figure, axes = _blank("prompt tokens", "time to first token, ms")
    for name, run in runs.items():
        lengths, times = zip(*ttft_by_prompt(run), strict=True)
        axes.scatter(lengths, times, s=10, alpha=0.6, label=name)
    axes.set_ylim(bottom=0)
    _finish(axes, runs)
    return figure


def _itl(runs: Mapping[str, Run]) -> Figure:
    figure, axes = _blank("seconds since the first request", "between two messages, ms")
    for name, run in runs.items():
        buckets = itl_over_time(run)
        times = [bucket.at_s for bucket in buckets]
        (line,) = axes.plot(times, [bucket.median_ms for bucket in buckets], marker=".", label=f"{name}, median")
        p99 = [bucket.p99_ms for bucket in buckets]
        axes.plot(times, p99, linestyle="--", marker=".", color=line.get_color(), label=f"{name}, p99")
    axes.set_ylim(bottom=0)
    _finish(axes, ("median", "p99"))
    return figure


def _goodput(points: Sequence[GoodputPoint]) -> Figure:
    figure, axes = _blank("requests offered a second", "requests a second")
    rates = [point.rate for point in points]
    axes.plot(rates, rates, color="lightgrey", label="offered")
    axes.plot(rates, [point.throughput for point in points], marker="o", label="completed")
    axes.plot(rates, [point.goodput for point in points], marker="o", label="in time (goodput)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _finish(axes, ("offered", "completed", "in time"))
    return figure


def _blank(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _finish(axes: Axes, names: Iterable[str]) -> None:
    """Adds a legend where there is more than one thing."""
    if len(list(names)) > 1:
        axes.legend()
