"""Whether, and when, a process group that ended is started again.

Pure: the time is an argument and the answer a value. Before a group has served for the first time its errors are the
operator's to mend, so a mistake in the configuration or the checkpoint ends the attempt at once, and anything else
after a few tries. A group that has served is brought back for ever, at growing intervals.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Restart:
    """Start again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Starting again cannot help."""

    why: str
    is_mistake: bool
    """True when the configuration or the checkpoint is to blame."""


class RestartPolicy:
    """The memory of one group's starts and ends."""

    def __init__(
        self,
        *,
        first_delay_s: float = 0.2,
        max_delay_s: float = 15.0,
        steady_s: float = 60.0,
        max_first_tries: int = 3,
    ) -> None:
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._steady_s = steady_s
        self._max_first_tries = max_first_tries
        self._num_failures = 0
        self._has_served = False
        self._serving_since: float | None = None

    def started(self, now: float) -> None:
        """The group serves."""
        self._has_served = True
        self._serving_since = now

    def ended(self, now: float, why: str, *, is_mistake: bool = False) -> Restart | GiveUp:
        """The group failed to start, or ended without being asked to."""
        if self._serving_since is not None and now - self._serving_since >= self._steady_s:
            self._num_failures = 0
        self._serving_since = None
        self._num_failures += 1
        if not self._has_served:
            if is_mistake:
                return GiveUp(why, is_mistake=True)
            if self._num_failures >= self._max_first_tries:
                return GiveUp(f"{why} (tried {self._num_failures} times)", is_mistake=False)
        doublings = min(self._num_failures - 1, 30)
        return Restart(min(self._max_delay_s, self._first_delay_s * 2**doublings))
