"""What fetches of prefixes take between workers, as the router has measured it, and which pairs of workers rest.

For each holder and target a line through the seconds by tokens of the latest ones; older ones fade, and after a minute
nothing is known any more. The first of a pair opens the connection and teaches nothing; until a pair has taught
something, what all others did stands in for it. After a failure nothing is fetched between two workers for a while.
Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Time for which nothing is fetched between two workers after a failure; twice as long after each that follows."""
FORGET_S = 60.0
"""What fetches took longer ago says nothing of the next."""
_MEMORY = 0.8
"""Weight that earlier fetches keep when another one ends."""
_MOST_PAIRS = 4096


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
    """A fetch has ended, in whatever way: by the next one the connection should be there."""
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
        pair.paused_until, pair.is_open = now + pair.pause_s, True

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
