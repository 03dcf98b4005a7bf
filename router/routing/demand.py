"""Counts what clients ask for: sums over the last seconds, in buckets of one second that are dropped when they are old.

As many seconds count as it takes to see some requests: few under a heavy load, which may change its kind at any moment.
Pure: time is an argument. Knows requests only by their sizes.
"""

from __future__ import annotations

from collections import deque

from cluster.demand import Demand
from cluster.step_cost import StepSize
from router.queue.output_lengths import OutputLengths

WINDOW_S = 60.0
"""At most so many seconds count."""
LEAST_WINDOW_S = 3.0
ENOUGH_REQUESTS = 16
"""Once so many are in them, those before count no more."""
_BUCKET_S = 1.0


class DemandWindow:
    """Of one router."""

    def __init__(self, lengths: OutputLengths, window_s: float = WINDOW_S) -> None:
        self._lengths = lengths
        self._window_s = window_s
        self._since: float | None = None
        """When the first request came."""
        self._buckets: deque[tuple[float, Demand]] = deque()
        """Each with when it began, the newest last."""

    def arrived(self, now: float) -> None:
        self._add(now, Demand(num_arrived=1))

    def placed(
        self, now: float, num_prompt_tokens: int, num_cached_tokens: int, num_sequences: int, most_output_tokens: int
    ) -> None:
        """A request was given to workers for the first time; each of its sequences gets `most_output_tokens` at most.

        How long they should be is told at once: what has ended says nothing of a load that has just changed, and of
        what runs, long ones are seen for longer.
        """
        num_new = max(0, num_prompt_tokens - num_cached_tokens)
        size = StepSize.of_prompt(num_new, num_cached_tokens)
        num_output_tokens = self._lengths.expected(most_output_tokens)
        self._add(
            now,
            Demand(
                num_placed=1,
                num_prompt_tokens=num_new,
                num_attended=size.num_attended,
                num_cached_tokens=num_cached_tokens,
                num_sequences=num_sequences,
                num_output_tokens=num_sequences * num_output_tokens,
                num_kv_tokens=num_sequences * (num_prompt_tokens + num_output_tokens / 2),
            ),
        )

    def ended(self, now: float, *, is_kept: bool) -> None:
        """A request, within the objectives or not; one that its client gave up is not told."""
        self._add(now, Demand(num_ended=1, num_kept=is_kept))

    def sums(self, now: float) -> tuple[float, Demand]:
        """Of the last seconds, and how many those are."""
        self._drop_old(now)
        total = Demand()
        for began, demand in reversed(self._buckets):
            total += demand
            if now - began >= LEAST_WINDOW_S and total.num_placed >= ENOUGH_REQUESTS:
                return now - began, total
        since = now if self._since is None else self._since
        return min(max(now - since, _BUCKET_S), self._window_s), total

    def _add(self, now: float, demand: Demand) -> None:
        self._drop_old(now)
        if self._since is None:
            self._since = now
        if self._buckets and now - self._buckets[-1][0] < _BUCKET_S:
            began, before = self._buckets.pop()
            self._buckets.append((began, before + demand))
        else:
            self._buckets.append((now, demand))

    def _drop_old(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] >= self._window_s:
            self._buckets.popleft()
