"""Explores the two hand-off machines against each other, every interleaving within bounds: `make model-check`.

Depth first over all states of `handoff_model.Model`; a state is explored once, and known by a hash of 64 bits. Each of
these would be a violation, and is printed with the moves that led to it:

    a page is released, or read, or written, while an operation may touch it or nobody holds it
    a chunk counts as landed that was read out of pages which the other worker does not hold
    a slot is used by two chunks, or on a link that is down; a chunk is sent twice, or lands where another was expected
    a request is ready without all of its prompt, or ends twice on one side
    a machine raises
    nothing but faults could happen any more, and a request has no outcome, or a page or slot is not back
    the system can go round in a circle
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fetch_ring import Ring, RingBounds
from handoff_model import Model, Move
from handoff_state import Bounds, Violation

import prefill_worker.sender as sender_module

TWO_SENDERS: dict[str, Any] = {"num_attempts": 2, "other_sender": True}
TWO_REQUESTS: dict[str, Any] = {"num_requests": 2, "num_tokens": 1, "num_slots": 1}
LAYERED: dict[str, Any] = {"is_layered": True, "num_faults": 1}
SHARED: dict[str, Any] = {"shares_pages": True}
FETCH: dict[str, Any] = {"num_tokens": 2, "num_slots": 1}
CONFIGURATIONS = (
    Bounds("1 request, 3 chunks, 2 slots, 1 fault", num_faults=1),
    Bounds("1 request, 3 chunks, 1 slot, 2 faults", num_slots=1),
    Bounds("1 request, 2 chunks, 2 slots, 2 faults", num_tokens=2),
    Bounds(
        "layers sent during the last step, 1 fault", num_tokens=2, windows=(None,) * 3, is_layered=True, num_faults=1
    ),
    Bounds("a layer with a window and one without, 1 fault", windows=(2, None), is_layered=True, num_faults=1),
    Bounds("2 attempts, 1 sender, 3 chunks, 1 slot, 1 fault", num_attempts=2, num_slots=1, num_faults=1),
    Bounds("2 attempts, 2 senders, 3 chunks, 1 slot, 1 fault", **TWO_SENDERS, num_slots=1, num_faults=1),
    Bounds("2 attempts, 1 sender, 1 chunk, 2 faults", num_attempts=2, num_tokens=1, num_slots=1),
    Bounds("2 requests on one link, 1 chunk, 1 slot, 1 fault", **TWO_REQUESTS, num_faults=1),
    Bounds("a fetch, 2 chunks, 1 slot, 2 faults", **FETCH, num_kept=2),
    Bounds("a fetch of less than was known, 1 chunk, 2 faults", **FETCH, num_kept=1),
    Bounds("a fetch of what was evicted, 1 fault", **FETCH, num_kept=0, num_faults=1),
    Bounds("a fetch out of shared pages, 2 chunks, 1 slot, 1 fault", **FETCH, **SHARED, num_kept=2, num_faults=1),
    Bounds("shared pages, 1 request, 2 chunks, 2 slots, 2 faults", **SHARED, num_tokens=2),
    Bounds("shared pages, 1 request, 3 chunks, 1 slot, 1 fault", **SHARED, num_slots=1, num_faults=1),
    Bounds("shared pages, 2 attempts, 1 chunk, 1 fault", **SHARED, **TWO_SENDERS, num_tokens=1, num_faults=1),
    Bounds("shared pages, 2 requests, 1 chunk, 1 slot, 1 fault", **SHARED, **TWO_REQUESTS, num_faults=1),
    RingBounds("2 workers fetch from each other, 1 block each, 1 fault", num_faults=1),
    RingBounds("2 workers fetch from each other, 2 blocks each", pool_blocks=2),
    RingBounds("3 workers fetch in a circle, 1 block each", num_workers=3),
)
DEEP = (
    Bounds("2 attempts, 2 senders, 1 chunk, 2 faults", **TWO_SENDERS, num_tokens=1, num_slots=1),
    Bounds("1 request, 3 chunks, 2 slots, 3 faults", num_faults=3),
    Bounds("2 attempts, 1 sender, 3 chunks, 2 slots, 2 faults", num_attempts=2),
    Bounds("2 attempts, 2 senders, 3 chunks, 2 slots, 2 faults", **TWO_SENDERS),
    Bounds(
        "2 requests on one link, 2 chunks, 1 slot, 1 fault", num_requests=2, num_tokens=2, num_slots=1, num_faults=1
    ),
)
"""For `--deep`: the first takes minutes, the others hours."""


@dataclass
class Result:
    """What one exploration found."""

    bounds: Bounds | RingBounds
    num_states: int = 0
    num_moves: int = 0
    num_ends: int = 0
    violation: str = ""
    trace: tuple[Move, ...] = ()
    seconds: float = 0.0


def explore(
    bounds: Bounds | RingBounds, machines: tuple[Callable[..., object], Callable[..., object]] | None = None
) -> Result:
    """Every state within the bounds, or the first violation."""
    result, begun = Result(bounds), time.monotonic()
    sender_module.MIN_LAYERED_TOKENS = 1  # prompts here are short
    first: Any
    if isinstance(bounds, RingBounds):
        first = Ring(bounds)
    else:
        first = Model(bounds) if machines is None else Model(bounds, machines)  # type: ignore[arg-type]
    name = hash(first.freeze())
    seen, on_path = {name}, {name}
    stack = [(first, iter(first.fair_moves() + first.faults()), name)]
    path: list[Move] = []
    while stack:
        world, moves, name = stack[-1]
        move = next(moves, None)
        if move is None:
            stack.pop()
            on_path.discard(name)
            if path:
                path.pop()
            continue
        result.num_moves += 1
        try:
            after = world.after(move)
            reached = hash(after.freeze())
            if reached in on_path and reached != name:
                raise Violation("the system can go round in a circle")
            if reached in seen:
                continue
            seen.add(reached)
            fair = after.fair_moves()
            if not fair:
                result.num_ends += 1
                after.check_end()
        except Violation as violation:
            result.violation, result.trace = str(violation), (*path, move)
            break
        path.append(move)
        on_path.add(reached)
        stack.append((after, iter(fair + after.faults()), reached))
    result.num_states, result.seconds = len(seen), time.monotonic() - begun
    return result


def report(result: Result) -> None:
    found = "no violation" if not result.violation else f"VIOLATION: {result.violation}"
    print(
        f"{result.bounds.name:<55} {result.num_states:>9,} states {result.num_moves:>10,} moves "
        f"{result.num_ends:>7,} ends {result.seconds:6.1f} s  {found}",
        flush=True,
    )
    for number, move in enumerate(result.trace, start=1):
        print(f"  {number:>3}. {' '.join(str(part) for part in move)}")


def main(configurations: Sequence[Bounds | RingBounds]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # takes the pool's processes along
    results = []
    with multiprocessing.get_context("spawn").Pool(min(len(configurations), os.cpu_count() or 1)) as pool:
        for result in pool.imap_unordered(explore, configurations):
            report(result)
            results.append(result)
    states, moves = sum(r.num_states for r in results), sum(r.num_moves for r in results)
    violations = sum(bool(r.violation) for r in results)
    print(f"{states:,} states, {moves:,} moves, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(DEEP if "--deep" in sys.argv[1:] else CONFIGURATIONS))
