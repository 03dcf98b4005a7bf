"""A controller without processes: a reconfigurer whose workers are only names.

A step is carried out when the test says so (or at once); updates of the routers are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cluster.config.schema import ModelSection, RoleSection, RolesSection, ServingConfig
from cluster.settings import RouterSettings
from controller.adoption import FoundProcess, SavedRouter
from controller.change_plan import Member, Replace, Start, Step, apply_step
from controller.events import ClusterEvent, EventKind, EventLog
from controller.reconfigurer import Reconfigurer
from controller.router_pool import RouterPool, SharedPorts
from controller.supervisor import StartFailed, Supervisor, SupervisorState
from controller.worker_pool import StepFailed

FILE = Path(__file__).resolve().parents[2] / "cluster.yaml"


def config_of(prefill: int = 1, decode: int = 3) -> ServingConfig:
    return ServingConfig(
        model=ModelSection(path="models/m"),
        roles=RolesSection(RoleSection(devices=prefill), RoleSection(devices=decode)),
    )


class FakeSteps:
    """Workers by name only. `gate`: steps wait for it. `broken`: the step with this text fails."""

    def __init__(self, config: ServingConfig) -> None:
        self.workers = [
            Member(f"{role}-{number}", role, config.role(role).tensor_parallel)  # type: ignore[arg-type]
            for role in ("prefill", "decode")
            for number in range(config.role(role).num_workers)  # type: ignore[arg-type]
        ]
        self._engines = {worker.worker_id: config.engine for worker in self.workers}
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = ""
        self.num_told = 0

    def members(self, wanted: ServingConfig | None = None) -> list[Member]:
        """A worker is stale that has been started with another block size, or for smaller steps."""
        return [replace(w, is_stale=wanted is not None and self._is_stale(w, wanted)) for w in self.workers]

    def _is_stale(self, worker: Member, wanted: ServingConfig) -> bool:
        engine = self._engines[worker.worker_id]
        is_larger = wanted.engine.max_num_batched_tokens > engine.max_num_batched_tokens
        return is_larger or wanted.engine.block_size != engine.block_size

    async def update_routers(self) -> None:
        self.num_told += 1

    async def carry_out(self, step: Step, config: ServingConfig) -> None:
        await self.gate.wait()
        if str(step) == self.broken:
            raise StepFailed(f"{step.worker_id} did not")
        if isinstance(step, (Start, Replace)):
            self._engines[step.worker_id] = config.engine
        self.workers = apply_step(self.workers, step)


class NamedRouter:
    """A router that serves until it is stopped, which `gate` holds up."""

    def __init__(self, name: str, settings: RouterSettings, stage: RouterStage) -> None:
        self.card = {"address": f"127.0.0.1:{settings.router.port}"}
        self.name = name
        self.settings = settings
        self._stage = stage

    async def ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self, grace_s: float) -> None:
        self._stage.stopping.append((self.name, grace_s))
        await self._stage.gate.wait()
        self._stage.running.remove(self)

    async def kill(self) -> None:
        self._stage.running.remove(self)


class NamedRouterStarter:
    """Routers that serve at once, but for those in `broken`; a free port is 7000."""

    def __init__(self, name: str, settings: RouterSettings, stage: RouterStage) -> None:
        self.settings = settings
        self.is_successor = False
        self._name = name
        self._stage = stage

    async def launch(self) -> NamedRouter:
        self._stage.launches.append((self._name, self.is_successor))
        if self._name in self._stage.broken:
            raise StartFailed("no such policy", is_mistake=True)
        section = self.settings.router
        http_port = 7001 if section.http_port == 0 else section.http_port
        self.settings = replace(self.settings, router=replace(section, port=section.port or 7000, http_port=http_port))
        self._stage.running.append(NamedRouter(self._name, self.settings, self._stage))
        return self._stage.running[-1]

    def adopt(self, router: FoundProcess) -> NamedRouter:
        raise AssertionError("nothing is adopted here")


class NamedLink:
    """The link of a router; updates arrive."""

    def __init__(self, router: Supervisor) -> None:
        self.router = router

    @property
    def is_up(self) -> bool:
        return self.router.state is SupervisorState.READY

    async def try_to_update(self) -> bool:
        return self.is_up

    async def close(self) -> None:
        pass


class RouterStage:
    """A pool whose routers are only names; `launches` says which began, and whether as successors."""

    def __init__(
        self,
        config: ServingConfig,
        journal: str = "/nowhere/journal.db",
        saved: Sequence[SavedRouter] = (),
        ports: SharedPorts | None = None,
    ) -> None:
        self.running: list[NamedRouter] = []
        self.launches: list[tuple[str, bool]] = []
        self.stopping: list[tuple[str, float]] = []
        self.broken: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.links: list[NamedLink] = []
        self.pool = RouterPool(
            lambda name, number, settings, num_starts: NamedRouterStarter(name, settings, self),
            self._make_link,
            lambda supervisor: None,
            journal,
            ports,
        )
        self.pool.add(config, saved, have_served=False)

    async def come_up(self) -> None:
        self.pool.run()
        while not self.pool.links.are_all_up:
            await asyncio.sleep(0)

    def names(self) -> list[str]:
        return [router.name for router in self.running]

    def _make_link(self, router: Supervisor) -> Any:
        self.links.append(NamedLink(router))
        return self.links[-1]


class ReconfigurerStage:
    """A reconfigurer over fake steps, and its events."""

    def __init__(self, config: ServingConfig | None = None, max_devices: int | None = None) -> None:
        config = config or config_of()
        self.told: list[ClusterEvent] = []
        self.events = EventLog(self.told.append)
        self.steps = FakeSteps(config)
        num_devices = None if max_devices is None else lambda: max_devices
        self.routers = RouterStage(config)
        self.reconfigurer = Reconfigurer(config, cast(Any, self.steps), self.routers.pool, self.events, num_devices)

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.told]

    def split(self) -> tuple[int, int]:
        roles = [worker.role for worker in self.steps.workers]
        return roles.count("prefill"), roles.count("decode")
