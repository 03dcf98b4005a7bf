"""What `benchmarks/colocated.py` or `benchmarks/auto_ratio.py` measured, beside its simulation.

    python benchmarks/auto_ratio.py --json > found.json
    python benchmarks/steered_simulated.py found.json --profile profile.json

The same arrivals, at the rates that the real cluster got, come to simulated workers of its configuration, each with the
same part of a core. Where its steps were timed, what it measured of a message is all that is known; where they were
computed, `--profile` names what `baton profile` measured of one such worker.
"""

from __future__ import annotations

import json
import logging
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
from rich.table import Table

from benchmarks import auto_ratio, colocated
from benchmarks.open_loop import Arrival, Kind
from benchmarks.report import tell, telling_failures
from benchmarks.simulated_cluster import Machine, configured
from cluster.config.schema import ServingConfig
from cluster.errors import BatonError
from router.routing.policies.interface import Objectives
from simulate.controller import ControllerSpec
from simulate.report import is_kept
from simulate.workload import RequestShape
from simulate.world import Cluster, ClusterSpec

COLUMNS = ("load", "rate/s", "split", "kept, %", "TTFT p50 ms", "TPOT p50 ms", "moves")


@dataclass(frozen=True)
class Figures:
    """Of the requests of one run that count, real or simulated."""

    kept: float
    """Their share that kept both objectives."""
    ttft_p50_ms: float
    tpot_p50_ms: float
    num_moves: int


@dataclass(frozen=True)
class Row:
    """One split, or `mode: auto`, under one load."""

    load: str
    rate: float
    """Requests a second."""
    name: str
    real: Figures
    simulated: Figures


class Bench:
    """A cluster of simulated workers, all alike."""

    def __init__(self, config: ServingConfig, machine: Machine, share: float) -> None:
        """`share`: of a core, of each worker; 0: as much as it gets."""
        self._config, self._machine = config, machine
        self._worker = replace(machine.worker(config), core_share=share or None)

    def run(
        self,
        split: tuple[int, int],
        arrivals: Sequence[Arrival],
        from_s: float,
        *,
        auto: bool = False,
        policy: str | None = None,
    ) -> Figures:
        """Of the requests from `from_s` on. `policy`: None: the configuration's."""
        config, message_s = self._config, self._machine.message_s
        router = replace(config.router, http_port=None, policy=policy or config.router.policy)  # type: ignore[arg-type]
        roles = config.roles
        steering = ControllerSpec(
            auto=config.rebalance.auto, min_prefill=roles.prefill.min_workers, min_decode=roles.decode.min_workers
        )
        spec = ClusterSpec.of_ratio(
            *split,
            self._worker,
            router=router,
            transfer=config.transfer,
            slo=config.rebalance.slo,
            message_s=message_s,
            client_s=message_s,
            cores=self._machine.cores,
            controller=steering if auto else None,
        )
        shapes = [RequestShape(a.at, a.kind.num_prompt_tokens, a.kind.num_output_tokens) for a in arrivals]
        result = Cluster(spec).run(shapes)
        counted = [outcome for outcome in result.outcomes if outcome.request.at_s >= from_s]
        objectives = Objectives(spec.slo.ttft_s, spec.slo.tpot_s)
        ttfts = sorted(o.ttft_s for o in counted if o.ttft_s is not None)
        tpots = sorted(o.tpot_s for o in counted if o.tpot_s is not None)
        medians = [1000 * times[len(times) // 2] if times else 0.0 for times in (ttfts, tpots)]
        kept = sum(o.is_finished and is_kept(o, objectives) for o in counted) / max(1, len(counted))
        return Figures(kept, *medians, num_moves=max(0, len(result.splits) - 1))


def rows_of(found: dict[str, Any], bench: Bench) -> list[Row]:
    """Each run that one of the two has measured, simulated."""
    return [
        _colocated(found, run, bench) if "points" in found else _auto_ratio(found, run, bench) for run in found["runs"]
    ]


def _colocated(found: dict[str, Any], run: dict[str, Any], bench: Bench) -> Row:
    said, mode = next(point for point in found["points"] if point["name"] == run["point"]), run["mode"]
    kinds = tuple((Kind(**kind), share) for kind, share in said["kinds"])
    arrivals, from_s = colocated.Point(**{**said, "kinds": kinds}).arrivals(mode)
    is_auto, policy = mode == "auto", colocated.policy_of(mode)
    simulated = bench.run(colocated.split_of(mode), arrivals, from_s, auto=is_auto, policy=policy)
    return Row(run["point"], run["rate"], mode, _real(run), simulated)


def _auto_ratio(found: dict[str, Any], run: dict[str, Any], bench: Bench) -> Row:
    load, is_auto = auto_ratio.Load(**found["load"]), run["name"] == "auto"
    num_prefill = auto_ratio.NUM_WORKERS // 2 if is_auto else int(run["name"].split(":")[0])
    arrivals = load.arrivals(run["seed"])
    split = (num_prefill, auto_ratio.NUM_WORKERS - num_prefill)
    rate = len(arrivals) / (3 * load.phase_s)
    return Row("prompts, outputs", rate, run["name"], _real(run), bench.run(split, arrivals, 0.0, auto=is_auto))


def _real(run: dict[str, Any]) -> Figures:
    figures = run["figures"]
    return Figures(figures["kept"], figures["ttft_p50_ms"], figures["tpot_p50_ms"], run.get("num_moves", 0))


def show(rows: Sequence[Row]) -> None:
    table = Table(*COLUMNS, title="measured, simulated")
    for row in rows:
        real, simulated = row.real, row.simulated
        table.add_row(
            row.load,
            f"{row.rate:.2f}",
            row.name,
            f"{100 * real.kept:.0f}, {100 * simulated.kept:.0f}",
            f"{real.ttft_p50_ms:.0f}, {simulated.ttft_p50_ms:.0f}",
            f"{real.tpot_p50_ms:.1f}, {simulated.tpot_p50_ms:.1f}",
            f"{real.num_moves}, {simulated.num_moves}",
        )
    Console(width=140).print(table)


def main(
    found: Annotated[Path, typer.Argument(metavar="FILE", help="What one of the two printed.", exists=True)],
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `baton profile` wrote, with a thread a worker.", exists=True),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Simulate what a real benchmark has measured."""
    logging.getLogger("worker").setLevel(logging.ERROR)  # simulated workers say when they are done with one another
    with telling_failures():
        real = json.loads(found.read_text(encoding="utf-8"))
        document = real["profile"] if profile is None else json.loads(profile.read_text(encoding="utf-8"))
        if document is None:
            raise BatonError(
                f"the workers of {found} computed; name what `baton profile` measured of one: --profile FILE"
            )
        bench = Bench(configured(Path(real["config"]), real["values"]), Machine.of(document), real["share"])
        rows = rows_of(real, bench)
        tell({"rows": [asdict(row) for row in rows]}, as_json, lambda _: show(rows))


if __name__ == "__main__":
    typer.run(main)
