"""Real clusters beside their simulation, at several ratios and loads.

    python benchmarks/timed_cluster.py --json > timed.json                   # workers whose steps are timed
    python benchmarks/timed_cluster.py --config cluster.yaml --splits 1:1,0:2 --rounds 5      # workers that compute
    python benchmarks/timed_cluster.py --measured timed.json                 # simulate the same loads again

The cluster of a cluster.yaml, as `baton serve` starts it, once for each ratio. Before the first load the machine is
measured, once: what it takes for a message, from requests that come alone, and where steps are computed, what those
take, as `baton profile` does. Nothing else is fitted. At each ratio come loads of the kind that `baton bench` sends:
Poisson arrivals of prompts and outputs of one mean length each, at shares of what the workers could do one request at a
time. What clients saw is held against the simulator: a figure may differ by 5 % where steps are timed, and goodput by 5
points; where they are computed by 10 %, or twice the standard deviation of the figure over the rounds. Exits 1 when a
figure differs by more, a request failed, or a token was lost or repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.plain_cluster import ROOT
from benchmarks.report import telling_failures
from benchmarks.served_cluster import ServedCluster
from benchmarks.simulated_cluster import COMPARED, Machine, OfferedLoad, configured, judge, slowed
from cluster import rpc
from cluster.config.load import load_config
from cluster.config.schema import ServingConfig, SloSection
from cluster.step_cost import StepSize
from simulate.curves import StepCurve
from simulate.worker_profile import HANDED_MESSAGES, MESSAGES
from simulate.workload import RequestShape
from tools.bench.figures import details_of, figures_of
from tools.bench.targets import GrpcTarget
from tools.bench.workload import Sample, make_requests, send_all
from tools.client import BatonClient
from tools.profiler import Profiler, ProfileSizes

CONFIG = ROOT / "deploy" / "timed" / "cluster.yaml"
SHARES = (0.15, 0.3, 0.45, 0.6, 0.75)
VOCAB = 1000
ROUND_SEEDS = 1_000_000
"""The prompts of each round have seeds of their own, so that none is found in a prefix cache."""
TIMEOUT_S = 120.0
LONE_REQUESTS = 20
COLUMNS = ("P:D", "rate/s", "busy", "req/s", "TTFT p50 ms", "p90", "TPOT p50 ms", "p90", "in time", "failed", "")


def calibrate(address: str, config: ServingConfig, like: OfferedLoad) -> dict[str, Any]:
    """The document of a `Machine`, measured on an idle cluster."""
    if config.engine.timed_steps.is_on:
        return {"message_s": asyncio.run(message_seconds(address, config, like)), "cores": len(os.sched_getaffinity(0))}
    every, longest = ProfileSizes(), (1 + like.spread) * (like.num_prompt_tokens + like.num_output_tokens)
    prompts, lengths = ([n for n in sizes if n < 2 * longest] for sizes in (every.prompts, every.lengths))
    with BatonClient(address) as client:
        return Profiler(client, replace(every, prompts=prompts, lengths=lengths)).measure()


async def message_seconds(address: str, config: ServingConfig, like: OfferedLoad) -> float:
    """What requests that come alone take to their first token beside their step, for each message on the way."""
    shapes = [RequestShape(0.0, like.num_prompt_tokens, 2)] * LONE_REQUESTS
    step_s = config.engine.timed_steps.cost.of_prompt(like.num_prompt_tokens, 0)
    found = []
    async with rpc.create_channel(address) as channel:
        target = GrpcTarget(channel, timeout_s=TIMEOUT_S)
        for request in make_requests(shapes, VOCAB, like.seed + 1):
            sample = await target.send(request, time.perf_counter())
            is_handed = sample.placement.startswith("disaggregated")
            found.append((sample.ttft_s - step_s) / (HANDED_MESSAGES if is_handed else MESSAGES))
    return statistics.median(found)


def values_of(
    file: Path, model: Path | None, ttft_ms: float | None, slower: float, splits: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """The keys of a configuration that are set anew. Timed steps, the wire and objectives take so many times longer;
    workers that compute share the cores, each with its own."""
    config = load_config(file)
    values: dict[str, Any] = {} if model is None else {"model.path": str(model.resolve())}
    if ttft_ms is not None:
        slo = replace(config.rebalance.slo, ttft_ms=ttft_ms)
        config = replace(config, rebalance=replace(config.rebalance, slo=slo))
        values["rebalance.slo.ttft_ms"] = ttft_ms
    if not config.engine.timed_steps.is_on:
        threads = len(os.sched_getaffinity(0)) // max(map(sum, splits))
        return values | {"engine.threads": max(1, threads), "router.http_port": None}
    return values | slowed(config, slower)


def loads_at(
    shares: Sequence[float], curve: StepCurve, split: tuple[int, int], seconds: float, like: OfferedLoad
) -> list[OfferedLoad]:
    """Of so many seconds each, at shares of what workers do one request at a time: the prompt where there are prefill
    workers, and else all of it. Each has a seed of its own, so that it does not find the prompts of the one before in
    the prefix cache."""
    each_s = curve.seconds(StepSize.of_prompt(like.num_prompt_tokens))
    if not split[0]:
        step = StepSize(num_sequences=1, num_kv_tokens=like.num_prompt_tokens)
        each_s += like.num_output_tokens * curve.seconds(step)
    most = (split[0] or split[1]) / each_s
    return [
        replace(like, num_requests=max(10, round(share * most * seconds)), rate=round(share * most, 3), seed=seed)
        for seed, share in zip(itertools.count(like.seed, 2), shares, strict=False)
    ]


async def send(address: str, load: OfferedLoad, round_number: int) -> list[Sample]:
    """The samples of a load, after a few requests that do not count."""
    seed = load.seed + ROUND_SEEDS * round_number
    async with rpc.create_channel(address) as channel:
        target = GrpcTarget(channel, timeout_s=TIMEOUT_S)
        for shapes, own in ((load.warm_shapes(), seed + 1), (load.shapes(), seed)):
            requests = make_requests(shapes, VOCAB, own)
            samples = await send_all(requests, target.send, most_at_once=None, on_end=lambda _: None)
    return samples


def measure_once(
    address: str, load: OfferedLoad, slo: SloSection, round_number: int, *, detailed: bool
) -> dict[str, Any]:
    psutil.cpu_percent()
    samples = asyncio.run(send(address, load, round_number))
    busy = psutil.cpu_percent() / 100
    seconds = max(s.ended_at for s in samples) - min(s.sent_at for s in samples)
    figures = figures_of(samples, seconds, {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms})
    figures["goodput_share"] = figures["request_goodput"] / figures["request_throughput"] if samples else 0.0
    figures["machine_busy"] = busy
    if detailed:
        figures["details"] = details_of(samples) | {"placements": [s.placement for s in samples]}
    return figures


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured at each ratio."""

    like: OfferedLoad
    shares: tuple[float, ...]
    seconds: float
    rounds: int
    detailed: bool


def measure(
    split: tuple[int, int],
    file: Path,
    values: Mapping[str, Any],
    options: MeasureOptions,
    document: dict[str, Any] | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rounds of each load at a ratio P:D, and the document of the machine, measured here unless it is known."""
    roles = {}
    for role, number in zip(("prefill", "decode"), split, strict=True):
        roles |= {f"roles.{role}.devices": number, f"roles.{role}.min_workers": min(1, number)}
    config, runs = configured(file, values), []
    with ServedCluster.running(file, {**values, **roles}) as cluster:
        address = cluster.address
        if document is None:
            print("measuring the machine", file=sys.stderr)
            document = calibrate(address, config, options.like)
        curve = Machine.of(document).worker(config).curve
        for load in loads_at(options.shares, curve, split, options.seconds, options.like):
            rounds = []
            for number in range(options.rounds):
                where = f"{split[0]}:{split[1]} at {load.rate:g} requests/s"
                print(f"{where}: round {number + 1} of {options.rounds}", file=sys.stderr)
                rounds.append(measure_once(address, load, config.rebalance.slo, number, detailed=options.detailed))
            runs.append({"prefill": split[0], "decode": split[1], "load": asdict(load), "rounds": rounds})
    return runs, document


def show(found: dict[str, Any]) -> None:
    message_s = found["profile"]["message_s"]
    table = Table(title=f"measured, simulated, difference in %; {1000 * message_s:.2f} ms a message")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for run in found["runs"]:
        cells = []
        for name in COMPARED:
            mark = "!" if name in run["differ"] else ""
            cells.append(f"{run[name]:.3g}, {run['predicted'][name]:.3g}, {100 * run['off'][name]:+.1f}{mark}")
        table.add_row(
            f"{run['prefill']}:{run['decode']}",
            f"{run['load']['rate']:g}",
            f"{run['machine_busy']:.0%}",
            *cells,
            str(sum(one["failed"] + one["num_gaps"] for one in run["rounds"])),
            "differs" if run["differ"] else "as simulated",
        )
    Console(width=160).print(table)
    for error in sorted({error for run in found["runs"] for one in run["rounds"] for error in one["errors"]}):
        print(f"failed: {error}")


def main(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The cluster.")] = CONFIG,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Another model than the file's.")] = None,
    slower: Annotated[
        float, typer.Option(min=0.1, help="Timed steps take so many times longer, for a machine of few cores.")
    ] = 1.0,
    ttft_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="Objective of the first token, before it is slowed; default: the file's."),
    ] = None,
    splits: Annotated[str, typer.Option(help="Ratios P:D, with commas between them.")] = "1:1,2:2,4:4",
    shares: Annotated[str, typer.Option(help="Loads, as shares of what workers do one by one.")] = ",".join(
        map(str, SHARES)
    ),
    seconds: Annotated[float, typer.Option(min=1, help="Of each load.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each load is sent.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, on the mean.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an output, on the mean.")] = 32,
    range_ratio: Annotated[float, typer.Option(min=0, max=1, help="Lengths vary by this share.")] = 0.25,
    seed: Annotated[int, typer.Option(help="The same seed makes the same loads.")] = 0,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A `--json` of before, whose profile of the machine is used.")
    ] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Measure nothing: simulate the runs of `--json` again.")
    ] = None,
    detailed: Annotated[bool, typer.Option("--detailed", help="Keep the times of each request.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Hold a real cluster against its simulation."""
    logging.getLogger("worker").setLevel(logging.ERROR)  # simulated workers say when they are done with one another
    with telling_failures():
        if measured:
            parts = [json.loads(file.read_text(encoding="utf-8")) for file in measured]
            found = parts[0] | {"runs": [run for part in parts for run in part["runs"]]}
        else:
            like = OfferedLoad(0, input_len, output_len, range_ratio, 0.0, seed)
            options = MeasureOptions(like, tuple(map(float, shares.split(","))), seconds, rounds, detailed)
            ratios = [(int(p), int(d)) for p, d in (text.split(":") for text in splits.split(","))]
            values = values_of(config, model, ttft_ms, slower, ratios)
            known = None if profile is None else json.loads(profile.read_text(encoding="utf-8"))["profile"]
            found = {"config": str(config.resolve()), "values": values, "runs": []}
            for ratio in ratios:
                runs, known = measure(ratio, config, values, options, known)
                found["runs"] += runs
            found["profile"] = known
        judge(found, detailed=detailed)
        print(json.dumps(found, indent=2)) if as_json else show(found)
        failed = any(one["failed"] or one["num_gaps"] for run in found["runs"] for one in run["rounds"])
        if failed or any(run["differ"] for run in found["runs"]):
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
