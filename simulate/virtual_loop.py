"""An asyncio event loop on virtual time: it never waits, but jumps to the next timer when nothing is ready.

What is due at one time runs in the order in which it was asked for, so that a run depends on its inputs alone. There
are no sockets, no signals and no other threads; `call_soon_threadsafe` is `call_soon`.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import math
import sys
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

COLLECT_EVERY = 200_000, 50, 1000
"""Thresholds of the collector of cycles while a loop runs: parts of a cluster are many and stay, and to look through
them at every 700 new ones takes a fifth of the time."""
MOST_CALLS_AT_ONCE = 1_000_000
"""Calls without any time passing; more are taken for a livelock."""


FAR_S = 1e12
"""Calls that are due later, or never, are not told apart by their second."""


class Stuck(Exception):
    """Nothing will happen any more, or not before the run's limit, and what was waited for has not come."""


class ScheduledCall:
    """A call that is to be made, at `when` if it has a time (`asyncio.Handle`, `asyncio.TimerHandle`)."""

    __slots__ = ("arguments", "callback", "context", "is_cancelled", "moment")

    def __init__(
        self,
        callback: Callable[..., object],
        arguments: tuple[Any, ...],
        context: contextvars.Context | None,
        moment: float,
    ) -> None:
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.moment = moment
        self.is_cancelled = False

    def when(self) -> float:
        return self.moment

    def cancel(self) -> None:
        self.is_cancelled = True
        self.arguments = ()

    def cancelled(self) -> bool:
        return self.is_cancelled


class VirtualLoop(AbstractEventLoop):
    """`run` it once. An error that nobody awaits ends the run."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[ScheduledCall] = deque()
        self._timers: list[tuple[float, int, ScheduledCall]] = []
        """A heap of those that are due before `_horizon`."""
        self._later: dict[int, list[tuple[float, int, ScheduledCall]]] = {}
        """The others, by the number of the second in which they are due: most of them are cancelled until then."""
        self._horizon: float = 1
        self._order = itertools.count()
        self._tasks: WeakValueDictionary[int, asyncio.Task[Any]] = WeakValueDictionary()
        """In the order in which they were made, which asyncio's own set of them does not know."""
        self._is_running = False
        self._is_closed = False
        self._error: BaseException | None = None
        self.num_calls = 0
        """Calls that were made so far."""

    def run(self, main: Coroutine[Any, Any, T], limit_s: float = float("inf")) -> T:
        """The result of `main`. Raises Stuck when it cannot end, or has not ended at `limit_s`."""
        hooks, thresholds = sys.get_asyncgen_hooks(), gc.get_threshold()
        gc.set_threshold(*COLLECT_EVERY)
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        asyncio.events._set_running_loop(self)
        self._is_running = True
        try:
            task = self.create_task(main)
            self._run_until(task, limit_s)
            return task.result()
        finally:
            self._end_tasks()
            self._is_running = False
            asyncio.events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            gc.set_threshold(*thresholds)

    def _run_until(self, task: asyncio.Task[Any], limit_s: float) -> None:
        ready, timers = self._ready, self._timers
        most_calls = MOST_CALLS_AT_ONCE
        while not task.done():
            if not ready:
                self._jump(limit_s)
                most_calls = self.num_calls + MOST_CALLS_AT_ONCE
            elif self.num_calls > most_calls:
                raise Stuck(f"at {self._now:.6f} s the run goes round in a circle, and no time passes")
            while timers and timers[0][0] <= self._now:
                ready.append(heappop(timers)[2])
            for _ in range(len(ready)):
                call = ready.popleft()
                if call.is_cancelled:
                    continue
                self.num_calls += 1
                if call.context is None:
                    call.callback(*call.arguments)
                else:
                    call.context.run(call.callback, *call.arguments)
            if self._error is not None:
                raise self._error

    def _end_tasks(self) -> None:
        """Cancels whatever is left, and lets it end, which takes no time."""
        self._is_closed = True
        for task in list(self._tasks.values()):
            task.cancel()
        for _ in range(MOST_CALLS_AT_ONCE):
            if not self._ready:
                break
            call = self._ready.popleft()
            if not call.is_cancelled:
                (call.callback if call.context is None else partial(call.context.run, call.callback))(*call.arguments)

    def _put_off(self, call: ScheduledCall) -> None:
        """Keeps a call that is due at the horizon or later."""
        second = int(min(call.moment, FAR_S))
        self._later.setdefault(second, []).append((call.moment, next(self._order), call))

    def _jump(self, limit_s: float) -> None:
        """To the next timer."""
        timers = self._timers
        while True:
            while timers and timers[0][2].is_cancelled:
                heappop(timers)
            if timers or not self._later:
                break
            second = min(self._later)
            self._horizon = second + 1 if second < FAR_S else math.inf
            timers += [timer for timer in self._later.pop(second) if not timer[2].is_cancelled]
            heapify(timers)
        if not timers or timers[0][0] > limit_s:
            what = "nothing will happen any more" if not timers else f"its limit is {limit_s:.3f} s"
            raise Stuck(f"at {self._now:.6f} s the run is not over, and {what}")
        self._now = timers[0][0]

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """An async generator that nobody will read to its end."""
        if not self._is_closed:
            self.create_task(generator.aclose())

    # What asyncio and the code that runs here ask of a loop

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]  # a lighter handle
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> ScheduledCall:
        call = ScheduledCall(callback, args, context, self._now)
        self._ready.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> ScheduledCall:
        when = self._now + delay  # as `call_at`, which is called as often as this
        call = ScheduledCall(callback, args, context, when)
        if when < self._horizon:
            heappush(self._timers, (when, next(self._order), call))
        else:
            self._put_off(call)
        return call

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> ScheduledCall:
        call = ScheduledCall(callback, args, context, when)
        if when < self._horizon:
            heappush(self._timers, (when, next(self._order), call))
        else:
            self._put_off(call)
        return call

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        task = self._tasks[next(self._order)] = asyncio.Task(coro, loop=self, name=name, context=context)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._error is None and not self._is_closed:
            self._error = context.get("exception") or RuntimeError(context.get("message"))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Drops the timers that are left."""
        self._timers.clear()
        self._later.clear()
