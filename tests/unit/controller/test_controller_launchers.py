"""A worker's start on Ray as the launcher orders it; what Ray would host is made here.

Ray is imported when a test runs and not before: a private Ray of other tests must come before the import.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from admin_world import config_of

from cluster.config.schema import EngineSection, ModelSection
from cluster.pb import admin_pb2
from cluster.settings import RouterSettings, WorkerSettings
from controller import worker_pool as change_steps
from controller.adoption import NodePlacement
from controller.change_plan import Start
from controller.plan import WorkerPlan, plan_worker
from controller.supervisor import StartFailed
from controller.worker_pool import StepFailed, StepRunner, WorkerPool

if TYPE_CHECKING:
    from controller.launchers import WorkerLauncher
    from controller.ray_actors import Hosting


class Host:
    """A process that Ray places when there is room, and that then loads until it is `loaded`."""

    def __init__(self) -> None:
        self.has_room = asyncio.Event()
        self.is_loading = asyncio.Event()
        self.loaded = asyncio.Event()
        self.is_killed = False
        self.gpu: int | None = None
        self.settings = ""

    async def locate(self) -> NodePlacement:
        await self.has_room.wait()
        return NodePlacement("127.0.0.1", 1, gpu=self.gpu)

    async def prepare(self, settings_json: str) -> str:
        self.settings = settings_json
        return '{"rank_address": "127.0.0.1:1"}'

    async def start(self) -> str:
        self.is_loading.set()
        await self.loaded.wait()
        return '{"address": "127.0.0.1:2"}'

    async def ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self, grace_s: float) -> None:
        self.is_killed = True

    async def kill(self) -> None:
        self.is_killed = True


class Cluster:
    """A pool without workers, over one host, and a router that sees who is ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from controller import launchers

        self.host = Host()
        self.groups: list[Any] = []
        self.lines: list[str] = []
        monkeypatch.setattr(launchers, "placement_group", self._book)
        monkeypatch.setattr(launchers, "remove_placement_group", self.groups.remove)
        monkeypatch.setattr(launchers.WorkerLauncher, "_host", lambda *_: self.host)
        monkeypatch.setattr(launchers, "_PLACING_S", 0.0)
        monkeypatch.setattr(change_steps, "LOOK_EVERY_S", 0.0)
        self.selectors: list[Any] = []
        self.pool = WorkerPool(self._launcher, lambda _: None)
        link: Any = self
        self.steps = StepRunner(self.pool, link, EngineSection(device="cpu", threads=1))

    async def status(self) -> admin_pb2.GetStatusResponse:
        ready = self.pool.addresses()
        states = admin_pb2.WorkerStatus
        return admin_pb2.GetStatusResponse(
            workers=[states(worker_id=w.worker_id, role=w.role, state=states.STATE_READY) for w in ready]
        )

    def _book(self, bundles: list[Mapping[str, float]], strategy: str, bundle_label_selector: Any, **_: object) -> Any:
        self.selectors.append(bundle_label_selector)
        self.groups.append(object())
        return self.groups[-1]

    def _launcher(self, plan: WorkerPlan) -> WorkerLauncher:
        from controller.launchers import Capacity, WorkerLauncher

        made = hosting()
        capacity = Capacity(made.namespace, lambda: plan.bundles)
        return WorkerLauncher(plan, "worker.program", self.lines.append, capacity, made)


def hosting() -> Hosting:
    from controller.ray_actors import Hosting
    from controller.ray_namespace import RayNamespace

    return Hosting(RayNamespace("baton-test"), None, lambda: 1)


START = Start("decode-3", "decode", 1)


class Actor:
    """A process's actor that answers `locate`, and never has news."""

    def __init__(self, protocol: str) -> None:
        self.place = NodePlacement("elsewhere", 1, protocol)
        self.locate = self.news = self

    async def remote(self, after: int | None = None) -> NodePlacement:
        if after is not None:
            await asyncio.Event().wait()
        return self.place


@pytest.mark.parametrize("protocol", ["", "1-1", "1-2"])
async def test_a_process_that_speaks_a_version_of_ours_is_started(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await located(protocol, monkeypatch)).protocol == protocol


async def test_a_process_of_another_protocol_is_refused_by_name_before_it_gets_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = "decode-3 speaks protocol 2 to 3; this controller speaks 1: upgrade this controller first"
    with pytest.raises(StartFailed, match=why) as refused:
        await located("2-3", monkeypatch)
    assert refused.value.is_mistake, "it is not tried again and again"


async def located(protocol: str, monkeypatch: pytest.MonkeyPatch) -> NodePlacement:
    from controller import ray_actors

    monkeypatch.setattr(ray_actors.ray.util, "get_node_ip_address", lambda: "here")
    process = ray_actors.HostedProcess(Actor(protocol), "decode-3", lambda line: None)
    try:
        return await process.locate()
    finally:
        process._ended.cancel()


async def test_a_worker_that_ray_cannot_place_is_taken_back_and_the_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    monkeypatch.setattr(change_steps, "_PLACE_S", 0.0)
    with pytest.raises(StepFailed, match=r"decode-3 did not start: Ray has not found a node with room for 1 × "):
        await cluster.steps.carry_out(START, config_of(1, 4))
    assert len(cluster.pool) == 0
    assert cluster.host.is_killed and not cluster.groups


async def test_a_worker_that_is_placed_loads_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    limits: list[asyncio.Timeout] = []

    def limit(delay_s: float | None) -> asyncio.Timeout:
        limits.append(asyncio.Timeout(None if delay_s is None else asyncio.get_running_loop().time() + delay_s))
        return limits[-1]

    monkeypatch.setattr(asyncio, "timeout", limit)
    cluster.host.has_room.set()
    starting = asyncio.create_task(cluster.steps.carry_out(START, config_of(1, 4)))
    await cluster.host.is_loading.wait()
    assert len(limits) == 1 and limits[0].when() is not None
    with pytest.raises(RuntimeError, match="finished"):
        limits[0].reschedule(0.0)  # only one that still holds can be put off
    cluster.host.loaded.set()
    await starting
    assert cluster.pool["decode-3"].launcher.placing_limit_s is None
    await cluster.pool.stop(0.0)


async def test_without_a_limit_a_worker_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.pool.add([plan_worker(config_of(1, 4), "decode", 3)])
    cluster.pool.run()
    while not cluster.lines:
        await asyncio.sleep(0)
    assert cluster.lines[0].startswith("waiting for Ray to find a node with room for 1 × ")
    cluster.host.has_room.set()
    cluster.host.loaded.set()
    while not cluster.pool["decode-3"].is_ready:
        await asyncio.sleep(0)
    await cluster.pool.stop(0.0)


async def test_a_worker_is_placed_on_a_node_with_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    plan = replace(plan_worker(config_of(1, 4), "decode", 3), labels=(("zone", "in(a,b)"),))
    cluster.pool.add([plan])
    cluster.pool.run()
    while not cluster.lines:
        await asyncio.sleep(0)
    assert cluster.selectors == [[{"zone": "in(a,b)"}]]
    assert cluster.lines[0].endswith(", zone=in(a,b)")
    await cluster.pool.stop(0.0)


class Hosted(Host):
    """A router's process, as the launcher asks Ray for it; what it was asked for."""

    def __init__(self, *_: object, strategy: Any, **__: object) -> None:
        super().__init__()
        self.strategy = strategy
        self.settings = RouterSettings(ModelSection(""))
        self.loaded.set()

    async def prepare(self, settings_json: str) -> str:
        self.settings = RouterSettings.from_json(settings_json)
        return "{}"


async def test_spread_routers_wait_for_nodes_of_their_own_and_listen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from controller import launchers

    booked: list[tuple[int, str]] = []

    def book(bundles: list[Mapping[str, float]], strategy: str, **_: object) -> object:
        booked.append((len(bundles), strategy))
        return booked

    monkeypatch.setattr(launchers, "placement_group", book)
    monkeypatch.setattr(launchers, "_PLACING_S", 0.0)
    hosts: list[Hosted] = []
    made = hosting()
    monkeypatch.setattr(type(made), "start", lambda *a, **b: hosts.append(Hosted(*a, **b)) or hosts[-1])
    places, lines = launchers.RouterPlaces(made.namespace, 2, are_spread=True), list[str]()
    routers = [
        launchers.RouterLauncher(
            "router.program",
            places,
            made,
            lambda _: lines.append,
            tuple,
            name,
            i,
            RouterSettings.from_values(model_path="m", port=5),
        )
        for i, name in enumerate(("router", "router-1"))
    ]
    starting = [asyncio.create_task(router.launch()) for router in routers]
    while len(lines) < 2:
        await asyncio.sleep(0)
    for host in hosts:
        host.has_room.set()
    await asyncio.gather(*starting)
    assert (booked, set(lines)) == ([(2, "STRICT_SPREAD")], {"waiting for Ray to find a node for each of 2 routers"})
    assert [host.strategy.placement_group_bundle_index for host in hosts] == [0, 1]
    assert [(host.settings.node_host, host.settings.router.port) for host in hosts] == [("127.0.0.1", 5)] * 2


async def test_a_rank_is_told_which_of_the_gpus_that_it_sees_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.host.gpu = 3
    cluster.host.has_room.set()
    cluster.host.loaded.set()
    await cluster.steps.carry_out(START, config_of(1, 4))
    assert WorkerSettings.from_json(cluster.host.settings).gpu == 3
    await cluster.pool.stop(0.0)


@pytest.mark.parametrize(
    ("assigned", "visible", "number"),
    [
        ([2], None, 2),
        (["2"], "", 2),
        ([5], "4,5", 1),
        ([5], "5", 0),
        (["GPU-b"], "GPU-a, GPU-b", 1),
        ([], "0,1", None),
        ([0, 1], "0,1", None),
        ([7], "4,5", None),
    ],
)
def test_gpus_are_numbered_as_cuda_does(assigned: list[int | str], visible: str | None, number: int | None) -> None:
    from controller.ray_actors import gpu_number

    assert gpu_number(assigned, visible) == number


def test_only_what_has_a_gpu_sees_the_others() -> None:
    from controller.ray_actors import gpu_options

    variables = gpu_options({"CPU": 0.01, "GPU": 1.0})["runtime_env"]["env_vars"]
    assert variables == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert gpu_options({"CPU": 0.01}) == {}
