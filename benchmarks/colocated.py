"""Whether disaggregation pays: workers that do both against a split, and against what Baton chooses, on equal cores.

    python benchmarks/colocated.py --json

Two workers, the same engine, each with the same part of a core. At each point of a grid of prompt and output lengths,
and for a stream of chats with long prompts among them, the same requests come to

    colocated       both workers compute prompts in chunks beside what they decode
    disaggregated   one prefills, one decodes, and every prompt is handed over
    auto            `mode: auto`, which may choose either, with local prefill on decode workers

one right after the other, in two clusters of which one idles, at a share of what both workers complete when each does
both and clients keep them busy: a larger one for the mixed load, where one above the other two can only be seen when
they do not serve all of it in time. Exits 1 when a request was lost, repeated or changed.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.capacity import capacity_of
from benchmarks.open_loop import Arrival, Figures, Kind, figures_of, offer, poisson, problems_of
from benchmarks.plain_cluster import ROOT
from benchmarks.report import bars, tell, telling_failures
from benchmarks.steered import SteeredCluster
from cluster.config.schema import SloSection

PROMPT_TOKENS, OUTPUT_TOKENS = (64, 512), (16, 128)
CHAT, LONG = Kind("chat", 48, 96), Kind("long", 1024, 8)
MIXED = "chats, long prompts"
CAPACITY_S, STREAMS = 8.0, 24
WARM_S, ADAPT_S = 5.0, 26.0
"""The load goes on for so long before it counts: longer for auto, which has to make up its mind, and whose outputs from
before that have to end."""
MODES = ("colocated", "auto", "disaggregated")


def split_of(mode: str) -> tuple[int, int]:
    """P:D that a mode stays at, or begins with."""
    return (0, 2) if mode == "colocated" else (1, 1)


def policy_of(mode: str) -> str:
    """The router's: with `least_loaded` every prompt is handed over."""
    return "least_loaded" if mode == "disaggregated" else "predicted"


@dataclass(frozen=True)
class Point:
    """A load: kinds, each with its share of the requests."""

    name: str
    kinds: tuple[tuple[Kind, float], ...]
    seconds: float
    """That count."""
    rate: float = 0.0
    """Requests a second of all kinds together."""

    def arrivals(self, mode: str) -> tuple[list[Arrival], float]:
        """And from when on they count: those are the same for every mode."""
        rates = [(kind, part * self.rate) for kind, part in self.kinds]
        before_s = ADAPT_S if mode == "auto" else WARM_S
        before = poisson(rates, 0.0, before_s, random.Random(f"{self.name}, before"))
        return before + poisson(rates, before_s, self.seconds, random.Random(self.name)), before_s


def grid(seconds: float, mixed_seconds: float) -> list[Point]:
    points = [
        Point(f"{prompt} + {output}", ((Kind(f"{prompt} + {output}", prompt, output), 1.0),), seconds)
        for prompt in PROMPT_TOKENS
        for output in OUTPUT_TOKENS
    ]
    return [*points, Point(MIXED, ((CHAT, 0.85), (LONG, 0.15)), mixed_seconds)]


@dataclass(frozen=True)
class Run:
    """One mode at one point."""

    point: str
    mode: str
    rate: float
    figures: Figures
    split: str
    """At the end."""
    why: str
    """The last of its reasons."""
    reasons: list[str]
    problems: list[str]


class Bench:
    """What is asked of one cluster."""

    def __init__(self, cluster: SteeredCluster, progress: Progress) -> None:
        self._cluster = cluster
        self._slo = cluster.config.rebalance.slo
        self._progress = progress

    def loaded(self, point: Point, share: float) -> Point:
        """With its rate, of what both workers complete when each does both, and clients keep them busy."""
        self._cluster.steer(0, 2)
        bar = self._progress.add_task(f"{point.name}, capacity", total=None)
        rate = share * capacity_of(self._cluster.address, point.kinds, STREAMS, CAPACITY_S)
        self._progress.remove_task(bar)
        return replace(point, rate=rate)

    def run(self, point: Point, mode: str) -> Run:
        before = self._cluster.last_event()
        self._cluster.steer(*split_of(mode), auto=mode == "auto")
        arrivals, before_s = point.arrivals(mode)
        told = offer(self._cluster.address, arrivals, f"{point.name}, {mode}", self._progress)
        counted = [t for t in told if t.arrival.at >= before_s]
        figures = figures_of(counted, point.seconds, ttft_s=self._slo.ttft_s, tpot_s=self._slo.tpot_s)
        reasons = self._cluster.reasons(before) if mode == "auto" else []
        ended_as = ":".join(map(str, self._cluster.split()))
        why = reasons[-1] if reasons else ""
        return Run(point.name, mode, point.rate, figures, ended_as, why, reasons, problems_of(told))


def summary(points: Sequence[Point], runs: Sequence[Run]) -> dict[str, Any]:
    ratios = {}
    for point in dict.fromkeys(run.point for run in runs):
        goodput = {run.mode: run.figures.goodput for run in runs if run.point == point}
        better = max(goodput["colocated"], goodput["disaggregated"])
        ratios[point] = round(goodput["auto"] / better, 3) if better else 0.0
    return {
        "auto_of_the_better": ratios,
        "points": [asdict(point) for point in points],
        "runs": [asdict(run) for run in runs],
        "problems": [f"{run.point}, {run.mode}: {problem}" for run in runs for problem in run.problems],
    }


def show(found: dict[str, Any], slo: SloSection) -> None:
    table = Table(title=f"two workers; TTFT {1000 * slo.ttft_s:g} ms, TPOT {1000 * slo.tpot_s:g} ms")
    columns = ("prompt + output", "rate/s", "mode", "split", "goodput/s", "kept")
    for column in (*columns, "TTFT p50", "p99, ms", "ITL p50", "p99, ms"):
        table.add_column(column, justify="right")
    for run in found["runs"]:
        figures = run["figures"]
        times = [f"{figures[key]:.0f}" for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")]
        name = [run["point"], f"{run['rate']:.2f}", run["mode"], run["split"]]
        table.add_row(*name, f"{figures['goodput']:.2f}", f"{figures['kept']:.0%}", *times)
    console = Console()
    console.print(table)
    for point, ratio in found["auto_of_the_better"].items():
        console.print(f"{point}: auto has {ratio:.3f} of the better one's goodput")
    for line in [*(run["why"] for run in found["runs"] if run["why"]), *found["problems"][:5]]:
        console.print(line, markup=False)


def main(
    seconds: Annotated[float, typer.Option(min=2.0, help="That count, of each mode at each point.")] = 15.0,
    mixed_seconds: Annotated[float, typer.Option(min=2.0, help="The same, of chats with long prompts.")] = 40.0,
    load: Annotated[float, typer.Option(min=0.05, max=3, help="Of what colocated workers complete.")] = 0.8,
    mixed_load: Annotated[float, typer.Option(min=0.05, max=3, help="The same, of chats with long prompts.")] = 1.0,
    share: Annotated[float, typer.Option(min=0, max=1, help="Of a core for each worker; 0: what it gets.")] = 0.4,
    slower: Annotated[float, typer.Option(min=0.1, help="Timed steps and objectives take so many times longer.")] = 1.0,
    ttft_ms: Annotated[float, typer.Option(min=1)] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(min=1)] = 50.0,
    config: Annotated[Path, typer.Option(help="A cluster.yaml; it gets two workers.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Colocated, disaggregated and mode: auto, side by side."""
    values: dict[str, object] = {
        "roles.prefill.devices": 1,
        "roles.prefill.min_workers": 0,
        "roles.decode.devices": 1,
        "rebalance.slo.ttft_ms": ttft_ms,
        "rebalance.slo.tpot_ms": tpot_ms,
        "rebalance.auto.confirm_s": 4.0,
        "rebalance.auto.cooldown_s": 4.0,
        "rebalance.auto.dwell_s": 12.0,
    }
    points, runs = list[Point](), list[Run]()
    with telling_failures(), contextlib.ExitStack() as stack:
        clusters = [
            stack.enter_context(SteeredCluster.running(config, {**values, "router.policy": policy}, share, slower))
            for policy in map(policy_of, MODES[1:])
        ]
        progress = stack.enter_context(bars())
        described = clusters[0].described()
        predicted, handing_over = (Bench(cluster, progress) for cluster in clusters)
        for unloaded in grid(seconds, mixed_seconds):
            point = predicted.loaded(unloaded, mixed_load if unloaded.name == MIXED else load)
            points.append(point)
            runs += [predicted.run(point, mode) for mode in MODES[:2]]
            runs.append(handing_over.run(point, MODES[2]))
    found = described | summary(points, runs)
    tell(found, as_json, lambda found: show(found, clusters[0].config.rebalance.slo))
    if found["problems"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
