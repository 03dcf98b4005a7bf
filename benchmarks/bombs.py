"""How long good requests wait beside grammars made to stall the compiler, against an equal load of the processor.

    python -m benchmarks.bombs [--config cluster.yaml] [--rounds 5] [--seconds 8]

Each round measures short constrained requests, one after the other, for some seconds beside attackers, and for as long
beside processes that only compute: as many as grammars may compile at one time. Nothing fails here; it prints the
latencies of both, and the difference of each round's 99th percentiles.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.plain_cluster import ROOT, running_cluster
from cluster.errors import BatonError
from cluster.pb import generation_pb2 as pb
from tools.client import BatonClient

AT_ONCE = 2
"""Grammars of one tenant that a router compiles at one time."""
_BURN = "while True: sum(range(100000))"


def spec_of(regex: str, max_output_tokens: int) -> pb.GenerationSpec:
    sampling = pb.SamplingParams(temperature=0.8, seed=3, regex=regex)
    stopping = pb.StoppingCriteria(max_output_tokens=max_output_tokens)
    return pb.GenerationSpec(text="ROMEO:", sampling=sampling, stopping=stopping)


def ask_for(address: str, seconds: float) -> list[float]:
    """Latencies of good requests, in seconds."""
    taken, until = [], time.monotonic() + seconds
    with BatonClient(address) as client:
        while time.monotonic() < until:
            began = time.monotonic()
            client.generate(spec_of("([A-Z][a-z]{2,9} ){3}end", 40), timeout_s=60)
            taken.append(time.monotonic() - began)
    return taken


@contextlib.contextmanager
def attackers(address: str, numbers: Iterator[int]) -> Iterator[None]:
    """Each bomb is another one, and compiles for longer than the budget."""
    is_over = threading.Event()

    def attack() -> None:
        with BatonClient(address) as client:
            while not is_over.is_set():
                with contextlib.suppress(BatonError):
                    client.generate(spec_of(f"{next(numbers)}" + "a?" * 16_000, 4), timeout_s=60)

    threads = [threading.Thread(target=attack) for _ in range(2 * AT_ONCE)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def burners() -> Iterator[None]:
    """As much of the processor as the compiling of bombs takes."""
    processes = [subprocess.Popen(["nice", "-n", "5", sys.executable, "-c", _BURN]) for _ in range(AT_ONCE)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "cluster.yaml")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    differences, numbers = [], itertools.count()
    with running_cluster(given.config) as address:
        ask_for(address, 2.0)
        for number in range(given.rounds):
            with burners():
                beside_burners = ask_for(address, given.seconds)
            with attackers(address, numbers):
                beside_attackers = ask_for(address, given.seconds)
            differences.append(p99(beside_attackers) - p99(beside_burners))
            for name, taken in (("processor", beside_burners), ("attack", beside_attackers)):
                median, last = 1000 * statistics.median(taken), 1000 * p99(taken)
                print(
                    f"round {number}, {name}: {len(taken)} requests, p50 {median:.0f} ms, p99 {last:.0f} ms", flush=True
                )
    print(f"p99 beside the attack, less p99 beside the load: median {1000 * statistics.median(differences):.0f} ms")


if __name__ == "__main__":
    main()
