"""The controller: starts the workers and the routers of a plan, keeps them up, connects them, and changes their roles
while they serve.

Each worker and each router has a supervisor of its own; when one rank of a worker ends, all its ranks are killed and
started again. Every router gets the complete set of workers after every change. What runs outlives a controller that
dies: the next one, which Ray starts, adopts it, goes on with the change that was under way, and starts what has ended
meanwhile. `controller.launchers` starts processes. Decisions are in `controller.plan`, `controller.supervisor`,
`controller.adoption`, `controller.reconfigurer` (changes, from the file or from the AdminService) and
`controller.auto_mode`, which know no Ray; no request passes through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from cluster.config.schema import ROLES, ServingConfig
from cluster.errors import BatonError, ConfigError, IncompatibleProtocol
from cluster.pb import admin_pb2
from cluster.protocol import spoken
from cluster.tls import internal_tls_of
from controller.adoption import Adoption, SavedCluster, SavedWorker
from controller.auto_mode import AutoMode
from controller.config_file import ConfigFile, ConfigWatch
from controller.events import ClusterEvent, EventKind, EventLog, ProgressBatch, ProgressEvent, ProgressLog
from controller.launchers import Capacity, RouterLauncher, RouterPlaces, WorkerLauncher, num_gpus
from controller.listeners import Listeners
from controller.metrics import ControllerMetrics
from controller.plan import ClusterPlan, found_device
from controller.ray_actors import Hosting, die_with_parent, send_logs_to
from controller.reconfigurer import Reconfigurer, SaveConfig
from controller.router_link import RouterLink
from controller.router_pool import RouterPool, SharedPorts
from controller.supervisor import Supervisor, SupervisorState
from controller.takeover import Takeover
from controller.worker_pool import STOP_S, StepRunner, WorkerPool

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_NAME_AGAIN_S = 2.0
_LOOK_S = 0.1
"""Seconds between two looks at the file; an edit counts at the second look that finds it."""
_LEFT_ALONE = "what runs serves on without a controller, until `baton serve` of its version takes it over"
_NUMBERS_OF_A_LIFE = 1_000_000
"""Events that a controller may number before the first one of the next controller."""


@dataclass(frozen=True)
class Programs:
    """The modules that offer `create`; named, never imported here."""

    worker: str = "worker.program"
    router: str = "router.program"


class Controller:
    """`run` once; `progress` for as long as someone listens; `shutdown` at the end. `saved`: what the controller before
    has left, or what the first one begins with; `plan`: the routers and how the workers are placed. `refusal`: why the
    state that was left is not understood here; it touches nothing then."""

    def __init__(
        self,
        saved: SavedCluster,
        plan: ClusterPlan,
        programs: Programs,
        file: ConfigFile | None,
        hosting: Hosting,
        refusal: IncompatibleProtocol | None = None,
    ) -> None:
        die_with_parent()
        config, report = saved.config, self._reporter("controller")
        self.saved = saved
        self._has_served = saved.has_served
        numbers_before = (saved.life - 1) * _NUMBERS_OF_A_LIFE
        self._progress = ProgressLog(numbers_before)
        send_logs_to(report, "controller", config.log_dir)
        self._takeover = Takeover(hosting, report, refusal)
        self._changed = asyncio.Event()
        self._has_begun = False
        self._is_announced = False
        self._is_stopping = False
        self._file = file
        self._watch: ConfigWatch | None = None
        if file is not None and file.is_own:
            self._watch = ConfigWatch(file, self._apply_file, self._refuse_file)
        are_spread = config.placement.routers == "spread"
        self._places = RouterPlaces(hosting.namespace, config.router.replicas, are_spread=are_spread)
        self._capacity = Capacity(
            hosting.namespace, lambda: steps.next_worker(self.reconfigurer.config).bundles, plan.workers[0].labels
        )
        self.pool = WorkerPool(
            lambda w: WorkerLauncher(w, programs.worker, self._reporter(w.worker_id), self._capacity, hosting),
            self._on_change,
        )
        tls = internal_tls_of(config.internal_tls)
        inside = None if tls is None else tls.client
        starter = partial(RouterLauncher, programs.router, self._places, hosting, self._reporter, self.pool.names)
        new_link = partial(RouterLink, compose=self._compose, tls=inside, token=hosting.token)
        journal, ports = saved.journal or plan.journal or "", None if are_spread else SharedPorts()
        self._routers = RouterPool(starter, new_link, self._on_change, journal, ports)
        self._routers.add(config, saved.routers, have_served=self._has_served)
        self._links = self._routers.links
        steps = StepRunner(self.pool, self._links, saved.engine)
        steps.restore(saved.workers, config, have_served=self._has_served)
        self.events = EventLog(self._on_event, numbers_before)
        self.events.version = saved.version
        are_on_gpus = all(found_device(config.engine_of(role), saved.engine.device) == "cuda" for role in ROLES)
        num_devices = num_gpus if are_on_gpus else None  # of some on CPUs there may be any number
        self.reconfigurer = Reconfigurer(
            config, steps, self._routers, self.events, num_devices, num_named=saved.num_devices_asked
        )
        places = self._capacity.ask, self._capacity.give_back
        self._auto = AutoMode(self.pool, self._links, self.reconfigurer, self.events, *places, saved.engine.device)
        node_host = ray.util.get_node_ip_address() if are_spread else ""
        self._listeners = Listeners(self, config, tls, node_host, hosting.token)
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Adopts or starts everything, once; returns when what could be adopted is."""
        if self._has_begun:
            return
        self._has_begun = True
        if self.saved.life > 1:
            try:
                self._go_on(await self._takeover.adopt(self.pool, self._routers))
            except IncompatibleProtocol as error:
                logger.error("%s", error.message)
                self._progress.add(ProgressEvent("refused", "controller", f"{error.message}; {_LEFT_ALONE}"))
                return
        try:
            registry = ControllerMetrics(self.events, self._auto.rebalancer, self._workers_by_state).registry
            await self._listeners.open(registry, self.saved.admin_port)
        except ConfigError as error:
            self._progress.add(ProgressEvent("failed", "admin", error.message, is_mistake=True))
            return
        self._progress.add(ProgressEvent("admin", "admin", self._listeners.address))
        if self.metrics_address:
            self._progress.add(ProgressEvent("progress", "controller", f"metrics: {self.metrics_address}"))
        self._routers.run()
        self.pool.run()
        self._tasks.append(asyncio.create_task(self._keep_routers_updated()))
        self._tasks.append(asyncio.create_task(self._takeover.keep_saved(self._to_save)))

    def _go_on(self, adoption: Adoption) -> None:
        """Reports the adoption, and goes on with the change that was under way, if there was one."""
        self.events.version = max(self.events.version, adoption.newest_version)
        self._routers.renew(self.saved.config)
        names = ", ".join(adoption.kept) or "nothing"
        ended = f"; ended {len(adoption.orphans)} processes that nobody wants" if adoption.orphans else ""
        text = f"the controller was started again; it has adopted {names}{ended}"
        logger.info("%s", text)
        self._progress.add(ProgressEvent("change", "controller", text))
        if self.saved.is_changing:
            with contextlib.suppress(BatonError):  # a refusal is an event already
                self.reconfigurer.propose(self.reconfigurer.config, "the controller was started again")

    def _to_save(self) -> SavedCluster:
        return replace(
            self.saved,
            protocol=spoken(),
            config=self.reconfigurer.config,
            version=self.reconfigurer.version,
            num_devices_asked=self.reconfigurer.num_named,
            is_changing=self.reconfigurer.changing is not None,
            admin_port=self._listeners.port,
            has_served=self._has_served,
            routers=self._routers.saved,
            workers=tuple(SavedWorker(m.plan.worker_id, m.plan.role, m.is_draining) for m in self.pool),
        )

    async def progress(self, after: int = 0) -> ProgressBatch:
        """The progress events after that number; waits until there is one."""
        return await self._progress.after(after)

    async def apply(self, text: str, filename: str) -> tuple[list[str], str]:
        """Applies a cluster.yaml and waits for the end of the change: its events, and why it failed, if it did."""
        try:
            answer = self.reconfigurer.propose(
                self.reconfigurer.split_kept(self.parse(text, filename)), f"serve {filename}", save=self.save
            )
        except BatonError as error:
            return [], error.message
        await self.reconfigurer.settled()
        events = self.events.since(answer.after_sequence) if answer.is_change else []
        failed = [event.text for event in events if event.kind is EventKind.FAILED]
        return [event.text for event in events], failed[-1] if failed else ""

    async def status(self) -> dict[str, dict[str, Any]]:
        """Returns for each process group its state, how often it was started, and its card."""
        return {
            supervisor.name: {
                "state": supervisor.state.value,
                "num_starts": supervisor.num_starts,
                "why": supervisor.why,
                **supervisor.card,
            }
            for supervisor in (*self.routers, *(member.supervisor for member in self.pool))
        }

    async def shutdown(self) -> None:
        """The routers first, so that running requests end; then the workers."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await self.reconfigurer.close()
        await self._links.close()
        await self._routers.stop(self.reconfigurer.config.rebalance.drain_timeout_s + STOP_S)
        await self.pool.stop(STOP_S)
        self._places.close()
        self._capacity.give_back()
        await self._listeners.close()

    async def hold(self) -> None:
        """Never returns: who waits for it notices when Ray gives this controller up."""
        await asyncio.Event().wait()

    @property
    def routers(self) -> Sequence[Supervisor]:
        return self._routers.supervisors

    @property
    def config_path(self) -> str:
        return str(self._file.path) if self._file is not None and self._file.is_own else ""

    @property
    def save(self) -> SaveConfig | None:
        return self._watch.save if self._watch is not None else None

    @property
    def auto(self) -> admin_pb2.Auto | None:
        if self.reconfigurer.config.rebalance.mode != "auto":
            return None
        rebalancer = self._auto.rebalancer
        why = "" if rebalancer.decision is None else rebalancer.decision.why
        return admin_pb2.Auto(why=why, gain=rebalancer.gain, num_moves=rebalancer.num_moves)

    @property
    def metrics_address(self) -> str:
        return self._listeners.metrics_address

    def _workers_by_state(self) -> Counter[tuple[str, SupervisorState]]:
        return Counter((member.plan.role, member.supervisor.state) for member in tuple(self.pool))

    def parse(self, text: str, filename: str) -> ServingConfig:
        """Parses the text as if it stood in the watched file."""
        file = self._file or ConfigFile(Path("cluster.yaml"))
        return file.parse(text, filename)

    async def router_status(self) -> admin_pb2.GetStatusResponse | None:
        return await self._links.status()

    def _reporter(self, who: str) -> Callable[[str], None]:
        return lambda line: self._progress.add(ProgressEvent("progress", who, line))

    def _on_event(self, event: ClusterEvent) -> None:
        self._takeover.changed()
        logger.info("%s: %s", event.kind.value, event.text)
        if event.kind not in (EventKind.WORKER_READY, EventKind.WORKER_LOST):
            self._progress.add(ProgressEvent("change", "controller", event.text))

    def _on_change(self, supervisor: Supervisor) -> None:
        self._changed.set()
        self._takeover.changed()
        if self._is_stopping:
            return
        match supervisor.state:
            case SupervisorState.READY:
                self.events.add(EventKind.WORKER_READY, f"{supervisor.name} is ready", supervisor.name)
                event_shown = ProgressEvent("ready", supervisor.name, str(supervisor.card.get("address", "")))
            case SupervisorState.BACKING_OFF:
                self.events.add(EventKind.WORKER_LOST, f"{supervisor.name}: {supervisor.why}", supervisor.name)
                event_shown = ProgressEvent("lost", supervisor.name, supervisor.why)
            case SupervisorState.FAILED if not self._has_served:
                event_shown = ProgressEvent("failed", supervisor.name, supervisor.why, supervisor.is_mistake)
            case _:
                return
        self._progress.add(event_shown)

    async def _keep_routers_updated(self) -> None:
        """Sends every router its workers after each change, until it has got them, and from time to time, so that it
        knows that there is a controller."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NAME_AGAIN_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                has_arrived = await self._update_routers()
            except Exception:
                # A bug here must not leave the routers with old workers for ever.
                logger.exception("the routers could not be updated")
                has_arrived = False
            if not has_arrived:
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    async def _update_routers(self) -> bool:
        """False: to be tried again. While no router is up nothing is sent; the start of one is a change."""
        if not self._links.is_up:
            return True
        if not await self._links.try_to_update():
            return False
        are_up = self._links.are_all_up and all(member.is_ready for member in self.pool)
        if not self._is_announced and (are_up or self._has_served):
            await self._announce()
        return True

    def _compose(self) -> admin_pb2.SetWorkersRequest:
        self._takeover.changed()
        return self.reconfigurer.router_update(self._listeners.inner_address)

    async def _announce(self) -> None:
        """Waits until the router is connected to its workers, unless those have changed meanwhile, or the cluster has
        served before."""
        while not self._changed.is_set():
            status = await self._links.status()
            ready = admin_pb2.WorkerStatus.STATE_READY
            address = self.routers[0].card.get("address")
            are_ready = status is not None and sum(w.state == ready for w in status.workers) == len(self.pool)
            if (are_ready or self._has_served) and address is not None:
                self._has_served = self._is_announced = True
                self._takeover.changed()
                http = self.routers[0].card.get("http_address")
                if http:
                    self._progress.add(ProgressEvent("http", "router", str(http)))
                self._progress.add(ProgressEvent("serving", "router", str(address)))
                self._tasks.append(asyncio.create_task(self._auto.run()))
                if self._watch is not None:
                    self._tasks.append(asyncio.create_task(self._look_at_file(self._watch)))
                return
            if self._has_served:
                return
            await asyncio.sleep(_RETRY_S)

    async def _look_at_file(self, watch: ConfigWatch) -> None:
        """Whenever no change is being carried out."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self.reconfigurer.changing is None:
                    watch.look()
            except Exception:
                # A bug here must not end the watch over the file unseen.
                logger.exception("%s could not be looked at", self.config_path)

    def _apply_file(self, wanted: ServingConfig) -> None:
        # A refusal is an event already.
        with contextlib.suppress(BatonError):
            self.reconfigurer.propose(self.reconfigurer.split_kept(wanted), f"{self.config_path} was edited")

    def _refuse_file(self, why: str) -> None:
        self.reconfigurer.refuse(self.config_path, why)
