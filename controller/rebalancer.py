"""`rebalance.mode: auto` at work: looks at the load once a second and asks the door for another split when it pays.

Decides nothing itself (`controller.rebalance_policy` does) and moves nobody (the door does). Before one more worker is
asked for there must be a place for it (`ScaleUpCapacity`), which may take a new node minutes to bring; the split goes
on following the load meanwhile. It says why the split moves, and why it stays when the reason is another one. Knows the
cluster by what `Sight` and `Split` tell.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.config import ServingConfig
from cluster.demand import Demand
from cluster.errors import BatonError
from cluster.pb import admin_pb2
from cluster.step_cost import RoleCosts, StepCost, usual
from controller.goodput_model import Slo, SplitBounds, WorkerModel
from controller.rebalance_policy import AutoRatio, Patience, Reason, RebalanceDecision
from controller.reconfigurer import AnotherChange, StaleVersion

logger = logging.getLogger(__name__)

_SAY_AGAIN_S = 30.0
"""While the same split is right, why is said so often."""


@dataclass(frozen=True)
class Sight:
    """What the routers have counted lately, together."""

    window_s: float
    demand: Demand
    costs: RoleCosts | None
    kv_tokens: int

    @classmethod
    def of(cls, reports: list[admin_pb2.GetDemandResponse]) -> Sight | None:
        """None of nothing."""
        if not reports:
            return None
        window_s = max(r.window_s for r in reports)
        told = [r for r in reports if r.HasField("prefill_cost")]
        costs = None
        if told:
            prefill = usual([StepCost.from_proto(r.prefill_cost) for r in told])
            costs = RoleCosts(prefill, usual([StepCost.from_proto(r.decode_cost) for r in told]))
        return cls(
            window_s=window_s,
            demand=sum((Demand.from_proto(r.demand).scaled(window_s / r.window_s) for r in reports), Demand()),
            costs=costs,
            kv_tokens=min(r.kv_tokens for r in reports),
        )


@dataclass(frozen=True)
class Split:
    """Workers as they are now."""

    num_prefill: int
    num_decode: int
    version: int
    num_added: int = 0
    """Of them, by `mode: auto`."""

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode


class ScaleUpCapacity(Protocol):
    """A place for one more worker."""

    def ask(self) -> bool:
        """Whether there is one, which is then kept; while there is none, one is asked for."""
        ...

    def give_back(self) -> None:
        """None is needed now; nothing where none was asked for."""
        ...


class Rebalancer:
    """`look` once a second. `move(num_prefill, num_decode, version, why)` raises BatonError where it cannot be."""

    def __init__(
        self,
        sight: Callable[[], Awaitable[Sight | None]],
        split: Callable[[], Split | None],
        move: Callable[[int, int, int, str], None],
        room: ScaleUpCapacity,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self._sight = sight
        self._split = split
        self._move = move
        self._room = room
        self._tell = say
        self._auto: AutoRatio | None = None
        self._settings: tuple[Slo, Patience] | None = None
        self._costs: RoleCosts | None = None
        self._was: tuple[int, int] | None = None
        """Prefill workers, and workers in all, at the last look."""
        self._asks_from = 0.0
        """The door is not asked before; it has refused what will not be right a second later."""
        self._said = ""
        self._said_at = 0.0
        self.num_moves = 0
        self.num_verdicts: Counter[Reason] = Counter()
        self.verdict: RebalanceDecision | None = None
        """The last one; None while the mode is another."""

    async def look(self, now: float, config: ServingConfig) -> None:
        """Nothing while `config` says another mode, or a change is being carried out (`split` gives None then)."""
        if config.rebalance.mode != "auto":
            self._auto = self.verdict = None
            self._room.give_back()
            return
        split, sight = self._split(), await self._sight()
        if split is None or sight is None:
            return
        sizes = [config.roles.prefill.tensor_parallel, config.roles.decode.tensor_parallel]
        if sizes[0] != sizes[1]:
            why = (
                f"stays: the roles differ in tensor_parallel ({sizes[0]} and {sizes[1]}), so that no worker can change"
            )
            self._auto, self.verdict = (
                None,
                RebalanceDecision(split.num_prefill, split.num_workers, Reason.UNEQUAL, why),
            )
            self._say(now, self.verdict)
            return
        auto = self._tuned(config)
        now_is = split.num_prefill, split.num_workers
        if self._was is not None:
            auto.moved(now, self._was, now_is)
        self._was = now_is
        worker = None
        if sight.costs is not None:
            # What a load of one kind does not show was seen in another.
            known = self._costs or sight.costs
            self._costs = RoleCosts(sight.costs.prefill.filled(known.prefill), sight.costs.decode.filled(known.decode))
            worker = WorkerModel(self._costs, config.engine.max_num_seqs, sight.kv_tokens)
        bounds = self._bounds(config, split)
        self.verdict = auto.decide(now, sight.demand, sight.window_s, worker, bounds, split.num_prefill)
        if self.verdict.reason is not Reason.GROWS:
            self._room.give_back()
        elif not self._room.ask():
            why = f"stays until there is room for one more worker; {self.verdict.why}"
            self.verdict = replace(self.verdict, reason=Reason.ROOM, why=why)
        self._say(now, self.verdict)
        if self.verdict.moves and now >= self._asks_from:
            self._try(now, split, self.verdict, config.rebalance.auto.cooldown_s)

    def _bounds(self, config: ServingConfig, split: Split) -> SplitBounds:
        roles, most_devices = config.roles, config.rebalance.auto.max_devices
        most = 0 if most_devices is None else most_devices // roles.decode.tensor_parallel
        least = split.num_workers - split.num_added
        return SplitBounds(split.num_workers, roles.prefill.min_workers, roles.decode.min_workers, least, most)

    def _tuned(self, config: ServingConfig) -> AutoRatio:
        """Its memory lasts until somebody changes what it goes by."""
        slo, auto = config.rebalance.slo, config.rebalance.auto
        settings = (
            Slo(slo.ttft_ms / 1000, slo.tpot_ms / 1000),
            Patience(auto.margin, auto.headroom, auto.confirm_s, auto.cooldown_s, auto.dwell_s, auto.release_after_s),
        )
        if self._auto is None or settings != self._settings:
            self._auto, self._settings = AutoRatio(*settings), settings
            self._asks_from = 0.0
        return self._auto

    def _try(self, now: float, split: Split, verdict: RebalanceDecision, cooldown_s: float) -> None:
        try:
            self._move(verdict.num_prefill, verdict.num_workers - verdict.num_prefill, split.version, verdict.why)
            self.num_moves += 1
        except (AnotherChange, StaleVersion) as error:
            # Somebody else changed something at the same moment: the next look sees it.
            logger.warning("auto: the split stays: %s", error.message)
        except BatonError as error:
            self._asks_from = now + cooldown_s
            logger.warning("auto: the split stays, for %g s at least: %s", cooldown_s, error.message)

    def _say(self, now: float, verdict: RebalanceDecision) -> None:
        self.num_verdicts[verdict.reason] += 1
        gist = verdict.why.partition(" serves")[0]
        if gist != self._said or now - self._said_at >= _SAY_AGAIN_S:
            self._said, self._said_at = gist, now
            self._tell(verdict.why)
