"""The routers that run, and the steps that change them, one router at a time.

    plan: the routers there are, against a configuration -> steps -> carry_out

A router with other settings comes up beside the one it follows, at the same ports, connected to its workers; then the
old one takes no new connection, and ends when its requests have ended, or after the drain's time. What is left then is
resumed at the new one by those clients that can. A router that does not come up changes nothing. How a router is
started is behind `RouterStarter`. Knows no Ray.

Routers of one machine share their ports: Linux gives each some of the connections. `SharedPorts` holds a port while any
of them has it, so that one that is started again joins the others, and nobody else does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol

from cluster.address import hold_port
from cluster.config.diff import is_run_time, leaves
from cluster.config.schema import ServingConfig
from cluster.errors import FailedPrecondition
from cluster.file_store import remove as remove_journal
from cluster.settings import RouterSettings
from controller.adoption import FoundProcess, SavedRouter
from controller.plan import plan_routers
from controller.router_link import RouterLink, RouterLinks
from controller.supervisor import RestartPolicy, RunningProcesses, Supervisor, SupervisorState
from controller.worker_pool import STOP_S, StepFailed

_START_S = 120.0
"""Seconds that a router which a change starts may take to come up."""


class RouterStarter(Protocol):
    """Starts one router, as often as it takes; `controller.launchers` does so on Ray."""

    settings: RouterSettings
    """Settings of the next start; a free port that the router has got stands in them."""
    is_successor: bool
    """The next start takes over the ports of a router that still listens there."""

    async def launch(self) -> RunningProcesses: ...

    def adopt(self, router: FoundProcess) -> RunningProcesses:
        """Takes over what a controller before has started; later starts go on from there."""
        ...


@dataclass(frozen=True)
class StartRouter:
    """One router more."""

    worker_id: str

    def __str__(self) -> str:
        return f"start {self.worker_id}"


@dataclass(frozen=True)
class ReplaceRouter:
    """A router with the wanted settings takes over the ports of the one that has that name."""

    worker_id: str

    def __str__(self) -> str:
        return f"start {self.worker_id} with the new settings beside the old one, and drain and stop that"


@dataclass(frozen=True)
class StopRouter:
    """The router takes no new connection, and ends when nothing is left on it."""

    worker_id: str

    def __str__(self) -> str:
        return f"drain and stop {self.worker_id}"


RouterStep = StartRouter | ReplaceRouter | StopRouter
"""`worker_id` is the router's name, by which events call it."""


@dataclass(frozen=True)
class PooledRouter:
    """One router."""

    starter: RouterStarter
    supervisor: Supervisor
    link: RouterLink


class SharedPorts:
    """The ports that routers of this machine share, each held by this process."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], socket.socket] = {}

    def hold(self, settings: RouterSettings, *, is_joined: bool = False) -> RouterSettings:
        """Holds a router's ports, 0: a free one, and returns the settings with which it shares them; as they are where
        a port cannot be had, which the router then reports. `is_joined`: a router of the cluster listens there."""
        section, before = settings.router, set(self._held)
        try:
            port = self._hold(section.host, section.port, is_joined)
            http_port = section.http_port
            if http_port is not None:
                http_port = self._hold(section.host, http_port, is_joined)
        except OSError:
            self._close(self._held.keys() - before)
            return replace(settings, shares_ports=False)
        return replace(settings, shares_ports=True, router=replace(section, port=port, http_port=http_port))

    def keep(self, used: Iterable[RouterSettings]) -> None:
        """Gives back the ports that none of these has."""
        sections = [settings.router for settings in used]
        self._close(self._held.keys() - {(s.host, port) for s in sections for port in (s.port, s.http_port)})

    def _hold(self, host: str, port: int, is_joined: bool) -> int:
        if (host, port) in self._held:
            return port
        held = hold_port(host, port, is_joined=is_joined)
        bound: int = held.getsockname()[1]
        self._held[host, bound] = held
        return bound

    def _close(self, which: Iterable[tuple[str, int]]) -> None:
        for address in list(which):
            self._held.pop(address).close()


class RouterPool:
    """`make_starter(name, number, settings, num_starts)`: num_starts of the router that it follows. `changed` is called
    with a supervisor after each change of its state. `journal`: the file of the cluster, which ends with it; empty:
    there is none. `ports`: None where each router is on a machine of its own."""

    def __init__(
        self,
        make_starter: Callable[[str, int, RouterSettings, int], RouterStarter],
        make_link: Callable[[Supervisor], RouterLink],
        changed: Callable[[Supervisor], None],
        journal: str,
        ports: SharedPorts | None = None,
    ) -> None:
        self._make_starter = make_starter
        self._make_link = make_link
        self._changed = changed
        self._journal = journal
        self._ports = ports
        self._routers: list[PooledRouter] = []
        self._others: list[PooledRouter] = []
        """Routers that come or leave."""
        self._has_changed = asyncio.Event()
        self.links = RouterLinks()

    def __len__(self) -> int:
        return len(self._routers)

    @property
    def saved(self) -> tuple[SavedRouter, ...]:
        """Returns what the next controller has to know of each."""
        return tuple(_ports_of(router) for router in self._routers)

    @property
    def supervisors(self) -> Sequence[Supervisor]:
        return [router.supervisor for router in self._routers]

    def add(self, config: ServingConfig, saved: Sequence[SavedRouter] = (), *, have_served: bool) -> None:
        """Adds the routers of a configuration, which `run` starts, at the ports that they had under a controller
        before. `have_served`: they are brought back however often they fail."""
        ports = chain(saved, repeat(SavedRouter()))
        for number, (name, settings) in enumerate(plan_routers(config, self._journal)):
            settings = _at_ports(next(ports), settings)
            self._join(self._make(name, number, settings, RestartPolicy(has_served=have_served)))

    def adopt(self, router: FoundProcess) -> None:
        """Takes over a router that serves already."""
        identity = router.identity
        pooled = next(one for one in self._routers if one.supervisor.name == identity.group)
        pooled.supervisor.run(pooled.starter.adopt(router), identity.epoch)
        if self._ports is not None:
            pooled.starter.settings = self._ports.hold(pooled.starter.settings, is_joined=True)

    def run(self) -> None:
        """Starts all that have not been started or adopted."""
        for router in self._routers:
            router.supervisor.run()

    async def stop(self, grace_s: float) -> None:
        """Ends all and their journal; they stay known."""
        await asyncio.gather(*(router.supervisor.stop(grace_s) for router in (*self._routers, *self._others)))
        if self._ports is not None:
            self._ports.keep(())
        if self._journal:
            await asyncio.to_thread(remove_journal, self._journal)

    def renew(self, config: ServingConfig) -> None:
        """Has routers of these settings begin, whenever they are started again, with all of the configuration: also
        with what they took over as they ran, and with the model's present folder."""
        for router, (_, settings) in zip(self._routers, plan_routers(config, self._journal), strict=False):
            settings = _at_ports(_ports_of(router), settings)
            if _fixed_values(router.starter.settings) == _fixed_values(settings):
                router.starter.settings = settings

    def plan(self, wanted: ServingConfig) -> tuple[RouterStep, ...]:
        """Returns the steps that lead to the routers of a configuration: new ones first. Raises FailedPrecondition."""
        then = plan_routers(wanted, self._journal)
        names = [name for name, _ in then]
        if wanted.placement.routers == "spread" and len(then) > len(self):
            raise FailedPrecondition(
                f"router.replicas cannot become {len(then)} while the cluster runs: with placement.routers: spread the "
                f"nodes of {len(self)} are reserved at the start; restart `baton serve` for it"
            )
        starts = [StartRouter(name) for name in names[len(self) :]]
        replaces = [
            ReplaceRouter(name)
            for router, (name, settings) in zip(self._routers, then, strict=False)
            if _fixed_values(router.starter.settings) != _fixed_values(_at_ports(_ports_of(router), settings))
        ]
        stops = [StopRouter(router.supervisor.name) for router in reversed(self._routers[len(then) :])]
        return (*starts, *replaces, *stops)

    async def carry_out(self, step: RouterStep, config: ServingConfig) -> None:
        """`config`: the wanted one. Raises StepFailed, and leaves no router behind that did not come up."""
        drain_s = config.rebalance.drain_timeout_s
        match step:
            case StartRouter():
                await self._start(step.worker_id, config)
            case ReplaceRouter():
                await self._replace(step.worker_id, config, drain_s)
            case StopRouter():
                await self._drain(self._leave(step.worker_id), drain_s)

    async def _start(self, name: str, config: ServingConfig) -> None:
        number, settings = self._find(name, config)
        router = self._make(name, number, settings, RestartPolicy())
        await self._come_up(router, 0)
        self._join(router)

    async def _replace(self, name: str, config: ServingConfig, drain_s: float) -> None:
        number, settings = self._find(name, config)
        old = self._routers[number]
        num_starts = old.supervisor.num_starts
        router = self._make(name, number, _at_ports(_ports_of(old), settings), RestartPolicy(), num_starts)
        router.starter.is_successor = True
        await self._come_up(router, num_starts)
        router.starter.is_successor = False
        await router.link.try_to_update()
        self._leave(name)
        self._join(router, number)
        await self._drain(old, drain_s)

    async def _come_up(self, router: PooledRouter, num_starts: int) -> None:
        """Starts it, and returns when it serves. Raises StepFailed, and ends it then."""
        supervisor = router.supervisor
        self._others.append(router)
        try:
            async with asyncio.timeout(_START_S):
                supervisor.run(num_starts=num_starts)
                while supervisor.state not in (SupervisorState.READY, SupervisorState.FAILED):
                    self._has_changed.clear()
                    await self._has_changed.wait()
            why = supervisor.why
        except TimeoutError:
            why = supervisor.why or f"it was not there after {_START_S:g} s"
        if supervisor.state is not SupervisorState.READY:
            await self._drain(router, 0.0)
            raise StepFailed(f"{supervisor.name} did not start: {why}")
        self._others.remove(router)

    def _make(
        self, name: str, number: int, settings: RouterSettings, policy: RestartPolicy, num_starts: int = 0
    ) -> PooledRouter:
        starter = self._make_starter(name, number, settings, num_starts)
        supervisor = Supervisor(name, partial(self._launch, starter), self._on_change, policy)
        return PooledRouter(starter, supervisor, self._make_link(supervisor))

    async def _launch(self, starter: RouterStarter) -> RunningProcesses:
        """Starts a router, at the free ports that another one has got already where it wants free ones."""
        if self._ports is not None:
            settings = starter.settings
            for other in self._routers:
                settings = _at_ports(_ports_of(other), settings)
            starter.settings = self._ports.hold(settings)
        return await starter.launch()

    def _find(self, name: str, config: ServingConfig) -> tuple[int, RouterSettings]:
        """The number of a router, and the settings that it has by a configuration."""
        return next(
            (number, settings)
            for number, (known, settings) in enumerate(plan_routers(config, self._journal))
            if known == name
        )

    def _join(self, router: PooledRouter, number: int | None = None) -> None:
        self._routers.insert(len(self._routers) if number is None else number, router)
        self.links.add(router.link)

    def _leave(self, name: str) -> PooledRouter:
        """Takes it out of the routers there are; it hears of its workers until it has ended."""
        router = next(one for one in self._routers if one.supervisor.name == name)
        self._routers.remove(router)
        self._others.append(router)
        return router

    async def _drain(self, router: PooledRouter, drain_s: float) -> None:
        await router.supervisor.stop(drain_s + STOP_S)
        self._others.remove(router)
        await self.links.remove(router.link)
        if self._ports is not None:
            self._ports.keep(each.starter.settings for each in (*self._routers, *self._others))

    def _on_change(self, supervisor: Supervisor) -> None:
        self._has_changed.set()
        self._changed(supervisor)


def _ports_of(router: PooledRouter) -> SavedRouter:
    section = router.starter.settings.router
    return SavedRouter(section.port, section.http_port or 0)


def _at_ports(has: SavedRouter, then: RouterSettings) -> RouterSettings:
    """Settings with the ports that a router has where any free one will do."""
    wants = then.router
    http_port = wants.http_port if wants.http_port != 0 else has.http_port
    return replace(then, router=replace(wants, port=wants.port or has.port, http_port=http_port))


def _fixed_values(settings: RouterSettings) -> dict[str, Any]:
    """Values by key that a router of these settings keeps for its life. The model's are not among them: as far as
    routers read it, it stays."""
    sections: Iterable[tuple[str, Any]] = (
        ("router", settings.router),
        ("auth", settings.auth),
        ("tls", settings.tls),
        ("internal_tls", settings.internal_tls),
    )
    values = {key: value for path, section in sections for key, value in leaves(section, path).items()}
    values |= {"metrics.router": settings.metrics_port is not None, "state": settings.state}
    return {key: value for key, value in values.items() if key != "router.replicas" and not is_run_time(key)}
