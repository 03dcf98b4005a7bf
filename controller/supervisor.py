"""Keeps one thing that serves (a worker's group of ranks, or the router) running until it is asked to stop.

    STARTING ──► READY ──► BACKING_OFF ──► STARTING …
        └──────────────────────┴──► FAILED        STOPPED is reachable from every state

How a group is started and what it is made of is behind `Launch`. Whether and when it is started again, `RestartPolicy`
decides: before a group has served for the first time its errors are the operator's to mend, so a mistake in the
configuration or the checkpoint ends supervision at once, and anything else after a few tries; a group that has served
is brought back for ever, at growing intervals. Runs in one asyncio loop and knows no Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class StartFailed(Exception):
    """A group did not come up; `is_mistake` when the configuration or the checkpoint is to blame."""

    def __init__(self, message: str, *, is_mistake: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.is_mistake = is_mistake


class RunningProcesses(Protocol):
    """A group that serves."""

    @property
    def card(self) -> Mapping[str, Any]:
        """Facts that it reported when it was ready, such as its address."""
        ...

    async def ended(self) -> str:
        """Waits for the first of its processes to end, and says why; a group lives and dies as one."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Asks for a clean end, waits at most `grace_s`, then kills."""
        ...

    async def kill(self) -> None:
        """Ends every process at once."""
        ...


Launch = Callable[[], Awaitable[RunningProcesses]]
"""Starts a group afresh; raises StartFailed, and leaves no process behind when it raises or is cancelled."""


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
    """Remembers one group's starts and ends. Pure: the time is an argument."""

    def __init__(
        self,
        *,
        first_delay_s: float = 0.2,
        max_delay_s: float = 15.0,
        steady_s: float = 60.0,
        max_first_tries: int = 3,
        has_served: bool = False,
    ) -> None:
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._steady_s = steady_s
        self._max_first_tries = max_first_tries
        self._num_failures = 0
        self._has_served = has_served
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


class SupervisorState(Enum):
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    FAILED = "failed"
    STOPPED = "stopped"


class Supervisor:
    """`run` until `stop`; `changed` is called with the supervisor after each change of state."""

    def __init__(
        self,
        name: str,
        launch: Launch,
        changed: Callable[[Supervisor], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        self.name = name
        self.state = SupervisorState.STARTING
        self.why = ""
        """Why the last life ended, or could not begin."""
        self.is_mistake = False
        self.num_starts = 0
        self._launch = launch
        self._changed = changed
        self._policy = policy or RestartPolicy()
        self._running: RunningProcesses | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def card(self) -> Mapping[str, Any]:
        """The card of the group that serves now; empty when none does."""
        return self._running.card if self._running is not None else {}

    def run(self, running: RunningProcesses | None = None, num_starts: int = 0) -> None:
        """Begins, inside the loop; does nothing the second time. `running`: a group that serves already, which was
        started that often."""
        if self._task is not None:
            return
        self._running, self.num_starts = running, num_starts
        if running is not None:
            self._policy.started(_now())
            self._enter(SupervisorState.READY)
        self._task = asyncio.create_task(self._supervise(), name=f"supervise-{self.name}")

    async def stop(self, grace_s: float) -> None:
        """Ends supervision first, so that nothing is started again, then the group."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._running is not None:
            # It answers while it drains, so its card stays until it has ended.
            await self._running.stop(grace_s)
        self._running = None
        self._enter(SupervisorState.STOPPED)

    def _enter(self, state: SupervisorState) -> None:
        self.state = state
        self._changed(self)

    async def _supervise(self) -> None:
        while True:
            if self._running is None:
                self.num_starts += 1
                self._enter(SupervisorState.STARTING)
                verdict = await self._live_once()
            else:
                verdict = await self._until_ended(self._running)
            if isinstance(verdict, GiveUp):
                self.why, self.is_mistake = verdict.why, verdict.is_mistake
                self._enter(SupervisorState.FAILED)
                return
            if self.state is not SupervisorState.BACKING_OFF:
                self._enter(SupervisorState.BACKING_OFF)
            await asyncio.sleep(verdict.delay_s)

    async def _live_once(self) -> Restart | GiveUp:
        """One life of the group, from its launch to the policy's verdict on its end."""
        try:
            running = self._running = await self._launch()
        except StartFailed as failure:
            self.why = failure.message
            return self._policy.ended(_now(), self.why, is_mistake=failure.is_mistake)
        except Exception as error:
            # A fault of the launcher itself must not end supervision unseen.
            logger.exception("%s could not be launched", self.name)
            self.why = f"{type(error).__name__}: {error}"
            return self._policy.ended(_now(), self.why)
        self._policy.started(_now())
        self._enter(SupervisorState.READY)
        return await self._until_ended(running)

    async def _until_ended(self, running: RunningProcesses) -> Restart | GiveUp:
        self.why = await running.ended()
        # Told first, so that nothing is sent to what is left of the group while that is killed.
        self._enter(SupervisorState.BACKING_OFF)
        await running.kill()
        self._running = None
        return self._policy.ended(_now(), self.why)


def _now() -> float:
    return asyncio.get_running_loop().time()
