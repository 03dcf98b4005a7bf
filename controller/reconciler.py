"""The controller: a Ray actor that starts the workers and the routers of a plan, keeps them up, connects them, and
changes their roles while they serve.

Each worker and each router has a supervisor of its own; when one rank of a worker ends, all its ranks are killed and
started again. Every router gets the complete set of workers after every change. `controller.launchers` starts
processes. Decisions are in `controller.plan`, `controller.supervisor`, `controller.reconfigurer` (changes, from the
file or from the AdminService) and `controller.rebalancer`, which know no Ray; no request passes through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.auth import KeyFile
from cluster.config.schema import AdminSection, ServingConfig
from cluster.errors import BatonError, ConfigError
from cluster.file_store import remove as remove_journal
from cluster.metrics import MetricsPage, serve_beside
from cluster.pb import admin_pb2
from cluster.settings import run_time_json
from cluster.tls import internal_tls_of, public_tls_of
from controller.admin_service import start_admin
from controller.config_file import ConfigFile, ConfigWatch
from controller.events import ClusterEvent, EventKind, EventLog, ProgressBatch, ProgressEvent, ProgressLog
from controller.launchers import Capacity, RouterLauncher, RouterPlaces, WorkerLauncher, num_gpus
from controller.metrics import ControllerMetrics
from controller.plan import CPU_SHARE, ClusterPlan
from controller.ray_actors import die_with_parent, send_logs_to
from controller.rebalancer import MeasuredLoad, Rebalancer, Split
from controller.reconfigurer import Reconfigurer, SaveConfig
from controller.router_link import RouterLink, RouterLinks
from controller.supervisor import Supervisor, SupervisorState
from controller.worker_pool import STOP_S, StepRunner, WorkerPool

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_REBALANCE_S = 1.0
_LOOK_S = 0.1
"""How often the file is looked at; an edit counts at the second look that finds it."""


@dataclass(frozen=True)
class Programs:
    """The modules that offer `create`; named, never imported here."""

    worker: str = "worker.program"
    router: str = "router.program"


class Controller:
    """The actor. `run` once; `progress` for as long as someone listens; `shutdown` at the end."""

    def __init__(
        self, config: ServingConfig, plan: ClusterPlan, programs: Programs, file: ConfigFile | None = None
    ) -> None:
        die_with_parent()
        self._progress = ProgressLog()
        self._changed = asyncio.Event()
        self._has_begun = False
        self._has_served = False
        self._is_stopping = False
        self._file = file
        self._watch: ConfigWatch | None = None
        if file is not None and file.is_own:
            self._watch = ConfigWatch(
                file, self._apply_file, lambda why: self.reconfigurer.refuse(self.config_path, why)
            )
        self._drain_s = plan.router.drain_timeout_s
        self._journal = plan.journal
        log_dir = config.log_dir
        send_logs_to(self._reporter("controller"), "controller", log_dir)
        self._places = RouterPlaces(plan.num_routers, are_spread=plan.are_routers_spread)
        self.routers = [
            Supervisor(
                name,
                RouterLauncher(
                    name, settings, programs.router, log_dir, self._reporter(name), number, self._places
                ).launch,
                self._on_change,
            )
            for number, (name, settings) in enumerate(plan.named_routers())
        ]
        self._capacity = Capacity(lambda: steps.next_worker(self.reconfigurer.config).bundles, plan.workers[0].labels)
        self.pool = WorkerPool(
            lambda worker: WorkerLauncher(
                worker, programs.worker, log_dir, self._reporter(worker.worker_id), self._capacity
            ),
            self._on_change,
        )
        self.pool.add(plan.workers)
        self._tls = internal_tls_of(config.internal_tls)
        inside = None if self._tls is None else self._tls.client
        self._links = RouterLinks([RouterLink(router, self._compose, inside) for router in self.routers])
        first = plan.workers[0].ranks[0].engine
        steps = StepRunner(self.pool, self._links, replace(config.engine, device=first.device, threads=first.threads))
        self.events = EventLog(self._on_event)
        self.reconfigurer = Reconfigurer(config, steps, self.events, num_gpus if first.device == "cuda" else None)
        self._rebalancer = Rebalancer(
            self._measure,
            self._split,
            self._move,
            self._capacity.ask,
            self._capacity.give_back,
            lambda why: self.events.add(EventKind.AUTO, f"mode auto: {why}"),
        )
        self._admins: list[grpc.aio.Server] = []
        self._inner_admin = ""
        """Address of the AdminService for routers, whose pages pass on what an operator asks for; for those of this
        node alone where strangers could reach it."""
        self._metrics_page: MetricsPage | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Starts everything, once; returns at once."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            address = await self._open_admin(self.reconfigurer.config)
            self._serve_metrics(self.reconfigurer.config)
        except ConfigError as error:
            self._progress.add(ProgressEvent("failed", "admin", error.message, is_mistake=True))
            return
        self._progress.add(ProgressEvent("admin", "admin", address))
        for router in self.routers:
            router.run()
        self.pool.run()
        self._tasks.append(asyncio.create_task(self._keep_routers_updated()))

    async def _open_admin(self, config: ServingConfig) -> str:
        """With the router's keys and certificate. Raises ConfigError."""
        file = None if config.auth.keys_file is None else KeyFile(config.auth.keys_file)
        tls = public_tls_of(config.tls)
        inside = None if self._tls is None else self._tls.server
        inner = AdminSection(port=0)
        if self._places.are_spread and (inside is not None or config.admin.insecure):
            inner = AdminSection(ray.util.get_node_ip_address(), port=0, insecure=config.admin.insecure)
        ring, addresses = None if file is None else file.ring, []
        for section, identity in ((config.admin, tls), (inner, inside)):
            server, address = await start_admin(section, self, ring, identity)
            self._admins.append(server)
            addresses.append(address)
        if file is not None:
            self._tasks.append(asyncio.create_task(file.follow(), name="keys"))
        outer, self._inner_admin = addresses
        return outer

    def _serve_metrics(self, config: ServingConfig) -> None:
        """With the TLS of the cluster's inside, as workers serve theirs; without it on loopback, unless `insecure`."""
        if not config.metrics.controller:
            return
        admin, page = config.admin, None if self._tls is None else self._tls.page
        registry = ControllerMetrics(self.events, self._rebalancer, self._workers_by_state).registry
        self._metrics_page = serve_beside(registry, admin.host, 0, insecure=admin.insecure, tls=page)
        self._progress.add(ProgressEvent("progress", "controller", f"metrics: {self.metrics_address}"))

    async def progress(self, after: int = 0) -> ProgressBatch:
        """The progress events after that number; waits until there is one."""
        return await self._progress.after(after)

    async def apply(self, text: str, filename: str) -> tuple[list[str], str]:
        """Applies a cluster.yaml and waits for the end of the change: its events, and why it failed, if it did."""
        origin = f"serve {filename}"
        try:
            answer = self.reconfigurer.propose(
                self.reconfigurer.split_kept(self.parse(text, filename)), origin, save=self.save
            )
        except BatonError as error:
            return [], error.message
        await self.reconfigurer.settled()
        events = self.events.since(answer.after_sequence) if answer.is_change else []
        failed = [event.text for event in events if event.kind is EventKind.FAILED]
        return [event.text for event in events], failed[-1] if failed else ""

    async def status(self) -> dict[str, dict[str, Any]]:
        """For each process group: its state, how often it was started, and its card."""
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
        await asyncio.gather(*(router.stop(self._drain_s + STOP_S) for router in self.routers))
        if self._journal is not None:
            await asyncio.to_thread(remove_journal, self._journal)
        await self.pool.stop(STOP_S)
        self._places.close()
        self._capacity.give_back()
        for admin in self._admins:
            await admin.stop(None)
        if self._metrics_page is not None:
            self._metrics_page.close()

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
        rebalancer = self._rebalancer
        why = "" if rebalancer.decision is None else rebalancer.decision.why
        return admin_pb2.Auto(why=why, gain=rebalancer.gain, num_moves=rebalancer.num_moves)

    @property
    def metrics_address(self) -> str:
        return "" if self._metrics_page is None else self._metrics_page.address

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
        logger.info("%s: %s", event.kind.value, event.text)
        if event.kind not in (EventKind.WORKER_READY, EventKind.WORKER_LOST):
            self._progress.add(ProgressEvent("change", "controller", event.text))

    def _on_change(self, supervisor: Supervisor) -> None:
        self._changed.set()
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
        """Sends every router its workers after each change, until it has got them."""
        while True:
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
        if not self._has_served and self._links.are_all_up and all(member.is_ready for member in self.pool):
            await self._first_served()
        return True

    def _compose(self) -> admin_pb2.SetWorkersRequest:
        return admin_pb2.SetWorkersRequest(
            workers=self.pool.addresses(),
            config_version=self.reconfigurer.version,
            needs_prefill=self.reconfigurer.needs_prefill,
            run_time_settings=run_time_json(self.reconfigurer.config),
            admin_address=self._inner_admin,
        )

    async def _first_served(self) -> None:
        """Waits until the router is connected to its workers, unless those have changed meanwhile."""
        while not self._changed.is_set():
            status = await self._links.status()
            ready = admin_pb2.WorkerStatus.STATE_READY
            address = self.routers[0].card.get("address")
            are_ready = status is not None and sum(w.state == ready for w in status.workers) == len(self.pool)
            if are_ready and address is not None:
                self._has_served = True
                http = self.routers[0].card.get("http_address")
                if http:
                    self._progress.add(ProgressEvent("http", "router", str(http)))
                self._progress.add(ProgressEvent("serving", "router", str(address)))
                self._tasks.append(asyncio.create_task(self._rebalance()))
                if self._watch is not None:
                    self._tasks.append(asyncio.create_task(self._look_at_file(self._watch)))
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

    async def _rebalance(self) -> None:
        """Has `mode: auto` look at the load; does nothing in another mode, which may change."""
        while True:
            await asyncio.sleep(_REBALANCE_S)
            try:
                await self._rebalancer.look(asyncio.get_running_loop().time(), self.reconfigurer.config)
            except Exception:
                # A bug here must not end the watch over the load unseen.
                logger.exception("mode auto could not look at the load")

    async def _measure(self) -> MeasuredLoad | None:
        return MeasuredLoad.of(await self._links.demand())

    def _split(self) -> Split | None:
        """None while it changes, or a worker is not there."""
        members = [m for m in self.pool.members() if not m.is_draining]
        if self.reconfigurer.changing is not None or not all(m.is_ready for m in members):
            return None
        num_prefill = sum(m.role == "prefill" for m in members)
        num_added = self.reconfigurer.num_added // self.reconfigurer.config.roles.decode.tensor_parallel
        return Split(num_prefill, len(members) - num_prefill, self.reconfigurer.version, num_added)

    def _move(self, num_prefill: int, num_decode: int, version: int, why: str) -> None:
        wanted = self.reconfigurer.with_split(num_prefill, num_decode)
        self.reconfigurer.propose(
            wanted, f"mode auto {num_prefill}:{num_decode}", expected_version=version, is_auto=True
        )


def start_controller(
    config: ServingConfig, plan: ClusterPlan, programs: Programs, file: ConfigFile | None = None
) -> Any:
    """Starts the actor on the caller's node and returns its handle. `file`: where `config` comes from; it is watched if
    it is the operator's own."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class = ray.remote(Controller).options(num_cpus=CPU_SHARE, max_restarts=0, scheduling_strategy=here)
    return actor_class.remote(config, plan, programs, file)
