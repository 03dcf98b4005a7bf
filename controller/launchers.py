"""Starts the processes of a worker, or of a router, on Ray: where they are placed, and in which order they come up.

A worker's ranks share a placement group (STRICT_PACK); rank 0 prepares first and returns its address for the other
ranks, then all start. `Capacity` reserves a place for one more worker before that worker is asked for: while no node
has room, its placement group waits at Ray, which has Ray's autoscaler bring a node where cluster.yaml lets it
(`max_workers`). What a controller before has started is adopted with its place. Knows no role and no request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.address import parse_address
from cluster.settings import RouterSettings, WorkerSettings
from cluster.text import count_of
from controller.adoption import FoundProcess, NodePlacement, ProcessIdentity
from controller.plan import CPU_SHARE, WorkerPlan
from controller.ray_actors import HostedProcess, Hosting, Strategy
from controller.ray_namespace import RayNamespace
from controller.supervisor import StartFailed

ROUTER_BUNDLE = {"CPU": CPU_SHARE}
_PLACING_S = 5.0


Bundles = Sequence[dict[str, float]]
"""Resources that each rank of a worker books."""


Labels = Sequence[tuple[str, str]]
"""Labels of a node, each a key and what Ray selects by."""


def place(namespace: RayNamespace, bundles: Bundles, labels: Labels = ()) -> PlacementGroup:
    """A placement group on one node with these labels, as soon as one has room for all."""
    selector = [dict(labels)] * len(bundles) if labels else None
    group: PlacementGroup = placement_group(
        list(bundles), strategy="STRICT_PACK", bundle_label_selector=selector, **namespace.group_options("worker")
    )
    return group


def num_gpus() -> int:
    """GPUs on the nodes that Ray has now."""
    return int(ray.cluster_resources().get("GPU", 0))


class Capacity:
    """A place for the next worker. `bundles` returns what that books; `labels`: of nodes on which workers may be."""

    def __init__(self, namespace: RayNamespace, bundles: Callable[[], Bundles], labels: Labels = ()) -> None:
        self._namespace = namespace
        self._bundles = bundles
        self._labels = labels
        self._group: PlacementGroup | None = None
        self._is_for: Bundles = ()

    def ask(self) -> bool:
        """True where there is a place, which is then reserved; otherwise Ray is asked for one."""
        bundles = self._bundles()
        if bundles != self._is_for:
            self.give_back()
        if self._group is None:
            self._group, self._is_for = place(self._namespace, bundles, self._labels), bundles
        return _is_there(self._group)

    def take(self, bundles: Bundles) -> PlacementGroup | None:
        """The reserved place, if it fits these; it belongs to the caller from now on."""
        if self._group is None or bundles != self._is_for or not _is_there(self._group):
            return None
        taken, self._group = self._group, None
        return taken

    def give_back(self) -> None:
        """Releases the reserved place, or the request for one."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _is_there(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


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
    """Starts one worker, as often as it takes, in the placement group that it keeps; `plan`: what the next start goes
    by, `capacity`: may have a place reserved for it."""

    def __init__(
        self, plan: WorkerPlan, module: str, report: Callable[[str], None], capacity: Capacity, hosting: Hosting
    ) -> None:
        self.plan = plan
        self._module = module
        self._report = report
        self._capacity = capacity
        self._hosting = hosting
        self._epoch = 0
        self.group: PlacementGroup | None = None
        """The placement group that the ranks are in; None before the first start."""
        self.placing_limit_s: float | None = None

    async def launch(self) -> RunningGroup:
        if self.group is None:
            namespace, plan = self._hosting.namespace, self.plan
            self.group = self._capacity.take(plan.bundles) or place(namespace, plan.bundles, plan.labels)
        self._epoch += 1
        ranks = [self._host(number, self.group) for number in range(len(self.plan.ranks))]
        try:
            return RunningGroup(ranks, await self._start(ranks))
        except BaseException:
            await asyncio.gather(*(rank.kill() for rank in ranks))
            raise

    def adopt(self, ranks: Sequence[FoundProcess]) -> RunningGroup:
        """Takes over what a controller before has started, its settings and its place."""
        settings = (WorkerSettings.from_json(rank.settings) for rank in ranks)
        self.plan = replace(self.plan, ranks=tuple(replace(each, leader=None) for each in settings))
        self.group, self._epoch = ranks[0].placement_group, ranks[0].identity.epoch
        return _adopted(ranks, self._hosting, self._report)

    def close(self) -> None:
        """Gives the resources back to Ray."""
        if self.group is not None:
            remove_placement_group(self.group)

    def _host(self, number: int, group: PlacementGroup) -> HostedProcess:
        plan, version = self.plan, self._hosting.config_version()
        identity = ProcessIdentity(plan.worker_id, number, len(plan.ranks), self._epoch, version)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return self._hosting.start(self._module, identity, self._report, bundle=plan.bundle, strategy=strategy)

    async def _start(self, ranks: Sequence[HostedProcess]) -> dict[str, Any]:
        """Returns rank 0's card, with the pids of all."""
        places = await self._locate(ranks)
        token = self._hosting.token
        settings = [
            replace(s, host=place.host, gpu=place.gpu, cluster_token=token)
            for s, place in zip(self.plan.ranks, places, strict=True)
        ]
        leader = json.loads(await ranks[0].prepare(settings[0].to_json()))["rank_address"]
        others = [replace(s, leader=leader).to_json() for s in settings[1:]]
        await asyncio.gather(*(rank.prepare(text) for rank, text in zip(ranks[1:], others, strict=True)))
        cards = [json.loads(text) for text in await asyncio.gather(*(rank.start() for rank in ranks))]
        return {**cards[0], "pids": [place.pid for place in places]}

    async def _locate(self, ranks: Sequence[HostedProcess]) -> list[NodePlacement]:
        """Returns where Ray placed them. Raises StartFailed after `placing_limit_s`; without one it waits for room."""
        labels = "".join(f", {key}={value}" for key, value in self.plan.labels)
        wanted = f"a node with room for {len(ranks)} × {self.plan.bundle}{labels}"
        try:
            async with asyncio.timeout(self.placing_limit_s):
                return await _located(ranks, wanted, self._report)
        except TimeoutError:
            raise StartFailed(
                f"Ray has not found {wanted} in {self.placing_limit_s:g} s; free some, or ask for fewer devices",
                is_mistake=True,
            ) from None


class RouterPlaces:
    """The places of the routers: with the controller, or each on a node of its own."""

    def __init__(self, namespace: RayNamespace, num_routers: int, *, are_spread: bool) -> None:
        self.are_spread = are_spread
        self._namespace = namespace
        self._num_routers = num_routers
        self.group: PlacementGroup | None = None
        """Has a node for each of them; None: there is none yet, or they are with the controller."""

    def strategy(self, number: int) -> Strategy:
        """Returns Ray's scheduling strategy for that router, each time it starts."""
        if not self.are_spread:
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if self.group is None:
            self.group = placement_group(
                [ROUTER_BUNDLE] * self._num_routers,
                strategy="STRICT_SPREAD",
                **self._namespace.group_options("routers"),
            )
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)

    async def found(self, router: HostedProcess, report: Callable[[str], None]) -> NodePlacement:
        if not self.are_spread:
            return await router.locate()
        wanted = f"a node for each of {count_of(self._num_routers, 'router')}"
        return (await _located([router], wanted, report))[0]

    def close(self) -> None:
        """Gives the resources back to Ray."""
        if self.group is not None:
            remove_placement_group(self.group)


class RouterLauncher:
    """Starts router `number`; once it has had a port, always on that one. `workers` returns those that it
    connects to before it listens beside another one, as RouterSettings have them; `num_starts`: of the router that it
    follows."""

    def __init__(
        self,
        module: str,
        places: RouterPlaces,
        hosting: Hosting,
        reporter: Callable[[str], Callable[[str], None]],
        workers: Callable[[], tuple[str, ...]],
        name: str,
        number: int,
        settings: RouterSettings,
        num_starts: int = 0,
    ) -> None:
        self.settings = settings
        self.is_successor = False
        self._name = name
        self._number = number
        self._places = places
        self._workers = workers
        self._module = module
        self._report = reporter(name)
        self._hosting = hosting
        self._epoch = num_starts

    async def launch(self) -> RunningGroup:
        self._epoch += 1
        strategy = self._places.strategy(self._number)
        identity = ProcessIdentity(self._name, epoch=self._epoch, config_version=self._hosting.config_version())
        bundle = {} if self.is_successor else ROUTER_BUNDLE  # the one before has the place
        router = self._hosting.start(self._module, identity, self._report, bundle=bundle, strategy=strategy)
        try:
            settings, place = self.settings, await self._places.found(router, self._report)
            settings = replace(settings, cluster_token=self._hosting.token)
            if self.is_successor or settings.shares_ports:
                settings = replace(settings, is_successor=self.is_successor, workers=self._workers())
            if self._places.are_spread:
                settings = replace(settings, node_host=place.host)
            await router.prepare(settings.to_json())
            card = json.loads(await router.start())
        except BaseException:
            await router.kill()
            raise
        self._keep_ports(card)
        return RunningGroup([router], {**card, "pids": [place.pid]})

    def adopt(self, router: FoundProcess) -> RunningGroup:
        """Takes over what a controller before has started, its settings, ports and place."""
        self._epoch = router.identity.epoch
        self.settings = replace(RouterSettings.from_json(router.settings), is_successor=False, workers=())
        self._places.group = router.placement_group or self._places.group
        running = _adopted([router], self._hosting, self._report)
        self._keep_ports(running.card)
        return running

    def _keep_ports(self, card: Mapping[str, Any]) -> None:
        _, port = parse_address(card["address"])
        self.settings = self.settings.with_values(port=port)
        if card.get("http_address"):
            _, http_port = parse_address(card["http_address"])
            self.settings = self.settings.with_values(http_port=http_port)


def _adopted(found: Sequence[FoundProcess], hosting: Hosting, report: Callable[[str], None]) -> RunningGroup:
    """The group of these processes, by rank."""
    card = {**json.loads(found[0].card), "pids": [process.placement.pid for process in found]}
    return RunningGroup([hosting.adopt(process, report) for process in found], card)


async def _located(
    processes: Sequence[HostedProcess], wanted: str, report: Callable[[str], None]
) -> list[NodePlacement]:
    """Returns where Ray placed them; reports what is missing when that takes long."""
    locating = asyncio.gather(*(process.locate() for process in processes))
    try:
        done, _ = await asyncio.wait([locating], timeout=_PLACING_S)
        if not done:
            report(f"waiting for Ray to find {wanted}")
        return await locating
    except asyncio.CancelledError:
        locating.cancel()
        raise
