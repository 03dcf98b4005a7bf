"""Carries out one step of a plan, and returns when the router has seen it done.

A step that takes a worker from a role waits until the router has enough others of that role ready. Which steps there
are, and in which order, is for `controller.change_plan` to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from cluster.config import ServingConfig
from cluster.config.schema import EngineSection, RoleName
from cluster.pb import admin_pb2
from controller.change_plan import Flip, Member, Start, Step, Stop
from controller.plan import WorkerPlan, plan_worker
from controller.router_link import LOOK_EVERY_S, RouterLinks
from controller.supervisor import SupervisorState
from controller.worker_pool import ROLE_NUMBERS, WorkerPool

STOP_S = 5.0
"""How long a worker may take to end by itself."""
_FLIP_S = 120.0
"""How long a worker that is down when it flips may take to come back, and others until they can spare it."""
_PLACE_S = 120.0
"""How long a worker that a change starts may wait for Ray to place it; to load its weights it may take longer."""
READY = admin_pb2.WorkerStatus.STATE_READY

Status = admin_pb2.GetStatusResponse


class StepFailed(Exception):
    """The step cannot be done; the message says why."""


class Steps:
    """`engine`: what every worker here is started with, for its device and memory; what has changed since then reaches
    it over the router."""

    def __init__(self, crew: WorkerPool, link: RouterLinks, engine: EngineSection) -> None:
        self._crew = crew
        self._link = link
        self._engine = engine

    def members(self) -> list[Member]:
        return self._crew.members()

    def next_worker(self, config: ServingConfig) -> WorkerPlan:
        """One more of any role, where both have workers of one size; whose number is not given yet."""
        return self._plan(config, "decode")

    async def tell(self) -> None:
        """Has the router hear how things are now."""
        await self._link.tell()

    async def carry_out(self, step: Step, config: ServingConfig) -> None:
        """`config`: the one that is wanted. Raises StepFailed, and leaves no worker behind that did not come up."""
        match step:
            case Flip():
                await self._flip(step, config)
            case Start():
                await self._start(step, config)
            case Stop():
                await self._stop(step, config)

    async def _flip(self, step: Flip, config: ServingConfig) -> None:
        member = self._crew[step.worker_id]
        await self._can_be_spared(step.worker_id, config)
        number_free = self._plan(config, step.role)
        ranks = [replace(rank, worker_id=step.worker_id) for rank in number_free.ranks]
        step_logs = [rank.step_log for rank in member.plan.ranks]
        member.launcher.plan = replace(
            number_free,
            worker_id=step.worker_id,
            ranks=tuple(replace(rank, step_log=log) for rank, log in zip(ranks, step_logs, strict=True)),
        )
        await self._link.tell()
        await self._until(
            lambda status: _sees(status, step.worker_id, step.role), _FLIP_S, f"{step.worker_id} is not ready"
        )

    async def _start(self, step: Start, config: ServingConfig) -> None:
        number = int(step.worker_id.rpartition("-")[2])
        plan = self._plan(config, step.role, number)
        self._crew.add([plan])
        member = self._crew[step.worker_id]
        supervisor = member.supervisor
        member.launcher.placing_limit_s = _PLACE_S
        supervisor.run()
        while supervisor.state is not SupervisorState.FAILED:
            status = await self._link.status()
            if status is not None and _sees(status, step.worker_id, step.role):
                member.launcher.placing_limit_s = None  # from now on it is brought back whenever there is room
                return
            await asyncio.sleep(LOOK_EVERY_S)
        why = supervisor.why
        await self._crew.remove(step.worker_id, STOP_S)
        raise StepFailed(f"{step.worker_id} did not start: {why}")

    async def _stop(self, step: Stop, config: ServingConfig) -> None:
        member = self._crew[step.worker_id]
        await self._can_be_spared(step.worker_id, config)
        member.is_draining = True
        await self._link.tell()
        # What is left after that goes on elsewhere, as from a worker that was lost.
        await self._holds(lambda status: _is_empty(status, step.worker_id), config.rebalance.drain_timeout_s)
        member.is_named = False
        await self._link.tell()
        await self._crew.remove(step.worker_id, STOP_S)

    def _plan(self, config: ServingConfig, role: RoleName, number: int = 0) -> WorkerPlan:
        return plan_worker(replace(config, engine=self._engine), role, number)

    async def _can_be_spared(self, worker_id: str, config: ServingConfig) -> None:
        """Until its role has its minimum without it."""
        member = self._crew[worker_id]
        role = member.plan.role
        least = max(config.role(role).min_workers, 1 if role == "decode" else 0)
        if not member.is_draining:
            await self._until(
                lambda status: (
                    sum(_sees(status, m.plan.worker_id, role) for m in self._crew if m is not member) >= least
                ),
                _FLIP_S,
                f"{worker_id} cannot be spared: fewer than {least} other {role} workers are ready",
            )

    async def _until(self, condition: Callable[[Status], bool], limit_s: float, problem: str) -> None:
        if not await self._holds(condition, limit_s):
            raise StepFailed(f"{problem} after {limit_s:g} s")

    async def _holds(self, condition: Callable[[Status], bool], limit_s: float) -> bool:
        """True as soon as the router says so."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    status = await self._link.status()
                    if status is not None and condition(status):
                        return True
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            return False


def _sees(status: Status, worker_id: str, role: RoleName) -> bool:
    return any(
        w.worker_id == worker_id and w.state == READY and w.role == ROLE_NUMBERS[role] and not w.is_draining
        for w in status.workers
    )


def _is_empty(status: Status, worker_id: str) -> bool:
    """Whichever router has something on it."""
    return not any(w.worker_id == worker_id and w.num_requests for w in status.workers)
