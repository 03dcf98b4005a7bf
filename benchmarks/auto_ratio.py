"""Goodput of a ratio that follows the load against every ratio that does not, on a load that changes its kind.

    python benchmarks/auto_ratio.py --json --repetitions 3

The load goes from long prompts to long outputs and back, each at a share of what is served when clients keep the split
busy that has most workers for it. It is the same for every split, and for `mode: auto`, one after the other
in one cluster of four workers, each with the same part of a core. Goodput are the requests a second that kept both
objectives. Exits 1 when a request was lost, repeated or changed.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import asdict, dataclass
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

NUM_WORKERS = 4
PROMPTS = Kind("prompts", 800, 24)
OUTPUTS = Kind("outputs", 32, 160)
CAPACITY_S = 12.0


@dataclass(frozen=True)
class Load:
    """Three phases of so many seconds each; requests a second of each kind."""

    phase_s: float
    prompts_rate: float
    outputs_rate: float

    def arrivals(self, seed: int) -> list[Arrival]:
        draw = random.Random(seed)
        phases = [(PROMPTS, self.prompts_rate), (OUTPUTS, self.outputs_rate), (PROMPTS, self.prompts_rate)]
        return [a for i, phase in enumerate(phases) for a in poisson([phase], i * self.phase_s, self.phase_s, draw)]


@dataclass(frozen=True)
class Run:
    """One way through the load."""

    name: str
    seed: int
    """Of the arrivals."""
    figures: Figures
    by_phase: list[float]
    """Goodput."""
    num_moves: int
    problems: list[str]


class Bench:
    """One cluster, and what is asked of it."""

    def __init__(self, cluster: SteeredCluster, phase_s: float, progress: Progress) -> None:
        self._cluster = cluster
        self._slo = cluster.config.rebalance.slo
        self._phase_s = phase_s
        self._progress = progress

    def load(self, share: float) -> Load:
        """At a share of what each kind's own split was seen to serve."""
        rates = []
        for kind, split, streams in ((PROMPTS, (3, 1), 4 * 3), (OUTPUTS, (1, 3), 40 * 3)):
            self._cluster.steer(*split)
            bar = self._progress.add_task(f"capacity, {kind.name}", total=None)
            rates.append(share * capacity_of(self._cluster.address, [(kind, 1.0)], streams, CAPACITY_S))
            self._progress.remove_task(bar)
        return Load(self._phase_s, *rates)

    def run(self, name: str, split: tuple[int, int], load: Load, seed: int, *, auto: bool = False) -> Run:
        self._cluster.steer(*split, auto=auto)
        before = self._cluster.num_moves() if auto else 0
        told = offer(self._cluster.address, load.arrivals(seed), name, self._progress)
        moves = self._cluster.num_moves() - before if auto else 0
        slo = {"ttft_s": self._slo.ttft_s, "tpot_s": self._slo.tpot_s}
        phases = [[t for t in told if int(t.arrival.at / load.phase_s) == i] for i in range(3)]
        by_phase = [figures_of(of_one, load.phase_s, **slo).goodput for of_one in phases]
        return Run(name, seed, figures_of(told, 3 * load.phase_s, **slo), by_phase, moves, problems_of(told))


def summary(load: Load, runs: list[Run], reasons: list[str]) -> dict[str, Any]:
    names = list(dict.fromkeys(run.name for run in runs))
    by_name = {name: [run for run in runs if run.name == name] for name in names}
    median = {name: statistics.median(run.figures.goodput for run in of_one) for name, of_one in by_name.items()}
    best = max(value for name, value in median.items() if name != "auto")
    repetitions = zip(*by_name.values(), strict=True)
    ratios = []
    for runs_of_one in repetitions:
        fixed = max(run.figures.goodput for run in runs_of_one if run.name != "auto")
        auto = next(run.figures.goodput for run in runs_of_one if run.name == "auto")
        ratios.append(round(auto / fixed, 3) if fixed else 0.0)
    return {
        "load": asdict(load),
        "goodput": {name: round(value, 3) for name, value in median.items()},
        "auto_of_best_fixed": round(median["auto"] / best, 3) if best else 0.0,
        "auto_of_best_fixed_by_repetition": ratios,
        "moves": [run.num_moves for run in by_name["auto"]],
        "runs": [asdict(run) for run in runs],
        "reasons": reasons,
        "problems": [f"{run.name}: {problem}" for run in runs for problem in run.problems],
    }


def show(found: dict[str, Any], slo: SloSection) -> None:
    load = Load(**found["load"])
    table = Table(
        title=f"{load.prompts_rate:.2f} long prompts/s, then {load.outputs_rate:.2f} long outputs/s, then prompts, "
        f"{load.phase_s:g} s each; TTFT {1000 * slo.ttft_s:g} ms, TPOT {1000 * slo.tpot_s:g} ms"
    )
    for column in ("split", "goodput/s", "by phase", "kept", "TTFT p50", "p99, ms", "ITL p50", "p99, ms", "moves"):
        table.add_column(column, justify="right")
    for run in found["runs"]:
        figures = run["figures"]
        phases = ", ".join(f"{value:.2f}" for value in run["by_phase"])
        times = [f"{figures[key]:.0f}" for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")]
        moves = str(run["num_moves"])
        table.add_row(run["name"], f"{figures['goodput']:.2f}", phases, f"{figures['kept']:.0%}", *times, moves)
    console = Console()
    console.print(table)
    console.print(f"auto has {found['auto_of_best_fixed']:.3f} of the best fixed split's goodput (medians)")
    for line in [*found["reasons"][:20], *found["problems"][:5]]:
        console.print(line, markup=False)


def main(
    repetitions: Annotated[int, typer.Option(min=1, help="Of every split and of auto.")] = 1,
    phase_seconds: Annotated[float, typer.Option(min=5.0, help="Of each of the three phases.")] = 30.0,
    load: Annotated[float, typer.Option(min=0.05, max=3, help="Of what a kind's own split serves.")] = 0.8,
    share: Annotated[float, typer.Option(min=0, max=1, help="Of a core for each worker; 0: what it gets.")] = 0.25,
    slower: Annotated[float, typer.Option(min=0.1, help="Timed steps and objectives take so many times longer.")] = 1.0,
    ttft_ms: Annotated[float, typer.Option(min=1)] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(min=1)] = 80.0,
    config: Annotated[Path, typer.Option(help="A cluster.yaml; it gets four workers.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """A load that changes its kind, over every fixed split and over mode: auto."""
    values: dict[str, object] = {
        "roles.prefill.devices": 2,
        "roles.decode.devices": 2,
        "rebalance.slo.ttft_ms": ttft_ms,
        "rebalance.slo.tpot_ms": tpot_ms,
        "rebalance.auto.confirm_s": 2.0,
        "rebalance.auto.cooldown_s": 2.0,
        "rebalance.auto.dwell_s": 10.0,
    }
    runs = []
    with telling_failures(), SteeredCluster.running(config, values, share, slower) as cluster, bars() as progress:
        described = cluster.described()
        bench = Bench(cluster, phase_seconds, progress)
        offered, before = bench.load(load), cluster.last_event()
        for number in range(repetitions):
            for p in range(1, NUM_WORKERS):
                split = p, NUM_WORKERS - p
                runs.append(bench.run(f"{p}:{NUM_WORKERS - p}", split, offered, number))
            runs.append(bench.run("auto", (2, 2), offered, number, auto=True))
        found = described | summary(offered, runs, cluster.reasons(before))
    tell(found, as_json, lambda found: show(found, cluster.config.rebalance.slo))
    if found["problems"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
