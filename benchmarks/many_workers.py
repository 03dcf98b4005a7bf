"""What workers cost a router while it places nothing: their reports, the looks at each of them, and what is known of
their prefix caches.

    python benchmarks/many_workers.py --workers 4096 --json

The dispatcher is the router's own; workers are simulated and have no connection, so gRPC is not in the figures. Times
are of the processor, medians of several.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console

from benchmarks.decisions import BLOCK_SIZE, SimulatedWorker
from benchmarks.report import tell
from cluster.pb import worker_pb2
from cluster.prefix_hash import HASH_BYTES
from cluster.settings import RouterSettings
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import DECODE, PREFILL, WorkerAddress
from router.routing.prefix_index import Holders, PrefixIndex
from router.routing.stalls import TICK_S as STALL_TICK_S
from router.routing.worker_client import HEARTBEAT_S, TICK_S

_REPORTS_PER_S = 5
"""Of a worker that computes."""
_NUM_COPIES = 2
"""Workers that hold each block."""
_BLOCKS_AT_ONCE = 16


class SilentWorker(SimulatedWorker):
    """A session in which nothing is sent but what the benchmark sends."""

    def start(self) -> None:
        super().start()
        self._stream = asyncio.get_running_loop().create_future()


def _milliseconds(action: Callable[[], object], rounds: int) -> float:
    times = list[float]()
    for _ in range(rounds):
        begun = time.thread_time()
        action()
        times.append(1000 * (time.thread_time() - begun))
    return statistics.median(times)


async def measure_upkeep(num_workers: int, rounds: int) -> dict[str, Any]:
    """Milliseconds for all workers together, and the share of a processor that this is at the usual rates."""
    dispatcher = Dispatcher(RouterSettings.from_values(model_path="", port=0), lambda: None, make_client=SilentWorker)
    roles = (PREFILL, DECODE)
    dispatcher.set_workers(WorkerAddress(f"w{i}", f"w{i}:1", roles[i % 2]) for i in range(num_workers))
    workers: list[SilentWorker] = list(dispatcher.fleet)  # type: ignore[arg-type]
    draw = random.Random(0)

    def report() -> None:
        for worker in workers:
            worker.report(draw.uniform(0.9, 1.1))

    def beat() -> None:
        for worker in workers:
            worker._read(worker_pb2.EventBatch())

    def look_for_stalls() -> None:
        dispatcher._stalls._tick()
        assert dispatcher._stalls._timer is not None
        dispatcher._stalls._timer.cancel()

    def look_for_silence() -> None:
        for worker in workers:
            worker.tick(TICK_S)

    for worker in workers:
        worker.open(1000, [])
    report()
    gc.collect()
    gc.freeze()  # as `router.collector` does
    actions: dict[str, tuple[Callable[[], object], float]] = {
        "reports": (report, _REPORTS_PER_S),
        "heartbeats": (beat, 1 / HEARTBEAT_S),
        "silence": (look_for_silence, 1 / TICK_S),
        "stalls": (look_for_stalls, 1 / STALL_TICK_S),
        "slowness": (lambda: dispatcher._slow._judge(1.0), 1.0),
    }
    found: dict[str, Any] = {}
    for name, (action, per_s) in actions.items():
        all_ms = _milliseconds(action, rounds)
        found[name] = {"all_ms": round(all_ms, 2), "share": round(all_ms * per_s / 1000, 4)}
    await dispatcher.drain(0.0)
    await dispatcher.fleet.close()
    return found


def measure_index(num_workers: int, num_blocks: int) -> dict[str, Any]:
    """Takes in the events of `num_blocks` cached blocks of which each is held by two workers, a few at a time."""
    draw, holders = random.Random(0), Holders()
    each = num_blocks // num_workers
    indices = [PrefixIndex(BLOCK_SIZE, each, holders, f"w{i}") for i in range(num_workers)]
    events = list[tuple[PrefixIndex, worker_pb2.CacheEvents]]()
    for index in indices:
        index.apply(worker_pb2.CacheEvents(snapshot=True))
    for first in range(0, num_workers - 1, _NUM_COPIES):
        for number in range(-(-each // _BLOCKS_AT_ONCE)):
            count = min(_BLOCKS_AT_ONCE, each - number * _BLOCKS_AT_ONCE)
            stored = [draw.randbytes(HASH_BYTES) for _ in range(count)]
            events += [
                (index, worker_pb2.CacheEvents(sequence_number=number + 1, stored=stored))
                for index in indices[first : first + _NUM_COPIES]
            ]
    draw.shuffle(events)
    events.sort(key=lambda event: event[1].sequence_number)
    before_bytes, begun, slowest_s = _resident_bytes(), time.thread_time(), 0.0
    for index, event in events:
        at = time.thread_time()
        assert index.apply(event)
        slowest_s = max(slowest_s, time.thread_time() - at)
    elapsed_s, used_bytes = time.thread_time() - begun, _resident_bytes() - before_bytes
    num_held = sum(len(index.hashes) for index in indices)
    return {
        "blocks": num_held,
        "taken_in_s": round(elapsed_s, 2),
        "slowest_ms": round(1000 * slowest_s, 3),
        "bytes_per_block": round(used_bytes / num_held),
    }


def _resident_bytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def show(found: dict[str, Any]) -> None:
    console, index = Console(), found["index"]
    for name, each in found["upkeep"].items():
        console.print(
            f"{name:>10}: {each['all_ms']:.1f} ms for {found['workers']} workers, {each['share']:.1%} of a processor"
        )
    console.print(
        f"{index['blocks']} cached blocks: taken in within {index['taken_in_s']:.1f} s, at most "
        f"{index['slowest_ms']:.1f} ms for {_BLOCKS_AT_ONCE} of them; {index['bytes_per_block']} bytes each"
    )


def main(
    workers: Annotated[int, typer.Option(min=2)] = 4096,
    blocks: Annotated[int, typer.Option(min=1000, help="Cached by all workers together.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1)] = 21,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Measures what so many workers cost a router that places nothing."""
    found = {
        "workers": workers,
        "index": measure_index(workers, blocks),
        "upkeep": asyncio.run(measure_upkeep(workers, rounds)),
    }
    tell(found, as_json, show)


if __name__ == "__main__":
    typer.run(main)
