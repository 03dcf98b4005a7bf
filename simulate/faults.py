"""Faults of a simulated cluster: what befalls workers, machines, routers, their store, links and transfers, and when.

Everything heals: whoever died comes back with nothing in memory, and what stood still goes on. Faults that have a rate
strike operations by chance, until `FaultPlan.until_s`; events strike once, in their time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from simulate.controller import SimulatedController
from simulate.network import Network
from simulate.router import SimulatedRouter, SimulatedStore
from simulate.virtual_loop import VirtualLoop
from simulate.worker import SimulatedWorker, WorkerSpec

WORKER_FAULTS = ("worker died", "worker stopped", "engine hung", "worker slow", "machine died")
LABEL_FAULTS = ("worker drained", "role changed")
"""Routers are told so of a worker; what decodes there is handed over to others as it is."""
CONTROLLER_FAULTS = ("controller died", "controller stopped")
ROUTER_FAULTS = ("router died", "store away", "store mute")
"""A mute store does what it is asked for, and its answers are lost."""
NETWORK_FAULTS = ("link cut", "link silent", "messages late")
RATED_FAULTS = (
    "gather failed",
    "transfer failed",
    "send failed",
    "receive failed",
    "landing torn",
    "damaged",
    "pair did not open",
    "link refused",
    "message lost",
    "message doubled",
)
"""A transfer fails on both sides, a send and a receive on one; a torn landing is one that failed and has written. The
last three befall hand-off streams. Beside these, `copy failed` befalls copies to the tier below a pool and back."""
MOST_LATE = 200.0
"""Times its usual latency that a late message takes, at most."""


class Stage(Protocol):
    """The cluster that faults befall."""

    @property
    def loop(self) -> VirtualLoop: ...
    @property
    def network(self) -> Network: ...
    @property
    def workers(self) -> Mapping[str, SimulatedWorker]: ...
    @property
    def routers(self) -> Mapping[str, SimulatedRouter]: ...
    @property
    def controller(self) -> SimulatedController | None: ...
    @property
    def store(self) -> SimulatedStore: ...
    @property
    def random(self) -> random.Random: ...
    def start(self, spec: WorkerSpec) -> SimulatedWorker: ...
    def start_router(self, name: str) -> SimulatedRouter: ...
    def start_controller(self) -> None: ...
    def label(self, worker_id: str, role: str, *, is_draining: bool = False) -> None: ...
    def count(self, fault: str) -> None: ...


@dataclass(frozen=True)
class FaultEvent:
    """One fault, which lasts `for_s` seconds."""

    at_s: float
    """From the begin of the run."""
    kind: str
    for_s: float
    worker_id: str
    """The worker that it befalls; network faults choose among the connections that there are."""
    factor: float = 1.0
    """Times slower that a slow worker is."""

    def strike(self, stage: Stage) -> None:
        """Makes it happen; a fault that finds nothing to befall is passed over."""
        if self.kind in NETWORK_FAULTS:
            has_struck = self._strike_network(stage)
        elif self.kind in ROUTER_FAULTS:
            has_struck = self._strike_router(stage)
        elif self.kind in CONTROLLER_FAULTS:
            has_struck = self._strike_controller(stage, stage.controller)
        elif self.kind in LABEL_FAULTS:
            has_struck = self._strike_label(stage, stage.workers[self.worker_id].spec.role)
        else:
            has_struck = self._strike_worker(stage, stage.workers[self.worker_id])
        if has_struck:
            stage.count(self.kind)

    def _strike_worker(self, stage: Stage, worker: SimulatedWorker) -> bool:
        if worker.is_dead:
            return False
        match self.kind:
            case "worker died":
                self._kill(stage, worker)
            case "machine died":
                beside = [other for other in stage.workers.values() if other is not worker and not other.is_dead]
                for each in [worker, *stage.random.sample(beside, (len(beside) + 1) // 2)]:
                    self._kill(stage, each)
            case "worker stopped":
                worker.stop(self.for_s)
            case "engine hung":
                worker.hang(self.for_s)
            case "worker slow":
                worker.ranks.slowdown = self.factor
                stage.loop.call_later(self.for_s, setattr, worker.ranks, "slowdown", 1.0)
        return True

    def _kill(self, stage: Stage, worker: SimulatedWorker) -> None:
        worker.die()
        if stage.controller is None:
            stage.loop.call_later(self.for_s, stage.start, worker.spec)

    def _strike_controller(self, stage: Stage, controller: SimulatedController | None) -> bool:
        if controller is None or controller.is_dead:
            return False
        if self.kind == "controller died":
            controller.die()
            stage.loop.call_later(self.for_s, stage.start_controller)
        else:
            controller.stop(self.for_s)
        return True

    def _strike_label(self, stage: Stage, role: str) -> bool:
        is_drained = self.kind == "worker drained"
        other = role if is_drained else {"prefill": "decode", "decode": "prefill"}[role]
        stage.label(self.worker_id, other, is_draining=is_drained)
        stage.loop.call_later(self.for_s, stage.label, self.worker_id, role)
        return True

    def _strike_router(self, stage: Stage) -> bool:
        running = [router for router in stage.routers.values() if not router.is_dead]
        if not running:
            return False
        if self.kind == "router died":
            router = stage.random.choice(running)
            router.die()
            stage.loop.call_later(self.for_s, stage.start_router, router.name)
        else:
            stage.store.go_away(self.for_s, loses_answers=self.kind == "store mute")
        return True

    def _strike_network(self, stage: Stage) -> bool:
        network, calls = stage.network, stage.network.calls
        if self.kind == "messages late":
            network.lateness = lambda: stage.random.uniform(1.0, MOST_LATE)
            stage.loop.call_later(self.for_s, setattr, network, "lateness", lambda: 1.0)
        elif calls:
            call = stage.random.choice(calls)
            if self.kind == "link cut":
                call.sever()
            else:
                network.silence(*call.way, self.for_s)
        else:
            return False
        return True


@dataclass(frozen=True)
class FaultPlan:
    """All faults of a run."""

    events: tuple[FaultEvent, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    """Chance of an operation to meet a fault, by its name."""
    until_s: float = 0.0
    """No fault lasts longer, and no operation meets one after that."""

    @classmethod
    def random(
        cls,
        rng: random.Random,
        worker_ids: Sequence[str],
        until_s: float,
        *,
        has_routers: bool = False,
        has_controller: bool = False,
    ) -> FaultPlan:
        """Some faults of some kinds, none of which lasts beyond `until_s` seconds. `has_routers`: that may die.
        `has_controller`: it says which worker has which role."""
        possible = [*WORKER_FAULTS, *NETWORK_FAULTS, *(CONTROLLER_FAULTS if has_controller else LABEL_FAULTS)]
        possible += ROUTER_FAULTS if has_routers else ()
        kinds = rng.sample(possible, rng.randint(1, 4))
        events = []
        for _ in range(rng.randint(1, 8)):
            at_s = rng.uniform(0.0, until_s)
            for_s = min(rng.choice((0.05, 0.5, 2.0, 5.0)) * rng.uniform(0.5, 1.5), until_s - at_s)
            worker_id, factor = rng.choice(worker_ids), rng.choice((2.0, 5.0, 30.0))
            events.append(FaultEvent(at_s, rng.choice(kinds), for_s, worker_id, factor))
        rates = {name: rng.choice((0.0, 0.0, 0.01, 0.05)) for name in RATED_FAULTS}
        rates["landing torn"] *= 10  # of the landings that fail
        return cls(tuple(events), rates, until_s)
