"""Goodput of `mode: auto` over loads that turn, in virtual time: against fixed splits, a threshold rule, and an oracle.

    python benchmarks/rebalance_simulated.py --workers 4 --workers 16 --trace conv.csv --found found.jsonl

Loads are traces, at a rate for that many workers, and an hour of three generated days (`HOURS`): a calm one, one whose
ratio of prompt to output tokens moves threefold within the hour, as production's does, and one that comes in bursts
besides. Of each, the middle `--seconds` are taken.

Each runs through one cluster: of queues (`simulate.turning_pools`, the real policy over workers that are simpler than
Baton's), or with `--fidelity fast` or `full` the real router, workers and controller in virtual time. `--found` keeps
what has run, so that the command can be ended and begun again, or told to run a part (`--only`).

    fixed      the split stays; with many workers those near the best one
    threshold  a worker goes to the role that is busier than 0.8 from the one that is less busy than 0.5
    oracle     the split of each window that served most there while it was fixed, where the gain is worth the move
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.report import telling_failures
from cluster.config.schema import AutoSection, SloSection
from cluster.step_cost import PACE_SHARE, StepCost
from controller.goodput_model import SplitBounds, service_of
from controller.rebalance_policy import Reason, RebalanceDecision, SplitQuestion
from router.routing.policies.interface import Objectives
from simulate.client import SimRequest
from simulate.controller import ControllerSpec, SplitSince, config_of
from simulate.curves import LinearCurve
from simulate.report import is_kept
from simulate.turning_pools import TurningPools
from simulate.workload import (
    DayShape,
    RequestShape,
    at_mean_rate,
    lognormal,
    over_a_day,
    read_trace,
    scaled,
    until,
)
from simulate.world import START_S, Cluster, ClusterSpec, Fidelity, WorkerSpec

COST = StepCost(fixed_s=0.030, prompt_token_s=4e-4, attended_s=1e-8, sequence_s=2e-4, kv_token_s=2e-7)
"""Of the order of a 70B model on two A100."""
SLO = SloSection(ttft_ms=3000, tpot_ms=75)
WORKER = WorkerSpec("", "decode", LinearCurve(COST), kv_tokens=200_000, max_num_seqs=256, max_model_len=16_384)
MOST_OUTPUT = 4096
"""What clients say that an output may be at most."""
NUM_WINDOWS = 30
MOVE_S = 8.0
"""Seconds of one worker's service that the oracle takes a move to cost."""
BUSY, IDLE = 0.8, 0.5
COLUMNS = ["load", "workers", "rate/s", "best fixed", "auto/s", "of best fixed", "of oracle", "threshold", "moves"]


class ThresholdRule:
    """Moves a worker to the role that is busy from one that is not, no sooner than `cooldown_s` after the last move."""

    def __init__(self, slo: SloSection, patience: AutoSection) -> None:
        self._slo = slo
        self._cooldown_s = patience.cooldown_s
        self._moved_at = 0.0

    def decide(self, question: SplitQuestion) -> RebalanceDecision:
        now, worker, bounds, num_prefill = question.now, question.worker, question.bounds, question.num_prefill
        usual, wanted = question.usual, num_prefill
        if worker is not None and usual is not None and now - self._moved_at >= self._cooldown_s:
            rate, num_decode = question.demand.num_arrived / question.window_s, bounds.num_workers - num_prefill
            service = service_of(usual, worker, self._slo)
            prefill, decode = rate * usual.prompt_s / num_prefill, rate / (num_decode * service.mu_decode)
            wanted += (prefill > BUSY and decode < IDLE) - (decode > BUSY and prefill < IDLE)
        return _decision(wanted if wanted in bounds.splits else num_prefill, num_prefill, bounds)

    def moved(self, now: float, before: tuple[int, int], after: tuple[int, int]) -> None:
        self._moved_at = now if before != after else self._moved_at


class PlannedSplits:
    """Moves at instants that are known before. `plan`: each with the prefill workers from then on, ascending."""

    def __init__(self, plan: Sequence[tuple[float, int]], *_: object) -> None:
        self._plan = plan

    def decide(self, question: SplitQuestion) -> RebalanceDecision:
        now, bounds, num_prefill = question.now, question.bounds, question.num_prefill
        begun = [split for at, split in self._plan if at <= now - START_S]
        return _decision(begun[-1] if begun else num_prefill, num_prefill, bounds)

    def moved(self, now: float, before: tuple[int, int], after: tuple[int, int]) -> None:
        """It has a plan."""


def _decision(wanted: int, num_prefill: int, bounds: SplitBounds) -> RebalanceDecision:
    reason = Reason.BEST if wanted == num_prefill else Reason.MOVES
    return RebalanceDecision(wanted, bounds.num_workers, reason, f"{reason}: {wanted}:{bounds.num_workers - wanted}")


@dataclass(frozen=True)
class Run:
    """One way through one load."""

    load: str
    num_workers: int
    policy: str
    """`fixed P`, auto, threshold or oracle."""
    num_requests: int
    rate: float
    kept: float
    """Share of the requests that were in time."""
    kept_by_window: list[int]
    num_moves: int
    splits: list[tuple[float, int]] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def key(self) -> tuple[str, int, str]:
        return self.load, self.num_workers, self.policy


def worker_seconds(shapes: Sequence[RequestShape]) -> tuple[float, float]:
    """Seconds of a worker that the mean request takes: for its prompt, and for its output, in steps as large as the
    time per token, the largest batch and the KV pool allow."""
    num, most_s = len(shapes), PACE_SHARE * SLO.tpot_s
    prompt_s = sum(COST.of_prompt(shape.num_prompt_tokens, 0) for shape in shapes) / num
    outputs = sum(shape.num_output_tokens for shape in shapes) / num
    kv_tokens = sum(shape.num_prompt_tokens + shape.num_output_tokens / 2 for shape in shapes) / num
    each_s = COST.sequence_s + COST.kv_token_s * kv_tokens
    batch = min(WORKER.max_num_seqs, WORKER.kv_tokens / kv_tokens, (most_s - COST.fixed_s) / each_s)
    return prompt_s, outputs * (COST.fixed_s / batch + each_s)


def busiest(shapes: Sequence[RequestShape], num_workers: int) -> float:
    """Requests a second over the most that any split of so many workers computes of such requests, in the busiest five
    minutes: what the best split of each moment needs to be busy all the time."""
    windows: dict[int, list[RequestShape]] = {}
    for shape in shapes:
        windows.setdefault(int(shape.at / BUSY_WINDOW_S), []).append(shape)

    def share(window: Sequence[RequestShape]) -> float:
        prompt_s, output_s = worker_seconds(window)
        most = max(min(p / prompt_s, (num_workers - p) / output_s) for p in range(1, num_workers))
        return len(window) / BUSY_WINDOW_S / most

    return max(map(share, windows.values()))


BUSY_WINDOW_S = 300.0
PROBE_RATE = 10.0
"""Requests a second at which lengths are drawn to say what a generated hour takes."""
HOUR_S = 3600.0
LENGTHS = ((1155.0, 2500.0), (211.0, 424.0))
"""Tokens of prompts and of outputs, by mean and 90th percentile: those of Azure's conversations of 2023."""
HOURS: Mapping[str, DayShape] = {
    "calm": DayShape(1.0, HOUR_S, 1.2, ratio_swing=1.0),
    "turning": DayShape(1.0, HOUR_S, 1.2, ratio_swing=3.0, ratio_period_s=HOUR_S),
    "bursty": DayShape(1.0, HOUR_S, 2.0, ratio_swing=3.0, ratio_period_s=HOUR_S, burstiness=0.25),
}
"""An hour of three days. The ratio of prompt to output tokens moves threefold, there and back, in the last two, as it
does in Azure's conversations (from 3.3 to 10.0 by windows of five minutes)."""


def load_of(name: str, num_workers: int, seconds: float, share: float) -> list[RequestShape]:
    """The middle `seconds` of a generated hour, by its name, or of a trace, by its path, whose busiest five minutes ask
    for `share` of what the best split serves."""
    most = WORKER.max_model_len - WORKER.block_size

    def middle(shapes: Sequence[RequestShape]) -> list[RequestShape]:
        begin = max(0.0, (shapes[-1].at - seconds) / 2)
        return [replace(s, at=s.at - begin) for s in until(shapes, begin + seconds) if s.at >= begin]

    if name not in HOURS:
        trace = middle(scaled(read_trace(Path(name)), most_tokens=most))
        rate = len(trace) / trace[-1].at
        return at_mean_rate(trace, rate * share / busiest(trace, num_workers), 1)

    def at_rate(rate: float) -> list[RequestShape]:
        return middle(over_a_day(replace(HOURS[name], mean_rate=rate), lognormal(*LENGTHS, most // 2), seed=1))

    return at_rate(PROBE_RATE * share / busiest(at_rate(PROBE_RATE), num_workers))


def served(
    fidelity: Fidelity, spec: ClusterSpec, shapes: Sequence[RequestShape]
) -> tuple[list[float], Sequence[SplitSince]]:
    """When those came that were in time, and how the split changed."""
    spec = replace(spec, fidelity=fidelity)
    requests = [SimRequest(shape, max_output_tokens=max(MOST_OUTPUT, shape.num_output_tokens)) for shape in shapes]
    result = Cluster(spec, seed=1).run(requests)
    objectives = Objectives.of(SLO)
    kept = [o.request.at_s for o in result.outcomes if o.is_finished and is_kept(o, objectives)]
    return kept, result.splits


def served_by_queues(spec: ClusterSpec, shapes: Sequence[RequestShape]) -> tuple[list[float], Sequence[SplitSince]]:
    """The same of a cluster of queues."""
    assert spec.controller is not None
    config = config_of(spec.controller, spec.workers, spec.router, spec.transfer, spec.slo)
    pools = TurningPools(WORKER, COST, config, spec.controller.make_policy, MOST_OUTPUT)
    return [request.shape.at for request in pools.run(shapes) if pools.is_kept(request)], pools.splits


class Bench:
    """Runs what has not run. `found`: where the runs are kept; None: nowhere."""

    def __init__(
        self, seconds: float, share: float, found: Path | None, auto: AutoSection, fidelity: Fidelity | None = None
    ) -> None:
        """`fidelity`: of whole workers and a router; None: queues."""
        self._seconds = seconds
        self._share = share
        self._auto = auto
        self._serve = served_by_queues if fidelity is None else partial(served, fidelity)
        self._found = found
        lines = found.read_text().splitlines() if found is not None and found.exists() else []
        self._shapes: tuple[tuple[str, int], list[RequestShape]] | None = None
        """The last load."""
        self.runs = {run.key: run for run in (Run(**json.loads(line)) for line in lines)}

    def fixed(self, load: str, num_workers: int, num_prefill: int) -> Run:
        return self._run(load, num_workers, f"fixed {num_prefill}", num_prefill, ControllerSpec("fixed"))

    def best_fixed(self, load: str, num_workers: int) -> Run:
        """With more than 8 workers it is climbed to from what the mean request asks for, in ever smaller steps: the
        last is one worker, or a sixty-fourth of many."""
        every = range(1, num_workers)
        if num_workers <= 8:
            return max((self.fixed(load, num_workers, p) for p in every), key=lambda run: run.kept)
        prompt_s, output_s = worker_seconds(self._load(load, num_workers))
        at, step = round(num_workers * prompt_s / (prompt_s + output_s)), num_workers // 16
        while step >= max(1, num_workers // 64):
            near = [p for p in (at - step, at, at + step) if p in every]
            best = max(near, key=lambda p: self.fixed(load, num_workers, p).kept)
            at, step = best, step // 2 if best == at else step
        return self.fixed(load, num_workers, at)

    def auto(self, load: str, num_workers: int) -> Run:
        return self._run(load, num_workers, "auto", num_workers // 2, ControllerSpec(auto=self._auto))

    def threshold(self, load: str, num_workers: int) -> Run:
        return self._run(
            load, num_workers, "threshold", num_workers // 2, ControllerSpec(auto=self._auto, make_policy=ThresholdRule)
        )

    def oracle(self, load: str, num_workers: int) -> Run:
        best = self.best_fixed(load, num_workers)
        fixed = [run for run in self.runs.values() if run.key[:2] == best.key[:2] and run.policy.startswith("fixed")]
        plan = plan_of({run.splits[0][1]: run.kept_by_window for run in fixed}, best.rate / num_workers, self._seconds)
        spec = ControllerSpec(auto=self._auto, make_policy=partial(PlannedSplits, plan))
        planned = self._run(load, num_workers, "oracle", plan[0][1], spec)
        return max(planned, best, key=lambda run: run.kept)

    def _load(self, load: str, num_workers: int) -> list[RequestShape]:
        if self._shapes is None or self._shapes[0] != (load, num_workers):
            self._shapes = (load, num_workers), load_of(load, num_workers, self._seconds, self._share)
        return self._shapes[1]

    def _run(self, load: str, num_workers: int, policy: str, num_prefill: int, controller: ControllerSpec) -> Run:
        known = self.runs.get((load, num_workers, policy))
        if known is not None:
            return known
        shapes = self._load(load, num_workers)
        spec = ClusterSpec.of_ratio(num_prefill, num_workers - num_prefill, WORKER, slo=SLO, controller=controller)
        begun = time.perf_counter()
        kept, splits = self._serve(spec, shapes)
        windows = [int(at / self._seconds * NUM_WINDOWS) for at in kept]
        run = Run(
            load,
            num_workers,
            policy,
            len(shapes),
            len(shapes) / self._seconds,
            len(kept) / len(shapes),
            [windows.count(number) for number in range(NUM_WINDOWS)],
            sum(one.at_s != other.at_s for one, other in pairwise(splits)),
            [(split.at_s, split.num_prefill) for split in splits],
            time.perf_counter() - begun,
        )
        self.runs[run.key] = run
        if self._found is not None:
            with self._found.open("a") as file:
                print(json.dumps(asdict(run)), file=file)
        return run


def plan_of(kept: Mapping[int, Sequence[int]], rate: float, seconds: float) -> list[tuple[float, int]]:
    """The splits by window that keep most, by dynamic programming. `kept`: of each fixed split; `rate`: of one
    worker."""
    cost, splits = MOVE_S * rate, sorted(kept)
    best: dict[int, tuple[float, list[int]]] = {split: (0.0, []) for split in splits}
    for window in range(NUM_WINDOWS):
        best = {
            split: max(
                (total + kept[split][window] - cost * abs(split - before if way else 0), [*way, split])
                for before, (total, way) in best.items()
            )
            for split in splits
        }
    way = max(best.values())[1]
    turns = [number for number in range(NUM_WINDOWS) if not number or way[number] != way[number - 1]]
    return [(number * seconds / NUM_WINDOWS, way[number]) for number in turns]


def row_of(bench: Bench, load: str, num_workers: int) -> dict[str, Any]:
    best, auto = bench.best_fixed(load, num_workers), bench.auto(load, num_workers)
    threshold, oracle = bench.threshold(load, num_workers), bench.oracle(load, num_workers)
    return {
        "load": load,
        "workers": num_workers,
        "rate": best.rate,
        "goodput": {run.policy: run.rate * run.kept for run in (best, auto, threshold, oracle)},
        "best_fixed": best.policy,
        "auto_of_best_fixed": auto.kept / best.kept if best.kept else 0.0,
        "auto_of_oracle": auto.kept / oracle.kept if oracle.kept else 0.0,
        "threshold_of_best_fixed": threshold.kept / best.kept if best.kept else 0.0,
        "moves": {"auto": auto.num_moves, "threshold": threshold.num_moves, "oracle": oracle.num_moves},
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=f"TTFT {SLO.ttft_ms:g} ms, TPOT {SLO.tpot_ms:g} ms; shares are of goodput")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        num_prefill, goodput = int(row["best_fixed"].split()[1]), row["goodput"]
        table.add_row(
            Path(row["load"]).stem,
            str(row["workers"]),
            f"{row['rate']:.2f}",
            f"{num_prefill}:{row['workers'] - num_prefill} {goodput[row['best_fixed']]:.2f}",
            f"{goodput['auto']:.2f}",
            f"{row['auto_of_best_fixed']:.3f}",
            f"{row['auto_of_oracle']:.3f}",
            f"{row['threshold_of_best_fixed']:.3f}",
            ", ".join(map(str, row["moves"].values())),
        )
    Console().print(table)


FIDELITIES: Mapping[str, Fidelity | None] = {"queues": None, "fast": "fast", "full": "full"}
PARTS: Mapping[str, Callable[[Bench, str, int], object]] = {
    "fixed": Bench.best_fixed,
    "auto": Bench.auto,
    "threshold": Bench.threshold,
    "oracle": Bench.oracle,
}


def main(
    workers: Annotated[list[int] | None, typer.Option(min=2, help="How many; may be given several times.")] = None,
    trace: Annotated[list[Path] | None, typer.Option(help="Traces beside the generated days.")] = None,
    hours: Annotated[str, typer.Option(help="Generated hours, with commas between them.")] = ",".join(HOURS),
    seconds: Annotated[float, typer.Option(min=60, max=HOUR_S, help="Length of each load.")] = HOUR_S,
    share: Annotated[
        float, typer.Option(min=0.05, max=2, help="Of what the best splits serve, in the busiest five minutes.")
    ] = 0.9,
    fidelity: Annotated[str, typer.Option(help="queues; fast or full: whole workers and a router.")] = "queues",
    only: Annotated[str | None, typer.Option(help="Run this part and print no table.")] = None,
    found: Annotated[Path | None, typer.Option(help="Where runs are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """mode: auto over loads that turn, in virtual time."""
    logging.getLogger("worker").setLevel(logging.ERROR)  # simulated workers say when they are done with one another
    with telling_failures():
        if fidelity not in FIDELITIES:
            raise typer.BadParameter(f"{fidelity}: use {', '.join(FIDELITIES)}", param_hint="--fidelity")
        bench = Bench(seconds, share, found, AutoSection(), FIDELITIES[fidelity])
        names = [name for name in hours.split(",") if name] + [str(path) for path in trace or ()]
        asked = [(name, number) for number in workers or [4] for name in names]
        if only is not None:
            for name, number in asked:
                print(PARTS[only](bench, name, number))
            return
        rows = [row_of(bench, name, number) for name, number in asked]
        print(json.dumps(rows, indent=2)) if as_json else show(rows)


if __name__ == "__main__":
    typer.run(main)
