"""What a cluster does with ten times the load it can serve: who is served in time, and how the others are refused.

    python benchmarks/overload.py --json

Starts the cluster of cluster.yaml, finds how many requests a second it serves within the objectives, offers that rate
and ten times as much at random instants, watches it recover, and then leaves 500 streams unread. Exits 1 when a request
was lost, repeated or changed, or an unread stream is still held after 30 s.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import overload_load as load
from benchmarks.overload_load import Outcome, Phase
from benchmarks.plain_cluster import ROOT, ProgramFailed, running_cluster
from benchmarks.report import bars, tell, telling_failures
from cluster.config.load import load_config
from cluster.pb import generation_pb2 as pb
from tools.client import BatonClient, make_spec

NUM_SPECS = 64
LEVELS = (8, 16, 32, 64)
"""Clients at a time, to find the capacity."""
WARM_UP_S = 3.0
"""At the beginning of a phase, not counted in its goodput: an overload is one when it has lasted for a second."""
AFTER_S = 15.0
DEAF_TOKENS, DEAF_LOGPROBS = 64, 20
DROPPED_S = 30.0
REFUSAL_S = 0.05


@dataclass(frozen=True)
class Objectives:
    ttft_s: float
    tpot_s: float

    def are_kept(self, outcome: Outcome) -> bool:
        is_served = outcome.code == "OK" and outcome.ttft_s is not None
        return is_served and outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s  # type: ignore[operator]


@dataclass
class Memory:
    """Resident bytes of a process, by phase: the most that was seen."""

    pid: int
    phase: str = "before"
    most: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator[Memory]:
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.1):
                self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield self
        finally:
            is_over.set()
            thread.join()

    def look(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        size = pages * os.sysconf("SC_PAGE_SIZE")
        self.most[self.phase] = max(size, self.most.get(self.phase, 0))
        return size


def spec_of(number: int, num_prompt: int, num_tokens: int) -> bytes:
    """Request `number`, always the same."""
    draw = random.Random(number)
    prompt = draw.choices(range(4, 1000), k=draw.randrange(num_prompt // 2, num_prompt + 1))
    length = draw.randrange(num_tokens // 2, num_tokens + 1)
    spec = make_spec(
        prompt,
        max_output_tokens=length,
        temperature=0.0 if number % 2 else 0.9,
        seed=number,
        ignore_eos=True,
        token_ids=True,
        include_timing=True,
    )
    return pb.GenerateStreamRequest(spec=spec).SerializeToString()


def patient(spec: bytes) -> bytes:
    """The same for a client that waits as long as it takes."""
    request = pb.GenerateStreamRequest.FromString(spec)
    request.spec.scheduling.queue_timeout.FromSeconds(300)
    return request.SerializeToString()


def deaf_spec() -> bytes:
    spec = make_spec([5] * 16, max_output_tokens=DEAF_TOKENS, top_logprobs=DEAF_LOGPROBS, ignore_eos=True)
    return patient(pb.GenerateStreamRequest(spec=spec).SerializeToString())


def problems_of(outcomes: list[Outcome], reference: dict[int, list[int]]) -> list[str]:
    """Requests that were neither served as they should be nor refused."""
    found = []
    for o in outcomes:
        if o.code == "OK" and not o.problem and o.tokens != reference[o.number]:
            o.problem = f"its tokens are {o.tokens[:8]}..., undisturbed {reference[o.number][:8]}..."
        is_refused = o.code == "RESOURCE_EXHAUSTED" and not o.tokens
        if o.problem or (o.code != "OK" and not is_refused):
            found.append(f"request {o.number}, sent at {o.sent_at:.2f} s: {o.problem or o.code} {o.reason}")
    return found


def percentiles(values: list[float]) -> dict[str, float | None]:
    """In milliseconds."""
    if len(values) < 2:
        return {"p50": None, "p99": None}
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(1000 * cuts[49], 1), "p99": round(1000 * cuts[98], 1)}


def _share(of: list[bool]) -> float | None:
    return round(sum(of) / len(of), 4) if of else None


def summary(phase: Phase, seconds: float, keep: Objectives) -> dict[str, Any]:
    """Rates are over the phase without its beginning; refusals are all, and those after the beginning."""
    counted = [o for o in phase.outcomes if o.sent_at >= WARM_UP_S]
    refused = [o for o in phase.outcomes if o.code == "RESOURCE_EXHAUSTED"]
    later = [o for o in refused if o.sent_at >= WARM_UP_S]
    served = [o for o in counted if o.code == "OK"]
    span_s = seconds - WARM_UP_S
    return {
        "offered_per_s": round(len(counted) / span_s, 2),
        "served_per_s": round(len(served) / span_s, 2),
        "goodput_per_s": round(sum(map(keep.are_kept, counted)) / span_s, 2),
        "ttft_ms": percentiles([o.ttft_s for o in served if o.ttft_s is not None]),
        "queue_ms": percentiles([o.queue_s for o in served]),
        "tpot_ms": percentiles([o.tpot_s for o in served]),
        "refused": len(refused),
        "with_retry_info": _share([o.has_retry for o in refused]),
        "refusal_ms": percentiles([o.took_s for o in later]),
        "refused_within_50_ms": _share([o.took_s <= REFUSAL_S for o in later]),
        "refusal_ms_with_beginning": percentiles([o.took_s for o in refused]),
        "client_share_of_machine": round(phase.cpu_s / phase.wall_s / (os.cpu_count() or 1), 3),
    }


def normal_after_s(phase: Phase, keep: Objectives) -> float | None:
    """From when on each request that was sent is served within the objectives but for one in twenty; None: never."""
    begins = [float(second) for second in range(int(AFTER_S) - 2)]
    for begin in begins:
        rest = [keep.are_kept(o) for o in phase.outcomes if o.sent_at >= begin]
        if rest and sum(rest) >= 0.95 * len(rest):
            return begin
    return None


class Run:
    """One cluster under load. `progress` is told what goes on."""

    def __init__(self, address: str, specs: list[bytes], keep: Objectives, progress: Progress) -> None:
        self.client = BatonClient(address)
        self._address, self._specs, self._keep = address, specs, keep
        self._progress = progress
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.reference: dict[int, list[int]] = {}
        self.problems: list[str] = []

    def close(self) -> None:
        self._pool.shutdown()
        self.client.close()

    def phase(self, title: str, seconds: float, function: Any, *arguments: Any) -> Any:
        """What the function returns in the other process; the bar follows the time that it should take."""
        bar = self._progress.add_task(title, total=seconds)
        future: Future[Any] = self._pool.submit(function, self._address, *arguments)
        begun = time.perf_counter()
        while not future.done():
            threading.Event().wait(0.1)
            self._progress.update(bar, completed=min(seconds, time.perf_counter() - begun))
        self._progress.update(bar, completed=seconds)
        result = future.result()
        if isinstance(result, Phase) and self.reference:
            self.problems += problems_of(result.outcomes, self.reference)
        return result

    def learn(self) -> None:
        """What each request's output is, undisturbed. Raises ProgramFailed."""
        found: Phase = self.phase("undisturbed", 10, load.each_once, [patient(s) for s in self._specs], 4)
        wrong = [o for o in found.outcomes if o.code != "OK" or o.problem]
        if wrong:
            raise ProgramFailed(f"undisturbed, {len(wrong)} requests failed: {wrong[0].code} {wrong[0].problem}")
        self.reference = {o.number: o.tokens for o in found.outcomes}

    def capacity(self, seconds: float) -> float:
        """Requests a second within the objectives, with as many clients as serve that best."""
        best = 0.0
        for streams in LEVELS:
            found = self.phase(f"{streams} at a time", seconds, load.at_a_time, self._specs, streams, seconds)
            kept = sum(map(self._keep.are_kept, found.outcomes)) / found.wall_s
            best = max(best, kept)
        return best

    def offer(self, title: str, rate: float, seconds: float, seed: int) -> Phase:
        found: Phase = self.phase(title, seconds, load.at_rate, self._specs, rate, seconds, seed)
        return found

    def leave_unread(self, num_clients: int, memory: Memory) -> dict[str, Any]:
        """Streams that nobody reads for as long as it takes to serve them all, and half a minute."""
        before = memory.look()
        memory.phase = "unread"
        begun, seconds = time.perf_counter(), DROPPED_S + num_clients * DEAF_TOKENS / 800
        ends = self.phase(f"{num_clients} unread", seconds, load.deaf, deaf_spec(), num_clients, seconds)
        held = max(0, memory.most["unread"] - before) / num_clients
        router = self.client.status().router
        is_free = not router.num_running and not router.num_queued
        dropped = ends.get("CLIENT_STALLED", 0)
        if dropped < num_clients or not is_free:
            self.problems.append(f"of {num_clients} unread streams, {dropped} were dropped: {ends}")
        return {
            "clients": num_clients,
            "ends": ends,
            "held_kib_each": round(held / 1024, 1),
            "seconds": round(time.perf_counter() - begun, 1),
        }


def measure(run: Run, keep: Objectives, seconds: float, factor: float, num_deaf: int) -> dict[str, Any]:
    run.learn()
    with Memory(run.client.status().router.pid).watched() as memory:
        capacity = run.capacity(max(4.0, seconds / 4))
        if not capacity:
            raise ProgramFailed("no request was served within the objectives, however few were sent at a time")
        once = run.offer("1x", capacity, seconds, 1)
        memory.phase = "during"
        over = run.offer(f"{factor:g}x", factor * capacity, seconds, 2)
        memory.phase = "after"
        after = run.offer("after", 0.5 * capacity, AFTER_S, 3)
        unread = run.leave_unread(num_deaf, memory) if num_deaf else {}
    phases = {"1x": summary(once, seconds, keep), "over": summary(over, seconds, keep)}
    once_per_s, over_per_s = phases["1x"]["goodput_per_s"], phases["over"]["goodput_per_s"]
    peak = max(capacity, once_per_s)
    return {
        "slo_ms": {"ttft": 1000 * keep.ttft_s, "tpot": 1000 * keep.tpot_s},
        "capacity_per_s": round(capacity, 2),
        "factor": factor,
        **phases,
        "ratio": round(over_per_s / once_per_s, 3) if once_per_s else None,
        "of_peak": round(over_per_s / peak, 3),
        "normal_after_s": normal_after_s(after, keep),
        "router_rss_mib": {phase: round(size / 2**20, 1) for phase, size in memory.most.items()},
        "unread": unread,
        "problems": run.problems,
    }


def show(found: dict[str, Any]) -> None:
    slo, factor = found["slo_ms"], f"{found['factor']:g}x"
    table = Table(title=f"goodput at TTFT {slo['ttft']:g} ms and TPOT {slo['tpot']:g} ms")
    for column in ("load", "offered /s", "served /s", "goodput /s", "TTFT p50, p99", "TPOT p50, p99", "refused", "in"):
        table.add_column(column, justify="right")

    def both(values: dict[str, float | None]) -> str:
        return ", ".join("-" if value is None else f"{value:g} ms" for value in values.values())

    for name, key in (("1x", "1x"), (factor, "over")):
        p = found[key]
        rates = (f"{p[rate]:.1f}" for rate in ("offered_per_s", "served_per_s", "goodput_per_s"))
        table.add_row(name, *rates, both(p["ttft_ms"]), both(p["tpot_ms"]), str(p["refused"]), both(p["refusal_ms"]))
    console = Console()
    console.print(table)
    share = found["over"]["client_share_of_machine"]
    console.print(f"{factor} is {found['of_peak']:.2f} of the best goodput, {found['ratio']} of that at 1x")
    console.print(f"the clients took {100 * share:.0f} % of the machine for it")
    refused = found["over"]
    console.print(
        f"refusals with a delay to try again: {refused['with_retry_info']}, in 50 ms: {refused['refused_within_50_ms']}"
    )
    console.print(f"normal after {found['normal_after_s']} s; router RSS in MiB: {found['router_rss_mib']}")
    console.print(f"unread streams: {found['unread']}")
    for problem in found["problems"][:5]:
        console.print(problem[:400], markup=False)


def main(
    seconds: Annotated[float, typer.Option(min=6.0, help="Of each load.")] = 30.0,
    factor: Annotated[float, typer.Option(min=1.0, help="Times the capacity.")] = 10.0,
    prompt: Annotated[int, typer.Option(min=2, help="Most prompt tokens.")] = 64,
    tokens: Annotated[int, typer.Option(min=4, help="Most output tokens.")] = 192,
    unread: Annotated[int, typer.Option(min=0, help="Streams that are left unread.")] = 500,
    config: Annotated[Path, typer.Option(help="A cluster.yaml.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Offers a cluster more than it can serve, and looks at what becomes of it."""
    specs = [spec_of(number, prompt, tokens) for number in range(NUM_SPECS)]
    with telling_failures():
        slo = load_config(config).rebalance.slo
        keep = Objectives(slo.ttft_ms / 1000, slo.tpot_ms / 1000)
        with running_cluster(config) as address, bars() as progress:
            run = Run(address, specs, keep, progress)
            try:
                found = measure(run, keep, seconds, factor, unread)
            finally:
                run.close()
    tell(found, as_json, show)
    if found["problems"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
