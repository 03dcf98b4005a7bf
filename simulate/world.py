"""One cluster in virtual time: a real router, real workers on simulated ranks, and clients that bring a load.

    Cluster(spec, seed).run(requests) -> RunResult

One process and one thread: the same spec, seed and requests give the same run, event by event. After every run its
invariants are checked: each request has ended, with the tokens of the undisturbed run, and no worker holds anything.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from cluster.config.schema import RouterSection, SloSection, TransferSection
from cluster.settings import RouterSettings
from cluster.text import ROLE_NUMBERS
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import WorkerAddress
from router.routing.worker_client import WorkerClient
from simulate.api_client import ApiClient
from simulate.client import RequestOutcome, SimRequest, run_client, watch_client
from simulate.controller import ControllerSpec, SimulatedController, config_of, serve_control
from simulate.faults import FaultPlan
from simulate.judgement import check_run
from simulate.links import DirectClient, beat
from simulate.network import Host, Network
from simulate.pairs import SimulatedPair
from simulate.report import RunResult, WorkerUse
from simulate.router import SimulatedRouter, SimulatedStore
from simulate.virtual_loop import VirtualLoop
from simulate.watched_router import WatchedDispatcher
from simulate.wire import Cores, Flows
from simulate.worker import SimulatedWorker, WorkerSpec
from simulate.workload import RequestShape

__all__ = ["Cluster", "ClusterSpec", "RunResult", "SimRequest", "WorkerSpec", "WorkerUse"]

Fidelity = Literal["full", "fast"]
ROUTER = "router:1"
"""Address of the router where there is one."""
START_S = 1.0
"""The workers have connected by then, and the run begins."""
SETTLE_S = 2.0
"""After the last request has ended: cancels arrive, transfers drain, pairs close."""
HEAL_S = 20.0
"""After the last fault: silence is noticed, workers are connected again, deadlines of transfers pass."""


@dataclass(frozen=True)
class ClusterSpec:
    """Workers, and what the configuration says of them and of the router."""

    workers: tuple[WorkerSpec, ...]
    router: RouterSection = field(default_factory=lambda: RouterSection(http_port=None))
    transfer: TransferSection = field(default_factory=TransferSection)
    slo: SloSection = field(default_factory=SloSection)
    message_s: float = 200e-6
    """Seconds of each message between two processes."""
    client_s: float = 0.0
    """The same between a client and the router."""
    cores: int | None = None
    """All programs run on one machine of so many cores: steps and messages wait for one another. None: on machines of
    their own."""
    jitter: float = 0.0
    """Messages, steps, gathers and landings take up to so many times longer than usual, each by chance: so nearly every
    order of things comes up."""
    controller: ControllerSpec | None = None
    """None: there is none, and the router was told of its workers at its start."""
    num_routers: int = 0
    """Routers with their API, and the store that they share; 0: clients read of one dispatcher, in its process."""
    is_watched: bool = False
    """Each read of KV and each token that a worker tells is checked, and that no engine sleeps over its work."""
    fidelity: Fidelity = "full"
    """full: every step, every token and every sign of life; fast: steps in which nothing happens are taken in one go,
    and KV has no content. Faults need the full one."""

    @classmethod
    def of_ratio(cls, prefill: int, decode: int, worker: WorkerSpec | None = None, **values: object) -> ClusterSpec:
        """So many workers of each role, all like `worker`; `values` are other fields."""
        like = worker or WorkerSpec("", "decode")
        roles = [("prefill", i) for i in range(prefill)] + [("decode", i) for i in range(decode)]
        workers = tuple(replace(like, worker_id=f"{role}-{i}", role=role) for role, i in roles)
        return cls(workers, **values)  # type: ignore[arg-type]  # checked where it is called


class _ErrorLog(logging.Handler):
    """Keeps what is logged as an error: Baton catches an exception where it fails one request or one session only."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        why = "" if error is None else f": {type(error).__name__}: {error}"
        self.messages.append(record.getMessage() + why)

    def raise_if_any(self, cause: BaseException | None = None) -> None:
        if self.messages:
            raise AssertionError(f"errors were logged, first: {self.messages[0]}") from cause


class Cluster:
    """Runs once."""

    def __init__(
        self, spec: ClusterSpec, seed: int = 0, *, faults: FaultPlan | None = None, keeps_trace: bool = False
    ) -> None:
        """Raises ValueError for a spec without a decode worker, or with two workers of one name."""
        names = [worker.worker_id for worker in spec.workers]
        if len(set(names)) < len(names) or not any(worker.role == "decode" for worker in spec.workers):
            raise ValueError(f"a cluster needs a decode worker, and a name for each worker, not {', '.join(names)}")
        if spec.fidelity == "fast" and (faults is not None or spec.num_routers or spec.is_watched):
            raise ValueError("faults, routers with their API and a watch over tokens need the full fidelity")
        if spec.cores is not None and (faults is not None or spec.num_routers or spec.fidelity == "fast"):
            raise ValueError("shared cores need the full fidelity, without faults and routers with their API")
        self.spec = spec
        self.seed = seed
        self.random = random.Random(seed)
        self.loop = VirtualLoop()  # type: ignore[abstract]  # sockets and processes are not simulated
        self.flows = Flows(self.loop)
        self.cores = None if spec.cores is None else Cores(self.loop, spec.cores)
        self.network = Network(self.loop, spec.message_s, self.cores)
        self.network.spread, self.network.strikes = self.spread, self.strikes
        self.pairs: dict[str, SimulatedPair] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self.store = SimulatedStore(self.loop)
        self.routers: dict[str, SimulatedRouter] = {}
        self._labels: dict[str, tuple[str, bool]] = {}
        """Workers that routers are told other things of than their specs say: role, and whether they drain."""
        self._dispatcher: Dispatcher
        self._on_end: Callable[[RequestOutcome], None]
        self._num_left: int
        """Requests that have not ended."""
        self._has_ended: asyncio.Event
        """Set once all have."""
        self._names = itertools.count(1)
        self._trace: list[str] | None = [] if keeps_trace else None
        self._num_lives = itertools.count(1)
        self._faults = faults or FaultPlan()
        self.num_faults: Counter[str] = Counter()
        """Faults that took effect."""
        self.controller: SimulatedController | None = None
        """Its present life, or its last one."""

    def run(
        self,
        requests: Iterable[RequestShape | SimRequest],
        limit_s: float = float("inf"),
        on_end: Callable[[RequestOutcome], None] = lambda outcome: None,
    ) -> RunResult:
        """Calls `on_end` with each request that has ended. Raises Stuck when one has not at `limit_s` of virtual time,
        AssertionError for whatever went wrong."""
        self._on_end = on_end
        begun = time.perf_counter()
        load = [each if isinstance(each, SimRequest) else SimRequest(each) for each in requests]
        load.sort(key=lambda request: request.at_s)
        errors = _ErrorLog()
        logging.getLogger().addHandler(errors)
        try:
            outcomes, duration_s = self.loop.run(self._main(load), START_S + limit_s)
        except Exception as error:
            errors.raise_if_any(error)
            raise
        finally:
            logging.getLogger().removeHandler(errors)
        errors.raise_if_any()
        return RunResult(
            tuple(outcomes),
            tuple(self._use_of(worker) for worker in self.workers.values()),
            duration_s,
            time.perf_counter() - begun,
            self.loop.num_calls,
            tuple(self._trace or ()),
            dict(self.num_faults),
            () if self.controller is None else tuple(self.controller.splits),
        )

    # What its parts share

    @property
    def is_watched(self) -> bool:
        return self.spec.is_watched

    @property
    def is_fast(self) -> bool:
        return self.spec.fidelity == "fast"

    @property
    def keeps_trace(self) -> bool:
        return self._trace is not None

    def note(self, what: str) -> None:
        """Adds a line to the trace, if there is one."""
        if self._trace is not None:
            self._trace.append(f"{self.loop.time():.9f} {what}")

    def fresh_name(self) -> str:
        return f"{next(self._names):x}"

    def strikes(self, fault: str) -> bool:
        """Whether a fault that has a rate happens now; one that does is counted."""
        rate = self._faults.rates.get(fault, 0.0)
        has_struck = rate > 0 and self.loop.time() < START_S + self._faults.until_s and self.random.random() < rate
        if has_struck:
            self.count(fault)
        return has_struck

    def spread(self) -> float:
        """Returns how many times longer than usual the next thing takes."""
        most = 1.0 + self.spec.jitter
        return 1.0 if most == 1.0 else most ** self.random.random()

    def count(self, fault: str) -> None:
        """A fault has taken effect."""
        self.num_faults[fault] += 1
        self.note(f"fault {fault}")

    # The run

    async def _main(self, requests: list[SimRequest]) -> tuple[list[RequestOutcome], float]:
        self._begin()
        await asyncio.sleep(START_S - self.loop.time())
        for fault in self._faults.events:
            self.loop.call_later(fault.at_s, fault.strike, self)
        self._num_left, self._has_ended = len(requests), asyncio.Event()
        if not requests:
            self._has_ended.set()
        outcomes = await self._bring(requests)
        duration_s = self.loop.time() - START_S
        until_s = self._faults.until_s
        await asyncio.sleep(max(0.0, until_s - duration_s) + (HEAL_S if until_s else SETTLE_S))
        if self.controller is not None:
            self.controller.check()
        check_run(self, outcomes, self.spec.router.queue_timeout_s)
        return outcomes, duration_s

    def start(self, spec: WorkerSpec) -> SimulatedWorker:
        """Begins a life of a worker."""
        life = str(next(self._num_lives))
        worker = self.workers[spec.worker_id] = SimulatedWorker(self, spec, self.spec.transfer, self.spec.slo, life)
        return worker

    def _begin(self) -> None:
        """Starts everything; where there is a controller, that starts the workers."""
        if self.spec.controller is not None:
            host = Host(self.network, ROUTER)
            self._dispatcher = self._new_dispatcher(host)
            serve_control(host, self._dispatcher, self._settings())
            self.start_controller()
            return
        for worker in self.spec.workers:
            self.start(worker)
        for number in range(self.spec.num_routers):
            self.start_router(f"router-{number}")
        if not self.routers:
            self._dispatcher = self._new_dispatcher(Host(self.network, ROUTER))
            self._dispatcher.set_workers(self._addresses())

    def start_controller(self) -> None:
        """Begins a life of the controller."""
        spec = self.spec
        assert spec.controller is not None
        config = config_of(spec.controller, spec.workers, spec.router, spec.transfer, spec.slo)
        self.controller = SimulatedController(
            self, spec.controller, config, spec.workers, ROUTER, begins_at=START_S, before=self.controller
        )
        self.controller.start()

    def start_router(self, name: str) -> SimulatedRouter:
        """Begins a life of a router."""
        router = self.routers[name] = SimulatedRouter(
            self,
            name,
            self._settings(),
            self._addresses(),
            min(worker.max_model_len for worker in self.spec.workers),
            self._dispatcher_class,
        )
        return router

    @property
    def dispatchers(self) -> list[Dispatcher]:
        """The dispatchers of the routers that run."""
        if not self.routers:
            return [self._dispatcher]
        return [router.dispatcher for router in self.routers.values() if not router.is_dead]

    def label(self, worker_id: str, role: str, *, is_draining: bool = False) -> None:
        """Routers are told so of a worker from now on."""
        self._labels[worker_id] = role, is_draining
        for dispatcher in self.dispatchers:
            dispatcher.set_workers(self._addresses())

    def any_router(self) -> SimulatedRouter | None:
        running = [router for router in self.routers.values() if not router.is_dead]
        return self.random.choice(running) if running else None

    @property
    def _dispatcher_class(self) -> type[Dispatcher]:
        return WatchedDispatcher if self.is_watched else Dispatcher

    def _settings(self) -> RouterSettings:
        spec = self.spec
        settings = RouterSettings.from_values(model_path="")
        needs_prefill = any(worker.role == "prefill" for worker in spec.workers)
        return replace(settings, router=spec.router, transfer=spec.transfer, slo=spec.slo, needs_prefill=needs_prefill)

    def _addresses(self) -> list[WorkerAddress]:
        addresses = []
        for name, worker in self.workers.items():
            role, is_draining = self._labels.get(name, (worker.spec.role, False))
            addresses.append(WorkerAddress(name, worker.address, ROLE_NUMBERS[role], is_draining))
        return addresses

    def _new_dispatcher(self, host: Host) -> Dispatcher:
        dispatcher = self._dispatcher_class(
            self._settings(),
            lambda: None,
            self.loop.time,
            open_channel=host.channel,
            make_client=partial(DirectClient, self.network) if self.is_fast else WorkerClient,
            rng=random.Random(self.random.random()),
        )
        if self.is_fast:
            beat(self.network, dispatcher.fleet)
        return dispatcher

    async def _bring(self, requests: list[SimRequest]) -> list[RequestOutcome]:
        """Each request in its time; returns when all have ended."""
        clients: list[asyncio.Future[RequestOutcome]] = []
        watched: list[RequestOutcome] = []
        way_s = 0.0 if self.cores is not None else self.spec.client_s
        begun_at = START_S - way_s  # what is noted of a client is what it sees, as long after
        for number, request in enumerate(requests):
            left_s = START_S + request.at_s + way_s - self.loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            if self.is_fast:
                watched.append(watch_client(self._dispatcher, number, request, begun_at, self._note_end))
            else:
                clients.append(asyncio.create_task(self._client(number, request, begun_at)))
        if self.is_fast:
            await self._has_ended.wait()
            return watched
        return list(await asyncio.gather(*clients))

    async def _client(self, number: int, request: SimRequest, begun_at: float) -> RequestOutcome:
        if self.routers:
            outcome = await ApiClient(self, number, request, self.seed, begun_at).run()
        else:
            way = None if self.cores is None else partial(self.cores.wait, self.spec.client_s)
            client = run_client(self._dispatcher, number, request, self.seed, begun_at, way, is_watched=self.is_watched)
            outcome = await client
        self._note_end(outcome)
        return outcome

    def _note_end(self, outcome: RequestOutcome) -> None:
        if self.keeps_trace:
            self.note(
                f"request {outcome.number} {outcome.state.value} {outcome.reason} tokens {outcome.num_tokens} first "
                f"{outcome.first_token_s} last {outcome.last_token_s} on {outcome.prefill_id} {outcome.decode_id}"
            )
        self._on_end(outcome)
        self._num_left -= 1
        if not self._num_left:
            self._has_ended.set()

    @staticmethod
    def _use_of(worker: SimulatedWorker) -> WorkerUse:
        return WorkerUse(
            worker.spec.worker_id,
            worker.spec.role,
            worker.stats.num_steps,
            worker.ranks.busy_s,
            worker.core.decode.num_preemptions,
            worker.stats.kv_bytes_sent,
        )
