"""A good request's latency alone and beside a flood of malformed ones, in one run.

The same request is made again and again, one at a time: for a while alone, then beside the flood, then alone once more.
The flood comes from a process of its own, at an even rate. Its requests are made before it begins, and each is tried
once: one that is served after all is not malformed and would measure the engine, so another takes its place. Every
answer to the flood is judged (a fault of ours is INTERNAL, UNKNOWN or UNAVAILABLE); every good answer must be the first
one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.nonsense import Call, make_call
from benchmarks.plain_cluster import ROOT, ProgramFailed, running_cluster
from benchmarks.report import bars, tell, telling_failures
from cluster import rpc
from tools.client import BatonClient, make_spec

FAULTS = ("INTERNAL", "UNKNOWN", "UNAVAILABLE")
CALL_S = 60.0
PROMPT = "First Citizen:"
_SHOWN_FAULTS = 5
_AT_ONCE = 64
_SERVED = ("OK", "DEADLINE_EXCEEDED")
_SIFT_S = 1.0
"""A request that runs for so long is served."""


def good_request(client: BatonClient, tokens: int) -> tuple[float, list[int]]:
    """Seconds to its last token, and the tokens."""
    spec = make_spec(PROMPT, max_output_tokens=tokens, temperature=0.0, ignore_eos=True, token_ids=True)
    spec.cache.bypass_prefix_cache = True
    begun = time.perf_counter()
    response = client.generate(spec, timeout_s=CALL_S)
    return time.perf_counter() - begun, list(response.outputs[0].token_ids)


class Measured:
    """Latencies of good requests, and how many were not the first one's."""

    def __init__(self, client: BatonClient, tokens: int) -> None:
        self._client = client
        self._tokens = tokens
        self._expected = good_request(client, tokens)[1]
        self.num_changed = 0

    def one(self) -> float:
        latency_s, tokens = good_request(self._client, self._tokens)
        self.num_changed += tokens != self._expected
        return latency_s


class Flood:
    """Sends calls on one connection, some at a time; how many ended how, and the first faults."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._may_run = asyncio.Semaphore(_AT_ONCE)
        self.codes: Counter[str] = Counter()
        self.faults: list[str] = []

    async def send(self, call: Call, timeout_s: float = CALL_S) -> str:
        """The name of the status that came back."""
        async with self._may_run:
            try:
                if call.method.server_streaming:
                    async for _ in self._channel.unary_stream(call.path)(call.data, timeout=timeout_s):
                        pass
                else:
                    await self._channel.unary_unary(call.path)(call.data, timeout=timeout_s)
                code = "OK"
            except grpc.aio.AioRpcError as error:
                code = error.code().name
                if code in FAULTS and len(self.faults) < _SHOWN_FAULTS:
                    self.faults.append(f"{call.path} ({call.how}): {code}: {error.details()}: {call.data[:200].hex()}")
        self.codes[code] += 1
        return code

    async def sift(self, random: Random, count: int) -> list[Call]:
        """So many calls that are refused."""
        refused: list[Call] = []
        while len(refused) < count:
            calls = [make_call(random) for _ in range(_AT_ONCE)]
            codes = await asyncio.gather(*(self.send(call, _SIFT_S) for call in calls))
            refused += [call for call, code in zip(calls, codes, strict=True) if code not in _SERVED]
        return refused[:count]

    async def run(self, calls: list[Call], rate: float) -> float:
        """Sends each when its time has come; seconds."""
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, call in enumerate(calls):
                await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
                group.create_task(self.send(call))
        return time.perf_counter() - begun


async def run_flood(address: str, requests: int, rate: float, seed: int) -> None:
    """The flood's process: says when it is ready, begins at a line of input, and prints what came of it."""
    async with rpc.create_channel(address) as channel:
        sifting = Flood(channel)
        calls = await sifting.sift(Random(seed), requests)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        flood = Flood(channel)
        seconds = await flood.run(calls, rate)
    told = {"codes": flood.codes, "sifted": sifting.codes, "faults": sifting.faults + flood.faults, "seconds": seconds}
    json.dump(told, sys.stdout)


@contextlib.contextmanager
def flooder(address: str, requests: int, rate: float, seed: int) -> Any:
    command = [sys.executable, "-m", "benchmarks.malformed", "--flood", address, "--requests", str(requests)]
    process = subprocess.Popen(
        [*command, "--rate", str(rate), "--seed", str(seed)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def measure(address: str, requests: int, rate: float, seed: int, good: int, tokens: int) -> dict[str, Any]:
    """What `--json` prints. Raises ProgramFailed when the flood cannot be made."""
    with BatonClient(address) as client, flooder(address, requests, rate, seed) as process, bars() as bar:
        alone_bar, flood_bar = bar.add_task("alone", total=2 * good), bar.add_task("beside the flood", total=requests)
        if process.stdout.readline().strip() != "ready":
            raise ProgramFailed("the flood's process ended before it began")
        measured = Measured(client, tokens)

        def alone() -> list[float]:
            latencies = []
            for _ in range(good):
                latencies.append(measured.one())
                bar.advance(alone_bar)
            return latencies

        before = alone()
        process.stdin.write("go\n")
        process.stdin.flush()
        begun, beside = time.perf_counter(), list[float]()
        while process.poll() is None:
            beside.append(measured.one())
            bar.update(flood_bar, completed=min(requests, (time.perf_counter() - begun) * rate))
        told = json.loads(process.stdout.read() or "{}")
        if not told:
            raise ProgramFailed("the flood's process ended without a word")
        return summary(told, before + alone(), beside) | {"good_changed": measured.num_changed}


def summary(told: dict[str, Any], alone: list[float], beside: list[float]) -> dict[str, Any]:
    quiet, loud = _latency(alone), _latency(beside)
    return {
        "requests": sum(told["codes"].values()),
        "requests_per_s": round(sum(told["codes"].values()) / told["seconds"], 1),
        "codes": dict(sorted(told["codes"].items())),
        "codes_of_sifting": dict(sorted(told["sifted"].items())),
        "faults": told["faults"],
        "alone_ms": quiet,
        "beside_ms": loud,
        "ratio": {name: round(loud[name] / quiet[name], 3) for name in ("p50", "p90", "p99")},
    }


def _latency(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return {name: round(1000 * cuts[at - 1], 2) for name, at in (("p50", 50), ("p90", 90), ("p99", 99))} | {
        "number": len(seconds)
    }


def show(found: dict[str, Any]) -> None:
    table = Table(title=f"{found['requests']} malformed requests, {found['requests_per_s']:g} a second")
    for column in ("good request", "number", "p50, ms", "p90, ms", "p99, ms"):
        table.add_column(column, justify="right")
    for name, key in (("alone", "alone_ms"), ("beside the flood", "beside_ms")):
        row = found[key]
        table.add_row(name, str(row["number"]), *(f"{row[at]:.1f}" for at in ("p50", "p90", "p99")))
    table.add_row("ratio", "", *(f"{ratio:.2f}" for ratio in found["ratio"].values()), style="bold")
    console = Console()
    console.print(table)
    console.print(", ".join(f"{code} {count}" for code, count in found["codes"].items()), markup=False)
    for fault in found["faults"]:
        console.print(fault, markup=False)


def main(
    requests: Annotated[int, typer.Option(min=1, help="Malformed ones.")] = 10_000,
    rate: Annotated[float, typer.Option(min=0.1, help="Of them in a second.")] = 100.0,
    good: Annotated[int, typer.Option(min=1, help="Good requests alone, before and again after the flood.")] = 100,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a good request.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the malformed requests.")] = 0,
    address: Annotated[str, typer.Option(help="A router that serves already; without it a cluster is started.")] = "",
    config: Annotated[Path, typer.Option(help="What to start.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    flood_at: Annotated[str, typer.Option("--flood", hidden=True)] = "",
) -> None:
    """Throws malformed requests at a cluster and measures a good one beside them."""
    if flood_at:
        asyncio.run(run_flood(flood_at, requests, rate, seed))
        return
    with telling_failures(), contextlib.nullcontext(address) if address else running_cluster(config) as where:
        found = measure(where, requests, rate, seed, good, tokens)
    tell(found, as_json, show)
    if found["faults"] or found["good_changed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
