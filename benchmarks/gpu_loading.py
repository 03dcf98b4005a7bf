"""How fast weights come from a file to the device, held against disk, memory and bus: a part of `benchmarks.gpu`.

    python -m benchmarks.gpu_loading loading --device cuda

Plain reads fill memory of the host by several threads, from the system's cache and then from the disk; the bus copies
page-locked memory. Baton can be no faster than the lower of the two. On the CPU there is no bus, the file is small and
the figures mean nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import timed
from benchmarks.gpu_part import Clock, attempt, run_named
from engine.checkpoint import Checkpoint, TensorSlice
from engine.weight_stream import BUFFER_BYTES, NUM_THREADS, WeightStream

ROOT = Path(__file__).resolve().parent.parent
SIZE_BYTES, SMALL_BYTES = 1 << 30, 16 << 20
_TENSORS, _COLUMNS, _RANKS = 16, 4096, 8
_READ_BYTES = 4 << 20
_PASSES = 3


def loading(device: str, clock: Clock) -> None:
    """Gigabytes a second of each way, and Baton's share of what it could be."""
    on = torch.device(device)
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    wanted_bytes = SMALL_BYTES if device == "cpu" else min(SIZE_BYTES, shutil.disk_usage(folder).free // 4)
    with tempfile.TemporaryDirectory(prefix="loading-", dir=folder) as name:
        path = Path(name) / "model.safetensors"
        parts = write_weights(path, wanted_bytes)
        size, bus = path.stat().st_size, _bus_rate(on, wanted_bytes // 8)

        def compare(*, from_disk: bool) -> dict[str, Any]:
            before, passes = ((lambda: _drop(path)), 1) if from_disk else ((lambda: None), _PASSES)
            threads = (NUM_THREADS, 4 * NUM_THREADS)
            plain = max(size / _median_s(_plain_reader(path, n), before, passes) for n in threads)
            ours = size / _median_s(lambda: _load(path.parent, parts, on), before, passes)
            return {**_gb_s(plain=plain, loaded=ours, bus=bus), "share": round(ours / min(plain, bus), 3)}

        def load_columns() -> dict[str, Any]:
            cut = [TensorSlice(part.name, part.shape, 1, 0, _COLUMNS // _RANKS) for part in parts]
            took_s = _median_s(lambda: _load(path.parent, cut, on), lambda: None, _PASSES)
            return _gb_s(read=size / took_s, kept=size / _RANKS / took_s)

        attempt("from the system's cache", lambda: {**compare(from_disk=False), "mb": size >> 20})
        attempt(f"columns of one rank of {_RANKS}, from the cache", load_columns)
        attempt("from the disk", lambda: compare(from_disk=True))
        if device != "cpu":
            attempt("from the system's cache, by other buffers", lambda: _by_buffers(path.parent, parts, on, size))


def write_weights(path: Path, size_bytes: int) -> list[TensorSlice]:
    """A safetensors file of equal matrices in bfloat16, on the disk when this returns."""
    rows = max(1, size_bytes // (_TENSORS * 2 * _COLUMNS))
    tensor_bytes = rows * _COLUMNS * 2
    parts = [TensorSlice(f"w{i}", (rows, _COLUMNS)) for i in range(_TENSORS)]
    places = {part.name: [i * tensor_bytes, (i + 1) * tensor_bytes] for i, part in enumerate(parts)}
    header = {p.name: {"dtype": "BF16", "shape": p.shape, "data_offsets": places[p.name]} for p in parts}
    text = json.dumps(header).encode()
    data = os.urandom(min(tensor_bytes, 1 << 22))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in parts:
            for begin in range(0, tensor_bytes, len(data)):
                file.write(data[: tensor_bytes - begin])
        file.flush()
        os.fsync(file.fileno())
    return parts


def _drop(path: Path) -> None:
    """Has the next read come from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _median_s(work: Callable[[], None], before: Callable[[], None], passes: int) -> float:
    """What is measured in several passes is done once before."""
    seconds = []
    for _ in range(passes + (passes > 1)):
        before()
        seconds.append(timed(work))
    return statistics.median(seconds[-passes:])


def _gb_s(**rates: float) -> dict[str, float]:
    return {f"{name}_gb_s": float(f"{rate / 1e9:.3g}") for name, rate in rates.items()}


def _by_buffers(folder: Path, parts: list[TensorSlice], device: torch.device, size: int) -> dict[str, float]:
    def rate(mb: int, num_threads: int) -> float:
        def load() -> None:
            _load(folder, parts, device, WeightStream(device, buffer_bytes=mb << 20, num_threads=num_threads))

        return size / _median_s(load, lambda: None, _PASSES)

    ways = [(mb, NUM_THREADS) for mb in (4, 8, 32, 64)] + [(BUFFER_BYTES >> 20, n) for n in (2, 4, 16)]
    return _gb_s(**{f"{mb} MiB, {num_threads} threads": rate(mb, num_threads) for mb, num_threads in ways})


def _load(folder: Path, parts: list[TensorSlice], device: torch.device, stream: WeightStream | None = None) -> None:
    out = torch.empty(parts[0].local_shape, dtype=torch.bfloat16, device=device)
    with Checkpoint(folder, stream) as checkpoint:
        for part in parts:
            checkpoint.read(part, out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _plain_reader(path: Path, num_threads: int) -> Callable[[], None]:
    """Each thread has memory of its own, which is there before it is measured."""
    size_bytes = path.stat().st_size
    rooms = [np.ones(_READ_BYTES, np.uint8).data for _ in range(num_threads)]

    def read_all() -> None:
        with path.open("rb") as file, ThreadPoolExecutor(num_threads) as threads:

            def read(number: int) -> None:
                for begin in range(number * _READ_BYTES, size_bytes, num_threads * _READ_BYTES):
                    os.preadv(file.fileno(), [rooms[number]], begin)

            list(threads.map(read, range(num_threads)))

    return read_all


def _bus_rate(device: torch.device, size_bytes: int) -> float:
    source = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return size_bytes / _median_s(copy, lambda: None, _PASSES)


if __name__ == "__main__":
    run_named({"loading": loading})
