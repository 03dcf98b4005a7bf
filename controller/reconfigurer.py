"""Changes the configuration of a running cluster: what runs, its version, and the change that is being carried out.

    propose -> refused (the reason, and the version there is)
            -> planned -> carried out step by step -> changed | failed (what was done stays)

Every change names the version that it builds on, or none. There is one change at a time. Knows no file and no RPC: a
`StepRunner` carries the steps out, `SaveConfig` writes an accepted change into the file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cluster.config.checks import check
from cluster.config.diff import SPLIT_KEYS, differences, refuse_fixed, role_differences
from cluster.config.schema import ROLES, RoleName, RolesSection, ServingConfig
from cluster.errors import BatonError, FailedPrecondition
from cluster.pb import admin_pb2
from cluster.settings import run_time_json
from controller.change_plan import Replace, Start, Step, Stop, plan_ratio, ratio_of, wanted_of
from controller.events import EventKind, EventLog
from controller.model_change import refuse_other_model
from controller.router_pool import ReplaceRouter, RouterPool, RouterStep, StartRouter, StopRouter
from controller.worker_pool import StepFailed, StepRunner

logger = logging.getLogger(__name__)

SaveConfig = Callable[[ServingConfig, dict[str, Any]], object]
"""Writes an accepted configuration into its file, given the keys that changed; raises BatonError when it cannot."""


class StaleVersion(FailedPrecondition):
    """The change builds on a configuration that no longer runs."""

    reason = "STALE_VERSION"


class AnotherChange(FailedPrecondition):
    """Another change is being carried out."""

    reason = "ANOTHER_CHANGE"


@dataclass
class Plan:
    """An accepted or a tried change."""

    origin: str
    changes: tuple[str, ...]
    steps: tuple[Step | RouterStep, ...]
    num_done: int = 0

    def __str__(self) -> str:
        moves = ", then ".join(map(str, self.steps)) or "no worker moves"
        return f"{self.origin}: {'; '.join(self.changes) or 'the same configuration'}: {moves}"


@dataclass(frozen=True)
class ProposalResult:
    """`version`: after the change, if it is one; `after_sequence`: of the last event before it."""

    version: int
    plan: Plan
    is_change: bool
    after_sequence: int


class Reconfigurer:
    """Used in one event loop. `config` is what runs; from the moment a change is accepted, the wanted one.
    `num_devices` returns how many there are now; None: CPU ranks, of which there may be any number. `num_named`: of
    the controller before this one; 0: there was none."""

    def __init__(
        self,
        config: ServingConfig,
        steps: StepRunner,
        routers: RouterPool,
        events: EventLog,
        num_devices: Callable[[], int] | None = None,
        *,
        num_named: int = 0,
    ) -> None:
        self.config = config
        self.changing: Plan | None = None
        self._before = config
        self._began_at = 0
        self._steps = steps
        self._routers = routers
        self._events = events
        self._num_devices = num_devices
        self.num_named = num_named or _num_devices(config)
        """Devices of both roles that an operator last asked for."""
        self._work: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._events.version

    @property
    def num_added(self) -> int:
        """Devices that Baton has added by itself."""
        return max(0, _num_devices(self.config) - self.num_named)

    @property
    def needs_prefill(self) -> bool:
        """True when requests should wait for a prefill worker; while the last ones leave, the first come, or the only
        one is replaced, they do not."""
        steps = () if self.changing is None else self.changing.steps
        if any(isinstance(step, Replace) and step.role == "prefill" and step.is_last for step in steps):
            return False
        return all(config.roles.prefill.num_workers > 0 for config in (self._before, self.config))

    def router_update(self, admin_address: str = "") -> admin_pb2.SetWorkersRequest:
        """The workers as routers get them, with what else those take over of the configuration."""
        return admin_pb2.SetWorkersRequest(
            workers=self._steps.addresses(),
            config_version=self.version,
            needs_prefill=self.needs_prefill,
            run_time_settings=run_time_json(self.config),
            admin_address=admin_address,
        )

    def with_split(self, prefill: int, decode: int) -> ServingConfig:
        """The configuration that runs, with these numbers of workers."""
        devices: dict[RoleName, int] = {
            role: count * self.config.role(role).tensor_parallel
            for role, count in zip(ROLES, (prefill, decode), strict=True)
        }
        return _with_devices(self.config, devices)

    def split_kept(self, wanted: ServingConfig) -> ServingConfig:
        """`wanted` with the present split, where `mode: auto` chooses it over the same devices (or those it added to
        them) and each role still fits: then the split in a file only says how a cluster begins."""
        is_auto = wanted.rebalance.mode == self.config.rebalance.mode == "auto"
        is_same = _num_devices(wanted) == self.num_named
        most = max(self.num_named, wanted.rebalance.auto.max_devices or 0)
        if not (is_auto and is_same and _num_devices(self.config) <= most):
            return wanted
        devices: dict[RoleName, int] = {role: self.config.role(role).devices for role in ROLES}
        kept = _with_devices(wanted, devices)
        return kept if all(_fits(kept, role) for role in ROLES) else wanted

    def without(self, worker_id: str) -> ServingConfig:
        """The configuration that runs, with one worker less in that worker's role."""
        counts = {role: self.config.role(role).devices for role in ROLES}
        for member in self._steps.members():
            if member.worker_id == worker_id and not member.is_draining:
                counts[member.role] -= self.config.role(member.role).tensor_parallel
        return _with_devices(self.config, counts)

    def propose(
        self,
        wanted: ServingConfig,
        origin: str,
        *,
        expected_version: int = 0,
        dry_run: bool = False,
        leaving: Collection[str] = (),
        save: SaveConfig | None = None,
        is_auto: bool = False,
    ) -> ProposalResult:
        """Plans at once, and begins to carry out unless it is a dry run or nothing differs.

        Raises FailedPrecondition; `expected_version` 0: whatever is current. `save` is called once all else is right;
        `is_auto`: `mode: auto` asks. A proposal equal to the change under way is answered with that one.
        """
        is_plain = not dry_run and not leaving and expected_version in (0, self.version)
        if self.changing is not None and is_plain and not differences(self.config, wanted):
            return ProposalResult(self.version, self.changing, True, self._began_at)
        try:
            plan = self._plan(wanted, origin, expected_version, leaving)
            is_change = bool(plan.changes or plan.steps)
            if is_change and not dry_run and save is not None:
                save(wanted, differences(self.config, wanted))
        except BatonError as error:
            self.refuse(origin, error.message)
            raise
        if not is_change or dry_run:
            return ProposalResult(self.version, plan, False, self._events.last_sequence)
        if not is_auto and _num_devices(wanted) != _num_devices(self.config):
            self.num_named = _num_devices(wanted)
        self._begin(wanted, plan)
        return ProposalResult(self.version, plan, True, self._began_at)

    def refuse(self, origin: str, why: str) -> None:
        """Records a change that did not get as far as a plan."""
        self._events.add(EventKind.REFUSED, f"{origin}: refused: {why}")

    async def close(self) -> None:
        """Stops carrying out; what was done stays."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])

    async def settled(self) -> None:
        """Waits for the change that is being carried out, if any."""
        if self._work is not None:
            await asyncio.wait([self._work])

    def _plan(self, wanted: ServingConfig, origin: str, expected: int, leaving: Collection[str]) -> Plan:
        if self.changing is not None:
            raise AnotherChange(f"another change is being carried out ({self.changing}); try again when it is done")
        if expected not in (0, self.version):
            raise StaleVersion(f"version {expected} is not current: {self.version} is; look at it and decide again")
        changed = differences(self.config, wanted)
        refuse_fixed(changed)
        refuse_other_model(self.config.model, wanted.model)
        # Of the split alone: a worker that a failed change has replaced stays as it is.
        is_split_alone = bool(changed) and changed.keys() <= SPLIT_KEYS
        members = self._steps.members(None if is_split_alone else wanted)
        max_devices = None if self._num_devices is None else self._num_devices()
        may_flip = not role_differences(wanted).keys() - {"tensor_parallel"}  # sizes are those of each worker
        of_workers = plan_ratio(members, wanted_of(wanted), max_devices=max_devices, leaving=leaving, may_flip=may_flip)
        of_routers = () if is_split_alone else self._routers.plan(wanted)
        findings = [f"{finding.key}: {finding.what}" for finding in check(wanted)]
        if findings:
            raise FailedPrecondition("; ".join(findings))
        return Plan(origin, tuple(_described(changed, wanted)), (*of_workers, *of_routers))

    def _begin(self, wanted: ServingConfig, plan: Plan) -> None:
        self._before, self.config, self.changing = self.config, wanted, plan
        self._began_at = self._events.last_sequence
        self._events.version += 1
        self._events.add(EventKind.PLANNED, str(plan))
        self._work = asyncio.create_task(self._carry_out(wanted, plan), name="carry out a change")

    async def _carry_out(self, wanted: ServingConfig, plan: Plan) -> None:
        began_as = ratio_of(self._steps.members())
        problem = ""
        try:
            for step in plan.steps:
                self._events.add(EventKind.STEP, str(step), step.worker_id)
                if isinstance(step, StartRouter | ReplaceRouter | StopRouter):
                    await self._routers.carry_out(step, wanted)
                else:
                    await self._steps.carry_out(step, wanted)
                plan.num_done += 1
                self._events.add(EventKind.STEP_DONE, f"{step}: done", step.worker_id)
        except StepFailed as error:
            problem = f"{error}{await self._stop_surplus(plan)}"
        except Exception as error:
            # A bug here must not block every later change.
            logger.exception("a step of %s could not be carried out", plan.origin)
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.config = self._as_it_is()
            self.num_named = min(self.num_named, _num_devices(self.config))
            self._events.version += 1
        self._before = self.config
        try:
            await self._steps.update_routers()
        except Exception as error:
            logger.exception("the routers could not be updated for %s", plan.origin)
            problem = problem or f"the routers did not get the update: {type(error).__name__}"
        self.changing = None
        if problem:
            done = f"{plan.num_done} of {len(plan.steps)} steps are done, and they stay"
            self._events.add(EventKind.FAILED, f"{plan.origin}: {problem}; {done}")
        else:
            self._routers.renew(wanted)
            is_now = ratio_of(self._steps.members())
            split = is_now if is_now == began_as else f"{began_as} to {is_now}"
            self._events.add(EventKind.CHANGED, f"{plan.origin}: done: {split}")

    async def _stop_surplus(self, plan: Plan) -> str:
        """Stops the worker that was started for one which then could not be stopped. Returns what became of it, for
        the message of the failure."""
        failed, before = plan.steps[plan.num_done], plan.steps[plan.num_done - 1 : plan.num_done]
        most = max(_num_devices(self._before), _num_devices(self.config))
        if not (isinstance(failed, Stop) and before and isinstance(before[0], Start)):
            return ""
        if _num_devices(self._as_it_is()) <= most:
            return ""
        started = before[0].worker_id
        try:
            await self._steps.carry_out(Stop(started), self._before)
        except Exception as error:
            # The failure that led here is told in any case.
            return f"; {started}, which was started for it, stays: {error}"
        plan.num_done -= 1
        return f"; {started}, which was started for it, was stopped"

    def _as_it_is(self) -> ServingConfig:
        """The configuration after a failure: the one before, with the workers and routers there are."""
        devices: dict[RoleName, int] = dict.fromkeys(ROLES, 0)
        for member in self._steps.members():
            devices[member.role] += 0 if member.is_draining else member.tp_size
        as_before = replace(self._before, router=replace(self._before.router, replicas=len(self._routers)))
        return _with_devices(as_before, devices)


def _with_devices(config: ServingConfig, devices: dict[RoleName, int]) -> ServingConfig:
    roles = RolesSection(*(replace(config.role(role), devices=devices[role]) for role in ROLES))
    return replace(config, roles=roles)


def _num_devices(config: ServingConfig) -> int:
    return sum(config.role(role).devices for role in ROLES)


def _fits(config: ServingConfig, name: RoleName) -> bool:
    """Its devices make whole workers, and enough of them."""
    role = config.role(name)
    return role.devices % role.tensor_parallel == 0 and role.num_workers >= role.min_workers


def _described(changed: dict[str, Any], wanted: ServingConfig) -> Iterator[str]:
    """The changed keys, and what that means for outputs that are under way."""
    for key, value in changed.items():
        yield f"{key}: {_shown(value)}"
    if any(key.startswith("model.") for key in changed):
        limit = f"rebalance.drain_timeout_s, {wanted.rebalance.drain_timeout_s:g} s"
        yield f"outputs end with the weights that they began with; those that take longer ({limit}) fail"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
