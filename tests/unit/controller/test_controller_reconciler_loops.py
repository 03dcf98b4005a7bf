"""The controller's loops: a fault in one round does not end them. Nothing is started here.

Ray is imported when a test runs and not before: a private Ray of other tests must come before the import.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from admin_world import FILE, config_of

from cluster.errors import IncompatibleProtocol
from cluster.pb import admin_pb2
from controller.adoption import Adoption, FoundProcess, NodePlacement, ProcessIdentity, SavedCluster
from controller.config_file import ConfigFile
from controller.plan import ClusterPlan, plan_cluster

if TYPE_CHECKING:
    from controller.reconciler import Controller


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """Of a copy of the shipped file."""
    from controller import reconciler as controller_module
    from controller.ray_actors import Hosting
    from controller.ray_namespace import RayNamespace

    monkeypatch.setattr(controller_module, "die_with_parent", lambda: None)
    monkeypatch.setattr(controller_module, "send_logs_to", lambda *_: None)
    for name in ("_RETRY_S", "_LOOK_S"):
        monkeypatch.setattr(controller_module, name, 0.0)
    (tmp_path / "models").symlink_to(FILE.parent / "models")
    shutil.copy(FILE, tmp_path / "cluster.yaml")
    file = ConfigFile(tmp_path / "cluster.yaml")
    config = file.load()
    plan, programs = plan_cluster(config, num_gpus=0, num_cores=2), controller_module.Programs()
    hosting = Hosting(RayNamespace("baton-test"), None, lambda: 1)
    return controller_module.Controller(SavedCluster.first(config, plan, 0.0), plan, programs, file, hosting)


def controller_of(saved: SavedCluster, plan: ClusterPlan) -> Controller:
    from controller.ray_actors import Hosting
    from controller.ray_namespace import RayNamespace
    from controller.reconciler import Controller, Programs

    return Controller(saved, plan, Programs(), None, Hosting(RayNamespace("baton-test"), None, lambda: 1))


async def test_the_next_controller_keeps_the_journal_of_a_cluster_at_a_free_port(controller: Controller) -> None:
    config = config_of()
    config = replace(config, router=replace(config.router, port=0))
    first, second = (plan_cluster(config, num_gpus=0, num_cores=2) for _ in range(2))
    assert first.journal != second.journal
    saved = SavedCluster.first(config, first, 0.0).next_life(1.0)
    follower = controller_of(saved, second)
    assert [router.starter.settings.state for router in follower._routers._routers] == [first.journal]
    assert follower._routers.plan(config) == ()


@pytest.mark.parametrize("is_changing", [False, True])
async def test_the_next_controller_goes_on_with_a_change_only_where_one_was_under_way(
    controller: Controller, is_changing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(1, 2)
    plan = plan_cluster(config, num_gpus=0, num_cores=2)
    saved = replace(SavedCluster.first(config, plan, 0.0).next_life(1.0), is_changing=is_changing)
    follower = controller_of(saved, plan)
    asked: list[str] = []
    monkeypatch.setattr(follower.reconfigurer, "propose", lambda _, origin: asked.append(origin))
    follower._go_on(Adoption({}, ()))
    assert asked == ["the controller was started again"] * is_changing


class Link:
    """Routers that are up. `answers`: what comes of telling them, one after another; an exception is raised."""

    is_up = True
    are_all_up = True

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.workers: list[admin_pb2.WorkerStatus] = []

    async def try_to_update(self) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def status(self) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(workers=self.workers)


async def until(condition: Callable[[], bool], task: asyncio.Task[None]) -> None:
    """While `task` runs; it is ended then."""
    while not condition():
        assert not task.done(), task
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def test_a_fault_while_routers_are_told_is_told_again(controller: Controller) -> None:
    link: Any = Link(KeyError("control_address"), False, True)
    controller._links = link
    controller._changed.set()
    task = asyncio.create_task(controller._keep_routers_updated())
    await until(lambda: not link.answers, task)


async def test_a_fault_while_the_file_is_looked_at_does_not_end_the_watch(controller: Controller) -> None:
    watch: Any = type("FaultyWatch", (), {"num_looks": 0})()

    def look() -> None:
        watch.num_looks += 1
        raise RuntimeError("a fault")

    watch.look = look
    task = asyncio.create_task(controller._look_at_file(watch))
    await until(lambda: watch.num_looks > 2, task)


async def test_a_controller_touches_nothing_of_what_speaks_another_protocol(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from controller import ray_actors, ray_namespace

    def touch(*_: object, **__: object) -> None:
        raise AssertionError("a process was ended, adopted or started")

    async def found(_: object) -> tuple[FoundProcess, ...]:
        names = {"prefill-0": "1-2", "decode-0": "2-3"}
        return tuple(
            FoundProcess(ProcessIdentity(name), NodePlacement("127.0.0.1", 1, speaks), card="{}")
            for name, speaks in names.items()
        )

    monkeypatch.setattr(ray_namespace.RayNamespace, "found", found)
    monkeypatch.setattr(ray_namespace.RayNamespace, "save", touch)
    monkeypatch.setattr(ray_actors.Hosting, "adopt", touch)
    monkeypatch.setattr(ray_actors.Hosting, "start", touch)
    controller.saved = controller.saved.next_life(1.0)
    await controller.run()
    (event,) = (await controller.progress()).events
    why = "decode-0 speaks protocol 2 to 3; this controller speaks 1: upgrade this controller first"
    assert (event.kind, event.who) == ("refused", "controller")
    assert (
        event.text
        == f"{why}; what runs serves on without a controller, until `baton serve` of its version takes it over"
    )
    assert not controller._tasks and not controller._listeners.address
    assert [record.getMessage() for record in caplog.records] == [why]


async def test_a_state_that_is_not_understood_is_refused_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from controller.takeover import Takeover

    nobody: Any = None
    refusal = IncompatibleProtocol("the controller before speaks protocol 3; this controller speaks 1")
    with pytest.raises(IncompatibleProtocol, match="the controller before"):
        await Takeover(nobody, nobody, refusal).adopt(nobody, nobody)


async def test_a_router_that_has_just_gone_is_not_announced_as_serving(controller: Controller) -> None:
    ready = admin_pb2.WorkerStatus.STATE_READY
    link: Any = Link()
    link.workers = [admin_pb2.WorkerStatus(worker_id=m.plan.worker_id, state=ready) for m in controller.pool]
    controller._links = link
    assert not controller.routers[0].card
    serving = asyncio.create_task(controller._announce())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not serving.done() and not controller._has_served
    controller._changed.set()
    await serving
    assert not controller._has_served
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(controller.progress(), 0.01)
