"""What clients see of roles that change: the ratio is edited in cluster.yaml while requests come at 70 % of capacity.

    python benchmarks/rebalance.py --json

Requests 0, 1, ... first run undisturbed, each once, then as many at a time as there are streams at every split, which
measures the capacity: the least of the splits counts. Then they arrive at random moments, at a share of that, while the
file goes from one split to the next, with a mistake in it in between. Every request must end with its undisturbed
output, no worker may be started anew, and the mistake must be refused. Exits 1 otherwise.
A flip is timed by itself (`flip_s`) and from the edit: until the router sends the worker new work (`label_s`), and
until a request is placed on it in its new role (`work_s`, which waits for a request that needs one). Every prompt is
handed over (`least_loaded`), so that prefill workers have work too.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
from benchmarks.outcome import Outcome, run_one
from benchmarks.plain_cluster import ROOT, ProgramFailed
from benchmarks.report import bars, tell, telling_failures
from benchmarks.served_cluster import ServedCluster
from cluster.errors import BatonError
from cluster.pb import admin_pb2
from cluster.pb import generation_pb2 as pb
from tools.client import AdminClient, BatonClient, make_spec

SPLITS = ((1, 3), (3, 1), (2, 2))
SHARED_TOKENS = 64
EVENT_S = 60.0
_MISTAKE = {"roles.decode.devices": "two"}
_PLACED = re.compile(r"^(?:disaggregated: (\S+) -> (\S+),|local prefill on (\S+):)")


def workers_of(outcome: Outcome) -> dict[str, str]:
    """Role by worker, of those that it was placed on."""
    found = _PLACED.match(outcome.placement)
    if found is None:
        return {}
    prefill, decode, alone = found.groups()
    return {decode: "decode", prefill: "prefill"} if prefill else {alone: "decode"}


@dataclass
class Flip:
    """Seconds from the edit on; None: it did not come about."""

    worker_id: str
    role: str
    at: float
    flip_s: float
    """Of this step alone."""
    label_s: float
    work_s: float | None = None


def spec_of(number: int, num_tokens: int) -> pb.GenerationSpec:
    """Request `number`, always the same; one in three begins like all of its kind."""
    draw = random.Random(number)
    prompt = draw.choices(range(4, 1000), k=draw.randrange(16, 160))
    if number % 3 == 0:
        prompt = random.Random(0).choices(range(4, 1000), k=SHARED_TOKENS) + prompt
    spec = make_spec(
        prompt,
        max_output_tokens=draw.randrange(num_tokens // 2, num_tokens),
        temperature=0.0 if number % 2 else 0.9,
        seed=number,
        ignore_eos=True,
        token_ids=True,
        include_timing=True,
    )
    spec.scheduling.queue_timeout.FromSeconds(300)
    return spec


class Operator:
    """Edits the file, and hears what the controller makes of it."""

    def __init__(self, cluster: ServedCluster) -> None:
        self._cluster = cluster
        self.admin = AdminClient(cluster.admin_address)
        self.flips: list[Flip] = []
        self.num_changes = 0
        self.num_refused = 0
        self.problems: list[str] = []

    def move(self, split: tuple[int, int]) -> None:
        """Returns when the cluster has it."""
        after, begun = self.admin.cluster().last_sequence, time.time()
        self._cluster.edit({"roles.prefill.devices": split[0], "roles.decode.devices": split[1]})
        kind = admin_pb2.ClusterEvent
        step_at = 0.0
        for event in self._events(after):
            if event.kind == kind.KIND_STEP:
                step_at = event.time
            elif event.kind == kind.KIND_STEP_DONE and event.text.startswith("flip "):
                role = event.text.partition(" to ")[2].partition(":")[0]
                self.flips.append(Flip(event.worker_id, role, begun, event.time - step_at, event.time - begun))
            elif event.kind == kind.KIND_CHANGED:
                self.num_changes += 1
                return
            elif event.kind in (kind.KIND_FAILED, kind.KIND_REFUSED):
                self.problems.append(event.text)
                return
        self.problems.append(f"{split[0]}:{split[1]} did not come about within {EVENT_S:g} s")

    def err(self) -> None:
        """Writes a mistake into the file, waits until it is refused, and takes it back."""
        after, good = self.admin.cluster().last_sequence, self._cluster.file.read_text(encoding="utf-8")
        self._cluster.edit(_MISTAKE)
        refused = (e for e in self._events(after) if e.kind == admin_pb2.ClusterEvent.KIND_REFUSED)
        if next(refused, None) is None:
            self.problems.append(f"a mistake in the file was not refused within {EVENT_S:g} s")
        else:
            self.num_refused += 1
        self._cluster.write(good)

    def starts(self) -> dict[str, int]:
        """How often each process was started."""
        return {process.name: process.num_starts for process in self.admin.cluster().processes}

    def _events(self, after: int) -> Iterator[admin_pb2.ClusterEvent]:
        return self.admin.events(after, timeout_s=EVENT_S)


def measure_capacity(load: ClosedLoop, seconds: float) -> float:
    """Requests a second that streams get which never pause."""
    num_ended, is_over = 0, threading.Event()

    def count(so_far: int) -> None:
        nonlocal num_ended
        num_ended = num_ended if is_over.is_set() else so_far

    timer = threading.Timer(seconds, is_over.set)
    timer.start()
    load.run(itertools.count(), is_over, count)
    return num_ended / seconds


def arrive(
    client: BatonClient, specs: list[pb.GenerationSpec], rate: float, is_over: threading.Event, seed: int
) -> list[Numbered]:
    """Requests at random moments, `rate` a second, until it is over; all have ended then."""
    draw, running = random.Random(seed), list[tuple[int, Future[Outcome]]]()
    next_at = time.perf_counter()
    with ThreadPoolExecutor(256) as pool:
        for number in itertools.count():
            next_at += draw.expovariate(rate)
            if is_over.wait(max(0.0, next_at - time.perf_counter())):
                break
            spec = specs[number % len(specs)]
            running.append((number % len(specs), pool.submit(run_one, client, spec)))
    return [(number, future.result()) for number, future in running]


def operate(operator: Operator, seconds: float, every: float, is_over: threading.Event, tick: Any) -> None:
    """From split to split, with a mistake after the first edit and every third one after it."""
    begun, turns = time.perf_counter(), itertools.cycle([*SPLITS[1:], SPLITS[0]])
    try:
        for number in itertools.count(1):
            if begun + number * every >= begun + seconds:
                break
            is_over.wait(begun + number * every - time.perf_counter())
            operator.move(next(turns))
            tick(time.perf_counter() - begun)
            if number % 3 == 1:
                is_over.wait(every / 2)
                operator.err()
        is_over.wait(begun + seconds - time.perf_counter())
    except BatonError as error:
        operator.problems.append(f"the controller: {error.message}")
    finally:
        is_over.set()


def note_work(flips: list[Flip], outcomes: list[Numbered]) -> None:
    """When each flipped worker first got work of its new role after its label had changed."""
    for flip in flips:
        since = flip.at + flip.label_s
        placed = [o.placed_at for _, o in outcomes if workers_of(o).get(flip.worker_id) == flip.role]
        flip.work_s = min((at - flip.at for at in placed if at >= since - 0.05), default=None)


def summary(
    reference: dict[int, Outcome], outcomes: list[Numbered], operator: Operator, starts: dict[str, int]
) -> dict[str, Any]:
    now = operator.starts()
    restarted = sorted(name for name in starts.keys() | now.keys() if starts.get(name) != now.get(name))
    note_work(operator.flips, outcomes)
    shared = [o for n, o in outcomes if n % 3 == 0 and o.num_prompt_tokens]
    return {
        **compare(reference, outcomes),
        "changes": operator.num_changes,
        "mistakes_refused": operator.num_refused,
        "flips": len(operator.flips),
        "flip_s": spread([flip.flip_s for flip in operator.flips]),
        "label_s": spread([flip.label_s for flip in operator.flips]),
        "work_s": spread([flip.work_s for flip in operator.flips if flip.work_s is not None]),
        "flips_without_work": sum(flip.work_s is None for flip in operator.flips),
        "restarted": restarted,
        "cached_share": round(
            sum(o.num_cached_tokens for o in shared) / max(1, sum(o.num_prompt_tokens for o in shared)), 3
        ),
        "problems": operator.problems,
    }


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"p50": round(statistics.median(values), 3), "max": round(max(values), 3)}


def measure(
    cluster: ServedCluster, specs: list[pb.GenerationSpec], streams: int, share: float, times: tuple[float, ...]
) -> dict[str, Any]:
    """`times`: seconds in all, from one edit to the next, and of each measurement of the capacity."""
    seconds, every, capacity_s = times
    operator = Operator(cluster)
    with BatonClient(cluster.address) as client, operator.admin, bars() as progress:
        load = ClosedLoop(partial(run_one, client), specs, streams)
        reference = load.run_undisturbed(progress)
        capacity: dict[str, float] = {}
        bar = progress.add_task("capacity", total=len(SPLITS))
        for split in (*SPLITS[1:], SPLITS[0]):
            operator.move(split)
            capacity[":".join(map(str, split))] = round(measure_capacity(load, capacity_s), 2)
            progress.advance(bar)
        rate = share * min(capacity.values())
        if rate <= 0 or operator.problems:
            raise ProgramFailed(f"capacity could not be measured: {capacity}, {operator.problems}")
        operator.flips.clear()
        operator.num_changes, starts = 0, operator.starts()
        bar = progress.add_task("edits", total=seconds)
        is_over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            tick = lambda done: progress.update(bar, completed=done)  # noqa: E731
            operating = pool.submit(operate, operator, seconds, every, is_over, tick)
            outcomes = arrive(client, specs, rate, is_over, seed=0)
            operating.result()
        found = summary(reference, outcomes, operator, starts)
    return {"capacity_requests_s": capacity, "offered_requests_s": round(rate, 2), **found}


def show(found: dict[str, Any]) -> None:
    offered, capacity = found["offered_requests_s"], found["capacity_requests_s"]
    table = Table(title=f"rebalance at {offered} requests/s, of {capacity}")
    counted = ("edits", "flips", "completed", "lost", "changed", "mistakes refused")
    for column in (*counted, "flip p50", "max", "label p50", "max", "work p50", "max"):
        table.add_column(column, justify="right")
    counts = [found["changes"], found["flips"], found["completed"], len(found["lost"]), len(found["changed"])]
    times = [f"{found[name].get(key, 0):.2f} s" for name in ("flip_s", "label_s", "work_s") for key in ("p50", "max")]
    table.add_row(*map(str, [*counts, found["mistakes_refused"]]), *times)
    Console().print(table)
    for problem in [*found["lost"], *found["changed"], *found["problems"]][:5]:
        Console().print(problem[:400], markup=False)


def main(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long it goes on.")] = 300.0,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds from one edit to the next.")] = 20.0,
    share: Annotated[float, typer.Option(min=0.01, max=2.0, help="Of the capacity, that is offered.")] = 0.7,
    capacity_seconds: Annotated[float, typer.Option(min=1.0, help="That each split is measured for.")] = 10.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time while the capacity is measured.")] = 32,
    requests: Annotated[int, typer.Option(min=3, help="Different ones.")] = 96,
    tokens: Annotated[int, typer.Option(min=4, help="Most output tokens of one request.")] = 160,
    config: Annotated[Path, typer.Option(help="A cluster.yaml; it gets four workers.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Edits the ratio under load, and compares what comes of every request."""
    with telling_failures():
        specs = [spec_of(number, tokens) for number in range(requests)]
        values = {"roles.prefill.devices": 1, "roles.decode.devices": 3, "router.policy": "least_loaded"}
        with ServedCluster.running(config, values) as cluster:
            found = measure(cluster, specs, streams, share, (seconds, every, capacity_seconds))
    tell(found, as_json, show)
    failures = [*found["lost"], *found["changed"], *found["problems"], *found["restarted"]]
    if failures or not (found["flips"] and found["mistakes_refused"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
