"""What clients that resume see of a router that dies, and of a Redis that dies, forgets or stands still: exact outputs.

    python benchmarks/resume.py --json

Streams of every kind run over a cluster of plain processes, first undisturbed. Then the router is killed every few
seconds and started again at its port, as Ray would; then Redis is flushed, killed, started again and stopped, while
the router lives. Every output must be the undisturbed one's. At the end some clients leave for good, and what they
left must be freed. Exits 1 when a request was lost, repeated or changed, or an orphan was kept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from benchmarks.failover import spec_of
from benchmarks.outcome import Outcome, note
from benchmarks.plain_cluster import ROOT, Program, beside_others, running_workers, wait_until_serving
from benchmarks.redis_server import RedisServer, running_redis
from benchmarks.report import bars, tell, telling_failures
from cluster.config.load import load_config
from cluster.errors import BatonError, NotReachable
from cluster.pb import generation_pb2 as pb
from cluster.settings import RouterSettings
from controller.plan import plan_cluster
from tools.client import BatonClient

WINDOW_S = 30.0
"""Longer than a router takes to start."""
ORPHAN_WINDOW_S = 2.0
"""Shorter than what is left takes to its end."""
ORPHAN_TOKENS = 1500
NUM_ORPHANS = 8
LOOK_EVERY_S = 0.05
DOWN_S = 2.0
"""How long a Redis that was killed is away."""


@dataclass(frozen=True)
class Arguments:
    """How long each phase lasts, seconds from one fault to the next, and how long Redis stands still."""

    seconds: float
    every: float
    stop_seconds: float
    streams: int


class MortalRouter:
    """A router that is killed, and comes back at its port."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._program: Program | None = None
        self.address = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[MortalRouter]:
        """Raises ProgramFailed for a bad start."""
        self._start()
        try:
            wait_until_serving(self.address)
            yield self
        finally:
            if self._program is not None:
                self._program.stop()

    def kill(self, **changes: Any) -> None:
        """SIGKILL, and a new one at once, with other settings where they are given."""
        self._settings = self._settings.with_values(**changes)
        assert self._program is not None
        code = self._program.kill()
        assert code == -signal.SIGKILL, f"the router ended with {code}"
        self._program.stop()
        self._program = None
        self._start()

    def _start(self) -> None:
        self._program = Program("router", self._settings)
        self.address = str(self._program.expect("ready")["address"])
        self._settings = self._settings.with_values(port=int(self.address.rpartition(":")[2]))


def run_one(address: str, spec: pb.GenerationSpec) -> Outcome:
    """Never raises: what goes wrong is the outcome. A router that is not there yet was not asked: it is asked again."""
    outcome = Outcome()
    with BatonClient(address) as client:
        while True:
            try:
                with client.resuming_stream(spec) as stream:
                    for event in stream:
                        note(outcome, event)
            except NotReachable as error:
                if not outcome.told_at:
                    time.sleep(LOOK_EVERY_S)
                    continue
                outcome.problem = f"{type(error).__name__}: {error.message}"
            except BatonError as error:
                outcome.problem = f"{type(error).__name__}: {error.message}"
            return outcome


def kill_routers(router: MortalRouter, every_s: float) -> Callable[[threading.Event], list[str]]:
    def disturb(is_over: threading.Event) -> list[str]:
        faults = []
        while not is_over.wait(every_s):
            router.kill()
            faults.append("router killed")
        return faults

    return disturb


def torment_redis(redis: RedisServer, args: Arguments) -> Callable[[threading.Event], list[str]]:
    """Flushed, killed and started again, stopped; then again. It is there and running at the end."""

    def disturb(is_over: threading.Event) -> list[str]:
        faults: list[str] = []
        while not is_over.wait(args.every):
            kind = ("redis flushed", "redis killed", "redis stopped")[len(faults) % 3]
            faults.append(kind)
            if kind == "redis flushed":
                redis.flush()
            elif kind == "redis killed":
                redis.kill()
                is_over.wait(DOWN_S)
                redis.start()
            else:
                redis.pause()
                is_over.wait(args.stop_seconds)
                redis.go_on()
        return faults

    return disturb


def leave_orphans(address: str, specs: list[pb.GenerationSpec]) -> dict[str, Any]:
    """Clients that leave in the middle and stay away: how many were cancelled, and after how long nothing ran."""
    with BatonClient(address) as client:
        before = client.status().router.num_orphaned
        for number in range(NUM_ORPHANS):
            spec = pb.GenerationSpec()
            spec.CopyFrom(specs[number % len(specs)])
            spec.resume.SetInParent()
            spec.stopping.ignore_eos, spec.stopping.max_output_tokens = True, ORPHAN_TOKENS
            spec.stopping.ClearField("stop")
            spec.sampling.ClearField("regex")  # whose output could end before
            with client.stream(spec) as stream:
                next(event for event in stream if event.HasField("delta"))
        left_at, never = time.perf_counter(), threading.Event()
        while (status := client.status().router).num_running and time.perf_counter() - left_at < WINDOW_S:
            never.wait(LOOK_EVERY_S)
        return {
            "left": NUM_ORPHANS,
            "freed": status.num_orphaned - before,
            "still_running": status.num_running,
            "after_s": round(time.perf_counter() - left_at, 2),
        }


def judge(reference: dict[int, Outcome], ended: list[Numbered], faults: list[str]) -> dict[str, Any]:
    gaps = [b - a for _, o in ended for a, b in zip(o.told_at, o.told_at[1:], strict=False)]
    return {
        "faults": {kind: faults.count(kind) for kind in sorted(set(faults))},
        **compare(reference, ended),
        "longest_stall_s": round(max(gaps, default=0.0), 2),
    }


def measure(
    router: MortalRouter, redis: RedisServer, specs: list[pb.GenerationSpec], args: Arguments
) -> dict[str, Any]:
    """Raises ProgramFailed when requests fail that nothing disturbs."""
    with bars() as progress:
        load = ClosedLoop(partial(run_one, router.address), specs, args.streams)
        reference, found = load.run_undisturbed(progress), {}
        for name, seconds, disturb in (
            ("redis", args.seconds + args.stop_seconds, torment_redis(redis, args)),
            ("router", args.seconds, kill_routers(router, args.every)),
        ):
            found[name] = judge(reference, *load.run_disturbed(f"disturbed: {name}", seconds, disturb, progress))
        router.kill(resume_window_s=ORPHAN_WINDOW_S)
        wait_until_serving(router.address)
        return found | {"orphans": leave_orphans(router.address, specs)}


def show(found: dict[str, Any]) -> None:
    table = Table(title="resume")
    for column in ("phase", "faults", "completed", "lost", "changed", "longest stall"):
        table.add_column(column, justify="right")
    for name in ("redis", "router"):
        row = found[name]
        faults = ", ".join(f"{count} × {kind}" for kind, count in row["faults"].items())
        counts = (row["completed"], len(row["lost"]), len(row["changed"]))
        table.add_row(name, faults, *map(str, counts), f"{row['longest_stall_s']:.2f} s")
    Console().print(table)
    orphans = found["orphans"]
    Console().print(f"{orphans['freed']} of {orphans['left']} orphans freed within {orphans['after_s']} s")
    for problem in [*(p for name in ("redis", "router") for p in (*found[name]["lost"], *found[name]["changed"]))][:5]:
        Console().print(problem[:400], markup=False)


def main(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long each phase goes on; the Redis one longer.")] = 70.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from one fault to the next.")] = 5.0,
    stop_seconds: Annotated[float, typer.Option(min=0.1, help="How long Redis stands still.")] = 30.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Different ones.")] = 32,
    tokens: Annotated[int, typer.Option(min=4, help="Most output tokens of one sequence.")] = 400,
    config: Annotated[Path, typer.Option(help="A cluster.yaml.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Kills the router, torments Redis, and compares what clients that resume end up with."""
    with telling_failures():
        specs = [spec_of(number, tokens) for number in range(requests)]
        plan = plan_cluster(load_config(config), num_gpus=0, num_cores=len(os.sched_getaffinity(0)))
        with running_redis() as redis, running_workers(plan.workers) as flags:
            settings = beside_others(plan.router).with_values(workers=flags, state=redis.url, resume_window_s=WINDOW_S)
            with MortalRouter(settings).running() as router:
                found = measure(router, redis, specs, Arguments(seconds, every, stop_seconds, streams))
    tell(found, as_json, show)
    phases = (found["redis"], found["router"])
    is_bad = any(phase["lost"] or phase["changed"] or not phase["faults"] for phase in phases)
    if is_bad or found["orphans"]["still_running"] or not found["orphans"]["freed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
