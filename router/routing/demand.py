"""Demand of clients: how long outputs get, and sums of recent requests for the controller's rebalancing.

Pure: time is an argument. Requests are known by their sizes only.
"""

from __future__ import annotations

import math
from collections import deque

from cluster.demand import Demand
from cluster.step_cost import StepSize

FIRST_GUESS_TOKENS = 128
"""Expected output before any similar request has ended."""
_MEMORY = 0.95
"""Weight that older outputs keep when another sequence ends."""
_LOAD_MEMORY = 0.99
"""The same where the load as a whole is to be known, not what comes next."""
WINDOW_S = 60.0
"""Requests older than this do not count."""
LEAST_WINDOW_S = 3.0
ENOUGH_REQUESTS = 16
"""The window is no shorter than what holds this many requests, nor than LEAST_WINDOW_S."""
_BUCKET_S = 1.0
_SURE = 3.0
"""Standard deviations by which what came before must differ from what came since, to be another load."""


class _OutputSums:
    """Output tokens, and the most that was allowed, summed over similar requests; older ones fade."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.num_tokens = self.num_most = self.num_generated = 0.0

    def add(self, num_tokens: int, most: int) -> None:
        self.num_tokens = self._memory * self.num_tokens + num_tokens
        self.num_most = self._memory * self.num_most + most
        self.num_generated *= self._memory

    @property
    def num_expected(self) -> float:
        return (self.num_tokens + self.num_generated) / 2 if self.num_generated else self.num_tokens


class OutputLengths:
    """Expected length of outputs, learned from those that ended lately.

    Requests whose `max_output_tokens` lies between the same powers of two are taken for similar, because some clients
    ask for what they need and others for the whole context.

    While more and more run, those that end are the short ones. Where running ones are counted too (`add_tokens`), what
    all have got while one ended is a second answer, too long for as long as the first is too short; the mean is taken.
    """

    def __init__(self, memory: float = _MEMORY) -> None:
        self._memory = memory
        self._sums: dict[int, _OutputSums] = {}

    def add_tokens(self, num_tokens: float, most: int) -> None:
        """A sequence got so many more of the `most` that it is allowed; to be told before its end."""
        self._sums_of(most).num_generated += num_tokens / self._memory  # which the next end takes away

    def add(self, num_tokens: int, most: int) -> None:
        """One sequence ended with `num_tokens` of the `most` that it was allowed."""
        self._sums_of(most).add(num_tokens, most)

    def expected(self, most: int) -> float:
        """Expected tokens of a sequence that may get `most`."""
        sums = self._sums.get(most.bit_length())
        if sums is None or not sums.num_most:
            return min(FIRST_GUESS_TOKENS, most)
        return min(most, max(1.0, most * sums.num_expected / sums.num_most))

    def _sums_of(self, most: int) -> _OutputSums:
        kind = most.bit_length()
        if kind not in self._sums:
            self._sums[kind] = _OutputSums(self._memory)
        return self._sums[kind]


class DemandWindow:
    """Sums over the last seconds, kept in buckets of one second.

    A load may change its kind at any moment, and few requests say little of it. So the window goes back as far as
    requests were alike: piece by piece, until one differs in its rate, prompts or outputs by more than chance would
    have it (after Bifet and Gavalda, Learning from Time-Changing Data with Adaptive Windowing, 2007).
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.lengths = OutputLengths(_LOAD_MEMORY)
        self._window_s = window_s
        self._since: float | None = None
        """When the first request arrived."""
        self._buckets: deque[tuple[float, Demand]] = deque()
        """Each with its start, the newest last."""

    def add_arrival(self, now: float) -> None:
        self._bucket(now).num_arrived += 1

    def add_placement(
        self, now: float, num_prompt_tokens: int, num_cached_tokens: int, num_sequences: int, most_output_tokens: int
    ) -> None:
        """A request was placed on workers for the first time; each of its sequences gets at most `most_output_tokens`.

        Its expected output counts at once: requests that have ended say nothing of a load that has just changed, and
        among running ones those with long outputs are over-represented.
        """
        num_new = max(0, num_prompt_tokens - num_cached_tokens)
        num_output_tokens = self.lengths.expected(most_output_tokens)
        bucket = self._bucket(now)
        bucket.num_placed += 1
        bucket.num_prompt_tokens += num_new
        bucket.num_attended += StepSize.of_prompt(num_new, num_cached_tokens).num_attended
        bucket.num_cached_tokens += num_cached_tokens
        bucket.num_sequences += num_sequences
        bucket.num_output_tokens += num_sequences * num_output_tokens
        bucket.num_kv_tokens += num_sequences * (num_prompt_tokens + num_output_tokens / 2)

    def add_end(self, now: float, *, is_kept: bool) -> None:
        """A request ended, within the objectives or not. Requests that their clients cancelled do not count."""
        bucket = self._bucket(now)
        bucket.num_ended += 1
        bucket.num_kept += is_kept

    def sums(self, now: float) -> tuple[float, Demand]:
        """Length of the window in seconds, and the sums over it."""
        self._drop_old(now)
        total, piece, total_s = Demand(), Demand(), 0.0
        for began, demand in reversed(self._buckets):
            piece += demand
            piece_s = now - began - total_s
            if piece_s >= LEAST_WINDOW_S and piece.num_placed >= ENOUGH_REQUESTS:
                if total_s and not _are_alike(total, total_s, piece, piece_s):
                    return total_s, total
                total, piece, total_s = total + piece, Demand(), total_s + piece_s
        since = now if self._since is None else self._since
        whole_s = min(max(now - since, _BUCKET_S), self._window_s)
        if total_s and (whole_s <= total_s or not _are_alike(total, total_s, piece, whole_s - total_s)):
            return total_s, total
        return whole_s, total + piece

    def _bucket(self, now: float) -> Demand:
        """The newest bucket, to be added to."""
        self._drop_old(now)
        if self._since is None:
            self._since = now
        if not self._buckets or now - self._buckets[-1][0] >= _BUCKET_S:
            self._buckets.append((now, Demand()))
        return self._buckets[-1][1]

    def _drop_old(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] >= self._window_s:
            self._buckets.popleft()


def _are_alike(one: Demand, one_s: float, other: Demand, other_s: float) -> bool:
    """Whether two pieces may be of one load, whose arrivals are random, and whose lengths vary as much as their
    mean."""
    rates = one.num_arrived / one_s - other.num_arrived / other_s
    if abs(rates) > _SURE * math.sqrt(one.num_arrived / one_s**2 + other.num_arrived / other_s**2):
        return False
    if not (one.num_placed and other.num_placed):
        return True
    spread = _SURE * math.sqrt(1 / one.num_placed + 1 / other.num_placed)
    means = (
        (each.num_prompt_tokens / each.num_placed, each.num_output_tokens / each.num_placed) for each in (one, other)
    )
    return all(abs(a - b) <= spread * (a + b) / 2 for a, b in zip(*means, strict=True))
