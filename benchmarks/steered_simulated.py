"""The loads of `benchmarks/colocated.py` and `benchmarks/auto_ratio.py` on simulated workers that share cores.

    python benchmarks/steered_simulated.py profile.json --load colocated --share 0.4
    python benchmarks/steered_simulated.py profile.json --load auto-ratio --share 0.25

`baton profile` has measured a worker on the machine whose real figures are to be explained, and each simulated worker
may use a part of a core there, as the real ones may. Loads are shares of what the workers complete when clients keep
them busy, in the simulation as in reality.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.auto_ratio import NUM_WORKERS, OUTPUTS, PROMPTS, Load
from benchmarks.colocated import ADAPT_S, MIXED, MODES, STREAMS, WARM_S, grid
from benchmarks.open_loop import Arrival, Kind, poisson
from benchmarks.plain_cluster import ROOT
from benchmarks.report import tell, telling_failures
from benchmarks.simulated_cluster import Machine
from cluster.config.load import load_config
from cluster.config.schema import AutoSection, RouterSection, SloSection
from simulate.client import RequestOutcome
from simulate.controller import ControllerSpec
from simulate.worker import WorkerSpec
from simulate.workload import RequestShape
from simulate.world import Cluster, ClusterSpec, RunResult

COLUMNS = ("load", "rate/s", "split", "goodput/s", "kept", "TTFT p50 ms", "TPOT p50 ms", "moves")


class LoadName(StrEnum):
    COLOCATED = "colocated"
    AUTO_RATIO = "auto-ratio"


@dataclass(frozen=True)
class Row:
    """One split, or `mode: auto`, under one load."""

    load: str
    rate: float
    name: str
    goodput: float
    """Requests a second that kept both objectives."""
    kept: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    num_moves: int


class Bench:
    """Simulated workers, all alike."""

    def __init__(self, worker: WorkerSpec, machine: Machine, slo: SloSection) -> None:
        self._worker = worker
        self._machine = machine
        self._slo = slo

    def spec(
        self,
        split: tuple[int, int],
        policy: str = "predicted",
        streams: int | None = None,
        auto: AutoSection | None = None,
    ) -> ClusterSpec:
        router = RouterSection(http_port=None, policy=policy, max_running_requests=streams)  # type: ignore[arg-type]
        message_s = self._machine.message_s
        return ClusterSpec.of_ratio(
            *split,
            self._worker,
            router=router,
            slo=self._slo,
            message_s=message_s,
            client_s=message_s,
            cores=self._machine.cores,
            controller=None if auto is None else ControllerSpec(auto=auto, min_prefill=0),
        )

    def capacity(self, split: tuple[int, int], kinds: Sequence[tuple[Kind, float]], streams: int) -> float:
        """Requests a second while so many run, and others wait."""
        draw = random.Random(0)
        drawn = draw.choices([kind for kind, _ in kinds], [share for _, share in kinds], k=4 * streams)
        shapes = [RequestShape(0.0, kind.num_prompt_tokens, kind.num_output_tokens) for kind in drawn]
        spec = self.spec(split, streams=streams)
        endless = replace(spec.router, queue_timeout_s=86_400.0, max_queue_wait_s=86_400.0)
        ends = sorted(o.ended_s for o in Cluster(replace(spec, router=endless)).run(shapes).outcomes)
        first, last = len(ends) // 4, 3 * len(ends) // 4
        return (last - first) / (ends[last] - ends[first])

    def run(self, spec: ClusterSpec, arrivals: Sequence[Arrival]) -> RunResult:
        shapes = [RequestShape(a.at, a.kind.num_prompt_tokens, a.kind.num_output_tokens) for a in arrivals]
        return Cluster(spec).run(shapes)

    def row(self, load: str, rate: float, name: str, result: RunResult, begin_s: float, seconds: float) -> Row:
        counted = [o for o in result.outcomes if o.request.at_s >= begin_s]
        kept = sum(self._is_kept(outcome) for outcome in counted)
        ttfts, tpots = (
            sorted(t for t in times if t is not None)
            for times in ((o.ttft_s for o in counted), (o.tpot_s for o in counted))
        )
        median = [1000 * times[len(times) // 2] if times else 0.0 for times in (ttfts, tpots)]
        num_moves = max(0, len(result.splits) - 1)
        return Row(load, rate, name, kept / seconds, kept / max(1, len(counted)), *median, num_moves)

    def _is_kept(self, outcome: RequestOutcome) -> bool:
        in_time = outcome.ttft_s is not None and outcome.ttft_s <= self._slo.ttft_s
        return outcome.is_finished and in_time and (outcome.tpot_s is None or outcome.tpot_s <= self._slo.tpot_s)


def colocated(bench: Bench, load: float, seconds: float) -> list[Row]:
    """As `benchmarks/colocated.py`."""
    rows, auto = [], AutoSection(confirm_s=4.0, cooldown_s=4.0, dwell_s=12.0)
    for point in grid(seconds, seconds):
        share = 1.0 if point.name == MIXED else load
        rate = share * bench.capacity((0, 2), point.kinds, STREAMS)
        rates = [(kind, part * rate) for kind, part in point.kinds]
        for mode in MODES:
            before_s = ADAPT_S if mode == "auto" else WARM_S
            arrivals = [
                *poisson(rates, 0.0, before_s, random.Random(f"{point.name}, before")),
                *poisson(rates, before_s, point.seconds, random.Random(point.name)),
            ]
            policy = "least_loaded" if mode == "disaggregated" else "predicted"
            split = (0, 2) if mode == "colocated" else (1, 1)
            result = bench.run(bench.spec(split, policy, auto=auto if mode == "auto" else None), arrivals)
            rows.append(bench.row(point.name, rate, mode, result, before_s, point.seconds))
    return rows


def auto_ratio(bench: Bench, load: float, seconds: float) -> list[Row]:
    """As `benchmarks/auto_ratio.py`."""
    prompts = load * bench.capacity((3, 1), [(PROMPTS, 1.0)], 4 * 3)
    outputs = load * bench.capacity((1, 3), [(OUTPUTS, 1.0)], 40 * 3)
    offered, rows = Load(seconds, prompts, outputs), []
    for name in ("1:3", "2:2", "3:1", "auto"):
        split = (2, 2) if name == "auto" else (int(name[0]), NUM_WORKERS - int(name[0]))
        spec = bench.spec(split, auto=AutoSection() if name == "auto" else None)
        result = bench.run(spec, offered.arrivals(1))
        what = f"{prompts:.2f} prompts/s, {outputs:.2f} outputs/s, {prompts:.2f} prompts/s"
        rows.append(bench.row(what, (2 * prompts + outputs) / 3, name, result, 0.0, 3 * seconds))
    return rows


def show(rows: Sequence[Row]) -> None:
    table = Table(*COLUMNS, title="simulated")
    for row in rows:
        times = [f"{row.ttft_p50_ms:.0f}", f"{row.tpot_p50_ms:.1f}", str(row.num_moves)]
        table.add_row(row.load, f"{row.rate:.2f}", row.name, f"{row.goodput:.2f}", f"{row.kept:.0%}", *times)
    Console(width=140).print(table)


def main(
    profile: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `baton profile` wrote, with a thread a worker.")
    ],
    load: Annotated[LoadName, typer.Option(help="Of which benchmark.")] = LoadName.COLOCATED,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Of a core for each worker.")] = 0.4,
    of_capacity: Annotated[float, typer.Option(min=0.05, max=3, help="Of what is completed.")] = 0.8,
    seconds: Annotated[float, typer.Option(min=2.0, help="Of each point, or of each phase.")] = 30.0,
    ttft_ms: Annotated[float, typer.Option(min=1)] = 2000.0,
    tpot_ms: Annotated[float | None, typer.Option(min=1, help="Default: that of the benchmark, 50 or 80.")] = None,
    config: Annotated[Path, typer.Option(help="Of the real cluster.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Simulate what a real benchmark has measured."""
    logging.getLogger("worker").setLevel(logging.ERROR)  # simulated workers say when they are done with one another
    with telling_failures():
        machine = Machine.of(json.loads(profile.read_text(encoding="utf-8")))
        slo = SloSection(ttft_ms, tpot_ms or (50.0 if load is LoadName.COLOCATED else 80.0))
        worker = replace(machine.worker(load_config(config)), core_share=share, max_num_seqs=64)
        bench = Bench(worker, machine, slo)
        rows = (colocated if load is LoadName.COLOCATED else auto_ratio)(bench, of_capacity, seconds)
        tell({"rows": [vars(row) for row in rows]}, as_json, lambda _: show(rows))


if __name__ == "__main__":
    typer.run(main)
