"""Collectives of CPU ranks of one machine: by Gloo, and in memory that the ranks share, in turn by the same processes.

    python -m benchmarks.collectives [--rounds 15]

512 floats are what a decode step of a small model sums after each layer, 4 MB what a prompt does. A line has the
medians of rank 0's rounds: microseconds of a call, and of its processor, which other programs disturb less.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.multiprocessing as processes
import typer
from torch.distributed import FileStore

from engine.tp import TPGroup, make_process_group

_CALLS: dict[str, Callable[[TPGroup, torch.Tensor], object]] = {
    "all_reduce": lambda tp, tensor: tp.all_reduce(tensor),
    "all_gather": lambda tp, tensor: tp.all_gather(tensor),
    "broadcast": lambda tp, tensor: tp.broadcast(tensor),
}
_SIZES = {"512 floats": (512, 100), "4 MB": (1 << 20, 5)}
"""Elements, and calls of a round."""
_WAYS = {"Gloo": "it is measured", "memory": ""}


def measure(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """One rank; the first prints."""
    torch.set_num_threads(1)
    groups = {
        way: make_process_group(FileStore(f"{folder}/{ranks}.{way}", ranks), rank, ranks, "cpu", obstacle=obstacle)
        for way, obstacle in _WAYS.items()
    }
    for size, (count, calls) in _SIZES.items():
        for name, call in _CALLS.items():
            found = {
                way: [_took(call, tp, torch.zeros(count), calls) for _ in range(rounds)] for way, tp in groups.items()
            }
            medians = {way: [statistics.median(clock) for clock in zip(*of, strict=True)] for way, of in found.items()}
            told = [f"{way} {wall:9.1f} us, processor {cpu:8.1f}" for way, (wall, cpu) in medians.items()]
            if rank == 0:
                print(f"{ranks} ranks, {name} of {size:10}: {'; '.join(told)}", flush=True)


def _took(
    call: Callable[[TPGroup, torch.Tensor], object], tp: TPGroup, tensor: torch.Tensor, calls: int
) -> list[float]:
    """Microseconds of one of several calls behind a first one: in all, and of this process's processor."""
    call(tp, tensor)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call(tp, tensor)
    return [1e6 * (time.perf_counter() - wall) / calls, 1e6 * (time.process_time() - cpu) / calls]


def main(rounds: Annotated[int, typer.Option(min=1)] = 15) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            processes.spawn(measure, (ranks, str(Path(folder)), rounds), nprocs=ranks)


if __name__ == "__main__":
    typer.run(main)
