"""Decides whether the beginning of a prompt is brought to the worker that is to compute it, and by which worker.

    fetch it     the rest is computed when it has come: the wait for the worker's other prompts passes meanwhile
    compute it   where that is as quick, nobody has more of it, or fetches between the two failed lately

To send the prompt to a holder instead is the choice of a policy, which weighs each worker with what it would fetch.
What fetches take is measured, for each pair of workers: a line through the seconds by tokens of the latest. The first
one of a pair opens the connection and teaches nothing; while nothing is known, one is tried, and given up when it has
taken what computing would. Pure: knows no connection, and is given the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.step_cost import StepCost
from router.routing.prefix_index import Candidate, PromptHashes

LEAST_GAIN = 0.2
"""Share of the seconds that a fetch spares a worker by which it must be the quicker way."""
LATE = 3.0
"""A fetch that takes so many times what is predicted is given up."""
LEAST_LIMIT_S = 0.02
"""No fetch is given up sooner, but one of which nothing is known."""
LONGEST_S = 10.0
"""Every fetch is given up after that."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Time for which nothing is fetched between two workers after a failure; twice as long after each that follows."""
FORGET_S = 60.0
"""What fetches took longer ago says nothing of the next."""
_MEMORY = 0.8
"""Weight that earlier fetches keep when another one ends."""
_MOST_PAIRS = 4096


class Fetch(NamedTuple):
    """The beginning of a prompt that one worker is to have from another."""

    holder_id: str
    num_tokens: int
    """Tokens from the first on that the holder has."""
    num_useful: int
    """Those of them that fill blocks of the target."""
    seconds: float
    """Prediction."""
    limit_s: float
    """It is given up after that."""


@dataclass
class _Line:
    """Seconds by tokens; older samples fade."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, _MEMORY * getattr(self, name) + value)

    def at(self, x: float) -> float:
        """Of samples of one size: no less than one of them takes, and more for more in proportion."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        if spread <= 1e-3 * mean_x * mean_x:
            return mean_y * max(1.0, x / mean_x)
        slope = (self.xy / self.weight - mean_x * mean_y) / spread
        return mean_y + min(max(0.0, slope), mean_y / mean_x) * (x - mean_x)


@dataclass
class _Pair:
    line: _Line = field(default_factory=_Line)
    last_at: float = 0.0
    is_open: bool = False
    """A fetch has come to its end: the connection is there."""
    paused_until: float = 0.0
    pause_s: float = 0.0


class FetchTimes:
    """What fetches take between workers, by holder and target, and which pairs are given a rest."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()
        self._all, self._all_at = _Line(), 0.0
        self._under_way: dict[str, int] = {}
        """Tokens that each worker sends or gets now."""

    def may_try(self, holder_id: str, target_id: str, now: float) -> bool:
        pair = self._pairs.get((holder_id, target_id))
        return pair is None or now >= pair.paused_until

    def predicted(self, holder_id: str, target_id: str, num_tokens: int, now: float) -> float | None:
        """Seconds of a fetch beside those that are under way; None: nothing is known."""
        num_tokens += self._under_way.get(holder_id, 0) + self._under_way.get(target_id, 0)
        pair = self._pairs.get((holder_id, target_id))
        if pair is not None and pair.line.weight and now - pair.last_at < FORGET_S:
            return pair.line.at(num_tokens)
        return self._all.at(num_tokens) if self._all.weight and now - self._all_at < FORGET_S else None

    def begun(self, holder_id: str, target_id: str, num_tokens: int) -> None:
        for worker_id in (holder_id, target_id):
            self._under_way[worker_id] = self._under_way.get(worker_id, 0) + num_tokens

    def ended(self, holder_id: str, target_id: str, num_tokens: int) -> None:
        """A fetch that had begun, of so many tokens, is over in whatever way."""
        for worker_id in (holder_id, target_id):
            left = self._under_way[worker_id] - num_tokens
            self._under_way[worker_id] = left
            if not left:
                del self._under_way[worker_id]

    def took(self, holder_id: str, target_id: str, num_tokens: int, seconds: float, now: float) -> None:
        """A fetch has moved so many tokens."""
        pair = self._pair(holder_id, target_id)
        pair.pause_s = 0.0
        if pair.is_open and num_tokens:
            for line in (pair.line, self._all):
                line.add(num_tokens, seconds)
            pair.last_at = self._all_at = now
        pair.is_open = True

    def failed(self, holder_id: str, target_id: str, now: float) -> None:
        """Nothing is fetched between the two for a while."""
        pair = self._pair(holder_id, target_id)
        pair.pause_s = min(LONGEST_PAUSE_S, 2 * pair.pause_s) if pair.pause_s else FIRST_PAUSE_S
        pair.paused_until = now + pair.pause_s

    def on_worker_lost(self, worker_id: str) -> None:
        """Its connections are gone."""
        for pair in [pair for pair in self._pairs if worker_id in pair]:
            del self._pairs[pair]

    def _pair(self, holder_id: str, target_id: str) -> _Pair:
        pair = self._pairs.setdefault((holder_id, target_id), _Pair())
        self._pairs.move_to_end((holder_id, target_id))
        if len(self._pairs) > _MOST_PAIRS:
            self._pairs.popitem(last=False)
        return pair


class Work(NamedTuple):
    """A prompt on one worker, as far as that is known."""

    num_tokens: int
    cost: StepCost | None
    """Of the worker's steps; None: not known yet, and nothing is fetched unless `always`."""
    wait_s: float = 0.0
    """Seconds until the worker's other prompts are computed."""
    time_share: float = 1.0
    """Share of the worker's time that prompts get."""

    def seconds(self, num_cached: int) -> float:
        """Seconds from its begin to its first token."""
        assert self.cost is not None
        return self.cost.of_prompt(self.num_tokens - num_cached, num_cached) / self.time_share


def best_fetch(
    prompt: PromptHashes,
    work: Work,
    target: Candidate,
    holders: Iterable[Candidate],
    times: FetchTimes,
    now: float,
    *,
    always: bool = False,
) -> Fetch | None:
    """Returns the fetch with which the first token comes soonest; None: it comes as soon without. `always`: whenever a
    holder has a block more than the target, whatever that takes."""
    index, best, best_s = target.prefix_index, None, 0.0
    if index is None or not target.prefix_format or (work.cost is None and not always):
        return None
    num_present = min(target.num_cached_tokens(prompt), work.num_tokens - 1)
    for holder in holders:
        if holder is target or _format_of(holder) != _format_of(target):
            continue
        num_tokens = min(holder.num_cached_tokens(prompt), work.num_tokens - 1)
        num_useful = num_tokens // index.block_size * index.block_size
        if num_useful - num_present < index.block_size or not times.may_try(holder.worker_id, target.worker_id, now):
            continue
        known_s = times.predicted(holder.worker_id, target.worker_id, num_tokens - num_present, now)
        seconds = known_s or 0.0
        spared_s = 0.0 if work.cost is None else work.seconds(num_present) - work.seconds(num_useful)
        gain_s = spared_s - max(0.0, seconds - work.wait_s)
        if not always and (gain_s <= LEAST_GAIN * spared_s or gain_s <= best_s):
            continue
        limit_s = LONGEST_S
        if not always:
            limit_s = min(LONGEST_S, spared_s if known_s is None else max(LEAST_LIMIT_S, LATE * seconds))
        if best is None or gain_s > best_s or (always and num_useful > best.num_useful):
            best, best_s = Fetch(holder.worker_id, num_tokens, num_useful, seconds, limit_s), gain_s
    return best


def _format_of(candidate: Candidate) -> tuple[str, str]:
    return candidate.prefix_format, candidate.weights_revision
