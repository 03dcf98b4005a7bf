"""The controller of a simulated cluster: the real pools of workers and routers, reconfigurer and rebalancer.

    ControllerSpec -> SimulatedController.run -> workers and the router are launched -> `mode: auto` looks once a second

The launchers stand where Ray stands: a worker that is launched begins its life in the simulated cluster. The controller
reaches the router over the network, by the same calls as in reality.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from cluster.config.choices import RebalanceMode
from cluster.config.schema import (
    AutoSection,
    EngineSection,
    ModelSection,
    RebalanceSection,
    RoleSection,
    RolesSection,
    RouterSection,
    ServingConfig,
    SloSection,
    TransferSection,
)
from cluster.settings import RouterSettings
from controller.adoption import FoundProcess
from controller.auto_mode import AutoMode
from controller.events import ClusterEvent, EventKind, EventLog
from controller.plan import WorkerPlan, plan_cluster
from controller.rebalance_policy import AutoRatio
from controller.rebalancer import MakePolicy
from controller.reconfigurer import Reconfigurer
from controller.router_link import RouterLink
from controller.router_pool import RouterPool
from controller.supervisor import Supervisor
from controller.worker_pool import StepRunner, WorkerPool
from router.api.control_service import ControlService, StatusService
from router.observe.activity import Activity
from router.routing.dispatcher import Dispatcher
from simulate.network import Host, Network
from simulate.virtual_loop import VirtualLoop
from simulate.worker import SimulatedWorker, WorkerSpec

_NAME_AGAIN_S = 2.0
"""Routers are sent their workers after each change, and so often besides."""


@dataclass(frozen=True)
class ControllerSpec:
    """What the configuration says of the controller, and the policy of `mode: auto`."""

    mode: RebalanceMode = "auto"
    auto: AutoSection = field(default_factory=AutoSection)
    min_prefill: int = 1
    min_decode: int = 1
    make_policy: MakePolicy = AutoRatio


@dataclass(frozen=True)
class SplitSince:
    """How many workers each role has had from an instant on."""

    at_s: float
    """From the begin of the run."""
    num_prefill: int
    num_decode: int


def config_of(
    spec: ControllerSpec,
    workers: Sequence[WorkerSpec],
    router: RouterSection,
    transfer: TransferSection,
    slo: SloSection,
) -> ServingConfig:
    """The configuration of such a cluster; its workers are alike but for their roles."""
    like, num_prefill = workers[0], sum(worker.role == "prefill" for worker in workers)
    roles = RolesSection(
        RoleSection(num_prefill, min_workers=spec.min_prefill),
        RoleSection(len(workers) - num_prefill, min_workers=spec.min_decode),
    )
    engine = EngineSection(
        device="cpu",
        block_size=like.block_size,
        kv_cache_tokens=like.kv_tokens,
        max_num_batched_tokens=like.max_num_batched_tokens,
        max_num_seqs=like.max_num_seqs,
    )
    rebalance = RebalanceSection(spec.mode, slo, auto=spec.auto)
    model = ModelSection("simulated")
    return ServingConfig(
        model, roles, engine=engine, transfer=transfer, router=router, rebalance=rebalance, state="memory"
    )


class ControlledCluster(Protocol):
    """What the controller asks of its cluster."""

    @property
    def loop(self) -> VirtualLoop: ...
    @property
    def network(self) -> Network: ...
    def start(self, spec: WorkerSpec) -> SimulatedWorker: ...
    def note(self, what: str) -> None: ...


class _Running:
    """A process that serves until it is stopped (`controller.supervisor.RunningProcesses`)."""

    def __init__(self, card: Mapping[str, Any], stop: Callable[[], None] = lambda: None) -> None:
        self.card = card
        self._stop = stop

    async def ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self, grace_s: float) -> None:
        self._stop()

    async def kill(self) -> None:
        self._stop()


class _WorkerLauncher:
    """Begins lives of one worker (`controller.worker_pool.Launcher`). A role is the router's label of a worker; it
    begins as it is to be named then."""

    def __init__(self, cluster: ControlledCluster, like: WorkerSpec, plan: WorkerPlan) -> None:
        self.plan = plan
        self.placing_limit_s: float | None = None
        self._cluster = cluster
        self._like = like

    async def launch(self) -> _Running:
        worker = self._cluster.start(replace(self._like, worker_id=self.plan.worker_id, role=self.plan.role))
        return _Running({"address": worker.address}, worker.die)

    def adopt(self, ranks: Sequence[FoundProcess]) -> _Running:
        raise AssertionError("a simulated controller has none before it")

    def close(self) -> None:
        """Nothing was booked."""


class _RouterStarter:
    """The router is there already (`controller.router_pool.RouterStarter`)."""

    def __init__(self, settings: RouterSettings, address: str) -> None:
        self.settings = settings
        self.is_successor = False
        self._address = address

    async def launch(self) -> _Running:
        return _Running({"control_address": self._address})

    def adopt(self, router: FoundProcess) -> _Running:
        raise AssertionError("a simulated controller has none before it")


class SimulatedController:
    """`workers` are alike. `run` once, in the loop."""

    def __init__(
        self,
        cluster: ControlledCluster,
        spec: ControllerSpec,
        config: ServingConfig,
        workers: Sequence[WorkerSpec],
        control_address: str,
        begins_at: float,
    ) -> None:
        """`control_address`: of the router, for its controller. `begins_at`: when the run does."""
        self._cluster = cluster
        self._begins_at = begins_at
        self.splits: list[SplitSince] = []
        """One more after each change of the split."""
        self._changed = asyncio.Event()
        like = {worker.worker_id: worker for worker in workers}
        make = partial(_WorkerLauncher, cluster)
        self.pool = WorkerPool(lambda plan: make(like.get(plan.worker_id, workers[0]), plan), self._on_change)
        self.pool.add(plan_cluster(config, num_gpus=0, num_cores=None).workers)
        host = Host(cluster.network, "controller:1")
        self._routers = RouterPool(
            lambda name, number, settings, num_starts: _RouterStarter(settings, control_address),
            lambda router: RouterLink(router, lambda: self.reconfigurer.router_update(), open_channel=host.channel),
            self._on_change,
            journal="",
        )
        self._routers.add(config, have_served=False)
        self.events = EventLog(self._on_event)
        steps = StepRunner(self.pool, self._routers.links, config.engine)
        self.reconfigurer = Reconfigurer(config, steps, self._routers, self.events)
        self.auto = AutoMode(
            self.pool,
            self._routers.links,
            self.reconfigurer,
            self.events,
            reserve=lambda: True,
            release=lambda: None,
            make_policy=spec.make_policy,
        )
        self._note_split()

    @property
    def num_moves(self) -> int:
        """Changes that `mode: auto` asked for."""
        return self.auto.rebalancer.num_moves

    async def run(self) -> None:
        """For ever."""
        self._routers.run()
        self.pool.run()
        await asyncio.gather(self._keep_routers_updated(), self.auto.run())

    async def _keep_routers_updated(self) -> None:
        while True:
            self._changed.clear()
            await self._routers.links.update()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NAME_AGAIN_S):
                    await self._changed.wait()

    def _on_change(self, supervisor: Supervisor) -> None:
        self._changed.set()

    def _on_event(self, event: ClusterEvent) -> None:
        self._cluster.note(f"controller {event.kind.value}: {event.text}")
        if event.kind is EventKind.STEP_DONE:
            self._note_split()

    def _note_split(self) -> None:
        roles = Counter(member.role for member in self.pool.members() if not member.is_draining)
        at_s = max(0.0, self._cluster.loop.time() - self._begins_at)
        self.splits.append(SplitSince(at_s, roles["prefill"], roles["decode"]))


def serve_control(host: Host, dispatcher: Dispatcher, settings: RouterSettings) -> None:
    """Has a router answer its controller at this host."""
    control = ControlService(dispatcher, settings)
    status = StatusService(dispatcher, control, Activity(), model="simulated", router_address=host.address)
    host.serve(SimpleNamespace(GetStatus=status.GetStatus, SetWorkers=control.SetWorkers, GetDemand=control.GetDemand))
