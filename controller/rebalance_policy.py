"""Decides when to move to another split of the workers, or to have one more or fewer of them.

A move is worth it when goodput (`controller.goodput_model`) grows by more than a margin, for the load of now and some
more; it must have been so for a while, and after a move there is peace, longer before one that goes back. What a split
was seen to serve counts more than what it should, and makes others doubtful, too. Where no split of these workers
serves what is asked for, and one more is allowed and pays as much, there is to be one more; one that the others have
not needed for long goes. Pure: time, load and costs come in, a verdict with its reason goes out. Knows no controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from cluster.config.schema import AutoSection, SloSection
from cluster.demand import Demand
from controller.goodput_model import (
    IN_TIME,
    LEAST_REQUESTS,
    SplitBounds,
    SplitService,
    TypicalRequest,
    WorkerModel,
    best_split,
    score_of,
    service_of,
    usual_request,
)

_ALIKE = 1.5
"""Times longer or shorter: prompts and outputs of another kind, of which what was seen says nothing."""
_AS_MUCH = 0.98
"""Share of what these workers serve that is enough of fewer."""
_WORTH_A_WORKER = 0.1
"""Share by which one more worker must serve more, at least."""
_OUTPUTS_END = 3.0
"""Nearly all outputs have ended after so many times the mean one."""
_BURST = 0.6
"""Share of what is asked for that the best split serves in a burst that is beyond the cluster, at most."""
_BURST_S = 30.0
"""A load that has been the same for longer is no burst."""
_SHORT = 0.75
"""Where the best split serves less than this share of what is asked for, workers in hand count as well."""
_LESS_IN_HAND = 0.1
"""There, a split that keeps fewer of them must serve more by this share, unless it would have lately on the mean."""
_HOLDS_S = 300.0
"""Seconds for which what was seen of a split is believed while the cluster has another."""


class Reason(StrEnum):
    """Why it moves or stays, for counters."""

    MOVES = "moves"
    GROWS = "grows"
    """One more worker serves more."""
    SHRINKS = "shrinks"
    """One worker fewer serves all that is asked for."""
    ROOM = "room"
    """One more would serve more, and there is no place for it yet."""
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
class RebalanceDecision:
    """The decision of one look, and its reason."""

    num_prefill: int
    num_workers: int
    """Workers in all, `num_prefill` of which should prefill; the present numbers: nothing moves."""
    reason: Reason
    why: str
    """The reason as text for the log."""
    gain: float = 0.0
    """Share by which the goodput of the best split is predicted to be larger."""

    @property
    def moves(self) -> bool:
        return self.reason in (Reason.MOVES, Reason.GROWS, Reason.SHRINKS)


@dataclass(frozen=True)
class _Seen:
    """The rate that a split served, where that was less than the demand."""

    rate: float
    """Requests a second within the objectives."""
    usual: TypicalRequest
    at: float
    doubt: float
    """Share of what is predicted of other splits that is believed after this."""

    def applies_to(self, usual: TypicalRequest, now: float) -> bool:
        pairs = (
            (self.usual.prompt_s, usual.prompt_s),
            (self.usual.num_output_tokens, usual.num_output_tokens),
        )
        return now - self.at < _HOLDS_S and all(max(a, b) <= _ALIKE * min(a, b) for a, b in pairs)


@dataclass(frozen=True)
class SplitQuestion:
    """The facts that a policy decides by, at one look."""

    now: float
    demand: Demand
    """The sums of the last `window_s`."""
    window_s: float
    worker: WorkerModel | None
    """None: nobody knows yet what steps cost."""
    bounds: SplitBounds
    num_prefill: int
    """Workers that prefill now."""

    @property
    def usual(self) -> TypicalRequest | None:
        """None while too little is known."""
        return None if self.worker is None else usual_request(self.demand, self.worker.costs)


class AutoRatio:
    """Remembers for how long a gain has been there, the last move, and which splits served less than predicted."""

    def __init__(self, slo: SloSection, patience: AutoSection) -> None:
        self._slo = slo
        self._patience = patience
        self._known_since: float | None = None
        """When enough had come to tell for the first time, or after a pause."""
        self._wanted: int | None = None
        self._wanted_since = 0.0
        self._better: int | None = None
        """The split that was predicted to serve more last."""
        self._better_by, self._followed_at = 0.0, 0.0
        """The share of it, as a mean of the last `_BURST_S`."""
        self._size: int | None = None
        """Number of workers that would have been better since `_size_since`."""
        self._size_since = 0.0
        self._moved_at = -math.inf
        self._last_direction = 0
        self._begun_at: float | None = None
        """With this split; from then on, what it serves is looked at."""
        self._late_since: float | None = None
        """Since then, too few of those that end have kept the objectives."""
        self._seen: dict[int, _Seen] = {}

    def decide(self, question: SplitQuestion) -> RebalanceDecision:
        now, demand, window_s = question.now, question.demand, question.window_s
        worker, bounds, num_prefill = question.worker, question.bounds, question.num_prefill
        usual = question.usual
        if worker is None or usual is None or not bounds.splits:
            self._wanted = self._known_since = self._better = None
            why = "stays: too little has been measured to tell"
            unknown = RebalanceDecision(num_prefill, bounds.num_workers, Reason.UNKNOWN, why)
            if demand.num_placed >= LEAST_REQUESTS:
                self._size = None
                return unknown
            return self._idle(now, bounds, num_prefill) or unknown
        if self._known_since is None:
            self._known_since = now
        service = service_of(usual, worker, self._slo)
        rate = demand.num_arrived / window_s
        self._look(now, usual, demand, window_s, num_prefill, service, bounds.num_workers)
        observed = {split: one for split, one in self._seen.items() if one.applies_to(usual, now)}
        seen = {split: one.rate for split, one in observed.items()}
        doubt = observed[num_prefill].doubt if num_prefill in observed else 1.0
        # Few arrivals may be many by chance: what is asked for is what probably is, and some more.
        asked = rate * (1 - 0.5 / math.sqrt(max(1.0, demand.num_arrived))) * (1 + self._patience.headroom)
        score = cache(lambda split: score_of(service, split, bounds, asked, seen, doubt))
        best = best_split(score, bounds, num_prefill)
        served = score(best)
        steady = cache(lambda split: service.steady(split, bounds.num_workers))
        # What splits were seen to serve says more than a rule.
        is_burst = not seen and served < _BURST * asked and window_s <= _BURST_S
        if is_burst:
            best = best_split(steady, bounds, num_prefill)
        # Also in a burst, what is moved for is a gain now.
        gain = score(best) / score(num_prefill) - 1 if score(num_prefill) > 0 else math.inf
        summary = _summary(score, service, asked, usual, rate, bounds, num_prefill, best, seen)
        if is_burst:
            summary += "; more than any split serves: each role keeps workers in hand"
        margin = self._patience.margin
        self._follow(now, best, num_prefill, score)
        if served < _SHORT * asked and steady(best) < steady(num_prefill) and self._better_by <= margin:
            margin = max(margin, _LESS_IN_HAND)
        if best != num_prefill and gain > margin:
            self._size = None
            held = self._hold(now, best, num_prefill, _OUTPUTS_END * usual.output_s(worker.costs.decode))
            if held is not None:
                reason, why = held
                return RebalanceDecision(num_prefill, bounds.num_workers, reason, f"stays: {why}; {summary}", gain)
            return RebalanceDecision(best, bounds.num_workers, Reason.MOVES, f"moves: {summary}", gain)
        self._wanted = None
        resized = self._resized(now, service, bounds, asked, served, num_prefill)
        if resized is not None:
            return replace(resized, why=f"{resized.why}; {summary}")
        reason = Reason.BEST if best == num_prefill else Reason.MARGIN
        return RebalanceDecision(num_prefill, bounds.num_workers, reason, f"stays: {summary}", gain)

    def moved(self, now: float, before: tuple[int, int], after: tuple[int, int]) -> None:
        """The split (prefill workers, and workers in all) has changed, by a verdict or by an operator."""
        if before == after:
            return
        self._moved_at, self._begun_at = now, now
        self._last_direction = (after[0] > before[0]) - (after[0] < before[0])
        self._wanted = self._size = self._late_since = self._better = None
        if before[1] != after[1]:
            self._seen.clear()

    def _follow(self, now: float, best: int, num_prefill: int, score: Callable[[int], float]) -> None:
        """Counts what a split that was better would have served more, also at looks at which it is not the best."""
        if self._better is None:
            self._better_by, self._followed_at = 0.0, now
        is_same_way = self._better is not None and (best - num_prefill) * (self._better - num_prefill) > 0
        if best != num_prefill and (is_same_way or self._better_by <= 0):
            self._better, self._better_by = best, max(0.0, self._better_by)
        if self._better is not None and score(num_prefill) > 0:
            gain = score(self._better) / score(num_prefill) - 1
            self._better_by += (gain - self._better_by) * min(1.0, (now - self._followed_at) / _BURST_S)
        self._followed_at = now

    def _resized(
        self, now: float, service: SplitService, bounds: SplitBounds, asked: float, served: float, num_prefill: int
    ) -> RebalanceDecision | None:
        """One more worker, where that serves more than the `served` of these, or one fewer; None: as many as there
        are."""
        patience, num = self._patience, bounds.num_workers
        more, fewer = (replace(bounds, num_workers=size) for size in (num + 1, num - 1))
        if num < bounds.most_workers:
            split, then = _best_of(service, more, asked, num_prefill)
            gain = then / served - 1 if served > 0 else math.inf
            is_worth_it = gain > max(patience.margin, _WORTH_A_WORKER)
            if is_worth_it and self._has_lasted(now, num + 1, patience.confirm_s):
                return _resize(Reason.GROWS, split, more, f"serves {then:.1f} of {asked:.1f} requests/s", gain)
            if is_worth_it:
                return None
        if num > bounds.least_workers and fewer.splits:
            split, then = _best_of(service, fewer, asked, num_prefill)
            if then >= _AS_MUCH * served and self._has_lasted(now, num - 1, patience.release_after_s):
                return _resize(Reason.SHRINKS, split, fewer, f"serves {then:.1f} of {asked:.1f} requests/s")
            if then >= _AS_MUCH * served:
                return None
        self._size = None
        return None

    def _idle(self, now: float, bounds: SplitBounds, num_prefill: int) -> RebalanceDecision | None:
        """One worker fewer, where hardly anything is asked for."""
        fewer = replace(bounds, num_workers=bounds.num_workers - 1)
        if bounds.num_workers <= bounds.least_workers or not fewer.splits:
            self._size = None
            return None
        if not self._has_lasted(now, fewer.num_workers, self._patience.release_after_s):
            return None
        split = min(max(num_prefill, fewer.splits[0]), fewer.splits[-1])
        return _resize(Reason.SHRINKS, split, fewer, "serves the little that is asked for")

    def _has_lasted(self, now: float, size: int, lasts_s: float) -> bool:
        """True where `size` workers would have been better for `lasts_s`, and the last move was not just now."""
        if self._size != size:
            self._size, self._size_since = size, now
        return now - self._size_since >= lasts_s and now - self._moved_at >= self._patience.cooldown_s

    def _look(
        self,
        now: float,
        usual: TypicalRequest,
        demand: Demand,
        window_s: float,
        num_prefill: int,
        service: SplitService,
        num_workers: int,
    ) -> None:
        """Records what the split serves, once all requests that ended in the window may have begun with it."""
        arrived, enough = demand.num_arrived / window_s, IN_TIME * service.can_keep
        if self._begun_at is None or service.kept(num_prefill, num_workers, arrived) < enough:
            # More comes than it should serve: what is late, until all that waits has ended, says nothing of it.
            self._begun_at, self._late_since = now, None
        longest_s = self._slo.ttft_s + usual.num_output_tokens * self._slo.tpot_s
        if now - self._begun_at < window_s + longest_s or demand.num_ended < LEAST_REQUESTS:
            return
        share = demand.num_kept / demand.num_ended
        if share >= enough:
            self._seen.pop(num_prefill, None)
        # More end than come: what waited from before the move is on its way out, and late whatever the split serves.
        if share >= enough or demand.num_ended > demand.num_arrived:
            self._late_since = None
            return
        if self._late_since is None:
            self._late_since = now
        if now - self._late_since >= self._patience.confirm_s:
            # At least one, or what is believed of the others would be nothing as well.
            served = max(1.0, demand.num_kept) / window_s
            self._seen[num_prefill] = _Seen(served, usual, now, _doubt(served, arrived))

    def _hold(self, now: float, best: int, num_prefill: int, ends_s: float) -> tuple[Reason, str] | None:
        """Why the move has to wait; None: it has not. `ends_s`: within these seconds nearly all outputs end."""
        direction = 1 if best > num_prefill else -1
        is_same_way = self._wanted is not None and (self._wanted > num_prefill) == (direction > 0)
        if not is_same_way:
            self._wanted_since = now
        self._wanted = best
        since_s, patience = now - self._moved_at, self._patience
        assert self._known_since is not None, "there is a load"
        if now - self._wanted_since < patience.confirm_s:
            return Reason.CONFIRM, f"the gain is to last for {patience.confirm_s:g} s"
        if now - self._known_since < ends_s:
            return Reason.UNKNOWN, f"the outputs that have ended are the short ones until {ends_s:.0f} s have passed"
        if since_s < patience.cooldown_s:
            why = f"the last move was {since_s:.0f} s ago, and {patience.cooldown_s:g} s are to pass"
            return Reason.COOLDOWN, why
        if direction == -self._last_direction and since_s < patience.dwell_s:
            return Reason.DWELL, f"who moved {since_s:.0f} s ago stays for {patience.dwell_s:g} s"
        return None


def _doubt(served: float, arrived: float) -> float:
    """Returns the share of a prediction that is believed after a split has `served` less than it should have of what
    `arrived`. The fault may be the split's or the predictions': half of it, by its logarithm, is taken for each."""
    return min(1.0, math.sqrt(served / arrived))


def _best_of(service: SplitService, bounds: SplitBounds, asked: float, num_prefill: int) -> tuple[int, float]:
    """A split and its goodput."""
    score = cache(lambda split: score_of(service, split, bounds, asked))
    best = best_split(score, bounds, num_prefill)
    return best, score(best)


def _resize(reason: Reason, split: int, bounds: SplitBounds, why: str, gain: float = 0.0) -> RebalanceDecision:
    num = bounds.num_workers
    return RebalanceDecision(split, num, reason, f"{reason}: {split}:{num - split} {why}", gain)


def _summary(
    score: Callable[[int], float],
    service: SplitService,
    asked: float,
    usual: TypicalRequest,
    rate: float,
    bounds: SplitBounds,
    num_prefill: int,
    best: int,
    seen: Mapping[int, float],
) -> str:
    def serves(split: int) -> str:
        name = f"{split}:{bounds.num_workers - split}" if split else f"0:{bounds.num_workers} (each does both)"
        if split not in seen:
            return f"{name} serves {score(split):.1f}"
        predicted = service.goodput(split, bounds.num_workers, asked)
        return f"{name} serves {seen[split]:.1f} as was seen (predicted {predicted:.1f})"

    load = (
        f"{rate:.1f} requests/s of {1000 * usual.prompt_s:.0f} ms of prompt (the time of {rate * usual.prompt_s:.1f} "
        f"workers) and {usual.num_output_tokens:.0f} tokens"
    )
    if best == num_prefill:
        return f"{serves(num_prefill)} of {asked:.1f} requests/s, no other one is better; {load}"
    return f"{serves(best)} of {asked:.1f} requests/s, {serves(num_prefill)}; {load}"
