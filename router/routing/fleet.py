"""The workers that the router knows, and which of them may get new work.

Owns their clients, and reconciles them with the complete set that the controller names. A worker that is no longer
named gets nothing new and is closed when its last request has ended. Knows requests only by their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cluster.errors import ConfigError
from cluster.pb import worker_pb2
from cluster.text import ROLE_NUMBERS
from cluster.tls import ClientTls
from router.routing.prefix_index import Holders
from router.routing.worker_client import Speed, WorkerCallbacks, WorkerClient

PREFILL = worker_pb2.ROLE_PREFILL
DECODE = worker_pb2.ROLE_DECODE


@dataclass(frozen=True)
class WorkerAddress:
    """A worker's address, and the role of its new work."""

    worker_id: str
    address: str
    role: worker_pb2.Role
    is_draining: bool = False
    """It gets nothing new; its requests end there or move away."""

    @classmethod
    def parse(cls, text: str) -> WorkerAddress:
        """From `prefill:ID=HOST:PORT`; raises ConfigError."""
        role, colon, rest = text.partition(":")
        worker_id, equals, address = rest.partition("=")
        if role not in ROLE_NUMBERS or not (colon and equals and worker_id and address):
            raise ConfigError(f"workers: {text!r} is not of the form prefill:ID=HOST:PORT or decode:ID=HOST:PORT")
        return cls(worker_id, address, ROLE_NUMBERS[role])


class Fleet:
    """`num_requests(worker)`: how many requests it runs now. A worker silent for `dead_after_s` is lost."""

    def __init__(
        self,
        callbacks: WorkerCallbacks,
        num_requests: Callable[[WorkerClient], int],
        dead_after_s: float,
        *,
        needs_prefill: bool = True,
    ) -> None:
        self.tls: ClientTls | None = None
        """Used to connect to workers that are named from now on, as `token` is."""
        self.token = ""
        """The token that workers ask for; empty: none."""
        self.needs_prefill = needs_prefill
        self.has_served = False
        """A request has run on this router."""
        self._callbacks = callbacks
        self._dead_after_s = dead_after_s
        self._holders = Holders()
        self._changed_settings: worker_pb2.Command | None = None
        self._num_requests = num_requests
        self._workers: dict[str, WorkerClient] = {}
        self._removed: set[WorkerClient] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[WorkerClient]:
        """Named workers, by id."""
        return iter(sorted(self._workers.values(), key=lambda worker: worker.worker_id))

    def __getitem__(self, worker_id: str) -> WorkerClient:
        return self._workers[worker_id]

    def ready(self, role: worker_pb2.Role) -> list[WorkerClient]:
        """Workers that may get new work of a role: slow ones only while there is no other."""
        able = [w for w in self._workers.values() if w.role == role and w.can_take_work]
        return [w for w in able if w.speed is Speed.USUAL or self._may_probe(w)] or able

    def _has_ready(self, role: worker_pb2.Role) -> bool:
        """Whether `ready` has any, without making the list."""
        return any(w.role == role and w.can_take_work for w in self._workers.values())

    def _may_probe(self, worker: WorkerClient) -> bool:
        return worker.speed is Speed.PROBED and not self._num_requests(worker)

    def candidates(self, revision: str = "") -> tuple[list[WorkerClient], list[WorkerClient]]:
        """(Prefill, decode): workers that may get new work of each kind now; only those with weights of this
        `revision`, unless it is empty.

        A role is a label: while no decode worker is ready, prefill workers do both; but not before a request has run
        here, because the decode workers of a starting cluster are still to come.
        """
        prefill, decode = self.ready(PREFILL), self.ready(DECODE)
        is_starting = not (self.has_served or decode)
        if revision:
            prefill, decode = ([w for w in group if w.weights_revision == revision] for group in (prefill, decode))
        return (prefill, decode) if decode or is_starting else ([], prefill)

    def has_lost(self, revision: str) -> bool:
        """No worker has these weights any more or may yet turn out to have them, and others are ready. Never true of
        the empty revision."""
        may_have = any(worker.info is None or worker.weights_revision == revision for worker in self)
        return bool(revision) and not may_have and any(worker.is_ready for worker in self)

    @property
    def can_serve(self) -> bool:
        """A decode worker is ready, and a prefill worker where one is needed; or a prefill worker that does both."""
        if not self._has_ready(DECODE):
            return self.has_served and self._has_ready(PREFILL)
        return not self.needs_prefill or self._has_ready(PREFILL)

    @property
    def weights_revision(self) -> str:
        """The revision that the workers report, one of them while they change; empty while none has connected."""
        return next((worker.weights_revision for worker in self if worker.weights_revision), "")

    def set_workers(self, addresses: Iterable[WorkerAddress]) -> None:
        """Makes these the complete set. A worker whose address stays keeps its session, whatever its role becomes."""
        wanted = {address.worker_id: address for address in addresses}
        for worker in list(self._workers.values()):
            address = wanted.get(worker.worker_id)
            if address is None or address.address != worker.address:
                self._removed.add(self._workers.pop(worker.worker_id))
            else:
                worker.role, worker.is_draining = address.role, address.is_draining
        for address in wanted.values():
            if address.worker_id not in self._workers:
                worker = WorkerClient(
                    address.worker_id,
                    address.address,
                    address.role,
                    self._callbacks,
                    self._dead_after_s,
                    self._holders,
                    self.tls,
                    self.token,
                )
                worker.is_draining, worker.changed_settings = address.is_draining, self._changed_settings
                self._workers[address.worker_id] = worker
                worker.start()
        self.close_idle()

    def change_settings(self, run_time_settings: str) -> None:
        """Sends settings that have changed to every worker, and to each when it connects from now on."""
        command = worker_pb2.Command(update_settings=worker_pb2.UpdateSettings(json=run_time_settings))
        if command == self._changed_settings:
            return
        self._changed_settings = command
        for worker in self._workers.values():
            worker.changed_settings = self._changed_settings
            worker.send(self._changed_settings)

    def close_idle(self) -> None:
        """Closes the connections of removed workers that have no request any more."""
        for worker in [w for w in self._removed if not self._num_requests(w)]:
            self._removed.discard(worker)
            self._close(worker)

    async def close(self) -> None:
        """Ends every session."""
        for worker in [*self._workers.values(), *self._removed]:
            self._close(worker)
        self._workers.clear()
        self._removed.clear()
        await asyncio.gather(*self._closing)

    def _close(self, worker: WorkerClient) -> None:
        task = asyncio.create_task(worker.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
