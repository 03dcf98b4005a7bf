"""The requests a second that a split of N workers serves within the objectives, by the known costs of steps.

    one prefill worker   mu_p = the share of its time that may be busy, so that the first token comes in time
                                / seconds of a prompt
    one decode worker    mu_d = as many as may come at any moment, and seldom are there more at a time than a step
                                advances within the time per token
                         what its steps leave of the time per token is for prompts: the fewer tokens it generates, the
                         more of them it computes itself (`engine.step_budget` holds it to that)
    P of N prefill       the highest rate whose outputs D = N - P workers generate, and whose prompts P workers and the
                         time that is left on D compute; without that time best near P / D = mu_d / mu_p
    P = 0                each worker does both, in the same way

Pure: load and costs come in, rates go out. Knows nothing of what was served, and moves no worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config.schema import SloSection
from cluster.demand import Demand
from cluster.step_cost import PACE_SHARE, RoleCosts, StepCost, StepSize

LEAST_REQUESTS = 10
"""Fewer say nothing about what requests are like."""
_HALVINGS = 50
"""Halvings of the interval in which the highest rate is searched."""
IN_TIME = 0.85
"""Share of the requests that are to keep the objectives."""
_LARGE = 1e100


@dataclass(frozen=True)
class SplitBounds:
    """The splits that are allowed, in workers; with 0 for prefill every worker does both."""

    num_workers: int
    min_prefill: int = 1
    min_decode: int = 1
    least_workers: int = 0
    most_workers: int = 0
    """Most workers there may be; not more than `num_workers`: none is added."""

    @property
    def splits(self) -> range:
        """Every number of prefill workers that is allowed, ascending."""
        return range(self.min_prefill, self.num_workers - max(1, self.min_decode) + 1)


@dataclass(frozen=True)
class WorkerModel:
    """The capacity of one worker; all are taken to be the same."""

    costs: RoleCosts
    max_num_seqs: int
    kv_tokens: int
    """Tokens that its pool holds; 0: not known."""


@dataclass(frozen=True)
class TypicalRequest:
    """One request as they come now."""

    prompt_s: float
    """Seconds that a prefill worker computes its prompt."""
    local_prompt_s: float
    """Seconds that a decode worker computes its prompt."""
    num_sequences: float
    num_output_tokens: float
    """Output tokens of one sequence."""
    num_kv_tokens: float
    """KV tokens that one sequence holds in the middle of its output."""


@dataclass(frozen=True)
class SplitService:
    """The rates that one worker serves, in requests a second, and the time that it has left."""

    mu_prefill: float
    mu_decode: float
    local_prompt_s: float
    ttft_s: float
    idle_share: float
    """Share of a decode worker's time that prompts may have where it generates nothing."""
    output_s: float
    """Seconds of that time that each output takes."""

    def of(self, num_prefill: int, num_workers: int) -> float:
        """Requests a second of a split that keep the objectives."""
        num_decode = num_workers - num_prefill
        low, high = 0.0, num_decode * self.mu_decode
        if self._computes(num_prefill, num_decode, high) >= high:
            return high
        for _ in range(_HALVINGS):
            rate = (low + high) / 2
            low, high = (rate, high) if self._computes(num_prefill, num_decode, rate) >= rate else (low, rate)
        return low

    def _computes(self, num_prefill: int, num_decode: int, rate: float) -> float:
        """Prompts a second, where so many outputs a second are generated beside them."""
        left = self.idle_share - rate / num_decode * self.output_s
        stretched_s = self.local_prompt_s / left if left > 0 else math.inf
        local = _busy_share(stretched_s, self.ttft_s) / stretched_s if stretched_s < self.ttft_s else 0.0
        return num_prefill * self.mu_prefill + num_decode * local


def usual_request(demand: Demand, costs: RoleCosts) -> TypicalRequest | None:
    """None while too few have come to tell, or nobody has seen what a prompt or a sequence costs; a step may cost the
    same however much is in it."""
    if demand.num_placed < LEAST_REQUESTS:
        return None
    num = demand.num_placed
    prompt = StepSize(max(1, round(demand.num_prompt_tokens / num)), max(1, round(demand.num_attended / num)))
    prompt_s, local_prompt_s = costs.prefill.of(prompt), costs.decode.of(prompt)
    num_kv_tokens = demand.num_kv_tokens / demand.num_sequences
    if min(prompt_s, local_prompt_s, costs.decode.of_sequences(1, round(num_kv_tokens))) <= 0:
        return None
    return TypicalRequest(
        prompt_s=prompt_s,
        local_prompt_s=local_prompt_s,
        num_sequences=demand.num_sequences / num,
        num_output_tokens=max(1.0, demand.num_output_tokens / demand.num_sequences),
        num_kv_tokens=num_kv_tokens,
    )


def service_of(usual: TypicalRequest, worker: WorkerModel, slo: SloSection) -> SplitService:
    """Rates of one worker in each role, and what of its time is left beside outputs."""
    cost = worker.costs.decode
    tokens = usual.num_output_tokens * usual.num_sequences
    return SplitService(
        mu_prefill=_busy_share(usual.prompt_s, slo.ttft_s) / usual.prompt_s,
        mu_decode=_sequences_per_s(usual, worker, slo) / usual.num_sequences,
        local_prompt_s=usual.local_prompt_s,
        ttft_s=slo.ttft_s,
        idle_share=max(0.0, 1 - cost.fixed_s / (PACE_SHARE * slo.tpot_s)),
        output_s=_each_s(cost, usual) * tokens,
    )


def _each_s(cost: StepCost, usual: TypicalRequest) -> float:
    """Seconds that a sequence adds to a step."""
    return cost.sequence_s + cost.kv_token_s * usual.num_kv_tokens


def _sequences_per_s(usual: TypicalRequest, worker: WorkerModel, slo: SloSection) -> float:
    """Sequences a second that may come to one worker at random, so that nearly all get their tokens in time.

    A step with n sequences takes fixed + n * each, so that n of them end n / (step * tokens) times a second. As many
    are there at a time as a chain of such births and deaths says; late are those that come upon too many.
    """
    cost, each_s = worker.costs.decode, _each_s(worker.costs.decode, usual)
    in_memory = worker.kv_tokens // usual.num_kv_tokens if worker.kv_tokens and usual.num_kv_tokens else math.inf
    most = max(1, int(min(worker.max_num_seqs, in_memory)))
    spare_s = PACE_SHARE * slo.tpot_s - cost.fixed_s
    in_time = most if spare_s >= most * each_s else int(spare_s / each_s) if each_s > 0 else 0
    ends = [n / ((cost.fixed_s + n * each_s) * usual.num_output_tokens) for n in range(1, most + 1)]
    if in_time < 1:
        return ends[0]  # some step must be made
    # Where all that a worker holds are in time, others may wait until one ends.
    num_may_wait = int(slo.ttft_s * ends[-1]) if in_time == most else 0
    low, high = 0.0, ends[-1]
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        low, high = (rate, high) if _late_share(rate, ends, in_time, num_may_wait) <= 1 - IN_TIME else (low, rate)
    return low


def _late_share(rate: float, ends: Sequence[float], in_time: int, num_may_wait: int) -> float:
    """Share of the sequences that run beside more than `in_time`, or wait behind `num_may_wait` others."""
    weight, total, late = 1.0, 0.0, 0.0
    for n, ends_per_s in enumerate(ends, 1):
        weight *= rate / ends_per_s
        total += n * weight
        late += n * weight if n > in_time else 0.0
        if weight > _LARGE:  # only their proportions count
            weight, total, late = 1.0, total / weight, late / weight
    less = rate / ends[-1]
    if less >= 1:
        return 1.0

    def waiting(num_before: int) -> float:
        """Weight of the sequences that wait behind `num_before` or more others beyond the largest batch."""
        n = len(ends) + num_before
        return float(weight * less**num_before * (n * less / (1 - less) + less / (1 - less) ** 2))

    return (late + waiting(num_may_wait)) / (total + waiting(0))


def _busy_share(prompt_s: float, ttft_s: float) -> float:
    """How busy a worker that computes prompts may be, so that the mean one, with those before it, is in time.

    With Poisson arrivals and prompts of one length the wait is busy / (2 * (1 - busy)) prompts. Where even a prompt
    without a wait is late, none is in time, and what counts is that all are done.
    """
    spare = ttft_s / prompt_s - 1
    return 2 * spare / (1 + 2 * spare) if spare > 0 else 1.0


def scores_of(
    service: SplitService, bounds: SplitBounds, rate: float, seen: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Goodput of each split that is allowed, by its prefill workers."""
    return {p: score_of(service, p, bounds, rate, seen) for p in bounds.splits}


def score_of(
    service: SplitService, split: int, bounds: SplitBounds, rate: float, seen: Mapping[int, float] | None = None
) -> float:
    """No more than `rate`, which is asked for, nor than what the split was `seen` to serve."""
    return min(rate, service.of(split, bounds.num_workers), (seen or {}).get(split, math.inf))
