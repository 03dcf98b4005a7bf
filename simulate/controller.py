"""The controller of a simulated cluster: the real pools of workers and routers, reconfigurer and rebalancer.

    ControllerSpec -> SimulatedController.run -> workers and the router are launched -> `mode: auto` looks once a second
                   -> it dies -> another one adopts what runs, from what this one has saved

The launchers stand where Ray stands: a worker that is launched begins its life in the simulated cluster, and one that
ends is launched again. The controller reaches the router over the network, by the same calls as in reality.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Protocol, Self

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
from cluster.errors import BatonError
from cluster.pb import admin_pb2
from cluster.protocol import spoken
from cluster.settings import RouterSettings
from controller.adoption import FoundProcess, NodePlacement, ProcessIdentity, SavedCluster, SavedWorker, choose
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

CONTROLLER = "controller:1"
"""Its address."""
SAVE_S = 2e-3
"""Seconds until a change is saved."""
_NAME_AGAIN_S = 2.0
"""Routers are sent their workers after each change, and so often besides."""


@dataclass(frozen=True)
class ControllerSpec:
    """The controller's part of the configuration, and the policy of `mode: auto`."""

    mode: RebalanceMode = "auto"
    auto: AutoSection = field(default_factory=AutoSection)
    min_prefill: int = 1
    min_decode: int = 1
    make_policy: MakePolicy = AutoRatio
    launch_s: float = 0.0
    """Seconds from a worker's launch until it serves."""


@dataclass(frozen=True)
class SplitSince:
    """The number of workers that each role has had from an instant on."""

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
    """The parts of a cluster that its controller uses."""

    @property
    def loop(self) -> VirtualLoop: ...
    @property
    def network(self) -> Network: ...
    @property
    def workers(self) -> Mapping[str, SimulatedWorker]: ...
    def start(self, spec: WorkerSpec) -> SimulatedWorker: ...
    def note(self, what: str) -> None: ...


class _Running:
    """A process that serves (`controller.supervisor.RunningProcesses`). `worker`: None for the router, which stays."""

    def __init__(self, card: Mapping[str, Any], worker: SimulatedWorker | None = None) -> None:
        self.card = card
        self._worker = worker

    @classmethod
    def of(cls, worker: SimulatedWorker) -> Self:
        return cls({"address": worker.address}, worker)

    async def ended(self) -> str:
        await (asyncio.Event().wait() if self._worker is None else asyncio.shield(self._worker.died))
        return "the process has died"

    async def stop(self, grace_s: float) -> None:
        await self.kill()

    async def kill(self) -> None:
        if self._worker is not None and not self._worker.is_dead:
            self._worker.die()


class _WorkerLauncher:
    """Begins lives of one worker (`controller.worker_pool.Launcher`). A role is the router's label of a worker; it
    begins as it is to be named then."""

    def __init__(self, controller: SimulatedController, like: WorkerSpec, plan: WorkerPlan) -> None:
        self.plan = plan
        self.placing_limit_s: float | None = None
        self._controller = controller
        self._like = like

    async def launch(self) -> _Running:
        await self._controller.launching()
        spec = replace(self._like, worker_id=self.plan.worker_id, role=self.plan.role)
        return _Running.of(self._controller.cluster.start(spec))

    def adopt(self, ranks: Sequence[FoundProcess]) -> _Running:
        return _Running.of(self._controller.cluster.workers[self.plan.worker_id])

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
        return _Running({"control_address": self._address})


class SimulatedController:
    """One life of the controller. `workers` are alike, as it sees them. `run` once, in the loop."""

    def __init__(
        self,
        cluster: ControlledCluster,
        spec: ControllerSpec,
        config: ServingConfig,
        workers: Sequence[WorkerSpec],
        control_address: str,
        begins_at: float,
        before: SimulatedController | None = None,
    ) -> None:
        """`control_address`: of the router, for its controller. `begins_at`: when the run does. `before`: the one that
        has died, whose processes this one adopts."""
        self.cluster = cluster
        self._spec = spec
        self._begins_at = begins_at
        self.splits: list[SplitSince] = [] if before is None else before.splits
        """One more after each change of the split."""
        if before is None:
            self.saved = SavedCluster.first(config, plan_cluster(config, num_gpus=0, num_cores=None), 0.0)
        else:
            self.saved = before.saved.next_life(cluster.loop.time())
        saved = self.saved
        self._running: asyncio.Task[None] | None = None
        self._stopped_until = 0.0
        self._changed = asyncio.Event()
        self._is_saving = False
        like = {worker.worker_id: worker for worker in workers}
        self.pool = WorkerPool(
            lambda plan: _WorkerLauncher(self, like.get(plan.worker_id, workers[0]), plan), self._on_change
        )
        self._host = Host(cluster.network, CONTROLLER)
        self._routers = RouterPool(
            lambda name, number, settings, num_starts: _RouterStarter(settings, control_address),
            lambda router: RouterLink(router, self._compose, open_channel=self._host.channel),
            self._on_change,
            journal="",
        )
        self._routers.add(saved.config, saved.routers, have_served=saved.has_served)
        self.events = EventLog(self._on_event, (saved.life - 1) * 1_000_000)
        self.events.version = saved.version
        steps = StepRunner(self.pool, self._routers.links, saved.engine)
        steps.restore(saved.workers, saved.config, have_served=saved.has_served)
        self.reconfigurer = Reconfigurer(
            saved.config, steps, self._routers, self.events, num_named=saved.num_devices_asked
        )
        self.auto = AutoMode(
            self.pool,
            self._routers.links,
            self.reconfigurer,
            self.events,
            reserve=lambda: True,
            release=lambda: None,
            make_policy=spec.make_policy,
        )
        if before is None:
            self._note_split()

    @property
    def num_moves(self) -> int:
        """Changes that `mode: auto` asked for."""
        return self.auto.rebalancer.num_moves

    def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    def check(self) -> None:
        """To be called once everything has healed: raises what has ended it (it never ends but by an error, or when it
        dies), and AssertionError unless all its workers serve."""
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()
        self._check_least()
        if not self.is_dead:
            missing = [m.plan.worker_id for m in self.pool if not m.is_ready]
            assert not missing, f"the controller has not brought back {', '.join(missing)}"

    @property
    def is_dead(self) -> bool:
        return self._running is None or self._running.done() or bool(self._running.cancelling())

    def die(self) -> None:
        """Nothing of it runs any more; what it has started does."""
        supervisors = [*self._routers.supervisors, *(member.supervisor for member in self.pool)]
        for task in (self._running, *(supervisor._task for supervisor in supervisors)):
            if task is not None:
                task.cancel()
        self._host.close()
        self.cluster.loop.create_task(self.reconfigurer.close())

    def stop(self, seconds: float) -> None:
        """It stands still for so long: it launches nothing, and nothing that it says or asks for arrives before."""
        self._stopped_until = self.cluster.loop.time() + seconds
        self.cluster.network.stop(CONTROLLER, seconds)

    async def launching(self) -> None:
        """Returns when a process serves that is launched now."""
        await asyncio.sleep(max(0.0, self._stopped_until - self.cluster.loop.time()) + self._spec.launch_s)

    async def _run(self) -> None:
        """Adopts what runs, unless this is its first life, and then serves until it is cancelled."""
        if self.saved.life > 1:
            self._adopt()
        self._routers.run()
        self.pool.run()
        await asyncio.gather(self._keep_routers_updated(), self.auto.run())

    def _adopt(self) -> None:
        """Takes over what runs (`controller.reconciler`), and goes on with the change that was under way."""
        names = {supervisor.name for supervisor in self._routers.supervisors}
        sizes = dict.fromkeys((*names, *(member.worker_id for member in self.pool.members())), 1)
        adoption = choose(sizes, [*map(_found, sorted(names)), *self._found_workers()])
        for group, ranks in adoption.kept.items():
            if group in names:
                self._routers.adopt(ranks[0])
            else:
                self.pool.adopt(group, ranks)
        for orphan in adoption.orphans:
            name = orphan.identity.group
            assert name not in sizes, f"a new controller ends {name}, which serves, and is wanted"
            self.cluster.workers[name].die()
        self.events.version = max(self.events.version, adoption.newest_version)
        self._routers.renew(self.saved.config)
        if self.saved.is_changing:
            with contextlib.suppress(BatonError):  # a refusal is an event already
                self.reconfigurer.propose(self.reconfigurer.config, "the controller was started again")

    def _found_workers(self) -> list[FoundProcess]:
        return [_found(name) for name, worker in self.cluster.workers.items() if not worker.is_dead]

    def _compose(self) -> admin_pb2.SetWorkersRequest:
        """Saves the state, and returns what routers are told."""
        self._check_least()
        self._save()
        return self.reconfigurer.router_update()

    def _check_least(self) -> None:
        """Raises AssertionError where a role has fewer workers than it must keep."""
        roles: Counter[str] = Counter(member.role for member in self.pool.members() if not member.is_draining)
        for role, least in (("prefill", self._spec.min_prefill), ("decode", self._spec.min_decode)):
            assert roles[role] >= least, f"{role} has {roles[role]} workers, and its min_workers is {least}"

    def _save(self) -> None:
        """A little later: what changes last before its death is lost with it."""
        if not self._is_saving:
            self._is_saving = True
            self.cluster.loop.call_later(SAVE_S, self._saved)

    def _saved(self) -> None:
        self._is_saving = False
        if self.is_dead:
            return
        has_served = self.saved.has_served or all(member.is_ready for member in self.pool)
        self.saved = replace(
            self.saved,
            config=self.reconfigurer.config,
            version=self.reconfigurer.version,
            num_devices_asked=self.reconfigurer.num_named,
            is_changing=self.reconfigurer.changing is not None,
            has_served=has_served,
            routers=self._routers.saved,
            workers=tuple(SavedWorker(m.plan.worker_id, m.plan.role, m.is_draining) for m in self.pool),
        )

    async def _keep_routers_updated(self) -> None:
        while True:
            self._changed.clear()
            await self._routers.links.update()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NAME_AGAIN_S):
                    await self._changed.wait()

    def _on_change(self, supervisor: Supervisor) -> None:
        self.cluster.note(f"controller: {supervisor.name} is {supervisor.state.value}")
        self._changed.set()
        self._save()

    def _on_event(self, event: ClusterEvent) -> None:
        self._save()
        self.cluster.note(f"controller {event.kind.value}: {event.text}")
        if event.kind is EventKind.STEP_DONE:
            self._note_split()

    def _note_split(self) -> None:
        roles = Counter(member.role for member in self.pool.members() if not member.is_draining)
        at_s = max(0.0, self.cluster.loop.time() - self._begins_at)
        self.splits.append(SplitSince(at_s, roles["prefill"], roles["decode"]))


def _found(name: str) -> FoundProcess:
    """A process as it describes itself."""
    return FoundProcess(ProcessIdentity(name), NodePlacement("", 0, protocol=spoken()), card="it serves")


def serve_control(host: Host, dispatcher: Dispatcher, settings: RouterSettings) -> None:
    """Has a router answer its controller at this host."""
    control = ControlService(dispatcher, settings)
    status = StatusService(dispatcher, control, Activity(), model="simulated", router_address=host.address)
    host.serve(SimpleNamespace(GetStatus=status.GetStatus, SetWorkers=control.SetWorkers, GetDemand=control.GetDemand))
