"""The requests that workers hold: which of them on which worker. Owns the tables; decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from cluster.pb import worker_pb2
from router.routing.worker_client import WorkerClient
from router.stream.request import LiveRequest


class RunningRequests:
    """By generation id. `on_free` is called when the last request has left a worker."""

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._running: dict[str, LiveRequest] = {}
        self._on_worker: dict[WorkerClient, set[str]] = {}
        self._on_free = on_free

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterates over a copy: requests may be removed meanwhile."""
        return iter(list(self._running.values()))

    def get(self, generation_id: str) -> LiveRequest | None:
        return self._running.get(generation_id)

    def add(self, live: LiveRequest) -> None:
        """Adds a request whose attempt has just been placed."""
        generation_id = live.key.request_id
        self._running[generation_id] = live
        for worker in live.attempt.workers:
            self._on_worker.setdefault(worker, set()).add(generation_id)

    def on(self, worker: WorkerClient) -> list[LiveRequest]:
        """Lists the requests that a worker holds something for."""
        return [self._running[generation_id] for generation_id in self._on_worker.get(worker, ())]

    def num_on(self, worker: WorkerClient) -> int:
        return len(self._on_worker.get(worker, ()))

    def handing_over(self) -> Counter[tuple[str, str]]:
        """Counts, for each prefill and decode worker, the requests that both hold."""
        attempts = [live.attempt for live in self._running.values()]
        both = [a.placement for a in attempts if a.prefill is not None and a.prefill in a.workers]
        return Counter((placement.computing_id, placement.decode_id) for placement in both)

    def find(self, worker: WorkerClient, key: worker_pb2.RequestKey) -> LiveRequest | None:
        """None for what comes late: for a request or an attempt that is over, or from a worker that was released."""
        live = self._running.get(key.request_id)
        if live is None or live.key.attempt != key.attempt or worker not in live.attempt.workers:
            return None
        return live

    def remove(self, live: LiveRequest) -> None:
        """Removes a request from its workers and gives back everything that it had charged."""
        del self._running[live.key.request_id]
        live.attempt.charge.all_done()
        for worker in list(live.attempt.workers):
            self.release(live, worker)

    def release(self, live: LiveRequest, worker: WorkerClient) -> None:
        """Records that the worker holds nothing for the request any more."""
        live.attempt.workers.remove(worker)
        ids = self._on_worker[worker]
        ids.discard(live.key.request_id)
        if not ids:
            del self._on_worker[worker]
            self._on_free()
