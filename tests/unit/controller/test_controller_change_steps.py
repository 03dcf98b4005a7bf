"""One step at a time, with supervisors over groups made here and a router that is only its word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from admin_world import config_of

from cluster.config.schema import EngineSection, ServingConfig
from cluster.pb import admin_pb2, worker_pb2
from controller import worker_pool as steps_module
from controller.change_plan import Flip, Replace, Start, Stop
from controller.plan import WorkerPlan, plan_cluster
from controller.supervisor import StartFailed, Supervisor, SupervisorState
from controller.worker_pool import StepFailed, StepRunner, WorkerPool


class Group:
    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.card: Mapping[str, Any] = {"address": f"127.0.0.1:{hash(plan.worker_id) % 1000 + 1}"}
        self.is_stopped = False

    async def ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self, grace_s: float) -> None:
        self.is_stopped = True

    async def kill(self) -> None:
        self.is_stopped = True


class GroupLauncher:
    """Groups that are ready at once; a worker in `broken` never starts."""

    def __init__(self, plan: WorkerPlan, stage: Stage) -> None:
        self.plan = plan
        self.placing_limit_s: float | None = None
        self._stage = stage

    async def launch(self) -> Group:
        if self.plan.worker_id in self._stage.broken:
            raise StartFailed("no room", is_mistake=True)
        if self.plan.ranks[0].engine.max_num_batched_tokens == self._stage.too_large:
            raise StartFailed("out of memory", is_mistake=True)
        group = Group(self.plan)
        self._stage.groups.append(group)
        return group

    def close(self) -> None:
        self._stage.closed.append(self.plan.worker_id)


class Router:
    """What several ones say together; they believe what they were told last. `busy`: requests on a worker; `blind`:
    workers that one of them does not reach."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.told: list[list[admin_pb2.WorkerAddress]] = []
        self.busy: dict[str, int] = {}
        self.blind: set[str] = set()

    async def update(self) -> None:
        self.told.append(self.pool.addresses())

    async def status(self) -> admin_pb2.GetStatusResponse:
        states = admin_pb2.WorkerStatus
        await self.update()
        return admin_pb2.GetStatusResponse(
            workers=[
                states(
                    worker_id=w.worker_id,
                    role=w.role,
                    is_draining=w.is_draining,
                    state=states.STATE_LOST if w.worker_id in self.blind else states.STATE_READY,
                    num_requests=self.busy.get(w.worker_id, 0),
                )
                for w in self.told[-1]
            ]
        )

    def last(self) -> dict[str, tuple[int, bool]]:
        return {w.worker_id: (w.role, w.is_draining) for w in self.told[-1]}


class Stage:
    def __init__(self) -> None:
        self.config = config_of(1, 2)
        self.groups: list[Group] = []
        self.closed: list[str] = []
        self.broken: set[str] = set()
        self.too_large: int | None = None
        """Workers do not start with steps of so many tokens."""
        self.pool = WorkerPool(lambda plan: GroupLauncher(plan, self), self._changed)
        self.pool.add(plan_cluster(self.config, num_gpus=0, num_cores=4).workers)
        self.router = Router(self.pool)
        link: Any = self.router
        self.steps = StepRunner(self.pool, link, EngineSection(device="cpu", threads=1))

    async def come_up(self) -> None:
        self.pool.run()
        while not all(member.is_ready for member in self.pool):
            await asyncio.sleep(0)

    def _changed(self, supervisor: Supervisor) -> None:
        assert isinstance(supervisor.state, SupervisorState)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(steps_module, "LOOK_EVERY_S", 0.0)
    made = Stage()
    await made.come_up()
    yield made
    await made.pool.stop(0.0)


async def test_a_flip_changes_the_label_and_nothing_else(stage: Stage) -> None:
    groups = list(stage.groups)
    before = stage.pool["decode-1"].plan
    await stage.steps.carry_out(Flip("decode-1", "prefill"), config_of(2, 1))
    assert stage.router.last()["decode-1"] == (worker_pb2.ROLE_PREFILL, False)
    assert stage.groups == groups, "something was started"
    assert not any(group.is_stopped for group in groups)
    after = stage.pool["decode-1"].plan
    assert (after.worker_id, after.role, after.ranks[0].role) == ("decode-1", "prefill", "prefill")
    assert (after.ranks[0].worker_id, after.ranks[0].step_log) == ("decode-1", before.ranks[0].step_log)


async def test_a_worker_that_restarts_after_a_flip_starts_with_its_new_role(stage: Stage) -> None:
    await stage.steps.carry_out(Flip("decode-1", "prefill"), config_of(2, 1))
    group = await stage.pool["decode-1"].launcher.launch()
    assert isinstance(group, Group)
    assert {rank.role for rank in group.plan.ranks} == {"prefill"}


async def test_a_worker_does_not_flip_before_its_role_can_spare_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "_FLIP_S", 0.01)
    stage.router.blind = {"decode-0"}
    with pytest.raises(StepFailed, match="decode-1 cannot be spared: fewer than 1 other decode workers are ready"):
        await stage.steps.carry_out(Flip("decode-1", "prefill"), config_of(2, 1))
    assert stage.router.last()["decode-1"] == (worker_pb2.ROLE_DECODE, False)


async def test_a_started_worker_counts_when_the_router_sees_it(stage: Stage) -> None:
    stage.router.blind = {"decode-2"}
    starting = asyncio.create_task(stage.steps.carry_out(Start("decode-2", "decode", 1), config_of(1, 3)))
    while not any("decode-2" in {w.worker_id for w in told} for told in stage.router.told):
        await asyncio.sleep(0)
    assert not starting.done()
    stage.router.blind = set()
    await starting
    assert [member.worker_id for member in stage.steps.members()] == ["prefill-0", "decode-0", "decode-1", "decode-2"]


async def test_a_worker_that_starts_after_steps_became_smaller_reserves_memory_for_those_of_the_start(
    stage: Stage,
) -> None:
    config = config_of(1, 3)
    smaller = replace(config, engine=replace(config.engine, max_num_batched_tokens=256))
    await stage.steps.carry_out(Start("decode-2", "decode", 1), smaller)
    assert stage.pool["decode-2"].plan.ranks[0].engine.max_num_batched_tokens == 2048


async def test_a_worker_that_does_not_start_is_removed_and_says_why(stage: Stage) -> None:
    stage.broken = {"decode-2"}
    with pytest.raises(StepFailed, match="decode-2 did not start: no room"):
        await stage.steps.carry_out(Start("decode-2", "decode", 1), config_of(1, 3))
    assert len(stage.pool) == 3
    assert stage.closed == ["decode-2"]


@pytest.mark.parametrize("blind", [set(), {"decode-1"}], ids=["all reach it", "one router does not"])
async def test_a_worker_drains_before_it_ends(stage: Stage, blind: set[str]) -> None:
    stage.router.busy, stage.router.blind = {"decode-1": 2}, blind
    stopping = asyncio.create_task(stage.steps.carry_out(Stop("decode-1"), config_of(1, 1)))
    while not stage.router.told or not stage.router.last()["decode-1"][1]:
        await asyncio.sleep(0)
    group = next(g for g in stage.groups if g.plan.worker_id == "decode-1")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not group.is_stopped and not stopping.done()
    stage.router.busy = {}
    await stopping
    assert group.is_stopped
    assert set(stage.router.last()) == {"prefill-0", "decode-0"}
    assert stage.closed == ["decode-1"]


async def test_a_worker_that_keeps_its_requests_too_long_ends_all_the_same(stage: Stage) -> None:
    config = config_of(1, 1)
    config = replace(config, rebalance=replace(config.rebalance, drain_timeout_s=0.01))
    stage.router.busy = {"decode-1": 1}
    await stage.steps.carry_out(Stop("decode-1"), config)
    assert {member.worker_id for member in stage.steps.members()} == {"prefill-0", "decode-0"}


def with_steps_of(config: ServingConfig, tokens: int) -> ServingConfig:
    return replace(config, engine=replace(config.engine, max_num_batched_tokens=tokens))


def stale(stage: Stage, wanted: ServingConfig) -> set[str]:
    return {member.worker_id for member in stage.steps.members(wanted) if member.is_stale}


async def test_workers_are_stale_where_they_would_be_started_with_other_settings(stage: Stage) -> None:
    config, everybody = stage.config, {"prefill-0", "decode-0", "decode-1"}
    assert stale(stage, config) == set()
    assert stale(stage, with_steps_of(config, 512)) == set(), "they take that up as they run"
    assert stale(stage, with_steps_of(config, 4096)) == everybody
    assert stale(stage, replace(config, engine=replace(config.engine, block_size=32))) == everybody
    assert stale(stage, replace(config, transfer=replace(config.transfer, num_slots=2))) == everybody
    roles = replace(config.roles, decode=replace(config.roles.decode, kv_cache_tokens=512))
    assert stale(stage, replace(config, roles=roles)) == {"decode-0", "decode-1"}


async def test_a_flipped_worker_keeps_the_pool_that_it_has(stage: Stage) -> None:
    config = config_of(2, 1)
    wanted = replace(config, roles=replace(config.roles, prefill=replace(config.roles.prefill, block_size=32)))
    await stage.steps.carry_out(Flip("decode-1", "prefill"), wanted)
    assert stale(stage, wanted) == {"prefill-0"}


async def test_a_replaced_worker_drains_and_comes_back_with_the_new_settings(stage: Stage) -> None:
    stage.router.busy = {"decode-1": 2}
    wanted = with_steps_of(stage.config, 4096)
    replacing = asyncio.create_task(stage.steps.carry_out(Replace("decode-1", "decode", 1), wanted))
    while not stage.router.told or not stage.router.last()["decode-1"][1]:
        await asyncio.sleep(0)
    old = next(g for g in stage.groups if g.plan.worker_id == "decode-1")
    assert not old.is_stopped
    stage.router.busy = {}
    await replacing
    assert old.is_stopped
    assert stage.router.last()["decode-1"] == (worker_pb2.ROLE_DECODE, False)
    assert stage.groups[-1].plan.ranks[0].engine.max_num_batched_tokens == 4096
    assert stale(stage, wanted) == {"prefill-0", "decode-0"}


async def test_a_worker_whose_successor_does_not_start_comes_back_as_it_was(stage: Stage) -> None:
    stage.too_large = 4096
    with pytest.raises(StepFailed, match=r"^decode-1 did not start: out of memory; it serves with its old settings"):
        await stage.steps.carry_out(Replace("decode-1", "decode", 1), with_steps_of(stage.config, 4096))
    assert stage.router.last()["decode-1"] == (worker_pb2.ROLE_DECODE, False)
    assert stale(stage, stage.config) == set()


async def test_the_only_worker_of_a_role_is_not_replaced_before_the_other_role_has_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "_FLIP_S", 0.01)
    stage.router.blind = {"decode-0", "decode-1"}
    with pytest.raises(StepFailed, match="prefill-0 cannot be spared: fewer than 1 other decode workers are ready"):
        await stage.steps.carry_out(Replace("prefill-0", "prefill", 1), stage.config)
    assert stage.router.last()["prefill-0"] == (worker_pb2.ROLE_PREFILL, False)
