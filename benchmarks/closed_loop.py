"""Clients in threads that ask again as soon as they are answered, undisturbed and while something is done to a cluster.

What `baton bench` cannot offer: streams of several sequences, clients that resume, a load that lasts as long as what is
done meanwhile, and each output compared with the undisturbed one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rich.progress import Progress

from benchmarks.outcome import Outcome
from benchmarks.plain_cluster import ProgramFailed
from cluster.pb import generation_pb2 as pb

Numbered = tuple[int, Outcome]
"""Which of the requests, and what came of it."""
F = TypeVar("F")


class ClosedLoop:
    """Requests 0, 1, ... over and over, so many at a time. `ask` never raises."""

    def __init__(self, ask: Callable[[pb.GenerationSpec], Outcome], specs: Sequence[pb.GenerationSpec], streams: int):
        self._ask, self._specs, self._streams = ask, specs, streams

    def run(self, numbers: Iterable[int], is_over: threading.Event, tick: Callable[[int], object]) -> list[Numbered]:
        """Until the numbers are, or it is, over; all have ended then. `tick` hears how many have so far."""
        left, ended = iter(numbers), list[Numbered]()

        def keep_going() -> None:
            while not is_over.is_set() and (number := next(left, None)) is not None:
                number %= len(self._specs)
                ended.append((number, self._ask(self._specs[number])))
                tick(len(ended))

        with ThreadPoolExecutor(self._streams) as pool:
            for future in [pool.submit(keep_going) for _ in range(self._streams)]:
                future.result()
        return ended

    def run_undisturbed(self, progress: Progress) -> dict[int, Outcome]:
        """Each once, by its number. Raises ProgramFailed when one fails."""
        bar, never = progress.add_task("undisturbed", total=len(self._specs)), threading.Event()
        ended = self.run(range(len(self._specs)), never, lambda count: progress.update(bar, completed=count))
        wrong = [f"request {n}: {o.problem}" for n, o in ended if o.problem]
        if wrong:
            raise ProgramFailed(f"undisturbed, {len(wrong)} requests failed: {wrong[0]}")
        return dict(ended)

    def run_disturbed(
        self, name: str, seconds: float, disturb: Callable[[threading.Event], list[F]], progress: Progress
    ) -> tuple[list[Numbered], list[F]]:
        """For so long. `disturb` is told when it is over, and returns what it has done."""
        is_over, bar, begun = threading.Event(), progress.add_task(name, total=seconds), time.perf_counter()
        timer = threading.Timer(seconds, is_over.set)
        timer.start()
        try:
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(disturb, is_over)
                ended = self.run(
                    itertools.count(),
                    is_over,
                    lambda _: progress.update(bar, completed=min(seconds, time.perf_counter() - begun)),
                )
                return ended, done.result()
        finally:
            timer.cancel()


def compare(reference: Mapping[int, Outcome], ended: Sequence[Numbered]) -> dict[str, Any]:
    """How many completed, and which were lost or are not the undisturbed ones."""
    lost = [f"request {n}: {o.problem}" for n, o in ended if o.problem]
    changed = [f"request {n}: {what}" for n, o in ended if not o.problem and (what := o.difference(reference[n]))]
    return {"completed": len(ended) - len(lost), "lost": lost, "changed": changed}
