"""What a client sees of workers that die: the same outputs as if none had, and how long a stream stands still.

    python benchmarks/failover.py --json
    python benchmarks/failover.py --signal stop

Streams of every kind (greedy and seeded; stop strings, penalties, logprobs, n = 2, constrained) run over two prefill
and two decode workers: first undisturbed, then again and again while a random rank is killed every few seconds, then
while one is stopped for a while. Every request must end, and its output be the undisturbed one's: no token lost,
repeated or changed. Exits 1 otherwise.

A stall is the longest time between two messages of a stream that a fault fell into. Prompt and told tokens are computed
again meanwhile: how long that should take is said by the undisturbed run, from its prompts' times under the same load.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.closed_loop import ClosedLoop, Numbered, compare
from benchmarks.mortal_cluster import Fault, MortalCluster
from benchmarks.outcome import Outcome, run_one
from benchmarks.plain_cluster import ROOT
from benchmarks.report import bars, tell, telling_failures
from cluster.config.load import load_config
from cluster.config.schema import ServingConfig
from cluster.pb import generation_pb2 as pb
from tools.client import BatonClient, make_spec

STALL_OBJECTIVE_S = 2.0
"""What a stall at p99 may last beyond the replayed prefill."""
MOST_PROMPT = 200


class Kind(StrEnum):
    """What is done to a rank."""

    KILL = "kill"
    STOP = "stop"


class Signal(StrEnum):
    KILL = "kill"
    STOP = "stop"
    BOTH = "both"

    @property
    def kinds(self) -> list[Kind]:
        return list(Kind) if self is Signal.BOTH else [Kind(self.value)]


@dataclass(frozen=True)
class Arguments:
    """How long faults come, seconds from one to the next, and how long a stopped rank stands still."""

    seconds: float
    every: float
    stop_seconds: float


def spec_of(number: int, num_tokens: int) -> pb.GenerationSpec:
    """Request `number`, always the same."""
    draw = random.Random(number)
    prompt = draw.choices(range(4, 1000), k=draw.randrange(8, MOST_PROMPT))
    spec = make_spec(
        prompt,
        max_output_tokens=draw.randrange(num_tokens // 2, num_tokens),
        temperature=0.0 if number % 2 else 0.9,
        seed=number,
        stop=["the", "and"] if number % 4 == 1 else (),
        n=2 if number % 6 == 2 else 1,
        top_logprobs=1 if number % 3 == 0 else None,
        ignore_eos=number % 5 != 0,
        token_ids=True,
        include_timing=True,
    )
    if number % 7 == 3:
        spec.sampling.frequency_penalty, spec.sampling.repetition_penalty = 0.4, 1.1
    if number % 5 == 0:
        spec.sampling.regex = r"([A-Za-z']{1,12}[ ,;.\n]){200,}"
    spec.scheduling.queue_timeout.FromSeconds(300)
    return spec


def disturb(cluster: MortalCluster, kind: Kind, args: Arguments, is_over: threading.Event) -> list[Fault]:
    """A fault every so often, until it is over."""
    faults = []
    while not is_over.wait(args.every):
        fault = cluster.kill_one() if kind is Kind.KILL else cluster.stop_one(args.stop_seconds, is_over)
        if fault is not None:
            faults.append(fault)
    return faults


class Replay:
    """How long computing so many tokens takes, drawn as a line through the prompts of an undisturbed run."""

    def __init__(self, undisturbed: list[Outcome]) -> None:
        sizes = [float(o.num_prompt_tokens) for o in undisturbed]
        seconds = [o.prefill_s for o in undisturbed]
        self._slope, self._base = statistics.fmean(seconds), 0.0
        if len(set(sizes)) > 1:
            self._slope, self._base = statistics.linear_regression(sizes, seconds)

    def seconds(self, num_tokens: int) -> float:
        return max(0.0, self._base + self._slope * num_tokens)


def percentiles_of(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [0.0] * 99
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3), "max": round(max(values, default=0.0), 3)}


def summary(reference: dict[int, Outcome], ended: list[Numbered], faults: list[Fault], span_s: float) -> dict[str, Any]:
    """`span_s`: after a fault, in which a gap in a stream counts as a stall of it."""
    replay = Replay(list(reference.values()))
    stalls, replays = [], []
    for fault in faults:
        for number, o in ended:
            if o.told_at and o.told_at[0] < fault.at < o.told_at[-1]:
                stall, num_told = o.longest_stall(fault.at, fault.at + span_s)
                stalls.append(stall)
                replays.append(replay.seconds(reference[number].num_prompt_tokens + num_told))
    beyond = [stall - again for stall, again in zip(stalls, replays, strict=True)]
    return {
        "faults": len(faults),
        **compare(reference, ended),
        "stall_s": percentiles_of(stalls),
        "replay_s": percentiles_of(replays),
        "stall_beyond_replay_s": percentiles_of(beyond),
        "p99_within_s": STALL_OBJECTIVE_S,
        "is_within": percentiles_of(beyond)["p99"] <= STALL_OBJECTIVE_S,
    }


def make_config(file: Path, streams: int, num_tokens: int) -> ServingConfig:
    """Of a cluster.yaml, with two workers of each role, either of which has room for every stream: what is left of a
    cluster that is full cannot take in what a lost worker held, and its clients wait for others to end."""
    config = load_config(file)
    prefill, decode = config.roles.prefill, config.roles.decode
    roles = replace(
        config.roles,
        prefill=replace(prefill, devices=2 * prefill.tensor_parallel),
        decode=replace(decode, devices=2 * decode.tensor_parallel),
    )
    engine, num_seqs = config.engine, max(config.engine.num_seqs, 2 * streams)
    pool = max(engine.kv_cache_tokens or 0, num_seqs * (MOST_PROMPT + num_tokens))
    engine = replace(engine, max_num_seqs=num_seqs, kv_cache_tokens=pool)
    return replace(config, roles=roles, engine=engine)


def measure(
    cluster: MortalCluster, specs: list[pb.GenerationSpec], streams: int, kinds: list[Kind], args: Arguments
) -> dict[str, Any]:
    """What `summary` says of each kind. Raises ProgramFailed when requests fail that nothing disturbs."""
    with BatonClient(cluster.address) as client, bars() as progress:
        load = ClosedLoop(partial(run_one, client), specs, streams)
        reference, found = load.run_undisturbed(progress), {}
        for kind in kinds:
            ended, faults = load.run_disturbed(
                f"disturbed: {kind.value}", args.seconds, partial(disturb, cluster, kind, args), progress
            )
            found[kind.value] = summary(reference, ended, faults, args.stop_seconds + args.every)
    return found


def show(found: dict[str, Any]) -> None:
    table = Table(title="failover")
    columns = ("faults", "completed", "lost", "changed", "stall p50", "p99", "longest", "replay p99", "p99 beyond it")
    table.add_column("signal")
    for column in columns:
        table.add_column(column, justify="right")
    for kind, of_kind in found.items():
        stall = of_kind["stall_s"]
        counts = (of_kind["faults"], of_kind["completed"], len(of_kind["lost"]), len(of_kind["changed"]))
        seconds = (stall["p50"], stall["p99"], stall["max"], of_kind["replay_s"]["p99"])
        beyond = of_kind["stall_beyond_replay_s"]["p99"]
        table.add_row(kind, *map(str, counts), *(f"{s:.2f} s" for s in (*seconds, beyond)))
    Console().print(table)
    for of_kind in found.values():
        for problem in [*of_kind["lost"], *of_kind["changed"]][:5]:
            Console().print(problem[:400], markup=False)


def main(
    signal: Annotated[Signal, typer.Option(help="What is done to ranks; both: one after the other.")] = Signal.BOTH,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long each goes on.")] = 120.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from one fault to the next.")] = 5.0,
    stop_seconds: Annotated[float, typer.Option(min=0.1, help="How long a stopped rank stands still.")] = 10.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Different ones.")] = 256,
    tokens: Annotated[int, typer.Option(min=4, help="Most output tokens of one sequence.")] = 400,
    config: Annotated[Path, typer.Option(help="A cluster.yaml; it gets two workers of each role.")] = ROOT
    / "cluster.yaml",
    seed: Annotated[int, typer.Option(help="Of what is killed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Kills or stops workers under streams, and compares what comes of them."""
    with telling_failures():
        args = Arguments(seconds, every, stop_seconds)
        specs = [spec_of(number, tokens) for number in range(requests)]
        with MortalCluster(make_config(config, streams, tokens), seed).running() as cluster:
            found = measure(cluster, specs, streams, signal.kinds, args)
    tell(found, as_json, show)
    if any(of_kind["lost"] or of_kind["changed"] or not of_kind["faults"] for of_kind in found.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
