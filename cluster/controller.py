"""The controller: a Ray actor that starts the workers and the router of a plan, keeps them up, and introduces them.

Each worker is a placement group of its own (STRICT_PACK: its ranks share a node) and a supervisor of its own: rank 0
prepares first and says where the other ranks find it, then all start; when one ends, all are killed and started
afresh. The router is told the complete set of workers after every change. Decisions are in `cluster.plan`,
`cluster.restart` and `cluster.supervisor`, which know no Ray; no request passes through here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import grpc
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.actors import HostedProcess, die_with_parent
from cluster.pb import admin_pb2, admin_pb2_grpc, worker_pb2
from cluster.plan import CPU_SHARE, ClusterPlan, WorkerPlan
from cluster.rpc import create_channel
from cluster.settings import RouterSettings
from cluster.supervisor import Running, State, Supervisor
from cluster.tls import internal_tls_of

logger = logging.getLogger(__name__)

NoticeKind = Literal["progress", "ready", "lost", "failed", "serving"]
STOP_S = 5.0
"""How long a worker may take to end by itself."""
_PLACING_S = 5.0
_CALL_S = 5.0
_RETRY_S = 0.1


@dataclass(frozen=True)
class Notice:
    """Something an operator wants to see. `serving` comes once: every worker and the router are up."""

    kind: NoticeKind
    who: str
    text: str
    is_mistake: bool = False


@dataclass(frozen=True)
class Programs:
    """The modules that offer `create`; named, never imported here."""

    worker: str = "worker.program"
    router: str = "router.program"


class RunningGroup:
    """The processes of one worker, or of the router, that live and die as one."""

    def __init__(self, processes: Sequence[HostedProcess], card: Mapping[str, Any]) -> None:
        self._processes = processes
        self.card = card

    async def ended(self) -> str:
        tasks = [asyncio.create_task(process.ended()) for process in self._processes]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return next(iter(done)).result()

    async def stop(self, grace_s: float) -> None:
        await asyncio.gather(*(process.stop(grace_s) for process in self._processes))

    async def kill(self) -> None:
        await asyncio.gather(*(process.kill() for process in self._processes))


class WorkerLauncher:
    """Starts one worker, as often as it takes, in the placement group that it keeps."""

    def __init__(self, plan: WorkerPlan, module: str, log_dir: str | None, report: Callable[[str], None]) -> None:
        self._plan = plan
        self._module = module
        self._log_dir = log_dir
        self._report = report
        self._group: PlacementGroup | None = None

    async def launch(self) -> Running:
        if self._group is None:
            bundles = [self._plan.bundle for _ in self._plan.ranks]
            self._group = placement_group(bundles, strategy="STRICT_PACK")
        ranks = [self._host(number, self._group) for number in range(len(self._plan.ranks))]
        try:
            return RunningGroup(ranks, await self._start(ranks))
        except BaseException:
            await asyncio.gather(*(rank.kill() for rank in ranks))
            raise

    def close(self) -> None:
        """Gives the resources back to Ray."""
        if self._group is not None:
            remove_placement_group(self._group)

    def _host(self, number: int, group: PlacementGroup) -> HostedProcess:
        name = self._plan.worker_id if len(self._plan.ranks) == 1 else f"{self._plan.worker_id} rank {number}"
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return HostedProcess(
            self._module, name, self._report, bundle=self._plan.bundle, strategy=strategy, log_dir=self._log_dir
        )

    async def _start(self, ranks: Sequence[HostedProcess]) -> dict[str, Any]:
        """Returns rank 0's card, with the pids of all."""
        locating = asyncio.gather(*(rank.locate() for rank in ranks))
        done, _ = await asyncio.wait([locating], timeout=_PLACING_S)
        if not done:
            self._report(f"waiting for Ray to find a node with room for {len(ranks)} × {self._plan.bundle}")
        places = await locating
        settings = [replace(s, host=place.host) for s, place in zip(self._plan.ranks, places, strict=True)]
        leader = json.loads(await ranks[0].prepare(settings[0].to_json()))["rank_address"]
        others = [replace(s, leader=leader).to_json() for s in settings[1:]]
        await asyncio.gather(*(rank.prepare(text) for rank, text in zip(ranks[1:], others, strict=True)))
        cards = [json.loads(text) for text in await asyncio.gather(*(rank.start() for rank in ranks))]
        return {**cards[0], "pids": [place.pid for place in places]}


class RouterLauncher:
    """Starts the router on the controller's node; once it has had a port, always on that one."""

    def __init__(
        self, settings: RouterSettings, module: str, log_dir: str | None, report: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._module = module
        self._log_dir = log_dir
        self._report = report

    async def launch(self) -> Running:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        router = HostedProcess(
            self._module, "router", self._report, bundle={"CPU": CPU_SHARE}, strategy=here, log_dir=self._log_dir
        )
        try:
            place = await router.locate()
            await router.prepare(self._settings.to_json())
            card = json.loads(await router.start())
        except BaseException:
            await router.kill()
            raise
        self._settings = replace(self._settings, port=int(card["address"].rpartition(":")[2]))
        return RunningGroup([router], {**card, "pids": [place.pid]})


class Controller:
    """The actor. `run` once; `notices` for as long as someone listens; `shutdown` at the end."""

    def __init__(self, plan: ClusterPlan, programs: Programs, log_dir: str | None) -> None:
        die_with_parent()
        self._notices: asyncio.Queue[Notice] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._has_served = False
        self._is_stopping = False
        self._plans = {worker.worker_id: worker for worker in plan.workers}
        self._launchers = {
            name: WorkerLauncher(worker, programs.worker, log_dir, self._reporter(name))
            for name, worker in self._plans.items()
        }
        router = RouterLauncher(plan.router, programs.router, log_dir, self._reporter("router"))
        tls = internal_tls_of(plan.router)
        self._tls = None if tls is None else tls.client
        self._drain_s = plan.router.drain_timeout_s
        self._router = Supervisor("router", router.launch, self._on_change)
        self._workers = {
            name: Supervisor(name, launcher.launch, self._on_change) for name, launcher in self._launchers.items()
        }
        self._announcing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Starts everything; returns at once."""
        for supervisor in (self._router, *self._workers.values()):
            supervisor.run()
        self._announcing = asyncio.create_task(self._announce())

    async def notices(self) -> list[Notice]:
        """Waits for news; returns all there are."""
        news = [await self._notices.get()]
        while not self._notices.empty():
            news.append(self._notices.get_nowait())
        return news

    async def status(self) -> dict[str, dict[str, Any]]:
        """For each process group: its state, how often it was started, and its card."""
        return {
            supervisor.name: {
                "state": supervisor.state.value,
                "num_starts": supervisor.num_starts,
                "why": supervisor.why,
                **supervisor.card,
            }
            for supervisor in (self._router, *self._workers.values())
        }

    async def shutdown(self) -> None:
        """The router first, so that running requests end; then the workers."""
        self._is_stopping = True
        if self._announcing is not None:
            self._announcing.cancel()
        await self._router.stop(self._drain_s + STOP_S)
        await asyncio.gather(*(worker.stop(STOP_S) for worker in self._workers.values()))
        for launcher in self._launchers.values():
            launcher.close()

    def _reporter(self, who: str) -> Callable[[str], None]:
        return lambda line: self._notices.put_nowait(Notice("progress", who, line))

    def _on_change(self, supervisor: Supervisor) -> None:
        self._changed.set()
        if self._is_stopping:
            return
        match supervisor.state:
            case State.READY:
                notice = Notice("ready", supervisor.name, str(supervisor.card.get("address", "")))
            case State.BACKING_OFF:
                notice = Notice("lost", supervisor.name, supervisor.why)
            case State.FAILED:
                notice = Notice("failed", supervisor.name, supervisor.why, supervisor.is_mistake)
            case _:
                return
        self._notices.put_nowait(notice)

    async def _announce(self) -> None:
        """Tells the router its workers after each change, until it has heard it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._router.state is not State.READY:
                continue
            try:
                await self._set_workers()
            except grpc.RpcError as error:
                logger.info("the router has not heard of its workers yet: %s", error)
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    async def _set_workers(self) -> None:
        addresses = [
            admin_pb2.WorkerAddress(
                worker_id=name,
                address=str(worker.card["address"]),
                role=worker_pb2.ROLE_PREFILL if self._plans[name].role == "prefill" else worker_pb2.ROLE_DECODE,
            )
            for name, worker in self._workers.items()
            if worker.state is State.READY
        ]
        card = self._router.card
        async with create_channel(str(card["control_address"]), tls=self._tls) as channel:
            control = admin_pb2_grpc.ControlServiceStub(channel)
            await control.SetWorkers(admin_pb2.SetWorkersRequest(workers=addresses), timeout=_CALL_S)
        if len(addresses) == len(self._workers) and not self._has_served:
            self._has_served = await self._router_sees(len(addresses), str(card["control_address"]))
            if self._has_served:
                self._notices.put_nowait(Notice("serving", "router", str(card["address"])))

    async def _router_sees(self, num_workers: int, address: str) -> bool:
        """Waits until the router is connected to its workers; False when those have changed meanwhile."""
        async with create_channel(address, tls=self._tls) as channel:
            admin = admin_pb2_grpc.StatusServiceStub(channel)
            while True:
                status = await admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=_CALL_S)
                if sum(w.state == admin_pb2.WorkerStatus.STATE_READY for w in status.workers) == num_workers:
                    return True
                if self._changed.is_set():
                    return False
                await asyncio.sleep(_RETRY_S)


def start_controller(plan: ClusterPlan, programs: Programs, log_dir: str | None) -> Any:
    """Starts the actor on the caller's node and returns its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class = ray.remote(Controller).options(num_cpus=CPU_SHARE, max_restarts=0, scheduling_strategy=here)
    return actor_class.remote(plan, programs, log_dir)
