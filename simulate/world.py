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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.config.schema import RouterSection, SloSection, TransferSection
from cluster.lifecycle import RequestState
from cluster.settings import RouterSettings
from cluster.text import ROLE_NUMBERS
from router.routing.dispatcher import Dispatcher
from router.routing.fleet import WorkerAddress
from simulate.client import RequestOutcome, SimRequest, run_client
from simulate.controller import ControllerSpec, SimulatedController, SplitSince, config_of, serve_control
from simulate.faults import FaultPlan
from simulate.network import Host, Network
from simulate.ranks import SimulatedPair
from simulate.virtual_loop import VirtualLoop
from simulate.wire import Wires
from simulate.worker import SimulatedWorker, WorkerSpec
from simulate.workload import RequestShape

__all__ = ["Cluster", "ClusterSpec", "RunResult", "SimRequest", "WorkerSpec", "WorkerUse"]

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
    controller: ControllerSpec | None = None
    """None: there is none, and the router was told of its workers at its start."""

    @classmethod
    def of_ratio(cls, prefill: int, decode: int, worker: WorkerSpec | None = None, **values: object) -> ClusterSpec:
        """So many workers of each role, all like `worker`; `values` are other fields."""
        like = worker or WorkerSpec("", "decode")
        roles = [("prefill", i) for i in range(prefill)] + [("decode", i) for i in range(decode)]
        workers = tuple(replace(like, worker_id=f"{role}-{i}", role=role) for role, i in roles)
        return cls(workers, **values)  # type: ignore[arg-type]  # checked where it is called


@dataclass(frozen=True)
class WorkerUse:
    """What one worker did in a run."""

    worker_id: str
    role: str
    num_steps: int
    busy_s: float
    """In steps."""
    num_preemptions: int
    kv_bytes_sent: int


@dataclass(frozen=True)
class RunResult:
    """A run, from its begin to the end of its last request."""

    outcomes: tuple[RequestOutcome, ...]
    workers: tuple[WorkerUse, ...]
    duration_s: float
    """Virtual seconds."""
    wall_s: float
    """Real seconds that the run took."""
    num_calls: int
    """Calls of the event loop."""
    trace: tuple[str, ...]
    """Everything that was noted, in order; empty unless it was asked for."""
    num_faults: Mapping[str, int] = field(default_factory=dict)
    """Faults that took effect, by name."""
    splits: tuple[SplitSince, ...] = ()
    """How it was split at first, and after each change, where there is a controller."""


class _ErrorLog(logging.Handler):
    """Keeps what is logged as an error: Baton catches an exception where it fails one request or one session only."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


class Cluster:
    """Runs once."""

    def __init__(
        self, spec: ClusterSpec, seed: int = 0, *, faults: FaultPlan | None = None, keeps_trace: bool = False
    ) -> None:
        """Raises ValueError for a spec without a decode worker, or with two workers of one name."""
        names = [worker.worker_id for worker in spec.workers]
        if len(set(names)) < len(names) or not any(worker.role == "decode" for worker in spec.workers):
            raise ValueError(f"a cluster needs a decode worker, and a name for each worker, not {', '.join(names)}")
        self.spec = spec
        self.seed = seed
        self.random = random.Random(seed)
        self.loop = VirtualLoop()  # type: ignore[abstract]  # sockets and processes are not simulated
        self.network = Network(self.loop, spec.message_s)
        self.wires = Wires(self.loop)
        self.pairs: dict[str, SimulatedPair] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self._names = itertools.count(1)
        self._trace: list[str] | None = [] if keeps_trace else None
        self._num_lives = itertools.count(1)
        self._faults = faults or FaultPlan()
        self.num_faults: Counter[str] = Counter()
        """Faults that took effect."""
        self.controller: SimulatedController | None = None

    def run(self, requests: Iterable[RequestShape | SimRequest], limit_s: float = float("inf")) -> RunResult:
        """Raises Stuck when a request has not ended at `limit_s` of virtual time, AssertionError for whatever went
        wrong."""
        begun = time.perf_counter()
        load = [each if isinstance(each, SimRequest) else SimRequest(each) for each in requests]
        load.sort(key=lambda request: request.at_s)
        errors = _ErrorLog()
        logging.getLogger().addHandler(errors)
        try:
            outcomes, duration_s = self.loop.run(self._main(load), START_S + limit_s)
        finally:
            logging.getLogger().removeHandler(errors)
        assert not errors.messages, f"errors were logged: {errors.messages[:3]}"
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

    def count(self, fault: str) -> None:
        """A fault has taken effect."""
        self.num_faults[fault] += 1
        self.note(f"fault {fault}")

    # The run

    async def _main(self, requests: list[SimRequest]) -> tuple[list[RequestOutcome], float]:
        dispatcher, controlling = self._begin()
        await asyncio.sleep(START_S - self.loop.time())
        for fault in self._faults.events:
            self.loop.call_later(fault.at_s, fault.strike, self)
        outcomes = await self._bring(dispatcher, requests)
        duration_s = self.loop.time() - START_S
        await asyncio.sleep(max(0.0, self._faults.until_s - duration_s) + (HEAL_S if self._faults.events else SETTLE_S))
        if controlling is not None and controlling.done():
            controlling.result()  # it never ends but by an error
        self._check(dispatcher, outcomes)
        return outcomes, duration_s

    def start(self, spec: WorkerSpec) -> SimulatedWorker:
        """Begins a life of a worker."""
        life = str(next(self._num_lives))
        worker = self.workers[spec.worker_id] = SimulatedWorker(self, spec, self.spec.transfer, self.spec.slo, life)
        return worker

    def _begin(self) -> tuple[Dispatcher, asyncio.Task[None] | None]:
        """Starts everything: the controller does, if there is one, and it is what runs then."""
        spec = self.spec
        settings = RouterSettings.from_values(model_path="")
        needs_prefill = any(worker.role == "prefill" for worker in spec.workers)
        settings = replace(
            settings, router=spec.router, transfer=spec.transfer, slo=spec.slo, needs_prefill=needs_prefill
        )
        if spec.controller is None:
            for worker in spec.workers:
                self.start(worker)
        host = Host(self.network, "router:1")
        dispatcher = Dispatcher(
            settings, lambda: None, self.loop.time, open_channel=host.channel, rng=random.Random(self.random.random())
        )
        if spec.controller is None:
            dispatcher.set_workers(
                WorkerAddress(name, worker.address, ROLE_NUMBERS[worker.spec.role])
                for name, worker in self.workers.items()
            )
            return dispatcher, None
        serve_control(host, dispatcher, settings)
        config = config_of(spec.controller, spec.workers, spec.router, spec.transfer, spec.slo)
        self.controller = SimulatedController(
            self, spec.controller, config, spec.workers, host.address, begins_at=START_S
        )
        return dispatcher, asyncio.create_task(self.controller.run())

    async def _bring(self, dispatcher: Dispatcher, requests: list[SimRequest]) -> list[RequestOutcome]:
        """Each request in its time; returns when all have ended."""
        clients: list[asyncio.Task[RequestOutcome]] = []
        for number, request in enumerate(requests):
            left_s = START_S + request.at_s - self.loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            clients.append(asyncio.create_task(self._client(dispatcher, number, request)))
        return list(await asyncio.gather(*clients))

    async def _client(self, dispatcher: Dispatcher, number: int, request: SimRequest) -> RequestOutcome:
        way_s = self.spec.client_s
        if way_s:
            await asyncio.sleep(way_s)
        # It notes when the client sees each token, which is as long after.
        outcome = await run_client(dispatcher, number, request, self.seed, START_S - way_s)
        self.note(
            f"request {number} {outcome.state.value} {outcome.reason} tokens {len(outcome.token_ids)} "
            f"first {outcome.first_token_s} last {outcome.last_token_s} on {outcome.prefill_id} {outcome.decode_id}"
        )
        return outcome

    # Judgement

    def _check(self, dispatcher: Dispatcher, outcomes: list[RequestOutcome]) -> None:
        assert not dispatcher.num_queued and not dispatcher.num_running, "the router still holds requests"
        for outcome in outcomes:
            assert outcome.state is not RequestState.QUEUED, f"request {outcome.number} has no end"
            assert outcome.reason not in ("INTERNAL", "INVALID_REQUEST"), f"request {outcome.number}: {outcome.reason}"
            outcome.check(self.seed)
        for worker in self.workers.values():
            if worker.is_dead:
                continue  # the controller has stopped it
            worker.check_idle()
            index = dispatcher.fleet[worker.spec.worker_id].prefix_index
            cached = worker.core.blocks.cached_hashes
            assert index is None or index.hashes == cached, f"the router knows another cache of {worker.spec.worker_id}"

    @staticmethod
    def _use_of(worker: SimulatedWorker) -> WorkerUse:
        return WorkerUse(
            worker.spec.worker_id,
            worker.spec.role,
            worker.ranks.num_steps,
            worker.ranks.busy_s,
            worker.core.decode.num_preemptions,
            worker.stats.kv_bytes_sent,
        )
