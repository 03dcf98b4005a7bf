"""The share of the requests that a split of N workers serves within the objectives, by the known costs of steps.

    prompts    P workers compute them, as one queue (M/M/P; lengths that vary stretch its waits, after Allen and
               Cunneen). Who would be late there is computed on a decode worker, of the time that its pace leaves, if
               that is soon enough, else waits all the same
    outputs    D = N - P workers generate them: as many are at one as a chain of births and deaths says that a step of
               n sequences leads to. In time are those that come upon no more than a step may have
    P = 0      every worker does both, in the same way

Prompts count with their mean and their variance, which the keys that they attend to tell. Pure: load and costs come in,
shares go out. Knows nothing of what was served, and moves no worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from cluster.config.schema import SloSection
from cluster.demand import Demand
from cluster.step_cost import PACE_SHARE, RoleCosts, StepCost, StepSize

LEAST_REQUESTS = 10
"""Fewer say nothing about what requests are like."""
_HALVINGS = 12
"""Halvings of the interval in which the highest rate is searched."""
IN_TIME = 0.85
"""Share of the requests that are to keep the objectives."""
_LARGE = 1e100
_SPEED_SHARE = 0.95
"""Share of the time per token that a step of sequences alone may take; the rest is for hand-offs, and between steps."""
_NUM_PROMPTS = 10
"""Lengths of prompts that stand for all."""
_MOST_SPREAD = 8.0
_FEW_SPLITS = 8
_ROUNDS = 4
_FAR = 50.0
_LEAST_SHARE = 0.02
"""Share of its time that a decode worker has for prompts at least (`router.routing.policies.predicted`)."""
_LEAST_ADDED = 0.01
"""Share of a step alone that a prompt adds to a step with sequences at least."""
_LEAST_WAIT = 2.0
"""The objective as a multiple of the mean prompt's time, where the mean prompt takes longer than the objective."""


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
    """Seconds that its prompt adds to the steps of a decode worker, which are made for the sequences in any case."""
    num_sequences: float
    num_output_tokens: float
    """Output tokens of one sequence."""
    num_kv_tokens: float
    """KV tokens that one sequence holds in the middle of its output."""
    spread: float = 0.0
    """Variance of a prompt's seconds over the square of their mean; 0: all are alike."""

    def output_s(self, cost: StepCost) -> float:
        """Seconds of an output on a decode worker that has no other."""
        return self.num_output_tokens * cost.of_sequences(1, round(self.num_kv_tokens))


@dataclass(frozen=True)
class _Sequences:
    """Sequences on one decode worker, which come at random."""

    ends: tuple[float, ...]
    """Sequences that end in a second where so many are there, from 1 to the most that it holds."""
    in_time: int
    """With more, a step takes longer than a token may."""
    num_may_wait: int
    """With no more than these before it, one that finds no room is in time all the same."""

    @cached_property
    def most(self) -> float:
        """Highest rate at which nearly all are in time."""
        if self.in_time < 1:
            return self.ends[0]  # some step must be made
        return _highest(lambda rate: self.late(rate) <= 1 - IN_TIME, self.ends[-1])

    def late(self, rate: float) -> float:
        """Share of the sequences that run beside more than `in_time`, or wait behind `num_may_wait` others.

        A step with n sequences takes fixed + n * each, so that n of them end n / (step * tokens) times a second. As
        many are there at a time as a chain of such births and deaths says.
        """
        weight, total, late = 1.0, 0.0, 0.0
        for n, ends_per_s in enumerate(self.ends, 1):
            weight *= rate / ends_per_s
            total += n * weight
            late += n * weight if n > max(1, self.in_time) else 0.0
            if weight > _LARGE:  # only their proportions count
                weight, total, late = 1.0, total / weight, late / weight
        less = rate / self.ends[-1]
        if less >= 1:
            return 1.0

        def waiting(num_before: int) -> float:
            """Weight of the sequences that wait behind `num_before` or more others beyond the largest batch."""
            n = len(self.ends) + num_before
            return float(weight * less**num_before * (n * less / (1 - less) + less / (1 - less) ** 2))

        everyone = total + waiting(0)
        return (late + waiting(self.num_may_wait)) / everyone if everyone else 0.0


@dataclass(frozen=True)
class SplitService:
    """The time that requests of one kind take of one worker in each role, and what that means for a split."""

    prompts_s: tuple[float, ...]
    """Seconds of prompts that are equally likely on a prefill worker, ascending."""
    spread: float
    stretch: float
    """Times longer that a decode worker takes which has nothing else to do."""
    ttft_s: float
    sequences: _Sequences
    num_sequences: float
    """Sequences of a request."""
    idle_share: float
    """Share of a decode worker's time that prompts may have where it generates nothing."""
    output_s: float
    """Seconds of that time that each output takes."""

    @property
    def prompt_s(self) -> float:
        return sum(self.prompts_s) / len(self.prompts_s)

    @cached_property
    def mu_decode(self) -> float:
        """Requests a second whose outputs one worker generates, nearly all of them in time."""
        return self.sequences.most / self.num_sequences

    def kept(self, num_prefill: int, num_workers: int, rate: float) -> float:
        """Share of so many requests a second that keep both objectives."""
        num_decode = num_workers - num_prefill
        outputs = 1 - self.sequences.late(rate * self.num_sequences / num_decode)
        if outputs <= 0:
            return 0.0
        left = self.idle_share - rate / num_decode * self.output_s
        return outputs * self._prompts_in_time(num_prefill, num_decode, rate, left)

    def of(self, num_prefill: int, num_workers: int) -> float:
        """Requests a second of which a split serves nearly all in time that can be."""
        num_decode = num_workers - num_prefill
        most = min(num_decode * self.mu_decode, (num_prefill + num_decode / self.stretch) / self.prompt_s)
        return _highest(lambda rate: self.kept(num_prefill, num_workers, rate) >= IN_TIME * self.can_keep, most)

    def steady(self, num_prefill: int, num_workers: int) -> float:
        """Requests a second that a split goes on to compute whatever comes next: bursts change from second to second,
        and short outputs of now, for which few decode workers are enough, are not the next ones. Each role keeps some
        workers in hand."""
        num_decode = num_workers - num_prefill
        if not num_prefill:
            return self.of(0, num_workers)
        return min(_without_spare(num_prefill) / self.prompt_s, _without_spare(num_decode) * self.mu_decode)

    def goodput(self, num_prefill: int, num_workers: int, rate: float) -> float:
        """Requests a second that keep both objectives. Where `rate` is too much, others are late for what a split can
        do, which no split helps for long: it is taken for what the split can do."""
        share = self.kept(num_prefill, num_workers, rate)
        if share >= IN_TIME * self.can_keep:
            return rate * share
        most = min(rate, self.of(num_prefill, num_workers))
        return max(rate * share, most * self.kept(num_prefill, num_workers, most))

    @cached_property
    def can_keep(self) -> float:
        """Share of the requests that are in time where they need not wait."""
        return sum(prompt_s <= self.ttft_s for prompt_s in self.prompts_s) / len(self.prompts_s)

    def _prompts_in_time(self, num_prefill: int, num_decode: int, rate: float, left: float) -> float:
        """Share of the prompts; decode workers have the share `left` of their time for them."""
        fitting = [prompt_s for prompt_s in self.prompts_s if prompt_s <= self.ttft_s]
        local = self.stretch / max(_LEAST_SHARE, left)
        queue = _PromptQueue(num_prefill, rate, self.prompt_s, self.spread)
        stay, kept = 1.0, 0.0
        stay_there = 0.0 if num_prefill else 1.0  # where each computes both, there is no other queue to wait in
        for _ in range(_ROUNDS):
            late = [queue.longer_than(self.ttft_s - prompt_s, stay) for prompt_s in fitting]
            num_late = sum(late)
            asked = rate * num_late / len(self.prompts_s)
            there = _PromptQueue(num_decode if left > 0 else 0, asked, local * self.prompt_s, self.spread)
            saved = [
                share * (1 - there.longer_than(self.ttft_s - local * prompt_s, stay_there))
                for share, prompt_s in zip(late, fitting, strict=True)
            ]
            kept = len(fitting) - num_late + sum(saved)
            stay = (stay + (1 - sum(saved) / num_late if num_late else 1.0)) / 2
        return kept / len(self.prompts_s)


def _without_spare(num_workers: int) -> float:
    """Counts those of a role that are not kept in hand: that is twice the square root of their number, about what comes
    and goes at random, so that a small pool keeps a larger share; an eighth of them always counts."""
    return max(num_workers / 8, num_workers - 2 * math.sqrt(num_workers))


class _PromptQueue:
    """Prompts that come at random to workers with one queue, from which some go elsewhere when they would be late."""

    def __init__(self, num_workers: int, rate: float, prompt_s: float, spread: float) -> None:
        self._num = num_workers
        self._rate = rate
        self._ends = num_workers / prompt_s
        """Prompts a second that all workers compute."""
        self._scale = 2 / (1 + spread)
        offered, blocked = rate * prompt_s, 1.0
        for n in range(1, num_workers + 1):  # Erlang B, by its recursion
            blocked = offered * blocked / (n + offered * blocked)
        self._idle = offered / num_workers * (1 - blocked) / blocked if num_workers and blocked else math.inf
        """Weight of the states in which a worker is free, against that of the last of them."""

    def longer_than(self, seconds: float, stay: float) -> float:
        """Share of those who come that find a longer wait; the share `stay` of these waits all the same.

        Up to so many seconds the virtual wait thins out as that of M/M/c does, by the rate that the workers have to
        spare; beyond, by what they have to spare when only those come who stay.
        """
        beyond = self._ends - stay * self._rate
        if not self._num or seconds < 0 or beyond <= 0:
            return 1.0
        if math.isinf(self._idle):
            return 0.0
        spare, seconds = self._ends - self._rate, self._scale * seconds
        if -spare * seconds > _FAR:
            return spare / (spare - beyond)
        thinned = math.exp(-spare * seconds)
        within = (1 - thinned) / spare if abs(spare) > 1e-9 * self._rate else seconds
        late = self._rate * thinned / beyond
        return late / (self._idle + self._rate * within + late)


def usual_request(demand: Demand, costs: RoleCosts) -> TypicalRequest | None:
    """None while too few have come to tell, or nobody has seen what a prompt or a sequence costs; a step may cost the
    same however much is in it."""
    if demand.num_placed < LEAST_REQUESTS:
        return None
    num = demand.num_placed
    prompt = StepSize(max(1, round(demand.num_prompt_tokens / num)), max(1, round(demand.num_attended / num)))
    prompt_s, alone_s = costs.prefill.of(prompt), costs.decode.of(prompt)
    num_kv_tokens = demand.num_kv_tokens / demand.num_sequences
    if min(prompt_s, alone_s, costs.decode.of_sequences(1, round(num_kv_tokens))) <= 0:
        return None
    varies = 1 - costs.prefill.fixed_s / prompt_s
    return TypicalRequest(
        prompt_s=prompt_s,
        local_prompt_s=max(_LEAST_ADDED * alone_s, alone_s - costs.decode.fixed_s),
        num_sequences=demand.num_sequences / num,
        num_output_tokens=max(1.0, demand.num_output_tokens / demand.num_sequences),
        num_kv_tokens=num_kv_tokens,
        spread=varies**2 * _spread_of(demand),
    )


def _spread_of(demand: Demand) -> float:
    """Variance of the prompts' lengths over their mean's square: n tokens attend to n * n / 2 of their own."""
    mean, cached = (total / demand.num_placed for total in (demand.num_prompt_tokens, demand.num_cached_tokens))
    own = demand.num_attended / demand.num_placed - mean * cached
    return min(_MOST_SPREAD, max(0.0, 2 * own / mean**2 - 1)) if mean else 0.0


def service_of(usual: TypicalRequest, worker: WorkerModel, slo: SloSection) -> SplitService:
    """Returns what these requests take of such workers."""
    cost = worker.costs.decode
    ttft_s = slo.ttft_s if usual.prompt_s < slo.ttft_s else _LEAST_WAIT * usual.prompt_s
    return SplitService(
        prompts_s=_prompts_of(usual),
        spread=usual.spread,
        stretch=usual.local_prompt_s / usual.prompt_s,
        ttft_s=ttft_s,
        sequences=_sequences_of(usual, worker, slo, ttft_s),
        num_sequences=usual.num_sequences,
        idle_share=max(0.0, 1 - cost.fixed_s / (PACE_SHARE * slo.tpot_s)),
        output_s=_each_s(cost, usual) * usual.num_output_tokens * usual.num_sequences,
    )


def _prompts_of(usual: TypicalRequest) -> tuple[float, ...]:
    """Lognormal, with the mean and the spread of the prompts."""
    if usual.spread <= 0:
        return (usual.prompt_s,)
    sigma = math.sqrt(math.log1p(usual.spread))
    drawn = [math.exp(NormalDist(0, sigma).inv_cdf((n + 0.5) / _NUM_PROMPTS)) for n in range(_NUM_PROMPTS)]
    return tuple(usual.prompt_s * one * len(drawn) / sum(drawn) for one in drawn)


def _each_s(cost: StepCost, usual: TypicalRequest) -> float:
    """Seconds that a sequence adds to a step."""
    return cost.sequence_s + cost.kv_token_s * usual.num_kv_tokens


def _sequences_of(usual: TypicalRequest, worker: WorkerModel, slo: SloSection, ttft_s: float) -> _Sequences:
    cost, each_s = worker.costs.decode, _each_s(worker.costs.decode, usual)
    in_memory = worker.kv_tokens // usual.num_kv_tokens if worker.kv_tokens and usual.num_kv_tokens else math.inf
    most = max(1, int(min(worker.max_num_seqs, in_memory)))
    spare_s = _SPEED_SHARE * slo.tpot_s - cost.fixed_s
    in_time = most if spare_s >= most * each_s else int(spare_s / each_s) if each_s > 0 else 0
    ends = tuple(n / ((cost.fixed_s + n * each_s) * usual.num_output_tokens) for n in range(1, most + 1))
    # Where all that a worker holds are in time, others may wait until one ends.
    return _Sequences(ends, in_time, int(ttft_s * ends[-1]) if in_time == most else 0)


def _highest(is_enough: Callable[[float], bool], most: float) -> float:
    """The highest rate up to `most` at which that holds, which it does below."""
    low, high = 0.0, most
    if is_enough(high):
        return high
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        low, high = (rate, high) if is_enough(rate) else (low, rate)
    return low


def score_of(
    service: SplitService,
    split: int,
    bounds: SplitBounds,
    rate: float,
    seen: Mapping[int, float] | None = None,
    doubt: float = 1.0,
) -> float:
    """Goodput where `rate` is asked for: no more than the split was `seen` to serve, else what so much of it would
    serve as is believed of predictions."""
    if seen is not None and split in seen:
        return min(rate, seen[split])
    return doubt * service.goodput(split, bounds.num_workers, rate / doubt)


def best_split(score: Callable[[int], float], bounds: SplitBounds, num_prefill: int) -> int:
    """The split with the highest score, of equals the one next to the present one. Of many it is climbed to, from the
    present one, by steps that get smaller."""
    splits = bounds.splits

    def key(split: int) -> tuple[float, int]:
        return score(split), -abs(split - num_prefill)

    if len(splits) <= _FEW_SPLITS:
        return max(splits, key=key)
    at, step = min(max(num_prefill, splits[0]), splits[-1]), len(splits) // 4
    while step:
        best = max((p for p in (at - step, at, at + step) if p in splits), key=key)
        at, step = best, step // 2 if best == at else step
    return at
