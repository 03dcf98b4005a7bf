"""A soak: a cluster at 60 % of its capacity for an hour or more, with faults all the while. Nothing may grow, and every
output must be exact.

    python -m benchmarks.soak --phase stops --minutes 60     faults that kill nothing: each process must stay flat
    python -m benchmarks.soak --phase kills --minutes 60     a kill every 20 s: the cluster as a whole must

It may be interrupted at any moment, by Ctrl-C or SIGKILL: the same command goes on where it was, with another cluster,
until the minutes are over, and then prints what has been found. Exits with 0 when all is well, 1 when not, 130 when it
was interrupted. benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import psutil
import typer

from benchmarks.plain_cluster import ROOT, ProgramFailed
from benchmarks.report import tell, telling_failures
from benchmarks.served_cluster import ServedCluster
from benchmarks.soak_clients import GIVE_UP_S, WAYS, Load
from benchmarks.soak_faults import Faults, LinkCutter
from benchmarks.soak_record import Record, Segment
from benchmarks.soak_report import Span, document, show
from benchmarks.soak_requests import requests_of, with_references
from benchmarks.soak_watch import Watch
from cluster.config.load import load_config

START_S = 300.0
"""That a cluster may take to come up: four workers, on a machine that may do other things."""
SAMPLE_S = 5.0
LINE_S = 60.0
QUIET_MOMENTS = 12
LEAST_QUIET_S = 30.0
"""From one quiet moment to the next."""
REST_S = 120.0
"""From the last client's end until nothing is held: a worker that was killed is back by then."""
LOOK_EVERY_S = 0.2
SMALL_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""oneDNN and torch keep 1,024 compiled products each, one for every number of rows that a step has had: some 400 MiB a
worker, which take half an hour to fill and would hide slow growth of anything else. Small, they are full at once."""
CAPACITY_STREAMS = 24
LEFT_S = 90.0
"""That a cluster gets to end whose soak was killed."""


class Phase(StrEnum):
    STOPS = "stops"
    KILLS = "kills"
    BOTH = "both"

    @property
    def phases(self) -> list[Phase]:
        return [Phase.STOPS, Phase.KILLS] if self is Phase.BOTH else [self]


@dataclass(frozen=True)
class Arguments:
    """`load`: share of the capacity; `every_s`: from one fault to the next; `folder`: of the state."""

    span: Span
    load: float
    every_s: float
    capacity_s: float
    requests: int
    workers: int
    config: Path
    folder: Path


class Soak:
    """One phase. `run` goes on with it to its end."""

    def __init__(self, phase: Phase, args: Arguments) -> None:
        self._phase, self._args = phase, args
        settings = {"load": args.load, "every_s": args.every_s, "requests": args.requests, "workers": args.workers}
        self.record = Record(args.folder / f"{phase}.jsonl", phase, **settings)
        self._logs = args.folder / f"{phase}.logs"

    def run(self) -> None:
        """Raises ProgramFailed for a cluster that does not start."""
        if self.record.seconds >= self._args.span.seconds:
            return
        if self.record.segments:
            _await_end(self.record.segments[-1])
        with self._cluster() as cluster:
            watch = Watch(cluster, self._logs)
            self._begin(cluster, watch)
        for left in (*watch.still_running(), *watch.shared_memory_left()):
            self._problem(f"left over when the cluster had ended: {left}")

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[ServedCluster]:
        """With its log files in a folder of the soak, which is removed before."""
        shutil.rmtree(self._logs, ignore_errors=True)
        roles = load_config(self._args.config).roles
        values = {
            "roles.prefill.devices": self._args.workers * roles.prefill.tensor_parallel,
            "roles.decode.devices": self._args.workers * roles.decode.tensor_parallel,
            "log_dir": str(self._logs.absolute()),
        }
        self._say("the cluster starts")
        with ServedCluster.running(self._args.config, values, START_S, SMALL_KERNEL_CACHES) as cluster:
            yield cluster

    def _begin(self, cluster: ServedCluster, watch: Watch) -> None:
        """From a cluster that serves to the end of the minutes, or the interruption."""
        self._say("the reference: what one process alone writes")
        model = str(load_config(self._args.config).model.path)
        asked = with_references(requests_of(self._args.requests, seed=1), model, cluster.address)
        number = len(self.record.segments)
        load = Load(cluster.address, cluster.http_address, asked, WAYS[self._phase], seed=number)
        with contextlib.ExitStack() as stack:
            stack.callback(load.end)
            if self.record.capacity is None:
                self._say(f"the capacity: {CAPACITY_STREAMS} clients for {self._args.capacity_s:g} s")
                self.record.append("capacity", per_s=round(load.capacity(CAPACITY_STREAMS, self._args.capacity_s), 3))
            owner = {"pid": cluster.pid, "created": psutil.Process(cluster.pid).create_time()}
            self.record.append("segment", owner=owner)
            rate = self._args.load * (self.record.capacity or 0.0)
            self._say(
                f"segment {number + 1}: {rate:.1f} requests a second, {100 * self._args.load:g} % of the capacity"
            )
            faults = Faults(self._phase, watch.targets, self._args.every_s, seed=number)
            load.begin(rate)
            with faults.running():
                try:
                    self._watch_over(watch, load, faults)
                finally:
                    self._count(load, faults)

    def _watch_over(self, watch: Watch, load: Load, faults: Faults) -> None:
        """Samples, looks for what is held, and says a line a minute."""
        span = self._args.span
        before_s, begun = self.record.seconds, time.monotonic()
        quiet_every_s = max(LEAST_QUIET_S, span.seconds / QUIET_MOMENTS)
        next_line, next_quiet, next_sample = LINE_S, quiet_every_s, 0.0
        serving: dict[str, tuple[int, ...]] = {}
        while True:
            now_s = time.monotonic() - begun
            is_over = before_s + now_s >= span.seconds
            if is_over or now_s >= next_quiet:
                self._rest(watch, load, faults, now_s)
                now_s = time.monotonic() - begun
                next_quiet = now_s + quiet_every_s
            if now_s >= next_sample or is_over:
                next_sample = now_s + SAMPLE_S
                is_minute = now_s >= next_line
                next_line += LINE_S if is_minute else 0.0
                self.record.append("sample", t=round(now_s, 1), processes=watch.sample(with_series=is_minute))
                if self._phase is Phase.STOPS:
                    serving = self._compare(serving, watch)
                if is_minute or is_over:
                    self._count(load, faults)
                    self._line()
            if faults.failure is not None:
                raise ProgramFailed(f"a fault could not be done: {faults.failure}")
            if is_over:
                return
            time.sleep(LOOK_EVERY_S)

    def _compare(self, serving: dict[str, tuple[int, ...]], watch: Watch) -> dict[str, tuple[int, ...]]:
        """Nothing may be started again where nothing is killed; returns who serves now."""
        now = {target.name: target.pids for target in watch.last} or serving
        for name, pids in serving.items():
            if now.get(name) != pids:
                self._problem(f"{name} was started again: it was {pids} and is {now.get(name)}")
        return now

    def _rest(self, watch: Watch, load: Load, faults: Faults, now_s: float) -> None:
        """Nobody asks and nothing is done for a moment: nothing may be held then."""
        with faults.keeps_still:
            try:
                if not load.pause(GIVE_UP_S):
                    self._problem(f"clients have not ended within {GIVE_UP_S:g} s")
                took_s = _until(lambda: not watch.held(), REST_S)
                if math.isinf(took_s) and (held := watch.held()):
                    self._problem(f"held when nothing ran for {REST_S:g} s: {held}")
                for left in watch.shared_memory_left():
                    self._problem(f"nobody has it open: {left}")
                self.record.append("quiet", t=round(now_s, 1), took_s=round(min(took_s, REST_S), 2))
            finally:
                load.go_on()

    def _count(self, load: Load, faults: Faults) -> None:
        ended, problems = load.take_counts()
        self.record.append("counts", ended=ended, faults=faults.take_counts())
        for problem in problems:
            self._problem(problem)

    def _problem(self, what: str) -> None:
        self.record.append("problem", what=what)
        self._say(f"PROBLEM: {what}")

    def _line(self) -> None:
        record, total = self.record, self.record.segments[-1].samples[-1]["processes"].get("total", {})
        held = ", ".join(f"{value:g} {name}" for name, value in total.items())
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(record.counts.items()))
        minutes = f"{record.seconds / 60:.0f} of {self._args.span.minutes:g} min"
        self._say(f"{minutes}: {counts}; {sum(record.faults.values())} faults; {held or 'not whole'}")

    def _say(self, line: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} {self._phase}: {line}", err=True)


def _until(condition: Callable[[], bool], within_s: float) -> float:
    """Seconds until it held; infinite when it did not in time."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() > begun + within_s:
            return math.inf
        time.sleep(LOOK_EVERY_S)
    return time.monotonic() - begun


def _await_end(segment: Segment) -> None:
    """The cluster of a soak that was killed ends by itself; one that does not is killed with all its processes."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        process = psutil.Process(segment.owner["pid"])
        if process.create_time() != segment.owner["created"]:
            return
        children = process.children(recursive=True)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(LEFT_S)
            return
        for each in (process, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def soak(phases: list[Phase], args: Arguments) -> dict[str, Any]:
    """What has been found of each phase."""
    found = {}
    for phase in phases:
        part = Soak(phase, args)
        try:
            part.run()
            found[str(phase)] = document(part.record, args.span)
        finally:
            part.record.close()
    return found


def show_all(found: dict[str, Any]) -> None:
    for phase, of_phase in found.items():
        typer.echo(phase)
        show(of_phase)
    if missing := LinkCutter.missing():
        typer.echo(f"links were not cut: it {missing}")


def main(
    phase: Annotated[Phase, typer.Option(help="Which faults; both: one after the other.")] = Phase.BOTH,
    minutes: Annotated[float, typer.Option(min=0.5, help="Of each phase, over all runs.")] = 60.0,
    state: Annotated[Path, typer.Option(help="Folder of what is kept from run to run.")] = ROOT / "build" / "soak",
    load: Annotated[float, typer.Option(min=0.05, max=1.0, help="Share of the capacity.")] = 0.6,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds from one fault to the next.")] = 20.0,
    capacity_seconds: Annotated[float, typer.Option(min=2.0, help="To measure the capacity for.")] = 60.0,
    requests: Annotated[int, typer.Option(min=1, help="Different ones.")] = 384,
    workers: Annotated[int, typer.Option(min=1, help="Of each role.")] = 2,
    config: Annotated[Path, typer.Option(help="A cluster.yaml.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Serves for a long time under faults, and looks at what grows and what is wrong."""
    args = Arguments(Span(minutes), load, every, capacity_seconds, requests, workers, config, state)
    try:
        with telling_failures():
            found = soak(phase.phases, args)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    tell(found, as_json, show_all)
    if any(of_phase["failures"] for of_phase in found.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
