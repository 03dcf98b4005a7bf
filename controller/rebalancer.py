"""`rebalance.mode: auto`: looks at the load once a second and proposes another split when that pays.

`controller.rebalance_policy` decides, the reconfigurer carries out. One more worker is proposed only when Ray has room
for it, which may take minutes where a new node must come; the split follows the load meanwhile. Logs why the split
moves, and why it stays when the reason is a new one. Knows the cluster by `MeasuredLoad` and `Split`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.config.choices import DeviceName
from cluster.config.diff import role_differences
from cluster.config.schema import AutoSection, ServingConfig, SloSection
from cluster.demand import Demand
from cluster.errors import BatonError
from cluster.pb import admin_pb2
from cluster.step_cost import RoleCosts, StepCost, usual
from controller.goodput_model import SplitBounds, WorkerModel
from controller.rebalance_policy import AutoRatio, Reason, RebalanceDecision, SplitQuestion
from controller.reconfigurer import AnotherChange, StaleVersion

logger = logging.getLogger(__name__)

_REPORT_AGAIN_S = 30.0
"""The reason of an unchanged decision is logged again after this."""


@dataclass(frozen=True)
class MeasuredLoad:
    """The demand that all routers have counted lately, and what steps cost their workers."""

    window_s: float
    demand: Demand
    costs: RoleCosts | None
    kv_tokens: int

    @classmethod
    def of(cls, reports: list[admin_pb2.GetDemandResponse]) -> MeasuredLoad | None:
        """The reports of all routers together; None without any."""
        if not reports:
            return None
        window_s = max(r.window_s for r in reports)
        with_costs = [r for r in reports if r.HasField("prefill_cost")]
        costs = None
        if with_costs:
            prefill = usual([StepCost.from_proto(r.prefill_cost) for r in with_costs])
            costs = RoleCosts(prefill, usual([StepCost.from_proto(r.decode_cost) for r in with_costs]))
        return cls(
            window_s=window_s,
            demand=sum((Demand.from_proto(r.demand).scaled(window_s / r.window_s) for r in reports), Demand()),
            costs=costs,
            kv_tokens=min(r.kv_tokens for r in reports),
        )


@dataclass(frozen=True)
class Split:
    """The number of workers that each role has now."""

    num_prefill: int
    num_decode: int
    version: int
    num_added: int = 0
    """Workers that `mode: auto` has added."""

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode


class RebalancePolicy(Protocol):
    """Decides by which split the workers serve best (`controller.rebalance_policy.AutoRatio`)."""

    def decide(self, question: SplitQuestion) -> RebalanceDecision: ...

    def moved(self, now: float, before: tuple[int, int], after: tuple[int, int]) -> None: ...


MakePolicy = Callable[[SloSection, AutoSection], RebalancePolicy]


class Rebalancer:
    """`look` once a second. `move(num_prefill, num_decode, version, why)` raises BatonError for a refused move.
    `reserve` returns whether a place for one more worker is there, and then reserved, and asks Ray for one otherwise;
    `release` gives it back."""

    def __init__(
        self,
        measure: Callable[[], Awaitable[MeasuredLoad | None]],
        split: Callable[[], Split | None],
        move: Callable[[int, int, int, str], None],
        reserve: Callable[[], bool],
        release: Callable[[], None],
        report: Callable[[str], None] = logger.info,
        device: DeviceName = "auto",
        make_policy: MakePolicy = AutoRatio,
    ) -> None:
        """`device`: that of the workers, where the configuration leaves it open. `make_policy`: called whenever its
        settings change."""
        self._measure = measure
        self._split = split
        self._move = move
        self._reserve = reserve
        self._release = release
        self._report = report
        self._device = device
        self._make_policy = make_policy
        self._auto: RebalancePolicy | None = None
        self._settings: tuple[SloSection, AutoSection] | None = None
        self._costs: RoleCosts | None = None
        self._was: tuple[int, int] | None = None
        """Prefill workers, and workers in all, at the last look."""
        self._asks_from = 0.0
        """No move is proposed before: the last one was refused, and would be a second later."""
        self._reported = ""
        self._reported_at = 0.0
        self.num_moves = 0
        self.num_decisions: Counter[Reason] = Counter()
        self.decision: RebalanceDecision | None = None
        """The last one; None while the mode is another."""

    @property
    def gain(self) -> float:
        """Share by which the best split is predicted to serve more; 0 in another mode."""
        return 0.0 if self.decision is None else self.decision.gain

    async def look(self, now: float, config: ServingConfig) -> None:
        """Nothing while `config` says another mode, or a change is being carried out (`split` gives None then)."""
        if config.rebalance.mode != "auto":
            self._auto = self.decision = None
            self._release()
            return
        split, load = self._split(), await self._measure()
        if split is None or load is None:
            return
        unequal = [f"{key} ({one} and {other})" for key, (one, other) in role_differences(config).items()]
        if unequal:
            why = f"stays: the roles differ in {', '.join(unequal)}, so that no worker can change"
            self._auto = None
            self.decision = RebalanceDecision(split.num_prefill, split.num_workers, Reason.UNEQUAL, why)
            self._release()
            self._report_decision(now, self.decision)
            return
        auto = self._tuned(config)
        now_is = split.num_prefill, split.num_workers
        if self._was is not None:
            auto.moved(now, self._was, now_is)
        self._was = now_is
        worker = None
        if load.costs is not None:
            # What a load of one kind does not show was seen in another.
            known = self._costs or load.costs
            self._costs = RoleCosts(load.costs.prefill.filled(known.prefill), load.costs.decode.filled(known.decode))
            num_seqs = replace(config.engine_of("decode"), device=self._device).num_seqs
            worker = WorkerModel(self._costs, num_seqs, load.kv_tokens)
        bounds = self._bounds(config, split)
        question = SplitQuestion(now, load.demand, load.window_s, worker, bounds, split.num_prefill)
        self.decision = auto.decide(question)
        if self.decision.reason is not Reason.GROWS:
            self._release()
        elif not self._reserve():
            why = f"stays until there is room for one more worker; {self.decision.why}"
            self.decision = replace(self.decision, reason=Reason.ROOM, why=why)
        self._report_decision(now, self.decision)
        if self.decision.moves and now >= self._asks_from:
            self._propose(now, split, self.decision, config.rebalance.auto.cooldown_s)

    def _bounds(self, config: ServingConfig, split: Split) -> SplitBounds:
        roles, most_devices = config.roles, config.rebalance.auto.max_devices
        most = 0 if most_devices is None else most_devices // roles.decode.tensor_parallel
        least = split.num_workers - split.num_added
        return SplitBounds(split.num_workers, roles.prefill.min_workers, roles.decode.min_workers, least, most)

    def _tuned(self, config: ServingConfig) -> RebalancePolicy:
        """The policy, whose memory lasts until its settings change."""
        settings = config.rebalance.slo, config.rebalance.auto
        if self._auto is None or settings != self._settings:
            self._auto, self._settings = self._make_policy(*settings), settings
            self._asks_from = 0.0
        return self._auto

    def _propose(self, now: float, split: Split, decision: RebalanceDecision, cooldown_s: float) -> None:
        try:
            self._move(decision.num_prefill, decision.num_workers - decision.num_prefill, split.version, decision.why)
            self.num_moves += 1
        except (AnotherChange, StaleVersion) as error:
            # Somebody else changed something at the same moment: the next look sees it.
            logger.warning("auto: the split stays: %s", error.message)
        except BatonError as error:
            self._asks_from = now + cooldown_s
            logger.warning("auto: the split stays, for %g s at least: %s", cooldown_s, error.message)

    def _report_decision(self, now: float, decision: RebalanceDecision) -> None:
        self.num_decisions[decision.reason] += 1
        gist = decision.why.partition(" serves")[0]
        if gist != self._reported or now - self._reported_at >= _REPORT_AGAIN_S:
            self._reported, self._reported_at = gist, now
            self._report(decision.why)
