"""The figures of a run, under vLLM's `bench serve` names where those exist, and pictures of runs: TTFT by prompt
length, time between messages over the run, goodput by offered rate.

Pure but for `draw`, which alone loads matplotlib (the extra `plots`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cluster.errors import ConfigError
from tools.bench.workload import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = Mapping[str, Any]
"""A document of `baton bench`; with `details`, if it was kept `--detailed`."""

NUM_BUCKETS = 60
"""Parts into which `itl_over_time` divides a run."""
_SIZE_INCHES = (8.0, 4.5)
_DPI = 120
PERCENTILES = (50, 90, 95, 99)
OBJECTIVES: Mapping[str, Callable[[Sample], float]] = {
    "ttft": lambda sample: sample.ttft_s,
    "tpot": lambda sample: sample.tpot_s,
    "e2el": lambda sample: sample.e2el_s,
}
"""The figures that `--goodput` may limit."""


def figures_of(samples: Sequence[Sample], duration_s: float, objectives_ms: Mapping[str, float]) -> dict[str, Any]:
    """Times in milliseconds, rates a second."""
    done = [sample for sample in samples if sample.is_complete]
    num_prompt, num_output = sum(s.num_prompt_tokens for s in done), sum(s.num_output_tokens for s in done)
    kept = sum(all(1000 * OBJECTIVES[name](s) <= most for name, most in objectives_ms.items()) for s in done)
    num_cached = sum(sample.num_cached_tokens for sample in done)
    times = {
        "ttft": [sample.ttft_s for sample in done],
        "tpot": [sample.tpot_s for sample in done if sample.num_output_tokens > 1],
        "itl": [itl for sample in done for itl in sample.itls_s],
        "e2el": [sample.e2el_s for sample in done],
    }
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": kept / duration_s if objectives_ms else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_prompt + num_output) / duration_s,
        **{key: value for name, values in times.items() for key, value in _spread(name, values).items()},
        "cached_share": num_cached / num_prompt if num_prompt else 0.0,
        "num_gaps": sum(sample.num_gaps for sample in samples),
        "num_moves": sum(sample.num_moves for sample in done),
        "max_concurrent_requests": _most_at_once(samples),
        "errors": sorted({sample.error for sample in samples if sample.error})[:10],
    }


def details_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Each completed request in the order of sending, in seconds, under vLLM's names of `--save-detailed`."""
    first = min((sample.sent_at for sample in samples), default=0.0)
    done = sorted((sample for sample in samples if sample.is_complete), key=lambda sample: sample.sent_at)
    return {
        "input_lens": [sample.num_prompt_tokens for sample in done],
        "output_lens": [sample.num_output_tokens for sample in done],
        "start_times": [sample.sent_at - first for sample in done],
        "ttfts": [sample.ttft_s for sample in done],
        "itls": [sample.itls_s for sample in done],
    }


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds, from texts like `ttft:500`. Raises ValueError."""
    found = {}
    for text in texts:
        name, _, most = text.partition(":")
        if name not in OBJECTIVES or not most.replace(".", "", 1).isdigit():
            raise ValueError(f"{text!r} is no objective; write NAME:MS, with {', '.join(OBJECTIVES)} as the name")
        found[name] = float(most)
    return found


def _spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    values_ms = 1000 * np.array(values_s or [0.0], dtype=np.float64)
    spread = {f"mean_{name}_ms": values_ms.mean(), f"median_{name}_ms": np.median(values_ms)}
    spread[f"std_{name}_ms"] = values_ms.std()
    spread |= {f"p{p}_{name}_ms": np.percentile(values_ms, p) for p in PERCENTILES}
    return {key: float(value) for key, value in spread.items()}


def _most_at_once(samples: Sequence[Sample]) -> int:
    changes = sorted([(s.ended_at, -1) for s in samples] + [(s.sent_at, 1) for s in samples])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


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
    drawn = pictures(runs)
    if not drawn:
        raise ConfigError(
            "these runs have nothing to draw: keep one with --detailed, or with --request-rate and --goodput"
        )
    try:
        files = []
        for name, figure in drawn.items():
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], dpi=_DPI)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return files


def pictures(runs: Mapping[str, Run]) -> dict[str, Figure]:
    """The pictures by name; one without data is left out."""
    detailed = {name: run for name, run in runs.items() if run.get("details", {}).get("ttfts")}
    drawn = {}
    if detailed:
        drawn["ttft"] = _ttft(detailed)
        drawn["itl"] = _itl(detailed)
    points = goodput_by_rate(runs.values())
    if points:
        drawn["goodput"] = _goodput(points)
    return drawn


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
    spreads = [np.percentile(itls, (50, 99)) if itls else (math.nan, math.nan) for itls in filled]
    return [PlotBucket((number + 0.5) * width, *map(float, spread)) for number, spread in enumerate(spreads)]


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
