"""Demand of clients: how long outputs get, and sums of recent requests for the controller's rebalancing.

Pure: time is an argument. Requests are known by their sizes only.
"""

from __future__ import annotations

from collections import deque

from cluster.demand import Demand
from cluster.step_cost import StepSize

FIRST_GUESS_TOKENS = 128
"""Expected output before any similar request has ended."""
_MEMORY = 0.95
"""Weight that older outputs keep when another sequence ends."""
WINDOW_S = 60.0
"""Requests older than this do not count."""
LEAST_WINDOW_S = 3.0
ENOUGH_REQUESTS = 16
"""The window ends where it holds this many requests, but not before LEAST_WINDOW_S."""
_BUCKET_S = 1.0


class _OutputSums:
    """Output tokens, and the most that was allowed, summed over similar requests; older ones fade."""

    def __init__(self) -> None:
        self.num_tokens = self.num_most = 0.0

    def add(self, num_tokens: int, most: int) -> None:
        self.num_tokens = _MEMORY * self.num_tokens + num_tokens
        self.num_most = _MEMORY * self.num_most + most


class OutputLengths:
    """Expected length of outputs, learned from those that ended lately.

    Requests whose `max_output_tokens` lies between the same powers of two are taken for similar, because some clients
    ask for what they need and others for the whole context.
    """

    def __init__(self) -> None:
        self._sums: dict[int, _OutputSums] = {}

    def add(self, num_tokens: int, most: int) -> None:
        """One sequence ended with `num_tokens` of the `most` that it was allowed."""
        self._sums.setdefault(most.bit_length(), _OutputSums()).add(num_tokens, most)

    def expected(self, most: int) -> float:
        """Expected tokens of a sequence that may get `most`."""
        sums = self._sums.get(most.bit_length())
        if sums is None or not sums.num_most:
            return min(FIRST_GUESS_TOKENS, most)
        return min(most, max(1.0, most * sums.num_tokens / sums.num_most))


class DemandWindow:
    """Sums over the last seconds, kept in buckets of one second.

    The window is as short as it can be and still hold some requests: a heavy load may change its kind at any moment.
    """

    def __init__(self, lengths: OutputLengths, window_s: float = WINDOW_S) -> None:
        self._lengths = lengths
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
        num_output_tokens = self._lengths.expected(most_output_tokens)
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
        total = Demand()
        for began, demand in reversed(self._buckets):
            total += demand
            if now - began >= LEAST_WINDOW_S and total.num_placed >= ENOUGH_REQUESTS:
                return now - began, total
        since = now if self._since is None else self._since
        return min(max(now - since, _BUCKET_S), self._window_s), total

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
