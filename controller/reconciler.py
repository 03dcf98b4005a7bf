"""The controller: a Ray actor that starts the workers and the routers of a plan, keeps them up, introduces them, and
changes their roles while they serve.

Each worker and each router has a supervisor of its own; of a worker whose rank ends, all ranks are killed and started
afresh. Every router is told the complete set of workers after every change. How processes start is in
`controller.launchers`. Decisions are in `controller.plan`, `controller.restart_policy`, `controller.supervisor`,
`controller.reconfigurer` (what becomes of a change, from the file or from the AdminService) and
`controller.rebalancer`, which know no Ray; no request passes through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import AdminSection, ServingConfig
from cluster.errors import BatonError, ConfigError
from cluster.key_file import KeyFile
from cluster.metrics import MetricsPage, serve_beside
from cluster.pb import admin_pb2
from cluster.settings import run_time_json
from cluster.tls import internal_tls_of, public_tls_of
from controller.admin_service import start_admin
from controller.capacity import Capacity, num_gpus
from controller.change_steps import STOP_S, Steps
from controller.config_file import ConfigFile, Watch
from controller.event_log import ClusterEvent, EventKind, EventLog
from controller.launchers import RouterLauncher, RouterPlaces, WorkerLauncher
from controller.metrics import ControllerMetrics
from controller.plan import CPU_SHARE, ClusterPlan
from controller.progress_events import News, Notice, NoticeBoard
from controller.ray_actors import die_with_parent, send_logs_to
from controller.rebalance_policy import Reason
from controller.rebalancer import Rebalancer, Sight, Split
from controller.reconfigurer import Keep, Reconfigurer
from controller.router_link import RouterLink, RouterLinks
from controller.supervisor import Supervisor, SupervisorState
from controller.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_STEER_S = 1.0
_LOOK_S = 0.1
"""How often the file is looked at; an edit counts at the second look that finds it."""


@dataclass(frozen=True)
class Programs:
    """The modules that offer `create`; named, never imported here."""

    worker: str = "worker.program"
    router: str = "router.program"


class Controller:
    """The actor. `run` once; `notices` for as long as someone listens; `shutdown` at the end."""

    def __init__(
        self, config: ServingConfig, plan: ClusterPlan, programs: Programs, file: ConfigFile | None = None
    ) -> None:
        die_with_parent()
        self._notices = NoticeBoard()
        self._changed = asyncio.Event()
        self._has_begun = False
        self._has_served = False
        self._is_stopping = False
        self._file = file
        self._watch: Watch | None = None
        if file is not None and file.is_own:
            self._watch = Watch(file, self._apply_file, lambda why: self.door.refuse(self.config_path, why))
        self._drain_s = plan.router.drain_timeout_s
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
        self._room = Capacity(lambda: steps.next_worker(self.door.config).bundles, plan.workers[0].labels)
        self.crew = WorkerPool(
            lambda worker: WorkerLauncher(
                worker, programs.worker, log_dir, self._reporter(worker.worker_id), self._room
            ),
            self._on_change,
        )
        self.crew.add(plan.workers)
        self._tls = internal_tls_of(config.internal_tls)
        inside = None if self._tls is None else self._tls.client
        self._link = RouterLinks([RouterLink(router, self._compose, inside) for router in self.routers])
        first = plan.workers[0].ranks[0].engine
        steps = Steps(self.crew, self._link, replace(config.engine, device=first.device, threads=first.threads))
        self.events = EventLog(self._on_event)
        self.door = Reconfigurer(config, steps, self.events, num_gpus if first.device == "cuda" else None)
        self._pilot = Rebalancer(
            self._sight,
            self._split,
            self._move,
            self._room,
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
            address = await self._open_admin(self.door.config)
            self._serve_metrics(self.door.config)
        except ConfigError as error:
            self._notices.put(Notice("failed", "admin", error.message, is_mistake=True))
            return
        self._notices.put(Notice("admin", "admin", address))
        for router in self.routers:
            router.run()
        self.crew.run()
        self._tasks.append(asyncio.create_task(self._announce()))

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
        registry = ControllerMetrics(self).registry
        self._metrics_page = serve_beside(registry, admin.host, 0, insecure=admin.insecure, tls=page)
        self._notices.put(Notice("progress", "controller", f"metrics: {self.metrics_address}"))

    async def notices(self, after: int = 0) -> News:
        """Waits for news; returns all there are."""
        return await self._notices.after(after)

    async def apply(self, text: str, filename: str) -> tuple[list[str], str]:
        """What a cluster.yaml says, to the end of the change: the events of it, and why it failed, if it did."""
        origin = f"serve {filename}"
        try:
            answer = self.door.propose(self.door.split_kept(self.parse(text, filename)), origin, keep=self.keep)
        except BatonError as error:
            return [], error.message
        await self.door.settled()
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
            for supervisor in (*self.routers, *(member.supervisor for member in self.crew))
        }

    async def shutdown(self) -> None:
        """The routers first, so that running requests end; then the workers."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await self.door.close()
        await self._link.close()
        await asyncio.gather(*(router.stop(self._drain_s + STOP_S) for router in self.routers))
        await self.crew.stop(STOP_S)
        self._places.close()
        self._room.give_back()
        for admin in self._admins:
            await admin.stop(None)
        if self._metrics_page is not None:
            self._metrics_page.close()

    @property
    def config_path(self) -> str:
        return str(self._file.path) if self._file is not None and self._file.is_own else ""

    @property
    def keep(self) -> Keep | None:
        return self._watch.keep if self._watch is not None else None

    @property
    def auto(self) -> admin_pb2.Auto | None:
        if self.door.config.rebalance.mode != "auto":
            return None
        verdict = self._pilot.verdict
        why, gain = ("", 0.0) if verdict is None else (verdict.why, verdict.gain)
        return admin_pb2.Auto(why=why, gain=gain, num_moves=self._pilot.num_moves)

    @property
    def metrics_address(self) -> str:
        return "" if self._metrics_page is None else self._metrics_page.address

    # What the page of metrics is made of

    @property
    def config_version(self) -> int:
        return self.door.version

    @property
    def events_by_kind(self) -> Mapping[EventKind, int]:
        return self.events.num_by_kind

    @property
    def verdicts(self) -> Mapping[Reason, int]:
        return self._pilot.num_verdicts

    @property
    def num_auto_moves(self) -> int:
        return self._pilot.num_moves

    @property
    def auto_gain(self) -> float:
        verdict = self._pilot.verdict
        return 0.0 if verdict is None else verdict.gain

    def workers(self) -> Counter[tuple[str, SupervisorState]]:
        return Counter((member.plan.role, member.supervisor.state) for member in tuple(self.crew))

    def parse(self, text: str, filename: str) -> ServingConfig:
        """As if it stood in the file that is watched."""
        file = self._file or ConfigFile(Path("cluster.yaml"))
        return file.parse(text, filename)

    async def router_status(self) -> admin_pb2.GetStatusResponse | None:
        return await self._link.status()

    def _reporter(self, who: str) -> Callable[[str], None]:
        return lambda line: self._notices.put(Notice("progress", who, line))

    def _on_event(self, event: ClusterEvent) -> None:
        logger.info("%s: %s", event.kind.value, event.text)
        if event.kind not in (EventKind.WORKER_READY, EventKind.WORKER_LOST):
            self._notices.put(Notice("change", "controller", event.text))

    def _on_change(self, supervisor: Supervisor) -> None:
        self._changed.set()
        if self._is_stopping:
            return
        match supervisor.state:
            case SupervisorState.READY:
                self.events.add(EventKind.WORKER_READY, f"{supervisor.name} is ready", supervisor.name)
                notice = Notice("ready", supervisor.name, str(supervisor.card.get("address", "")))
            case SupervisorState.BACKING_OFF:
                self.events.add(EventKind.WORKER_LOST, f"{supervisor.name}: {supervisor.why}", supervisor.name)
                notice = Notice("lost", supervisor.name, supervisor.why)
            case SupervisorState.FAILED if not self._has_served:
                notice = Notice("failed", supervisor.name, supervisor.why, supervisor.is_mistake)
            case _:
                return
        self._notices.put(notice)

    async def _announce(self) -> None:
        """Tells the router its workers after each change, until it has heard it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                has_heard = await self._tell_change()
            except Exception:
                # A fault of ours must not leave the routers with old workers for ever.
                logger.exception("the routers could not be told of a change")
                has_heard = False
            if not has_heard:
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    async def _tell_change(self) -> bool:
        """False: to be tried again. While no router is up nobody is told; the start of one is a change."""
        if not self._link.is_up:
            return True
        if not await self._link.try_to_tell():
            return False
        if not self._has_served and self._link.are_all_up and all(member.is_ready for member in self.crew):
            await self._first_served()
        return True

    def _compose(self) -> admin_pb2.SetWorkersRequest:
        return admin_pb2.SetWorkersRequest(
            workers=self.crew.addresses(),
            config_version=self.door.version,
            needs_prefill=self.door.needs_prefill,
            run_time_settings=run_time_json(self.door.config),
            admin_address=self._inner_admin,
        )

    async def _first_served(self) -> None:
        """Waits until the router is connected to its workers, unless those have changed meanwhile."""
        while not self._changed.is_set():
            status = await self._link.status()
            ready = admin_pb2.WorkerStatus.STATE_READY
            address = self.routers[0].card.get("address")
            are_ready = status is not None and sum(w.state == ready for w in status.workers) == len(self.crew)
            if are_ready and address is not None:
                self._has_served = True
                http = self.routers[0].card.get("http_address")
                if http:
                    self._notices.put(Notice("http", "router", str(http)))
                self._notices.put(Notice("serving", "router", str(address)))
                self._tasks.append(asyncio.create_task(self._steer()))
                if self._watch is not None:
                    self._tasks.append(asyncio.create_task(self._look_at_file(self._watch)))
                return
            await asyncio.sleep(_RETRY_S)

    async def _look_at_file(self, watch: Watch) -> None:
        """Whenever no change is being carried out."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self.door.changing is None:
                    watch.look()
            except Exception:
                # A fault of ours must not end the watch over the file unseen.
                logger.exception("%s could not be looked at", self.config_path)

    def _apply_file(self, wanted: ServingConfig) -> None:
        # A refusal is an event already.
        with contextlib.suppress(BatonError):
            self.door.propose(self.door.split_kept(wanted), f"{self.config_path} was edited")

    async def _steer(self) -> None:
        """Has `mode: auto` look at the load; it is nothing in another mode, which may change."""
        while True:
            await asyncio.sleep(_STEER_S)
            try:
                await self._pilot.look(asyncio.get_running_loop().time(), self.door.config)
            except Exception:
                # A fault of ours must not end the watch over the load unseen.
                logger.exception("mode auto could not look at the load")

    async def _sight(self) -> Sight | None:
        return Sight.of(await self._link.demand())

    def _split(self) -> Split | None:
        """None while it changes, or a worker is not there."""
        members = [m for m in self.crew.members() if not m.is_draining]
        if self.door.changing is not None or not all(m.is_ready for m in members):
            return None
        num_prefill = sum(m.role == "prefill" for m in members)
        num_added = self.door.num_added // self.door.config.roles.decode.tensor_parallel
        return Split(num_prefill, len(members) - num_prefill, self.door.version, num_added)

    def _move(self, num_prefill: int, num_decode: int, version: int, why: str) -> None:
        wanted = self.door.with_split(num_prefill, num_decode)
        self.door.propose(wanted, f"mode auto {num_prefill}:{num_decode}", expected_version=version, is_auto=True)


def start_controller(
    config: ServingConfig, plan: ClusterPlan, programs: Programs, file: ConfigFile | None = None
) -> Any:
    """Starts the actor on the caller's node and returns its handle. `file`: where `config` comes from; it is watched if
    it is the operator's own."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class = ray.remote(Controller).options(num_cpus=CPU_SHARE, max_restarts=0, scheduling_strategy=here)
    return actor_class.remote(config, plan, programs, file)
