"""Decides when to move to another split of the workers, or to have one more or fewer of them.

A move is worth it when goodput (`controller.goodput_model`) grows by more than a margin, for the load of now and some
more; it must have been so for a while, and after a move there is peace, longer before one that goes back. What a split
was seen to serve counts more than what it should, and makes others doubtful, too. Where no split of these workers
serves what is asked for, and one more is allowed and pays as much, there is to be one more; one that the others have
not needed for long goes. Pure: time, load and costs come in, a verdict with its reason goes out. Knows no controller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.config.schema import AutoSection, SloSection
from cluster.demand import Demand
from controller.goodput_model import (
    IN_TIME,
    LEAST_REQUESTS,
    SplitBounds,
    SplitService,
    TypicalRequest,
    WorkerModel,
    score_of,
    scores_of,
    service_of,
    usual_request,
)

_ALIKE = 1.5
"""Times longer or shorter: prompts and outputs of another kind, of which what was seen says nothing."""
_HOLDS_S = 300.0
"""For so long what was seen of a split is believed while the cluster has another."""


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


class AutoRatio:
    """Remembers for how long a gain has been there, the last move, and which splits served less than predicted."""

    def __init__(self, slo: SloSection, patience: AutoSection) -> None:
        self._slo = slo
        self._patience = patience
        self._wanted: int | None = None
        self._wanted_since = 0.0
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

    def decide(
        self,
        now: float,
        demand: Demand,
        window_s: float,
        worker: WorkerModel | None,
        bounds: SplitBounds,
        num_prefill: int,
    ) -> RebalanceDecision:
        """`demand` are the sums of the last `window_s`; `num_prefill` of the workers prefill now."""
        usual = None if worker is None else usual_request(demand, worker.costs)
        if worker is None or usual is None or not bounds.splits:
            self._wanted = None
            why = "stays: too little has been measured to tell"
            unknown = RebalanceDecision(num_prefill, bounds.num_workers, Reason.UNKNOWN, why)
            if demand.num_placed >= LEAST_REQUESTS:
                self._size = None
                return unknown
            return self._idle(now, bounds, num_prefill) or unknown
        service = service_of(usual, worker, self._slo)
        rate = demand.num_arrived / window_s
        self._look(now, usual, demand, window_s, num_prefill, service.of(num_prefill, bounds.num_workers))
        observed = {split: one for split, one in self._seen.items() if one.applies_to(usual, now)}
        seen = {split: one.rate for split, one in observed.items()}
        believed = dict(seen)
        if num_prefill in observed:
            doubt = observed[num_prefill].doubt
            believed = {p: doubt * service.of(p, bounds.num_workers) for p in bounds.splits} | seen
        # Few arrivals may be many by chance: what is asked for is what probably is, and some more.
        asked = rate * (1 - 0.5 / math.sqrt(max(1.0, demand.num_arrived))) * (1 + self._patience.headroom)
        scores = scores_of(service, bounds, asked, believed)
        score = score_of(service, num_prefill, bounds, asked, believed)
        best = max(scores, key=lambda p: (scores[p], -abs(p - num_prefill)))
        gain = scores[best] / score - 1 if score > 0 else math.inf
        summary = _summary(service, usual, rate, bounds, num_prefill, best, gain, seen)
        if best != num_prefill and gain > self._patience.margin:
            self._size = None
            held = self._hold(now, best, num_prefill)
            if held is not None:
                reason, why = held
                return RebalanceDecision(num_prefill, bounds.num_workers, reason, f"stays: {why}; {summary}", gain)
            return RebalanceDecision(best, bounds.num_workers, Reason.MOVES, f"moves: {summary}", gain)
        self._wanted = None
        resized = self._resized(now, service, bounds, asked, score)
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
        self._wanted = self._size = self._late_since = None
        if before[1] != after[1]:
            self._seen.clear()

    def _resized(
        self, now: float, service: SplitService, bounds: SplitBounds, asked: float, score: float
    ) -> RebalanceDecision | None:
        """One more worker, where these cannot serve what is asked for, or one fewer; None: as many as there are."""
        patience, num = self._patience, bounds.num_workers
        more, fewer = (replace(bounds, num_workers=size) for size in (num + 1, num - 1))
        if num < bounds.most_workers and score < asked:
            split, served = _best_of(scores_of(service, more, asked))
            gain = served / score - 1 if score > 0 else math.inf
            if gain > patience.margin and self._has_lasted(now, num + 1, patience.confirm_s):
                return _resize(Reason.GROWS, split, more, f"serves {served:.1f}, and {asked:.1f} are asked for", gain)
            if gain > patience.margin:
                return None
        elif num > bounds.least_workers and fewer.splits:
            split, served = _best_of(scores_of(service, fewer, asked))
            if served >= asked and self._has_lasted(now, num - 1, patience.release_after_s):
                return _resize(Reason.SHRINKS, split, fewer, f"serves the {asked:.1f} that are asked for")
            if served >= asked:
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
        self, now: float, usual: TypicalRequest, demand: Demand, window_s: float, num_prefill: int, predicted: float
    ) -> None:
        """Records what the split serves, once all requests that ended in the window may have begun with it."""
        if self._begun_at is None:
            self._begun_at = now
        longest_s = self._slo.ttft_s + usual.num_output_tokens * self._slo.tpot_s
        if now - self._begun_at < window_s + longest_s or demand.num_ended < LEAST_REQUESTS:
            return
        share = demand.num_kept / demand.num_ended
        if share >= IN_TIME:
            self._seen.pop(num_prefill, None)
        # More end than come: what waited from before the move is on its way out, and late whatever the split serves.
        if share >= IN_TIME or demand.num_ended > demand.num_arrived:
            self._late_since = None
            return
        if self._late_since is None:
            self._late_since = now
        if now - self._late_since >= self._patience.confirm_s:
            # At least one, or what is believed of the others would be nothing as well.
            served, arrived = max(1.0, demand.num_kept) / window_s, demand.num_arrived / window_s
            doubt = _doubt(served, arrived, predicted)
            self._seen[num_prefill] = _Seen(served, usual, now, doubt)

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


def _doubt(served: float, arrived: float, predicted: float) -> float:
    """How much of a prediction is believed after a split has `served` less than it should have; requests a second.

    The fault may be the split's or the predictions': half of it, by its logarithm, is taken for each. The more comes
    than is predicted, the less surprising it is that much is late, and the less it says of the split.
    """
    if predicted <= 0 or arrived <= 0:
        return 1.0
    of_predictions = min(1.0, max(0.5, arrived / predicted - 0.5))
    return float(min(1.0, served / min(arrived, predicted)) ** of_predictions)


def _best_of(scores: Mapping[int, float]) -> tuple[int, float]:
    """A split and its goodput."""
    return max(scores.items(), key=lambda scored: scored[1])


def _resize(reason: Reason, split: int, bounds: SplitBounds, why: str, gain: float = 0.0) -> RebalanceDecision:
    num = bounds.num_workers
    return RebalanceDecision(split, num, reason, f"{reason}: {split}:{num - split} {why}", gain)


def _summary(
    service: SplitService,
    usual: TypicalRequest,
    rate: float,
    bounds: SplitBounds,
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
