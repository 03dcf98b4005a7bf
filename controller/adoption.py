"""Decides what a controller that begins anew takes over from the one before it. Pure and without Ray.

What processes say of themselves crosses from one build of Baton to another: these classes are only added to, with
defaults.

Each process says who it is and whether it serves (`FoundProcess`); what it cannot know, the configuration as last
applied and the role of each worker, its controller has saved (`SavedCluster`). `choose` decides which processes are
kept: a worker whose ranks all serve, in the same life. What is left over is ended: ranks of a start that was
interrupted, of an older life, or of a worker that nobody wants any more.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from cluster.config.schema import EngineSection, RoleName, ServingConfig
from cluster.protocol import check_protocol, spoken
from cluster.settings import JsonSettings
from controller.plan import ClusterPlan

Row = TypeVar("Row", "SavedWorker", "SavedRouter")

STEADY_S = 60.0
"""A controller that has run for so long begins again at once after its death."""
_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0


@dataclass(frozen=True)
class ProcessIdentity:
    """The identity of one process of a cluster."""

    group: str
    """Name of the worker or the router."""
    rank: int = 0
    size: int = 1
    """Processes that live and die together with it, this one included."""
    epoch: int = 1
    """The start of the group that it belongs to, counted from 1."""
    config_version: int = 1
    """Version of the configuration at that start."""

    @property
    def name(self) -> str:
        return self.group if self.size == 1 else f"{self.group} rank {self.rank}"


@dataclass(frozen=True)
class NodePlacement:
    """The node and process of an actor."""

    host: str
    """Address at which the node's other processes and nodes reach this one."""
    pid: int
    protocol: str = ""
    """Versions of the protocol that the process speaks; empty: it is older than the handshake."""
    gpu: int | None = None
    """Number of the GPU that Ray has given it, among those that it sees; None: none, or it sees that one alone."""


@dataclass(frozen=True)
class FoundProcess:
    """A process as it describes itself."""

    identity: ProcessIdentity
    placement: NodePlacement
    settings: str = ""
    """The JSON that it was started with; empty: it has not got that far."""
    card: str = ""
    """The JSON that it reported when it was ready to serve; empty: it does not serve, or no longer."""
    num_lines: int = 0
    """Lines of progress that it has told so far."""
    placement_group: Any = None
    """Ray's handle of the resources that it was placed in, if it has any."""
    actor: Any = None
    """Ray's handle of the process; filled in by whoever asked it."""


@dataclass(frozen=True)
class Adoption:
    """`kept`: for each group its processes, by rank."""

    kept: Mapping[str, tuple[FoundProcess, ...]]
    orphans: tuple[FoundProcess, ...]

    @property
    def newest_version(self) -> int:
        """The newest configuration by which a kept process was started; 0 without any."""
        return max((ranks[0].identity.config_version for ranks in self.kept.values()), default=0)


def choose(wanted: Mapping[str, int], found: Sequence[FoundProcess]) -> Adoption:
    """`wanted`: the groups that there should be, with the number of their processes. Raises IncompatibleProtocol where
    this controller does not understand one of those found: to end it would end what it serves."""
    for process in found:
        check_protocol(process.identity.name, process.placement.protocol, "this controller")
    lives: dict[tuple[str, int], list[FoundProcess]] = defaultdict(list)
    for process in found:
        lives[process.identity.group, process.identity.epoch].append(process)
    kept: dict[str, tuple[FoundProcess, ...]] = {}
    for (group, _), life in sorted(lives.items(), key=lambda item: item[0]):
        ranks = sorted(life, key=lambda process: process.identity.rank)
        numbers = [process.identity.rank for process in ranks]
        if numbers == list(range(wanted.get(group, 0))) and all(process.card for process in ranks):
            kept[group] = tuple(ranks)  # of two lives the later one
    chosen = {id(process) for ranks in kept.values() for process in ranks}
    return Adoption(kept, tuple(process for process in found if id(process) not in chosen))


@dataclass(frozen=True)
class SavedWorker:
    """A worker as its controller last knew it."""

    worker_id: str
    role: RoleName
    is_draining: bool = False


@dataclass(frozen=True)
class SavedRouter:
    """The ports that a router had last, where any free one would do; 0: none yet, or not served."""

    port: int = 0
    http_port: int = 0


@dataclass(frozen=True)
class SavedCluster(JsonSettings):
    """The state that a controller saves for the next one, after each change."""

    config: ServingConfig
    """The configuration as last applied."""
    engine: EngineSection
    """Engine settings that workers here were started with, where a role does not say otherwise."""
    version: int = 1
    num_devices_asked: int = 0
    """Devices of both roles that an operator last asked for."""
    is_changing: bool = False
    """A change was under way, which leads to `config`."""
    admin_port: int = 0
    """The port that the AdminService had."""
    journal: str = ""
    """File of the routers' journal, which ends with the cluster; empty: there is none."""
    has_served: bool = False
    workers: tuple[SavedWorker, ...] = ()
    routers: tuple[SavedRouter, ...] = ()
    """The routers by their numbers."""
    life: int = 1
    """Controllers that this cluster has had."""
    num_early_deaths: int = 0
    """Controllers before this one, in a row, that died soon after they began."""
    token: str = ""
    """Secret that the cluster's processes show one another."""
    began_at: float = 0.0
    """When this controller began, in seconds of the wall clock."""
    protocol: str = ""
    """Versions of the protocol that it speaks; empty: it is older than the handshake."""

    @classmethod
    def first(cls, config: ServingConfig, plan: ClusterPlan, now: float) -> Self:
        """Makes the state with which the first controller of a cluster begins."""
        first = [(config.engine_of(worker.role), worker.ranks[0].engine) for worker in plan.workers]
        devices = [found.device for asked, found in first if asked.device == "auto"] or [first[0][1].device]
        threads = [found.threads for asked, found in first if asked.threads is None and found.device == "cpu"] or [None]
        engine = dataclasses.replace(config.engine, device=devices[0], threads=config.engine.threads or threads[0])
        workers = tuple(SavedWorker(worker.worker_id, worker.role) for worker in plan.workers)
        return cls(
            config,
            engine,
            journal=plan.journal or "",
            workers=workers,
            began_at=now,
            token=secrets.token_hex(32),
            protocol=spoken(),
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what a controller has saved, without what a later version has added. Raises IncompatibleProtocol, or
        TypeError by name."""
        values = json.loads(text)
        check_protocol("the controller before", values.get("protocol", ""), "this controller")
        workers = _rows(SavedWorker, values.pop("workers", ()))
        routers = _rows(SavedRouter, values.pop("routers", ()))
        return dataclasses.replace(super().from_json(json.dumps(values)), workers=workers, routers=routers)

    def next_life(self, now: float) -> Self:
        """Makes the state with which the next controller begins."""
        is_early = 0.0 <= now - self.began_at < STEADY_S
        deaths = self.num_early_deaths + 1 if is_early else 0
        return dataclasses.replace(self, life=self.life + 1, num_early_deaths=deaths, began_at=now)

    @property
    def delay_s(self) -> float:
        """Seconds that this controller waits first, so that one which dies again and again leaves others the
        processor."""
        if self.num_early_deaths <= 1:
            return 0.0
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(self.num_early_deaths - 2, 30))


def _rows(kind: type[Row], rows: Iterable[Mapping[str, Any]]) -> tuple[Row, ...]:
    names = {each.name for each in dataclasses.fields(kind)}
    return tuple(kind(**{name: row[name] for name in names & row.keys()}) for row in rows)
