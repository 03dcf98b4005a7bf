"""`rebalance.mode: auto` at work: looks at the load once a second and asks the door for another split when it pays.

Decides nothing itself (`cluster.auto_ratio` does) and moves nobody (the door does). It says why the split moves, and
why it stays when the reason is another one. Knows the cluster by what `Sight` and `Split` tell.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.auto_ratio import AutoRatio, Bounds, Patience, Reason, Slo, Verdict, Worker
from cluster.config import ServingConfig
from cluster.demand import Demand
from cluster.door import AnotherChange, StaleVersion
from cluster.errors import BatonError
from cluster.pb import admin_pb2
from cluster.step_cost import RoleCosts, StepCost, usual

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

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode


class Autopilot:
    """`look` once a second. `move(num_prefill, num_decode, version, why)` raises BatonError where it cannot be."""

    def __init__(
        self,
        sight: Callable[[], Awaitable[Sight | None]],
        split: Callable[[], Split | None],
        move: Callable[[int, int, int, str], None],
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self._sight = sight
        self._split = split
        self._move = move
        self._tell = say
        self._auto: AutoRatio | None = None
        self._settings: tuple[Slo, Patience] | None = None
        self._num_prefill: int | None = None
        self._asks_from = 0.0
        """The door is not asked before; it has refused what will not be right a second later."""
        self._said = ""
        self._said_at = 0.0
        self.num_moves = 0
        self.num_verdicts: Counter[Reason] = Counter()
        self.verdict: Verdict | None = None
        """The last one; None while the mode is another."""

    async def look(self, now: float, config: ServingConfig) -> None:
        """Nothing while `config` says another mode, or a change is being carried out (`split` gives None then)."""
        if config.rebalance.mode != "auto":
            self._auto = self.verdict = None
            return
        split, sight = self._split(), await self._sight()
        if split is None or sight is None:
            return
        sizes = [config.roles.prefill.tensor_parallel, config.roles.decode.tensor_parallel]
        if sizes[0] != sizes[1]:
            why = (
                f"stays: the roles differ in tensor_parallel ({sizes[0]} and {sizes[1]}), so that no worker can change"
            )
            self._auto, self.verdict = None, Verdict(split.num_prefill, Reason.UNEQUAL, why)
            self._say(now, self.verdict)
            return
        auto = self._tuned(config)
        if self._num_prefill is not None:
            auto.moved(now, self._num_prefill, split.num_prefill)
        self._num_prefill = split.num_prefill
        roles = config.roles
        bounds = Bounds(split.num_workers, roles.prefill.min_workers, roles.decode.min_workers)
        worker = None
        if sight.costs is not None:
            worker = Worker(sight.costs, config.engine.max_num_seqs, sight.kv_tokens)
        self.verdict = auto.decide(now, sight.demand, sight.window_s, worker, bounds, split.num_prefill)
        self._say(now, self.verdict)
        if self.verdict.moves and now >= self._asks_from:
            self._try(now, split, self.verdict, config.rebalance.auto.cooldown_s)

    def _tuned(self, config: ServingConfig) -> AutoRatio:
        """Its memory lasts until somebody changes what it goes by."""
        slo, auto = config.rebalance.slo, config.rebalance.auto
        settings = (
            Slo(slo.ttft_ms / 1000, slo.tpot_ms / 1000),
            Patience(auto.margin, auto.headroom, auto.confirm_s, auto.cooldown_s, auto.dwell_s),
        )
        if self._auto is None or settings != self._settings:
            self._auto, self._settings, self._num_prefill = AutoRatio(*settings), settings, None
            self._asks_from = 0.0
        return self._auto

    def _try(self, now: float, split: Split, verdict: Verdict, cooldown_s: float) -> None:
        try:
            self._move(verdict.num_prefill, split.num_workers - verdict.num_prefill, split.version, verdict.why)
            self.num_moves += 1
        except (AnotherChange, StaleVersion) as error:
            # Somebody else changed something at the same moment: the next look sees it.
            logger.warning("auto: the split stays: %s", error.message)
        except BatonError as error:
            self._asks_from = now + cooldown_s
            logger.warning("auto: the split stays, for %g s at least: %s", cooldown_s, error.message)

    def _say(self, now: float, verdict: Verdict) -> None:
        self.num_verdicts[verdict.reason] += 1
        gist = verdict.why.partition(" serves")[0]
        if gist != self._said or now - self._said_at >= _SAY_AGAIN_S:
            self._said, self._said_at = gist, now
            self._tell(verdict.why)
