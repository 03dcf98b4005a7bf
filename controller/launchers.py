"""Starts the processes of a worker, or of a router, on Ray: where they are placed, and in which order they come up.

A worker's ranks share a placement group (STRICT_PACK); rank 0 prepares first and returns its address for the other
ranks, then all start. `Capacity` reserves a place for one more worker before that worker is asked for: while no node
has room, its placement group waits at Ray, which has Ray's autoscaler bring a node where cluster.yaml lets it
(`max_workers`). Knows no role and no request.
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

from cluster.settings import RouterSettings
from cluster.text import count_of
from controller.plan import CPU_SHARE, WorkerPlan
from controller.ray_actors import HostedProcess, NodePlacement, Strategy
from controller.supervisor import StartFailed

ROUTER_BUNDLE = {"CPU": CPU_SHARE}
_PLACING_S = 5.0


Bundles = Sequence[dict[str, float]]
"""Resources that each rank of a worker books."""


Labels = Sequence[tuple[str, str]]
"""Labels of a node, each a key and what Ray selects by."""


def place(bundles: Bundles, labels: Labels = ()) -> PlacementGroup:
    """A placement group on one node with these labels, as soon as one has room for all."""
    selector = [dict(labels)] * len(bundles) if labels else None
    group: PlacementGroup = placement_group(list(bundles), strategy="STRICT_PACK", bundle_label_selector=selector)
    return group


def place_apart(num_nodes: int, bundle: dict[str, float]) -> PlacementGroup:
    """A bundle on each of so many nodes, as soon as there are as many."""
    group: PlacementGroup = placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
    return group


def num_gpus() -> int:
    """GPUs on the nodes that Ray has now."""
    return int(ray.cluster_resources().get("GPU", 0))


class Capacity:
    """A place for the next worker. `bundles` returns what that books; `labels`: of nodes on which workers may be."""

    def __init__(self, bundles: Callable[[], Bundles], labels: Labels = ()) -> None:
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
            self._group, self._is_for = place(bundles, self._labels), bundles
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
        self, plan: WorkerPlan, module: str, log_dir: str | None, report: Callable[[str], None], capacity: Capacity
    ) -> None:
        self.plan = plan
        self._module = module
        self._log_dir = log_dir
        self._report = report
        self._capacity = capacity
        self._group: PlacementGroup | None = None
        self.placing_limit_s: float | None = None

    async def launch(self) -> RunningGroup:
        if self._group is None:
            self._group = self._capacity.take(self.plan.bundles) or place(self.plan.bundles, self.plan.labels)
        ranks = [self._host(number, self._group) for number in range(len(self.plan.ranks))]
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
        name = self.plan.worker_id if len(self.plan.ranks) == 1 else f"{self.plan.worker_id} rank {number}"
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return HostedProcess(
            self._module, name, self._report, bundle=self.plan.bundle, strategy=strategy, log_dir=self._log_dir
        )

    async def _start(self, ranks: Sequence[HostedProcess]) -> dict[str, Any]:
        """Returns rank 0's card, with the pids of all."""
        places = await self._locate(ranks)
        settings = [replace(s, host=place.host) for s, place in zip(self.plan.ranks, places, strict=True)]
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
    """Where routers are: with the controller, or each on a node of its own."""

    def __init__(self, num_routers: int, *, are_spread: bool) -> None:
        self.are_spread = are_spread
        self._num_routers = num_routers
        self._group: PlacementGroup | None = None

    def strategy(self, number: int) -> Strategy:
        """For that router, each time it starts."""
        if not self.are_spread:
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if self._group is None:
            self._group = place_apart(self._num_routers, ROUTER_BUNDLE)
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)

    async def found(self, router: HostedProcess, report: Callable[[str], None]) -> NodePlacement:
        if not self.are_spread:
            return await router.locate()
        wanted = f"a node for each of {count_of(self._num_routers, 'router')}"
        return (await _located([router], wanted, report))[0]

    def close(self) -> None:
        """Gives the resources back to Ray."""
        if self._group is not None:
            remove_placement_group(self._group)


class RouterLauncher:
    """Starts router `number`; once it has had a port, always on that one."""

    def __init__(
        self,
        name: str,
        settings: RouterSettings,
        module: str,
        log_dir: str | None,
        report: Callable[[str], None],
        number: int,
        places: RouterPlaces,
    ) -> None:
        self._name = name
        self._number = number
        self._places = places
        self._settings = settings
        self._module = module
        self._log_dir = log_dir
        self._report = report

    async def launch(self) -> RunningGroup:
        strategy = self._places.strategy(self._number)
        router = HostedProcess(
            self._module, self._name, self._report, bundle=ROUTER_BUNDLE, strategy=strategy, log_dir=self._log_dir
        )
        try:
            settings, place = self._settings, await self._places.found(router, self._report)
            if self._places.are_spread:
                settings = replace(settings, node_host=place.host)
            await router.prepare(settings.to_json())
            card = json.loads(await router.start())
        except BaseException:
            await router.kill()
            raise
        self._settings = self._settings.with_values(port=_port_of(card["address"]))
        if card.get("http_address"):
            self._settings = self._settings.with_values(http_port=_port_of(card["http_address"]))
        return RunningGroup([router], {**card, "pids": [place.pid]})


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


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
