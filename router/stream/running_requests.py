"""The requests that workers hold: which of them on which worker, what they have charged, and how they leave.

Owns the tables; decides nothing. `Attempt` is one attempt at a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.pb import worker_pb2
from router.routing.load_tracker import Charge, Placement
from router.routing.worker_client import WorkerClient
from router.routing.worker_commands import cancel_command
from router.stream.request import LiveRequest
from router.stream.retry import RetryState


@dataclass
class Attempt:
    """An attempt that workers have been told of."""

    live: LiveRequest
    placement: Placement
    charge: Charge
    prefill: WorkerClient | None
    """None: the decode worker computes the prompt."""
    workers: list[WorkerClient]
    """Those that hold something for it: at first both, then the decode worker."""
    trail: RetryState
    is_move: bool = False
    """`prefill` is where it decoded before, and hands it over as it was."""

    def tell_to_drop(self, sequence_index: int | None = None, *, by: WorkerClient | None = None) -> None:
        """The request, or one sequence of it, at each of its workers except `by`."""
        command = cancel_command(self.live.key, sequence_index)
        for worker in self.workers:
            if worker is not by:
                worker.send(command)


class AttemptTable:
    """By generation id. `on_free` is called when the last request has left a worker."""

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._running: dict[str, Attempt] = {}
        self._on_worker: dict[WorkerClient, set[str]] = {}
        self._on_free = on_free

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Attempt]:
        """Of a copy: requests may leave meanwhile."""
        return iter(list(self._running.values()))

    def get(self, generation_id: str) -> Attempt | None:
        return self._running.get(generation_id)

    def add(self, running: Attempt) -> None:
        generation_id = running.live.key.request_id
        self._running[generation_id] = running
        for worker in running.workers:
            self._on_worker.setdefault(worker, set()).add(generation_id)

    def on(self, worker: WorkerClient) -> list[Attempt]:
        """Those that a worker holds something for."""
        return [self._running[generation_id] for generation_id in self._on_worker.get(worker, ())]

    def num_on(self, worker: WorkerClient) -> int:
        return len(self._on_worker.get(worker, ()))

    def handing_over(self) -> Counter[tuple[str, str]]:
        """Of each prefill and decode worker, requests that both hold."""
        both = [r for r in self._running.values() if r.prefill is not None and r.prefill in r.workers]
        return Counter((r.placement.computing_id, r.placement.decode_id) for r in both)

    def find(self, worker: WorkerClient, key: worker_pb2.RequestKey) -> Attempt | None:
        """None for what comes late: of a request or an attempt that is over, or of a worker that has left it."""
        running = self._running.get(key.request_id)
        if running is None or running.live.key.attempt != key.attempt or worker not in running.workers:
            return None
        return running

    def leave(self, running: Attempt) -> None:
        """Gives back everything that the request had here."""
        del self._running[running.live.key.request_id]
        running.charge.all_done()
        for worker in list(running.workers):
            self.part(running, worker)

    def part(self, running: Attempt, worker: WorkerClient) -> None:
        """The worker holds nothing for it any more."""
        running.workers.remove(worker)
        ids = self._on_worker[worker]
        ids.discard(running.live.key.request_id)
        if not ids:
            del self._on_worker[worker]
            self._on_free()
