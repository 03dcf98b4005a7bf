"""Tokens a second of one stream and of many at once, through the whole path: gRPC, router, prefill, hand-off, decode.

Each round measures both, one right after the other, so that a machine that is busy with something else slows both; the
numbers reported are medians over the rounds. The load comes from one asyncio client in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.plain_cluster import ROOT, ProgramFailed, running_cluster
from benchmarks.report import tell, telling_failures
from cluster import rpc
from tools.bench.targets import GrpcTarget
from tools.bench.workload import Sample
from tools.client import make_spec

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Round:
    """One stream alone, then many together."""

    alone: Sample
    together: list[Sample]


def tokens_per_second(streams: list[Sample]) -> float:
    """All tokens over the time from the first start to the last end."""
    elapsed_s = max(s.ended_at for s in streams) - min(s.sent_at for s in streams)
    return sum(s.num_output_tokens for s in streams) / elapsed_s


async def run_stream(target: GrpcTarget, number: int, num_tokens: int) -> Sample:
    """A prompt that no cache knows, and exactly `num_tokens` tokens of output. Raises ProgramFailed for others."""
    prompt = [(number * 7 + i * 13) % 900 + 3 for i in range(PROMPT_TOKENS)]
    spec = make_spec(prompt, max_output_tokens=num_tokens, temperature=0.8, seed=number, ignore_eos=True)
    spec.cache.bypass_prefix_cache = True
    sample = Sample(PROMPT_TOKENS, time.perf_counter())
    await target.stream(spec, sample)
    sample.ended_at = time.perf_counter()
    if sample.error or sample.num_output_tokens != num_tokens:
        raise ProgramFailed(sample.error or f"{sample.num_output_tokens} tokens came, not {num_tokens}")
    return sample


async def measure(address: str, rounds: int, streams: int, num_tokens: int) -> list[Round]:
    """The first round warms up and is not in the result."""
    measured = []
    async with rpc.create_channel(address) as channel:
        target = GrpcTarget(channel)
        for number in range(rounds + 1):
            first_id = number * (streams + 1)
            alone = await run_stream(target, first_id, num_tokens)
            many = (run_stream(target, first_id + 1 + i, num_tokens) for i in range(streams))
            measured.append(Round(alone, await asyncio.gather(*many)))
    return measured[1:]


def summary(rounds: list[Round], streams: int) -> dict[str, float]:
    alone = statistics.median(tokens_per_second([r.alone]) for r in rounds)
    together = statistics.median(tokens_per_second(r.together) for r in rounds)
    return {
        "single_tok_s": round(alone, 1),
        f"streams_{streams}_tok_s": round(together, 1),
        "ratio": round(
            statistics.median(tokens_per_second(r.together) / tokens_per_second([r.alone]) for r in rounds), 2
        ),
        "ttft_ms_p50": round(1000 * statistics.median(r.alone.ttft_s for r in rounds), 2),
    }


def show(rounds: list[Round], streams: int) -> None:
    table = Table(title=f"{len(rounds)} rounds, {rounds[0].alone.num_output_tokens} tokens a stream")
    for column in ("round", "1 stream, tok/s", f"{streams} streams, tok/s", "ratio", "TTFT alone, ms"):
        table.add_column(column, justify="right")
    for number, r in enumerate(rounds, start=1):
        alone, together = tokens_per_second([r.alone]), tokens_per_second(r.together)
        times = f"{together / alone:.2f}", f"{1000 * r.alone.ttft_s:.1f}"
        table.add_row(str(number), f"{alone:.0f}", f"{together:.0f}", *times)
    median = [f"{value:.4g}" for value in summary(rounds, streams).values()]
    table.add_section()
    table.add_row("median", *median, style="bold")
    Console().print(table)
    load = os.getloadavg()[0]
    Console().print(f"{os.cpu_count()} cores, load average {load:.1f} (the benchmark's own included)")


def main(
    address: Annotated[str, typer.Option(help="A router that serves already; without it a cluster is started.")] = "",
    config: Annotated[Path, typer.Option(help="What to start.")] = ROOT / "cluster.yaml",
    num_gpus: Annotated[int, typer.Option(help="GPUs for the cluster that is started.")] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    streams: Annotated[int, typer.Option(min=2, help="How many at once.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each stream.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Measures one stream against many at once."""
    cluster = contextlib.nullcontext(address) if address else running_cluster(config, num_gpus)
    with telling_failures(), cluster as where:
        measured = asyncio.run(measure(where, rounds, streams, tokens))
    tell(summary(measured, streams), as_json, lambda _: show(measured, streams))


if __name__ == "__main__":
    typer.run(main)
