"""The workers that the router knows, and which of them may get new work.

Owns their clients, and reconciles them with the complete set that the controller names. A worker that is no longer
named gets nothing new and is closed when its last request has ended. Knows requests only by their number.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from cluster import rpc
from cluster.errors import ConfigError
from cluster.pb import worker_pb2
from cluster.settings import run_time_json_of
from cluster.text import ROLE_NUMBERS, role_name
from cluster.tls import ClientTls
from router.routing.candidate_pool import CandidatePool
from router.routing.prefix_index import Holders
from router.routing.worker_client import TICK_S, Speed, WorkerCallbacks, WorkerClient

PREFILL = worker_pb2.ROLE_PREFILL
DECODE = worker_pb2.ROLE_DECODE


MOST_AT_ONCE = 256
"""Workers whose silence is counted in one piece."""
MakeClient = Callable[..., WorkerClient]
"""Makes the client of a worker (`WorkerClient`), or one that is simulated."""


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
        open_channel: rpc.OpenChannel = rpc.create_channel,
        make_client: MakeClient = WorkerClient,
        rng: random.Random | None = None,
    ) -> None:
        self.tls: ClientTls | None = None
        """Used to connect to workers that are named from now on, as `token` is."""
        self.token = ""
        """The token that workers ask for; empty: none."""
        self.needs_prefill = needs_prefill
        self.has_served = False
        """A request has run on this router."""
        self._callbacks = callbacks
        self._open_channel = open_channel
        self._make_client = make_client
        self._rng = rng
        self._dead_after_s = dead_after_s
        self.holders = Holders()
        """Which worker has which blocks cached."""
        self._run_time_settings = ""
        self._num_requests = num_requests
        self._workers: dict[str, WorkerClient] = {}
        self._in_order: list[WorkerClient] = []
        """The workers in the order of their ids."""
        self._usual = {role: CandidatePool[WorkerClient]() for role in (PREFILL, DECODE)}
        """Workers that may get new work."""
        self._slow = {role: CandidatePool[WorkerClient]() for role in (PREFILL, DECODE)}
        """Workers that may get it only while no other of their role may."""
        self._pools: dict[WorkerClient, CandidatePool[WorkerClient]] = {}
        """The pool that each of those workers is in."""
        self._changed: dict[str, None] = {}
        self._lost: dict[str, bool] = {}
        """Findings of `has_lost` since a worker changed."""
        self._removed: dict[WorkerClient, None] = {}
        """In the order in which they were removed."""
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0

    def __iter__(self) -> Iterator[WorkerClient]:
        """Named workers, by id."""
        return iter(self._in_order)

    def __getitem__(self, worker_id: str) -> WorkerClient:
        return self._workers[worker_id]

    @property
    def num_workers(self) -> int:
        """Named workers."""
        return len(self._in_order)

    def ready(self, role: worker_pb2.Role) -> CandidatePool[WorkerClient]:
        """Workers that may get new work of a role: slow ones only while there is no other."""
        return self._usual[role] or self._slow[role]

    def on_load(self, worker_id: str) -> None:
        """The work that is placed on a worker has changed."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._changed[worker_id] = None
            pool = self._pools.get(worker)
            if pool is not None:
                pool.touch(worker_id)

    def on_requests(self, worker: WorkerClient) -> None:
        """A worker has got its first request, or has none any more."""
        if worker.speed is Speed.PROBED:
            self._on_worker(worker)
        if not self._num_requests(worker):
            self.close_idle()

    def take_changed(self) -> dict[str, WorkerClient | None]:
        """The workers whose load, role or state has changed since the last call; None: it is not named any more."""
        changed = {worker_id: self._workers.get(worker_id) for worker_id in self._changed}
        self._changed.clear()
        return changed

    def _on_worker(self, worker: WorkerClient) -> None:
        """Takes over what has changed of a worker: whether it may get new work, and which."""
        last, pool = self._pools.get(worker), self._pool_for(worker)
        if last is None or last is not pool or not last.has_sizes_of(worker):
            self._changed[worker.worker_id] = None
            self._lost.clear()
        if last is not None and last is not pool:
            del self._pools[worker]
            last.discard(worker)
        if pool is not None:
            self._pools[worker] = pool
            pool.add(worker)

    def _on_cost(self, worker: WorkerClient) -> None:
        pool = self._pools.get(worker)
        if pool is not None:
            pool.place(worker)

    def _pool_for(self, worker: WorkerClient) -> CandidatePool[WorkerClient] | None:
        if self._workers.get(worker.worker_id) is not worker or not worker.can_take_work:
            return None
        may_probe = worker.speed is Speed.PROBED and not self._num_requests(worker)
        pools = self._usual if worker.speed is Speed.USUAL or may_probe else self._slow
        return pools.get(worker.role)

    def candidates(self, revision: str = "") -> tuple[CandidatePool[WorkerClient], CandidatePool[WorkerClient]]:
        """(Prefill, decode): workers that may get new work of each kind now; only those with weights of this
        `revision`, unless it is empty.

        A role is a label: while no decode worker is ready, prefill workers do both; but not before a request has run
        here, because the decode workers of a starting cluster are still to come.
        """
        prefill, decode = self.ready(PREFILL), self.ready(DECODE)
        is_starting = not (self.has_served or decode)
        if revision:
            prefill, decode = prefill.of_revision(revision), decode.of_revision(revision)
        return (prefill, decode) if decode or is_starting else (CandidatePool(), prefill)

    def has_lost(self, revision: str) -> bool:
        """No worker has these weights any more or may yet turn out to have them, and others are ready. Never true of
        the empty revision."""
        if revision and revision not in self._lost:
            may_have = any(worker.info is None or worker.weights_revision == revision for worker in self)
            self._lost[revision] = not may_have and any(worker.is_ready for worker in self)
        return bool(revision) and self._lost[revision]

    @property
    def can_serve(self) -> bool:
        """A decode worker is ready, and a prefill worker where one is needed; or a prefill worker that does both."""
        has_prefill = bool(self.ready(PREFILL))
        return not self.needs_prefill or has_prefill if self.ready(DECODE) else self.has_served and has_prefill

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
                self._removed[self._workers.pop(worker.worker_id)] = None
                self._on_worker(worker)
            else:
                worker.role, worker.is_draining = address.role, address.is_draining
                self._update_settings(worker)
        for address in wanted.values():
            if address.worker_id not in self._workers:
                worker = self._make_client(
                    address.worker_id,
                    address.address,
                    address.role,
                    self._callbacks,
                    self._dead_after_s,
                    self.holders,
                    self.tls,
                    self.token,
                    open_channel=self._open_channel,
                    rng=self._rng,
                )
                worker.is_draining, worker.changed_settings = address.is_draining, self._settings_for(worker)
                self._workers[address.worker_id] = worker
                worker.on_change, worker.on_cost = self._on_worker, self._on_cost
                self._on_worker(worker)
                worker.start()
        self._in_order = sorted(self._workers.values(), key=lambda worker: worker.worker_id)
        self.close_idle()

    def change_settings(self, run_time_settings: str) -> None:
        """Sends settings that have changed to every worker, by its role, and to each when it connects from now on."""
        self._run_time_settings = run_time_settings
        for worker in self._workers.values():
            self._update_settings(worker)

    def _update_settings(self, worker: WorkerClient) -> None:
        command = self._settings_for(worker)
        if command is not None and command != worker.changed_settings:
            worker.changed_settings = command
            worker.send(command)

    def _settings_for(self, worker: WorkerClient) -> worker_pb2.Command | None:
        if not self._run_time_settings:
            return None
        text = run_time_json_of(role_name(worker.role), self._run_time_settings)
        return worker_pb2.Command(update_settings=worker_pb2.UpdateSettings(json=text))

    def start(self) -> None:
        """From now on silent workers are taken as lost, until `close`. No effect the second time."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._last_tick, self._timer = loop.time(), loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        elapsed_s, self._last_tick = now - self._last_tick, now
        self._timer = loop.call_later(TICK_S, self._tick)
        self._tick_some(iter([*self._in_order, *self._removed]), elapsed_s)

    def _tick_some(self, workers: Iterator[WorkerClient], elapsed_s: float) -> None:
        """Counts the silence of so many at once as hold nobody up, that of the others after what is due meanwhile."""
        some = list(islice(workers, MOST_AT_ONCE))
        for worker in some:
            worker.tick(elapsed_s)
        if len(some) == MOST_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._tick_some, workers, elapsed_s)

    def close_idle(self) -> None:
        """Closes the connections of removed workers that have no request any more."""
        for worker in [w for w in self._removed if not self._num_requests(w)]:
            del self._removed[worker]
            self._close(worker)

    async def close(self) -> None:
        """Ends every session."""
        if self._timer is not None:
            self._timer.cancel()
        for worker in [*self._workers.values(), *self._removed]:
            self._close(worker)
        self._workers.clear()
        self._in_order.clear()
        self._removed.clear()
        await asyncio.gather(*self._closing)

    def _close(self, worker: WorkerClient) -> None:
        task = asyncio.create_task(worker.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
