"""Which split of N workers serves most requests within the objectives, and when it is worth to move to it.

    one prefill worker   mu_p = the share of its time that may be busy, so that the first token comes in time
                                / seconds of a prompt
    one decode worker    mu_d = the largest batch whose step keeps the time per token / (step * tokens of an output)
                         what its steps leave of the time per token is for prompts: the fewer tokens it generates, the
                         more of them it computes itself (`engine.step_budget` holds it to that)
    P of N prefill       the highest rate whose outputs D = N - P workers generate, and whose prompts P workers and the
                         time that is left on D compute; without that time best near P / D = mu_d / mu_p
    P = 0                each worker does both, in the same way

A move is worth it when goodput grows by more than a margin, for the load of now and some more; it must have been so
for a while, and after a move there is peace, longer before one that goes back. Pure: time, load and costs come in, a
verdict with its reason goes out. Knows no controller and no worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.demand import Demand
from cluster.step_cost import PACE_SHARE, RoleCosts, StepCost, StepSize

LEAST_REQUESTS = 10
"""Fewer tell nothing of their kind."""
_HALVINGS = 50
"""Of the span in which the highest rate is looked for."""
_IN_TIME = 0.85
"""Share of the requests that must keep the objectives, lest their split is held to what it did serve."""
_ALIKE = 1.5
"""Times longer or shorter: prompts and outputs of another kind, of which what was seen says nothing."""
_HOLDS_S = 300.0
"""For so long what was seen of a split is believed while the cluster has another."""


@dataclass(frozen=True)
class Bounds:
    """What a split may be, in workers; a prefill of 0: every worker does both."""

    num_workers: int
    min_prefill: int = 1
    min_decode: int = 1

    @property
    def splits(self) -> range:
        """Every number of prefill workers that is allowed, ascending."""
        return range(self.min_prefill, self.num_workers - max(1, self.min_decode) + 1)


@dataclass(frozen=True)
class Worker:
    """What one worker can do, taken the same for all of them."""

    costs: RoleCosts
    max_num_seqs: int
    kv_tokens: int
    """That its pool holds; 0: not known."""


@dataclass(frozen=True)
class Slo:
    """Seconds to the first token, and per token after it."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Usual:
    """One request as they come now."""

    prompt_s: float
    """That a prefill worker computes for its prompt."""
    local_prompt_s: float
    """That a decode worker does, in its own time."""
    num_sequences: float
    num_output_tokens: float
    """Of one sequence."""
    num_kv_tokens: float
    """That one sequence holds in the middle of its output."""


@dataclass(frozen=True)
class Service:
    """What one worker serves, in requests a second, and what it leaves."""

    mu_prefill: float
    mu_decode: float
    local_prompt_s: float
    ttft_s: float
    idle_share: float
    """Of a decode worker's time, that prompts may have where it generates nothing."""
    output_s: float
    """That an output takes of this, each."""

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


def usual_request(demand: Demand, costs: RoleCosts) -> Usual | None:
    """None while too few have come to tell, or nobody has seen what a prompt or a sequence costs."""
    if demand.num_placed < LEAST_REQUESTS:
        return None
    num = demand.num_placed
    prompt = StepSize(max(1, round(demand.num_prompt_tokens / num)), max(1, round(demand.num_attended / num)))
    if not (costs.prefill.knows_prompts and costs.decode.knows_prompts and costs.decode.knows_sequences):
        return None
    return Usual(
        prompt_s=costs.prefill.of(prompt),
        local_prompt_s=costs.decode.of(prompt),
        num_sequences=demand.num_sequences / num,
        num_output_tokens=max(1.0, demand.num_output_tokens / demand.num_sequences),
        num_kv_tokens=demand.num_kv_tokens / demand.num_sequences,
    )


def service_of(usual: Usual, worker: Worker, slo: Slo) -> Service:
    """Rates of one worker in each role, and what of its time is left beside outputs."""
    cost = worker.costs.decode
    batch, each_s = _largest_batch(usual, worker, slo.tpot_s), _each_s(cost, usual)
    tokens = usual.num_output_tokens * usual.num_sequences
    return Service(
        mu_prefill=_busy_share(usual.prompt_s, slo.ttft_s) / usual.prompt_s,
        mu_decode=batch / (_step_s(cost, batch, usual) * tokens),
        local_prompt_s=usual.local_prompt_s,
        ttft_s=slo.ttft_s,
        idle_share=max(0.0, 1 - cost.fixed_s / (PACE_SHARE * slo.tpot_s)),
        output_s=each_s * tokens,
    )


def _step_s(cost: StepCost, batch: float, usual: Usual) -> float:
    return cost.fixed_s + batch * _each_s(cost, usual)


def _each_s(cost: StepCost, usual: Usual) -> float:
    """That a sequence adds to a step."""
    return cost.sequence_s + cost.kv_token_s * usual.num_kv_tokens


def _largest_batch(usual: Usual, worker: Worker, tpot_s: float) -> float:
    """Sequences that one step can advance in time, as most steps and not the mean one are to be; at least one, as some
    step must be made."""
    cost = worker.costs.decode
    each_s = _each_s(cost, usual)
    in_time = (PACE_SHARE * tpot_s - cost.fixed_s) / each_s if each_s > 0 else math.inf
    in_memory = worker.kv_tokens / usual.num_kv_tokens if worker.kv_tokens and usual.num_kv_tokens else math.inf
    return max(1.0, min(in_time, in_memory, worker.max_num_seqs))


def _busy_share(prompt_s: float, ttft_s: float) -> float:
    """How busy a worker that computes prompts may be, so that the mean one, with those before it, is in time.

    With Poisson arrivals and prompts of one length the wait is busy / (2 * (1 - busy)) prompts. Where even a prompt
    without a wait is late, none is in time, and what counts is that all are done.
    """
    spare = ttft_s / prompt_s - 1
    return 2 * spare / (1 + 2 * spare) if spare > 0 else 1.0


@dataclass(frozen=True)
class Patience:
    """When a gain is believed and acted upon; seconds but for the shares."""

    margin: float = 0.1
    """Share by which goodput must grow."""
    headroom: float = 0.25
    """Share of load on top of that of now, for which it is to be enough."""
    confirm_s: float = 5.0
    """For so long the gain must have been there."""
    cooldown_s: float = 10.0
    """After a move, none for so long."""
    dwell_s: float = 30.0
    """A worker that was moved stays for so long before it may be moved back."""


class Reason(StrEnum):
    """Why it moves or stays, for counters."""

    MOVES = "moves"
    UNKNOWN = "unknown"
    """Too little has been measured."""
    BEST = "best"
    """The present split serves most."""
    MARGIN = "margin"
    """Another one serves hardly more."""
    CONFIRM = "confirm"
    """The gain has not lasted long enough."""
    COOLDOWN = "cooldown"
    """The last move was just now."""
    DWELL = "dwell"
    """It was in the other direction, and lately."""
    UNEQUAL = "unequal"
    """The roles differ in tensor_parallel."""


@dataclass(frozen=True)
class Verdict:
    """What to do now, and why."""

    num_prefill: int
    """That there should be; as many as there are: nothing moves."""
    reason: Reason
    why: str
    """In words for a log."""
    gain: float = 0.0
    """Share by which the goodput of the best split is predicted to be larger."""

    @property
    def moves(self) -> bool:
        return self.reason is Reason.MOVES


@dataclass(frozen=True)
class _Seen:
    """What a split served, where it was less than what was asked for."""

    rate: float
    """Requests a second within the objectives."""
    usual: Usual
    at: float

    def tells_of(self, usual: Usual, now: float) -> bool:
        pairs = (
            (self.usual.prompt_s, usual.prompt_s),
            (self.usual.num_output_tokens, usual.num_output_tokens),
        )
        return now - self.at < _HOLDS_S and all(max(a, b) <= _ALIKE * min(a, b) for a, b in pairs)


class AutoRatio:
    """Remembers for how long a gain has been there, the last move, and which splits served less than predicted."""

    def __init__(self, slo: Slo, patience: Patience) -> None:
        self._slo = slo
        self._patience = patience
        self._wanted: int | None = None
        self._wanted_since = 0.0
        self._moved_at = -math.inf
        self._last_direction = 0
        self._begun_at: float | None = None
        """With this split; from then on, what it serves is looked at."""
        self._seen: dict[int, _Seen] = {}

    def decide(
        self, now: float, demand: Demand, window_s: float, worker: Worker | None, bounds: Bounds, num_prefill: int
    ) -> Verdict:
        """`demand` are the sums of the last `window_s`; `num_prefill` of the workers prefill now."""
        usual = None if worker is None else usual_request(demand, worker.costs)
        if worker is None or usual is None or not bounds.splits:
            self._wanted = None
            return Verdict(num_prefill, Reason.UNKNOWN, "stays: too little has been measured to tell")
        service = service_of(usual, worker, self._slo)
        rate = demand.num_arrived / window_s
        self._look(now, usual, demand, window_s, num_prefill)
        seen = {split: told.rate for split, told in self._seen.items() if told.tells_of(usual, now)}
        # Few arrivals may be many by chance: what is asked for is what surely is, and some more.
        asked = rate * (1 - 1 / math.sqrt(max(1.0, demand.num_arrived))) * (1 + self._patience.headroom)
        scores = scores_of(service, bounds, asked, seen)
        score = _score(service, num_prefill, bounds, asked, seen)
        best = max(scores, key=lambda p: (scores[p], -abs(p - num_prefill)))
        gain = scores[best] / score - 1 if score > 0 else math.inf
        told = _tell(service, usual, rate, bounds, num_prefill, best, gain, seen)
        if best == num_prefill or gain <= self._patience.margin:
            self._wanted = None
            reason = Reason.BEST if best == num_prefill else Reason.MARGIN
            return Verdict(num_prefill, reason, f"stays: {told}", gain)
        held = self._hold(now, best, num_prefill)
        if held is not None:
            reason, why = held
            return Verdict(num_prefill, reason, f"stays: {why}; {told}", gain)
        return Verdict(best, Reason.MOVES, f"moves: {told}", gain)

    def moved(self, now: float, before: int, after: int) -> None:
        """The split has changed, by a verdict or by an operator."""
        if before != after:
            self._moved_at, self._last_direction = now, 1 if after > before else -1
            self._wanted = None
            self._begun_at = now

    def _look(self, now: float, usual: Usual, demand: Demand, window_s: float, num_prefill: int) -> None:
        """What the split serves, once all that ended in the window may have begun with it."""
        if self._begun_at is None:
            self._begun_at = now
        longest_s = self._slo.ttft_s + usual.num_output_tokens * self._slo.tpot_s
        if now - self._begun_at < window_s + longest_s or demand.num_ended < LEAST_REQUESTS:
            return
        share = demand.num_kept / demand.num_ended
        if share < _IN_TIME:
            self._seen[num_prefill] = _Seen(share * demand.num_ended / window_s, usual, now)
        else:
            self._seen.pop(num_prefill, None)

    def _hold(self, now: float, best: int, num_prefill: int) -> tuple[Reason, str] | None:
        """Why the move has to wait; None: it has not."""
        direction = 1 if best > num_prefill else -1
        is_same_way = self._wanted is not None and (self._wanted > num_prefill) == (direction > 0)
        if not is_same_way:
            self._wanted_since = now
        self._wanted = best
        since_s, patience = now - self._moved_at, self._patience
        if now - self._wanted_since < patience.confirm_s:
            return Reason.CONFIRM, f"the gain is to last for {patience.confirm_s:g} s"
        if since_s < patience.cooldown_s:
            why = f"the last move was {since_s:.0f} s ago, and {patience.cooldown_s:g} s are to pass"
            return Reason.COOLDOWN, why
        if direction == -self._last_direction and since_s < patience.dwell_s:
            return Reason.DWELL, f"who moved {since_s:.0f} s ago stays for {patience.dwell_s:g} s"
        return None


def scores_of(
    service: Service, bounds: Bounds, rate: float, seen: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Goodput of each split that is allowed, by its prefill workers."""
    return {p: _score(service, p, bounds, rate, seen or {}) for p in bounds.splits}


def _score(service: Service, split: int, bounds: Bounds, rate: float, seen: Mapping[int, float]) -> float:
    """No more than `rate`, which is asked for, nor than what the split was `seen` to serve."""
    return min(rate, service.of(split, bounds.num_workers), seen.get(split, math.inf))


def _tell(
    service: Service,
    usual: Usual,
    rate: float,
    bounds: Bounds,
    num_prefill: int,
    best: int,
    gain: float,
    seen: Mapping[int, float],
) -> str:
    def name(split: int) -> str:
        return f"{split}:{bounds.num_workers - split}" if split else f"0:{bounds.num_workers} (each does both)"

    def serves(split: int) -> str:
        predicted = service.of(split, bounds.num_workers)
        if seen.get(split, math.inf) < predicted:
            return f"{name(split)} serves {seen[split]:.1f} as was seen (predicted {predicted:.1f})"
        return f"{name(split)} serves {predicted:.1f}"

    load = (
        f"{rate:.1f} requests/s of {1000 * usual.prompt_s:.0f} ms of prompt and {usual.num_output_tokens:.0f} tokens; "
        f"a worker prefills {service.mu_prefill:.1f}/s, decodes {service.mu_decode:.1f}/s"
    )
    if best == num_prefill:
        return f"{serves(num_prefill)}, the most of all; {load}"
    grows = "" if math.isinf(gain) else f", {100 * gain:.0f} % more of what is asked for"
    return f"{serves(best)}, {serves(num_prefill)}{grows}; {load}"
