"""Chooses between a plan with disaggregation and one without, and refuses a question that neither can answer.

A refusal names the objective that binds, and the nearest question that has a plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.errors import ConfigError
from cluster.text import count_of
from simulate.placement import highest_rate
from simulate.planner import MOST_WORKERS, DevicePlan, Planner, RolePlan

_NEARBY = (1.05, 1.25, 2.0, 4.0)
"""Limits that are tried in the place of one that cannot be met: so many times what no wait at all would take."""
_RATE_TOLERANCE = 0.05
_FAR = 100.0
"""A rate is first sought in steps of so many times."""
_LEAST_RATE = 1e-3


@dataclass(frozen=True)
class PlanChoice:
    """The plans that were compared."""

    best: DevicePlan
    split: DevicePlan | None
    """None: no number of devices keeps the objectives with prefill and decode apart."""
    colocated: DevicePlan | None
    """None: no number of devices keeps them where each computes both."""
    what_if: DevicePlan | None

    @property
    def plans(self) -> dict[str, DevicePlan]:
        """The plans that there are, by name."""
        plans = {"disaggregated": self.split, "colocated": self.colocated, "what_if": self.what_if}
        return {name: plan for name, plan in plans.items() if plan is not None}

    @property
    def num_devices(self) -> int:
        """Devices of the larger of the two plans."""
        return max(plan.num_devices for plan in (self.split, self.colocated) if plan is not None)

    @property
    def verdict(self) -> str:
        """Whether to disaggregate, and why."""
        if self.colocated is None:
            return (
                "Disaggregate: no number of devices keeps these objectives where each computes both; apart "
                f"{self.best.num_devices} do."
            )
        both = self.colocated.num_devices
        if self.split is None:
            return (
                f"Do not disaggregate: no number of devices keeps these objectives apart; {both} that compute both do."
            )
        split = self.split.num_devices
        if both < split:
            return f"Do not disaggregate: where each computes both, it takes {count_of(both, 'device')}; apart {split}."
        if both == split:
            return f"Do not disaggregate: it takes {count_of(both, 'device')} either way, and nothing is handed over."
        return f"Disaggregate: {split} devices instead of {both} that each compute both, {1 - split / both:.0%} fewer."


def choose(planner: Planner, ratio: tuple[int, int] | None = None) -> PlanChoice:
    """The best plan with and without disaggregation. `ratio`: workers of each role, of the same layouts, to compare.

    Raises ConfigError for what no plan can meet.
    """
    split, colocated = planner.split(), planner.colocated()
    best = _better(split, colocated)
    if best is None:
        raise ConfigError(_refusal(planner))
    most = planner.question.most_devices
    if most is not None and best.num_devices > most:
        raise ConfigError(_too_few(planner, best, most))
    return PlanChoice(best, split, colocated, None if ratio is None else _of_ratio(planner, split, colocated, *ratio))


def _better(split: DevicePlan | None, colocated: DevicePlan | None) -> DevicePlan | None:
    """The one on fewer devices; where both take as many, the one without hand-offs."""
    plans = [plan for plan in (colocated, split) if plan is not None]
    return min(plans, key=lambda plan: plan.num_devices, default=None)


def _of_ratio(
    planner: Planner, split: DevicePlan | None, colocated: DevicePlan | None, num_prefill: int, num_decode: int
) -> DevicePlan:
    """Workers of the layouts of the plan of the same kind, or of the other one where there is none."""
    like = split or colocated if num_prefill else colocated or split
    assert like is not None
    decode = RolePlan(like.decode.option, num_decode)
    prefill = RolePlan((like.prefill or like.decode).option, num_prefill) if num_prefill else None
    return planner.of_workers(prefill, decode)


def _best(planner: Planner) -> DevicePlan | None:
    return _better(planner.split(), planner.colocated())


def _refusal(planner: Planner) -> str:
    """Why no number of devices is enough, and the nearest question that has a plan."""
    question = planner.question
    goal, name, device = question.goal, question.memory.shape.name, question.memory.device.name
    least = {"ttft": planner.least_ttft, "tpot": planner.least_tpot}
    limits = {"ttft": goal.ttft_s, "tpot": goal.tpot_s}
    missed = [objective for objective, (least_s, _) in least.items() if least_s > limits[objective]]
    if not missed and (text := _lower_rate(planner)):
        return text
    says = [
        f"--{one}-ms: {1000 * limits[one]:g} ms in {goal.share:.0%} of the requests cannot be met with any number of "
        f"{device}: {name} takes {1000 * seconds:.1f} ms without any wait with {layout}, which comes nearest"
        for one, (seconds, layout) in least.items()
        if one in missed
    ] or [f"--ttft-ms, --tpot-ms: no number of {device} keeps both with {name}"]
    return "; ".join([*says, _nearest(planner, {one: least[one][0] for one in missed or least})])


def _nearest(planner: Planner, least_s: Mapping[str, float]) -> str:
    """Limits that can be met, and what they would take. `least_s`: those to raise, by what they take without a wait."""
    question = planner.question
    limits_ms = {"ttft": 1000 * question.goal.ttft_s, "tpot": 1000 * question.goal.tpot_s}
    for factor in _NEARBY:
        raised = {name: math.ceil(max(limits_ms[name], 1000 * factor * least)) for name, least in least_s.items()}
        goal = replace(question.goal, **{f"{name}_s": limit_ms / 1000 for name, limit_ms in raised.items()})
        options = " ".join(f"--{name}-ms {limit_ms}" for name, limit_ms in raised.items())
        if (plan := _best(Planner(replace(question, goal=goal)))) is not None:
            return f"{options} would take {plan.num_devices} of them"
    return "use a faster device"


def _lower_rate(planner: Planner) -> str | None:
    """The highest rate that the most workers serve; None: they serve none."""
    question = planner.question
    most = question.load.rate
    while most > _LEAST_RATE and _best(planner.at_rate(most / _FAR)) is None:
        most /= _FAR
    rate = _rounded_down(highest_rate(lambda r: _best(planner.at_rate(r)) is not None, most, _RATE_TOLERANCE))
    plan = _best(planner.at_rate(rate)) if rate else None
    if plan is None:
        return None
    return (
        f"--rate: {question.load.rate:g} requests a second take more than {MOST_WORKERS:,} workers of "
        f"{question.memory.shape.name} on {question.memory.device.name}; --rate {rate:g} would take "
        f"{plan.num_devices:,} devices: plan for a part of the load"
    )


def _too_few(planner: Planner, plan: DevicePlan, most: int) -> str:
    """More devices are needed than there may be."""
    question = planner.question

    def is_enough(rate: float) -> bool:
        found = _best(planner.at_rate(rate))
        return found is not None and found.num_devices <= most

    rate = _rounded_down(highest_rate(is_enough, question.load.rate, _RATE_TOLERANCE))
    served = f"--rate {rate:g} is what they serve" if rate else "they serve no rate"
    return (
        f"--devices: {most} {question.memory.device.name} do not serve {question.load.rate:g} requests a second within "
        f"the objectives, {plan.num_devices} do; {served}: lower --rate, or allow more"
    )


def _rounded_down(rate: float) -> float:
    """Three digits; 0 below what a rate may be."""
    if rate < _LEAST_RATE:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(rate)) - 2)
    return math.floor(rate / unit) * unit
