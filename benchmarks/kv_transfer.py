"""What the hand-off of KV costs: bandwidth, what is left of it to wait for, and how long a commit and a cancel take.

    python benchmarks/kv_transfer.py --json

Each part starts its own processes here and ends them. Everything is a ratio within one run, or a median: what is held
against each other was measured right after one another. benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable
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

from benchmarks import kv_bandwidth
from benchmarks.kv_handoff import OUTPUT_TOKENS, Cancels, HandedOff, HandOffs
from benchmarks.kv_peer import BLOCK_SIZE
from benchmarks.make_model import Shape, make_model
from benchmarks.plain_cluster import ROOT, ProgramFailed
from benchmarks.worker_pair import running_pair
from cluster.errors import BatonError
from cluster.program import ExitCode
from engine.models.folder import read_model

BUNDLED_MODEL = ROOT / "models" / "tiny-shakespeare"
DEFAULT_CHUNK = 256
"""The chunk size that Baton is shipped with, for which `shm.of_memcpy` and `gloo.of_socket` stand."""
CANCELLED_OUTPUT = 1024
CANCELLED_PROMPT = 512

REFERENCES = {"shm": "memcpy", "gloo": "socket", "cuda_ipc": "copy", "nccl": "copy"}


class Part(StrEnum):
    """What can be measured by itself."""

    BANDWIDTH = "bandwidth"
    EXPOSED = "exposed"
    HANDOFF = "handoff"


PARTS = list(Part)
CHUNK_SIZES = [64, 256, 1024]
PROMPT_SIZES = [512, 2048, 4096]


class Results:
    """What was measured, as it is told."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.tables: list[Table] = []

    def add_bandwidth(self, plan: kv_bandwidth.Plan, measured: list[kv_bandwidth.Rates]) -> None:
        """Rates in GB/s and ratios, medians over the runs; each ratio is the median of the runs' own."""
        standing = DEFAULT_CHUNK if DEFAULT_CHUNK in plan.chunk_sizes else plan.chunk_sizes[0]
        names = list(measured[0].by_name)
        gb_s = {n: {c: round(kv_bandwidth.median_rate(measured, n, c), 2) for c in plan.chunk_sizes} for n in names}
        ratios: dict[str, dict[int, float]] = {}
        for key, name in _ratios(plan.transports).items():
            of_each = {c: round(kv_bandwidth.median_ratio(measured, name, c), 3) for c in plan.chunk_sizes}
            ratios[key] = of_each
            self.values[key] = of_each[standing]
        where = "gpu" if "cuda_ipc" in plan.transports else "cpu"
        self.values[f"{where}_gb_s"] = gb_s
        self.values[f"{where}_ratios"] = ratios
        title = f"KV between two ranks, GB/s by tokens of a chunk, medians of {len(measured)} runs"
        self._add_by_chunk(title, gb_s, "{:.2f}")
        self._add_by_chunk("of what this machine does at best", ratios, "{:.0%}")

    def _add_by_chunk(self, title: str, columns: dict[str, dict[int, float]], form: str) -> None:
        table = _table(title, "chunk", *columns)
        for chunk in next(iter(columns.values())):
            table.add_row(str(chunk), *(form.format(values[chunk]) for values in columns.values()))
        self.tables.append(table)

    def add_exposed(self, measured: dict[int, list[HandedOff]]) -> None:
        runs = len(next(iter(measured.values())))
        title = f"hand-offs of a 160M-parameter model, medians of {runs} runs"
        table = _table(title, "prompt, tokens", "prefill, ms", "exposed, ms", "exposed, share")
        for name in ("exposed_share", "exposed_ms", "prefill_ms"):
            self.values[name] = {}
        for prompt_tokens, some in measured.items():
            share = statistics.median(one.share for one in some)
            exposed_ms = 1000 * statistics.median(one.exposed for one in some)
            prefill_ms = 1000 * statistics.median(one.prefill for one in some)
            self.values["exposed_share"][str(prompt_tokens)] = round(share, 5)
            self.values["exposed_ms"][str(prompt_tokens)] = round(exposed_ms, 2)
            self.values["prefill_ms"][str(prompt_tokens)] = round(prefill_ms, 1)
            table.add_row(str(prompt_tokens), f"{prefill_ms:.0f}", f"{exposed_ms:.2f}", f"{share:.2%}")
        self.tables.append(table)

    def add_handoff(self, commits: list[float], cancels: Cancels) -> None:
        table = _table("hand-offs of a small model", "", "count", "p50, ms", "p99, ms")
        rows = {"commit": commits, "cancel": cancels.all}
        for name, seconds in rows.items():
            p50, p99 = (round(1000 * value, 2) for value in _percentiles(seconds))
            self.values[f"{name}_ms_p50"], self.values[f"{name}_ms_p99"] = p50, p99
            table.add_row(name, str(len(seconds)), f"{p50:.2f}", f"{p99:.2f}")
        self.values["commits"] = len(commits)
        self.values["cancels"] = {}
        for state, seconds in sorted(cancels.by_state.items()):
            p50, p99 = (round(1000 * value, 2) for value in _percentiles(seconds))
            self.values["cancels"][state] = {"count": len(seconds), "ms_p50": p50, "ms_p99": p99}
            table.add_row(f"cancel while {state}", str(len(seconds)), f"{p50:.2f}", f"{p99:.2f}")
        self.tables.append(table)


def _ratios(transports: tuple[str, ...]) -> dict[str, str]:
    """What is told of each transport, and of which rate. A network's own rate and that of the whole way are two."""
    told = {}
    for transport in transports:
        key = f"{transport}.of_{REFERENCES[transport]}"
        if transport in kv_bandwidth.THROUGH_NETWORK:
            told[key] = kv_bandwidth.slots_name(transport)
            key = f"{transport}.whole_of_{REFERENCES[transport]}"
        told[key] = transport
    return told


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _percentiles(values: list[float]) -> tuple[float, float]:
    """The 50th and the 99th."""
    if len(values) == 1:
        return values[0], values[0]
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]


def measure_bandwidth(plan: kv_bandwidth.Plan, runs: int, progress: Progress, results: Results) -> None:
    for each in (plan, kv_bandwidth.gpu_plan(plan)):
        if each is not None:
            what = f"bandwidth: {', '.join(each.transports)}"
            results.add_bandwidth(each, kv_bandwidth.measure(each, progress.track(range(runs), description=what)))


def measure_exposed(model: Path, prompt_sizes: list[int], runs: int, progress: Progress, results: Results) -> None:
    vocab_size = read_model(model).vocab_size
    with running_pair(model, max_model_len=max(prompt_sizes) + OUTPUT_TOKENS) as pair:
        hand_offs = HandOffs(pair, vocab_size)
        hand_offs.one(min(prompt_sizes))  # makes the pair, and warms up
        order = progress.track(prompt_sizes * runs, description="exposed time")
        results.add_exposed(hand_offs.exposed(order))


def measure_handoff(num_commits: int, num_cancels: int, progress: Progress, results: Results) -> None:
    vocab_size = read_model(BUNDLED_MODEL).vocab_size
    with running_pair(BUNDLED_MODEL, max_model_len=CANCELLED_PROMPT + CANCELLED_OUTPUT) as pair:
        hand_offs = HandOffs(pair, vocab_size)
        hand_offs.one(CANCELLED_PROMPT)
        commits = hand_offs.commits(progress.track(range(num_commits), description="commits"))
        numbers: Iterable[int] = progress.track(range(num_cancels), description="cancels")
        results.add_handoff(commits, hand_offs.cancels(numbers, CANCELLED_PROMPT, CANCELLED_OUTPUT))


def _check(chunk_sizes: list[int], num_tokens: int) -> None:
    if num_tokens % BLOCK_SIZE:
        raise typer.BadParameter(f"--tokens {num_tokens} is no multiple of the block size, {BLOCK_SIZE}")
    if max(chunk_sizes) > num_tokens:
        raise typer.BadParameter(f"--chunk-tokens {max(chunk_sizes)} is more than the --tokens moved, {num_tokens}")


def _check_prompts(model: Path, prompt_sizes: list[int]) -> None:
    limit = read_model(model).max_position_embeddings - OUTPUT_TOKENS
    if max(prompt_sizes) > limit:
        raise typer.BadParameter(f"--prompt-tokens {max(prompt_sizes)}: this model takes at most {limit}")


def main(
    runs: Annotated[int, typer.Option(min=1, help="Bandwidth and exposed time are medians over so many.")] = 5,
    part: Annotated[list[Part], typer.Option(help="Measure only this; repeat it for several.")] = PARTS,
    chunk_tokens: Annotated[
        list[int], typer.Option(min=1, help="Chunk sizes of the bandwidth part; repeat it.")
    ] = CHUNK_SIZES,
    tokens: Annotated[int, typer.Option(min=BLOCK_SIZE, help="Tokens of the prompt whose KV is moved.")] = 4096,
    passes: Annotated[int, typer.Option(min=1, help="How often it is moved in one measurement.")] = 4,
    prompt_tokens: Annotated[
        list[int], typer.Option(min=2, help="Prompt lengths of the exposed part; repeat it.")
    ] = PROMPT_SIZES,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            help="Keeps the random model of the exposed part, or has another one; without it: a temporary folder."
        ),
    ] = None,
    commits: Annotated[int, typer.Option(min=1, help="Hand-offs whose commit is timed.")] = 200,
    cancels: Annotated[int, typer.Option(min=3, help="Hand-offs that are cancelled.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Measures the hand-off of KV between a prefill and a decode worker."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what was started, too
    _check(chunk_tokens, tokens)
    plan = kv_bandwidth.Plan(("shm", "gloo"), chunk_sizes=tuple(chunk_tokens), num_tokens=tokens, passes=passes)
    results = Results()
    console = Console(stderr=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="baton-benchmark-") as folder,
            Progress(console=console, disable=as_json and not console.is_terminal) as progress,
        ):
            if Part.EXPOSED in part:
                model = make_model(Shape.MHA, model_dir or Path(folder))
                _check_prompts(model, prompt_tokens)
            if Part.BANDWIDTH in part:
                measure_bandwidth(plan, runs, progress, results)
            if Part.EXPOSED in part:
                measure_exposed(model, prompt_tokens, runs, progress, results)
            if Part.HANDOFF in part:
                measure_handoff(commits, cancels, progress, results)
    except (ProgramFailed, BatonError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    load = [round(value, 1) for value in os.getloadavg()]
    results.values |= {"runs": runs, "cores": os.cpu_count(), "load_average": load}
    if as_json:
        print(json.dumps(results.values))
        return
    for table in results.tables:
        Console().print(table)
    Console().print(f"{os.cpu_count()} cores, load average {load[0]} (the benchmark's own included)")


if __name__ == "__main__":
    typer.run(main)
