"""The workers that run: for each its supervisor, what it is started with, the role it has now, and whether it drains.

A worker's id is its name from birth to end; its role is a label, which the next start goes by. How a worker is started
is behind `Launcher`; who tells the router is `controller.router_link`. Knows no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cluster.config.schema import RoleName
from cluster.pb import admin_pb2, worker_pb2
from controller.change_plan import Member
from controller.plan import WorkerPlan
from controller.supervisor import RunningProcesses, Supervisor, SupervisorState

ROLE_NUMBERS: Mapping[RoleName, worker_pb2.Role] = {
    "prefill": worker_pb2.ROLE_PREFILL,
    "decode": worker_pb2.ROLE_DECODE,
}


class Launcher(Protocol):
    """Starts one worker, as often as it takes."""

    plan: WorkerPlan
    """What the next start goes by."""
    placing_limit_s: float | None
    """How long that start may wait for a place, until it fails; None: for ever."""

    async def launch(self) -> RunningProcesses: ...

    def close(self) -> None:
        """Gives back what the worker had booked."""
        ...


@dataclass
class CrewMember:
    """One worker."""

    launcher: Launcher
    supervisor: Supervisor
    is_draining: bool = False
    is_named: bool = field(default=True)
    """The router is told of it; not any more when it is about to end."""

    @property
    def plan(self) -> WorkerPlan:
        return self.launcher.plan

    @property
    def is_ready(self) -> bool:
        return self.supervisor.state is SupervisorState.READY


class WorkerPool:
    """`changed` is called with a supervisor after each change of its state."""

    def __init__(self, make_launcher: Callable[[WorkerPlan], Launcher], changed: Callable[[Supervisor], None]) -> None:
        self._make_launcher = make_launcher
        self._changed = changed
        self._members: dict[str, CrewMember] = {}

    def __iter__(self) -> Iterator[CrewMember]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, worker_id: str) -> CrewMember:
        return self._members[worker_id]

    def add(self, plans: Iterable[WorkerPlan]) -> None:
        """They run when `run` is called for them."""
        for plan in plans:
            launcher = self._make_launcher(plan)
            self._members[plan.worker_id] = CrewMember(
                launcher, Supervisor(plan.worker_id, launcher.launch, self._changed)
            )

    def run(self) -> None:
        """Starts all there are."""
        for member in self:
            member.supervisor.run()

    def members(self) -> list[Member]:
        """As `controller.change_plan` plans with them."""
        return [
            Member(m.plan.worker_id, m.plan.role, len(m.plan.ranks), m.is_ready, m.is_draining)
            for m in self._members.values()
        ]

    def addresses(self) -> list[admin_pb2.WorkerAddress]:
        """Of those that are ready, as the router is told them."""
        return [
            admin_pb2.WorkerAddress(
                worker_id=m.plan.worker_id,
                address=str(m.supervisor.card["address"]),
                role=ROLE_NUMBERS[m.plan.role],
                is_draining=m.is_draining,
            )
            for m in self
            if m.is_ready and m.is_named
        ]

    async def remove(self, worker_id: str, grace_s: float) -> None:
        """Ends it, whatever it is doing, and forgets it."""
        member = self._members[worker_id]
        member.is_named = False
        await member.supervisor.stop(grace_s)
        member.launcher.close()
        del self._members[worker_id]

    async def stop(self, grace_s: float) -> None:
        """Ends all; they stay known."""
        await asyncio.gather(*(m.supervisor.stop(grace_s) for m in self))
        for member in self:
            member.launcher.close()
