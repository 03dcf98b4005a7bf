"""The workers that run, and the steps that change them.

`WorkerPool` holds for each worker its supervisor, what it is started with, its role, and whether it drains. A worker's
id is its name for life; its role is a label, by which it is started the next time. `StepRunner` carries out one step of
a plan and returns when the routers have seen it done; `controller.change_plan` decides which steps there are, and in
which order. How a worker is started is behind `Launcher`. Knows no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cluster.config.diff import is_run_time, leaves
from cluster.config.schema import EngineSection, RoleName, ServingConfig
from cluster.errors import NotFound, Unavailable
from cluster.pb import admin_pb2
from cluster.settings import WorkerSettings
from cluster.text import ROLE_NUMBERS, role_name
from controller.adoption import FoundProcess, SavedWorker
from controller.change_plan import OTHER, Flip, Member, Replace, Start, Step, Stop
from controller.plan import WorkerPlan, found_device, plan_worker
from controller.router_link import LOOK_EVERY_S, RouterLinks
from controller.supervisor import RestartPolicy, RunningProcesses, Supervisor, SupervisorState

STOP_S = 5.0
"""Seconds that a worker may take to end by itself."""
_FLIP_S = 120.0
"""Seconds that a worker which is down when it flips may take to come back, and others until they can spare it."""
_PLACE_S = 120.0
"""Seconds that a worker which a change starts may wait for Ray to place it; to load its weights it may take longer."""
READY = admin_pb2.WorkerStatus.STATE_READY

Status = admin_pb2.GetStatusResponse


class Launcher(Protocol):
    """Starts one worker, as often as it takes; `controller.launchers` does so on Ray."""

    plan: WorkerPlan
    """The plan of the next start."""
    placing_limit_s: float | None
    """Seconds that this start may wait for a place, until it fails; None: without end."""

    async def launch(self) -> RunningProcesses: ...

    def adopt(self, ranks: Sequence[FoundProcess]) -> RunningProcesses:
        """Takes over what a controller before has started; later starts go on from there."""
        ...

    def close(self) -> None:
        """Gives back what the worker had booked."""
        ...


@dataclass
class PooledWorker:
    """One worker."""

    launcher: Launcher
    supervisor: Supervisor
    is_draining: bool = False
    is_named: bool = field(default=True)
    """The routers know it; False when it is about to end."""

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
        self._members: dict[str, PooledWorker] = {}

    def __iter__(self) -> Iterator[PooledWorker]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, worker_id: str) -> PooledWorker:
        return self._members[worker_id]

    def add(self, plans: Iterable[WorkerPlan], *, have_served: bool = False) -> None:
        """Workers that `run` starts. `have_served`: they are brought back however often they fail."""
        for plan in plans:
            launcher, policy = self._make_launcher(plan), RestartPolicy(has_served=have_served)
            self._members[plan.worker_id] = PooledWorker(
                launcher, Supervisor(plan.worker_id, launcher.launch, self._changed, policy)
            )

    def adopt(self, worker_id: str, ranks: Sequence[FoundProcess]) -> None:
        """Takes over a worker that serves already."""
        member = self._members[worker_id]
        member.supervisor.run(member.launcher.adopt(ranks), ranks[0].identity.epoch)

    def run(self) -> None:
        """Starts all that have not been started or adopted."""
        for member in self:
            member.supervisor.run()

    def members(self) -> list[Member]:
        """The workers as `controller.change_plan` sees them."""
        return [
            Member(m.plan.worker_id, m.plan.role, len(m.plan.ranks), m.is_ready, m.is_draining)
            for m in self._members.values()
        ]

    def addresses(self) -> list[admin_pb2.WorkerAddress]:
        """The ready workers, as routers get them."""
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

    def names(self) -> tuple[str, ...]:
        """Returns those that get new work, as `workers` of RouterSettings has them."""
        return tuple(f"{role_name(w.role)}:{w.worker_id}={w.address}" for w in self.addresses() if not w.is_draining)

    def address(self, worker_id: str) -> str:
        """Returns where a worker listens. Raises NotFound, or Unavailable while it is not ready."""
        member = self._members.get(worker_id)
        if member is None:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(sorted(self._members)) or 'none'}")
        if not member.is_ready:
            raise Unavailable(f"worker {worker_id} is {member.supervisor.state.value}; try again when it is ready")
        return str(member.supervisor.card["address"])

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


class StepFailed(Exception):
    """The step cannot be done; the message says why."""


class StepRunner:
    """`engine`: that of the cluster's first workers: the device and threads that were found where the configuration
    leaves them open, and the largest step for which each worker reserves memory at least, unless its role says one."""

    def __init__(self, pool: WorkerPool, routers: RouterLinks, engine: EngineSection) -> None:
        self._pool = pool
        self._routers = routers
        self.engine = engine

    def members(self, wanted: ServingConfig | None = None) -> list[Member]:
        """The workers; those are stale which `wanted` would start with other settings."""
        return [
            replace(m, is_stale=wanted is not None and self._is_stale(self._pool[m.worker_id].plan, wanted))
            for m in self._pool.members()
        ]

    def addresses(self) -> list[admin_pb2.WorkerAddress]:
        """The ready workers, as routers get them."""
        return self._pool.addresses()

    def restore(self, workers: Iterable[SavedWorker], config: ServingConfig, *, have_served: bool) -> None:
        """Fills the pool with the workers of the controller before, which are adopted or started afterwards."""
        for saved in workers:
            self._pool.add([self._plan(config, saved.role, saved.worker_id)], have_served=have_served)
            self._pool[saved.worker_id].is_draining = saved.is_draining

    def next_worker(self, config: ServingConfig) -> WorkerPlan:
        """One more worker of any role, where both roles have workers of one size; it has no number yet."""
        return self._plan(config, "decode")

    async def update_routers(self) -> None:
        """Returns when every router that is up knows the workers as they are now."""
        await self._routers.update()

    async def carry_out(self, step: Step, config: ServingConfig) -> None:
        """`config`: the wanted one. Raises StepFailed, and leaves no worker behind that did not come up."""
        match step:
            case Flip():
                await self._flip(step, config)
            case Start():
                await self._start(step, config)
            case Stop():
                await self._stop(step.worker_id, config)
            case Replace():
                await self._replace(step, config)

    async def _flip(self, step: Flip, config: ServingConfig) -> None:
        member = self._pool[step.worker_id]
        await self._can_be_spared(step.worker_id, config)
        member.launcher.plan = self._plan(config, step.role, step.worker_id)
        await self._routers.update()
        await self._until(
            lambda status: _sees(status, step.worker_id, step.role), _FLIP_S, f"{step.worker_id} is not ready"
        )

    async def _start(self, step: Start, config: ServingConfig) -> None:
        self._pool.add([self._plan(config, step.role, step.worker_id)])
        member = self._pool[step.worker_id]
        supervisor = member.supervisor
        member.launcher.placing_limit_s = _PLACE_S
        supervisor.run()
        while supervisor.state is not SupervisorState.FAILED:
            status = await self._routers.status()
            if status is not None and _sees(status, step.worker_id, step.role):
                member.launcher.placing_limit_s = None  # from now on it is brought back whenever there is room
                return
            await asyncio.sleep(LOOK_EVERY_S)
        why = supervisor.why
        await self._pool.remove(step.worker_id, STOP_S)
        raise StepFailed(f"{step.worker_id} did not start: {why}")

    async def _stop(self, worker_id: str, config: ServingConfig) -> None:
        member = self._pool[worker_id]
        await self._can_be_spared(worker_id, config)
        member.is_draining = True
        await self._routers.update()
        # After the limit, what is left goes on elsewhere, as from a lost worker.
        await self._holds(lambda status: _is_empty(status, worker_id), config.rebalance.drain_timeout_s)
        member.is_named = False
        await self._routers.update()
        await self._pool.remove(worker_id, STOP_S)

    async def _replace(self, step: Replace, config: ServingConfig) -> None:
        """A worker whose successor does not come up is started again as it was."""
        before = self._pool[step.worker_id].plan
        await self._stop(step.worker_id, config)
        try:
            await self._start(Start(step.worker_id, step.role, step.tp_size), config)
        except StepFailed as error:
            self._pool.add([before], have_served=True)
            self._pool[step.worker_id].supervisor.run()
            is_back = await self._holds(lambda status: _sees(status, step.worker_id, step.role), _FLIP_S)
            how = "serves with its old settings again" if is_back else "is being started with its old settings again"
            raise StepFailed(f"{error}; it {how}") from error

    def _plan(self, config: ServingConfig, role: RoleName, worker_id: str = "") -> WorkerPlan:
        tokens = max(config.engine.max_num_batched_tokens, self.engine.max_num_batched_tokens)
        config = replace(config, engine=replace(config.engine, max_num_batched_tokens=tokens))
        device = found_device(config.engine_of(role), self.engine.device)
        threads = self.engine.threads if device == "cpu" else None
        return plan_worker(config, role, worker_id=worker_id, device=device, threads=threads)

    def _is_stale(self, plan: WorkerPlan, wanted: ServingConfig) -> bool:
        """A worker takes over what changes at run time, but no larger step than it has reserved memory for, and keeps
        the pool of the role that it was started for."""
        now = plan.ranks[0]
        then = self._plan(wanted, "prefill" if now.role == "prefill" else "decode").ranks[0]
        if then.engine.max_num_batched_tokens > now.engine.max_num_batched_tokens:
            return True
        return _fixed_values(now) != _fixed_values(then)

    async def _can_be_spared(self, worker_id: str, config: ServingConfig) -> None:
        """Waits until the worker's role has its minimum without it, or, if it is its only one, the other role has a
        worker."""
        member = self._pool[worker_id]
        role = member.plan.role
        least = max(config.role(role).min_workers, 1 if role == "decode" else 0)
        if least and not any(m is not member and m.plan.role == role and not m.is_draining for m in self._pool):
            role, least = OTHER[role], 1
        if not member.is_draining:
            await self._until(
                lambda status: (
                    sum(_sees(status, m.plan.worker_id, role) for m in self._pool if m is not member) >= least
                ),
                _FLIP_S,
                f"{worker_id} cannot be spared: fewer than {least} other {role} workers are ready",
            )

    async def _until(self, condition: Callable[[Status], bool], limit_s: float, problem: str) -> None:
        if not await self._holds(condition, limit_s):
            raise StepFailed(f"{problem} after {limit_s:g} s")

    async def _holds(self, condition: Callable[[Status], bool], limit_s: float) -> bool:
        """True as soon as the routers' status meets the condition."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    status = await self._routers.status()
                    if status is not None and condition(status):
                        return True
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            return False


def _fixed_values(rank: WorkerSettings) -> dict[str, Any]:
    """Values that a worker of these settings keeps for its life, by key."""
    sections = {"model": rank.model, "engine": rank.engine, "transfer": rank.transfer}
    values = {key: value for path, section in sections.items() for key, value in leaves(section, path).items()}
    own = {name: getattr(rank, name) for name in ("weight_forms", "expert_parallel", "split_latents")}
    return {key: value for key, value in values.items() if not is_run_time(key)} | own


def _sees(status: Status, worker_id: str, role: RoleName) -> bool:
    return any(
        w.worker_id == worker_id and w.state == READY and w.role == ROLE_NUMBERS[role] and not w.is_draining
        for w in status.workers
    )


def _is_empty(status: Status, worker_id: str) -> bool:
    """No router has a request on it."""
    return not any(w.worker_id == worker_id and w.num_requests for w in status.workers)
