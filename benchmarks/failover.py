"""What a client sees of workers that die: the same outputs as if none had, and how long a stream stands still.

    python benchmarks/failover.py --json
    python benchmarks/failover.py --fault stop

Streams of every kind (greedy and seeded; stop strings, penalties, logprobs, n = 2) run twice over two prefill and two
decode workers: first undisturbed, then again and again while a random rank is killed, or stopped, every few seconds.
Every request must end, and its output be the undisturbed one's: no token lost, repeated or changed. Exits 1 otherwise.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.mortal_cluster import Fault, MortalCluster
from benchmarks.plain_cluster import ROOT, ProgramFailed
from cluster.client import BatonClient, make_spec
from cluster.config import ServingConfig, load_config
from cluster.errors import BatonError
from cluster.pb import generation_pb2 as pb
from cluster.program import ExitCode

LOGPROBS_AGREE_TO = 1e-3
"""Steps of other sizes add up in other orders."""


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"


@dataclass(frozen=True)
class Arguments:
    """How long faults come, seconds from one to the next, and how long a stopped rank stands still."""

    seconds: float
    every: float
    stop_seconds: float


@dataclass
class Outcome:
    """What one client got."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    told_at: list[float] = field(default_factory=list)
    """When each message with tokens came."""
    problem: str = ""
    """Why it did not complete, or what is wrong with what it told."""

    def difference(self, other: Outcome) -> str:
        """In what it differs from the undisturbed one, or nothing."""
        for name in ("tokens", "texts", "ends"):
            if getattr(self, name) != getattr(other, name):
                return f"its {name} are {getattr(self, name)}, undisturbed {getattr(other, name)}"
        for index, values in self.logprobs.items():
            theirs = other.logprobs[index]
            if len(values) != len(theirs) or any(
                abs(a - b) > LOGPROBS_AGREE_TO for a, b in zip(values, theirs, strict=True)
            ):
                return f"logprobs of its sequence {index} are others"
        return ""

    def longest_stall_s(self, since: float, until: float) -> float:
        """The longest time between two messages that overlaps with a span of time."""
        gaps = zip(self.told_at, self.told_at[1:], strict=False)
        return max((after - before for before, after in gaps if after > since and before < until), default=0.0)


@dataclass
class Run:
    """Requests that ended, with their number, and what was done meanwhile."""

    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def spec_of(number: int, num_tokens: int) -> pb.GenerationSpec:
    """Request `number`, always the same."""
    draw = random.Random(number)
    prompt = draw.choices(range(4, 1000), k=draw.randrange(8, 200))
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
    )
    if number % 7 == 3:
        spec.sampling.frequency_penalty, spec.sampling.repetition_penalty = 0.4, 1.1
    spec.scheduling.queue_timeout.FromSeconds(300)
    return spec


def run_one(client: BatonClient, spec: pb.GenerationSpec) -> Outcome:
    """Never raises: what goes wrong is the outcome."""
    outcome = Outcome()
    try:
        with client.stream(spec) as stream:
            for event in stream:
                _note(outcome, event)
    except BatonError as error:
        outcome.problem = f"{type(error).__name__}: {error.message}"
    return outcome


def _note(outcome: Outcome, event: pb.GenerateStreamResponse) -> None:
    if event.HasField("delta"):
        delta = event.delta
        told = outcome.tokens.setdefault(delta.index, [])
        if delta.first_token_index != len(told):
            outcome.problem = f"token {delta.first_token_index} came when {len(told)} was next"
        told.extend(delta.token_ids)
        outcome.texts[delta.index] = outcome.texts.get(delta.index, "") + delta.text
        outcome.logprobs.setdefault(delta.index, []).extend(entry.logprob for entry in delta.logprobs)
        outcome.told_at.append(time.perf_counter())
    elif event.HasField("sequence_end"):
        end = event.sequence_end
        outcome.ends[end.index] = (end.finish_reason, end.stop_string)


class Load:
    """Requests 0, 1, ... over and over, so many at a time."""

    def __init__(self, address: str, specs: list[pb.GenerationSpec], streams: int) -> None:
        self._client = BatonClient(address)
        self._specs, self._streams = specs, streams
        self._next, self._lock = 0, threading.Lock()

    def run(self, most: int | None, is_over: threading.Event, progress: Any) -> list[tuple[int, Outcome]]:
        """Until so many have been sent, or it is over; all of them have ended then."""
        ended: list[tuple[int, Outcome]] = []

        def keep_going() -> None:
            while not is_over.is_set() and (number := self._take(most)) is not None:
                number %= len(self._specs)
                ended.append((number, run_one(self._client, self._specs[number])))
                progress(len(ended))

        with ThreadPoolExecutor(self._streams) as pool:
            for future in [pool.submit(keep_going) for _ in range(self._streams)]:
                future.result()
        return ended

    def _take(self, most: int | None) -> int | None:
        with self._lock:
            number, self._next = self._next, self._next + 1
        return number if most is None or number < most else None


def disturb(cluster: MortalCluster, kind: Kind, args: Arguments, is_over: threading.Event) -> list[Fault]:
    """A fault every so often, until it is over."""
    faults = []
    while not is_over.wait(args.every):
        fault = cluster.kill_one() if kind is Kind.KILL else cluster.stop_one(args.stop_seconds, is_over)
        if fault is not None:
            faults.append(fault)
    return faults


def run_disturbed(load: Load, cluster: MortalCluster, kind: Kind, args: Arguments, progress: Progress) -> Run:
    is_over, bar = threading.Event(), progress.add_task("disturbed", total=args.seconds)
    begun = time.perf_counter()

    def tick(_: int) -> None:
        progress.update(bar, completed=min(args.seconds, time.perf_counter() - begun))

    timer = threading.Timer(args.seconds, is_over.set)
    timer.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            faults = pool.submit(disturb, cluster, kind, args, is_over)
            outcomes = load.run(None, is_over, tick)
            is_over.set()
            return Run(outcomes, faults.result())
    finally:
        timer.cancel()


def summary(reference: dict[int, Outcome], run: Run, span_s: float) -> dict[str, Any]:
    """`span_s`: after a fault, in which a gap in a stream counts as a stall of it."""
    lost = [f"request {n}: {o.problem}" for n, o in run.outcomes if o.problem]
    changed = [
        f"request {n}: {what}" for n, o in run.outcomes if not o.problem and (what := o.difference(reference[n]))
    ]
    stalls = [
        stall
        for fault in run.faults
        for _, o in run.outcomes
        if o.told_at and o.told_at[0] < fault.at < o.told_at[-1]
        if (stall := o.longest_stall_s(fault.at, fault.at + span_s))
    ]
    percentiles = statistics.quantiles(stalls, n=100) if len(stalls) > 1 else [0.0] * 99
    p50, p99, longest = percentiles[49], percentiles[98], max(stalls, default=0.0)
    return {
        "faults": len(run.faults),
        "completed": len(run.outcomes) - len(lost),
        "lost": lost,
        "changed": changed,
        "stall_s": {"p50": round(p50, 3), "p99": round(p99, 3), "max": round(longest, 3)},
    }


def make_config(file: Path) -> ServingConfig:
    """Of a cluster.yaml, with two workers of each role."""
    config = load_config(file)
    prefill, decode = config.roles.prefill, config.roles.decode
    roles = replace(
        config.roles,
        prefill=replace(prefill, devices=2 * prefill.tensor_parallel),
        decode=replace(decode, devices=2 * decode.tensor_parallel),
    )
    return replace(config, roles=roles)


def measure(cluster: MortalCluster, specs: list[pb.GenerationSpec], streams: int, kind: Kind, args: Arguments) -> Any:
    """What `summary` says. Raises ProgramFailed when requests fail that nothing disturbs."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("undisturbed", total=len(specs))
        load = Load(cluster.address, specs, streams)
        undisturbed = load.run(len(specs), threading.Event(), lambda count: progress.update(bar, completed=count))
        wrong = [f"request {n}: {o.problem}" for n, o in undisturbed if o.problem]
        if wrong:
            raise ProgramFailed(f"undisturbed, {len(wrong)} requests failed: {wrong[0]}")
        run = run_disturbed(Load(cluster.address, specs, streams), cluster, kind, args, progress)
    return summary(dict(undisturbed), run, args.stop_seconds + args.every)


def show(kind: Kind, found: dict[str, Any]) -> None:
    table = Table(title=f"failover: {kind.value}")
    for column in ("faults", "completed", "lost", "changed", "stall p50", "p99", "longest"):
        table.add_column(column, justify="right")
    stall = found["stall_s"]
    counts = (found["faults"], found["completed"], len(found["lost"]), len(found["changed"]))
    table.add_row(*map(str, counts), *(f"{stall[name]:.2f} s" for name in ("p50", "p99", "max")))
    Console().print(table)
    for problem in [*found["lost"], *found["changed"]][:5]:
        Console().print(problem[:400], markup=False)


def main(
    fault: Annotated[Kind, typer.Option(help="What is done to a rank.")] = Kind.KILL,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long it goes on.")] = 120.0,
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
    try:
        args = Arguments(seconds, every, stop_seconds)
        specs = [spec_of(number, tokens) for number in range(requests)]
        with MortalCluster(make_config(config), seed).running() as cluster:
            found = measure(cluster, specs, streams, fault, args)
    except (ProgramFailed, BatonError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    if as_json:
        json.dump(found, sys.stdout)
        print()
    else:
        show(fault, found)
    if found["lost"] or found["changed"] or not found["faults"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
