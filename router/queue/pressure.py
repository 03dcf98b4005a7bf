"""Tokens that running requests hold, how fast they give them back, and whether more arrives than leaves.

Tokens are counted as promised: prompt plus largest output of each request, which it gives back when it ends. The queue
is counted in the same tokens, so that their quotient is a wait. Requests that end while nothing waits say nothing of
how many could have ended, and do not count.

A burst that drains is no overload, nor are any number of clients that each wait for their answer before they ask again:
as much leaves as arrives. An overload stays: a queue that has stood for a while, with clearly more arrivals than ends.
It is over when nothing waits and no request was refused for a while. Pure: the time is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.routing.demand import OutputLengths
from router.routing.load_tracker import RequestLoad

MEMORY_S = 10.0
"""Time constant with which measurements of the drain rate fade, in seconds under pressure."""
LEAST_S = 0.25
LEAST_ENDS = 4
"""The drain rate is unknown before this much time under pressure, and this many ends in it."""
LONGEST_LOOK_S = 5.0
"""The measured drain rate is trusted after this much time under pressure, however long requests stay."""
BURST_S = 0.5
"""Arrivals this soon after the queue began to stand belong to a burst, and do not count as growth."""
STANDING_S = 1.0
"""A queue that has stood for less than this is no overload."""
LEAST_ARRIVALS = 8
CLEARLY = 1.5
"""Standard deviations of the number of arrivals, were they independent."""
CALM_S = 2.0
"""An overload is over this long after the last refusal."""
_MEMORY = 0.95
_MOST_EXCESS = 100.0


class Mean:
    """Mean of all values at first, later of the last twenty or so."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        share = max(1 - _MEMORY, 1 / self.count)
        self.value += share * (value - self.value)


class DrainRate:
    """Promised tokens that a decode worker gives back each second, measured while something waits or is refused."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self.num_seconds = 0.0
        """Time under pressure; older time counts less."""
        self._num_ends = 0
        self._at: float | None = None
        self._is_pressed = False

    def set_pressure(self, now: float, *, is_pressed: bool) -> None:
        """Whether something waits or is refused from now on."""
        self._advance(now)
        self._is_pressed = is_pressed

    def add_end(self, now: float, num_tokens: int, num_workers: int) -> None:
        """A request gave its tokens back while `num_workers` decode workers were ready."""
        self._advance(now)
        if self._is_pressed:
            self._tokens += num_tokens / max(1, num_workers)
            self._num_ends += 1

    def tokens_per_s(self, num_workers: int) -> float | None:
        """Rate of `num_workers` workers; None while it is not known."""
        if self.num_seconds < LEAST_S or self._num_ends < LEAST_ENDS or not num_workers:
            return None
        return max(1.0, self._tokens / self.num_seconds) * num_workers

    def _advance(self, now: float) -> None:
        if self._is_pressed and self._at is not None and now > self._at:
            kept = math.exp((self._at - now) / MEMORY_S)
            self._tokens *= kept
            self.num_seconds = self.num_seconds * kept + MEMORY_S * (1 - kept)
        self._at = now


@dataclass(frozen=True)
class _Held:
    """Tokens that one running request holds."""

    work: RequestLoad
    num_expected_tokens: float
    began_at: float


class InFlight:
    """Running requests in tokens: promised (prompt and largest output) and expected (by outputs that ended lately)."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        self.num_tokens = 0
        """Promised to all."""
        self.num_expected_tokens = 0.0
        self.num_sequences = 0
        self._held: dict[str, _Held] = {}
        self._stay_s = Mean()
        self._first_token_s = Mean()
        self._drain = DrainRate()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def first_token_s(self) -> float:
        """Recent mean from a request's placement to its first token."""
        return self._first_token_s.value

    def expected(self, work: RequestLoad) -> float:
        """KV tokens that a request should hold at its end."""
        return work.num_prompt_tokens + work.num_sequences * self._lengths.expected(work.most_output)

    def tokens_per_s(self, num_workers: int) -> float | None:
        """Promised tokens that are given back each second; None while that is not known.

        The measured drain rate, once pressure has lasted for as long as requests stay. Before that, a burst of requests
        that began together has not ended yet, and the rate is what is held over how long requests stay (Little's law).
        """
        if self._stay_s.count < LEAST_ENDS or not num_workers:
            return None
        if self._drain.num_seconds >= min(self._stay_s.value, LONGEST_LOOK_S):
            measured = self._drain.tokens_per_s(num_workers)
            if measured is not None:
                return measured
        return max(1.0, self.num_tokens / max(self._stay_s.value, 1e-3))

    def set_pressure(self, now: float, *, is_pressed: bool) -> None:
        """Whether something waits or is refused from now on."""
        self._drain.set_pressure(now, is_pressed=is_pressed)

    def add(self, generation_id: str, work: RequestLoad, now: float) -> None:
        held = _Held(work, self.expected(work), now)
        self._held[generation_id] = held
        self.num_tokens += work.num_output_tokens
        self.num_expected_tokens += held.num_expected_tokens
        self.num_sequences += work.num_sequences

    def pause(self, generation_id: str) -> None:
        """Workers hold nothing for the request, but it goes on: this does not count as an end."""
        held = self._held.pop(generation_id)
        self.num_tokens -= held.work.num_output_tokens
        self.num_sequences -= held.work.num_sequences
        self.num_expected_tokens = self.num_expected_tokens - held.num_expected_tokens if self._held else 0.0

    def remove(
        self, generation_id: str, now: float, num_workers: int, first_token_at: float | None, *, is_complete: bool
    ) -> None:
        """The request is over; `is_complete`: with all its output."""
        held = self._held[generation_id]
        self.pause(generation_id)
        self._drain.add_end(now, held.work.num_output_tokens, num_workers)
        if first_token_at is not None and first_token_at >= held.began_at:
            self._first_token_s.add(first_token_at - held.began_at)
        if is_complete:
            self._stay_s.add(now - held.began_at)


@dataclass
class _Standing:
    """A queue since it began to stand."""

    since: float
    num_arrivals: int = 0
    arrived: float = 0.0
    """Tokens."""
    ended: float = 0.0


class Overload:
    """Whether clearly more arrives than ends."""

    def __init__(self) -> None:
        self._standing: _Standing | None = None
        self._refused_at: float | None = None

    def set_queue(self, now: float, *, is_empty: bool) -> None:
        """Follows the queue."""
        if is_empty and not self.is_on(now):
            self._standing = None
        elif not is_empty and self._standing is None:
            self._standing = _Standing(now)

    def add_arrival(self, now: float, num_tokens: float) -> None:
        """A request arrived, accepted or not."""
        standing = self._standing
        if standing is not None and now > standing.since + BURST_S:
            standing.num_arrivals += 1
            standing.arrived += num_tokens

    def add_end(self, now: float, num_tokens: float) -> None:
        standing = self._standing
        if standing is not None and now > standing.since + BURST_S:
            standing.ended += num_tokens

    def add_refusal(self, now: float) -> None:
        """A request was refused because of the overload."""
        self._refused_at = now

    def is_on(self, now: float) -> bool:
        return self._refused_at is not None and now - self._refused_at < CALM_S

    def may_begin(self, now: float) -> bool:
        """Whether the queue has stood for long enough, with clearly more arrivals than ends."""
        standing = self._standing
        if standing is None or now - standing.since < STANDING_S or standing.num_arrivals < LEAST_ARRIVALS:
            return False
        spread = CLEARLY * math.sqrt(standing.num_arrivals) * standing.arrived / standing.num_arrivals
        return standing.arrived - standing.ended > spread

    @property
    def excess(self) -> float:
        """Arrivals over ends in tokens, from 1 to 100.

        One more has ended, of the mean size of what arrived: a first arrival before any end says nothing of rates.
        """
        standing = self._standing
        if standing is None or not standing.arrived:
            return 1.0
        ended = standing.ended + standing.arrived / standing.num_arrivals
        return min(_MOST_EXCESS, max(1.0, standing.arrived / ended))
