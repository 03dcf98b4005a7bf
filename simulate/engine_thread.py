"""A simulated worker's engine thread and speaking loop: calls on the virtual loop, in turns that take no time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from simulate.virtual_loop import VirtualLoop
from worker.core import Core, Inbox
from worker.service import SpeakingLoop


class SimulatedInbox(Inbox):
    """Has the engine thread take a turn whenever something is posted."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self.is_called = False
        """While the engine thread runs."""
        self._wake = wake
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._posted.append((function, arguments))
        self._wake()

    def run(self, wait: bool) -> None:
        while self._posted:
            function, arguments = self._posted.popleft()
            function(*arguments)


class DirectInbox(SimulatedInbox):
    """Makes a call at once, and has the engine thread take a turn only where something has come of it that a turn would
    do; what is posted meanwhile is for that turn."""

    def __init__(self, wake: Callable[[], None], is_due: Callable[[], bool]) -> None:
        super().__init__(wake)
        self._is_due = is_due

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        if self.is_called:
            super().post(function, *arguments)
            return
        self.is_called = True
        function(*arguments)
        self.is_called = False
        if self._is_due():
            self._wake()


class SimulatedSpeakingLoop(SpeakingLoop):
    """The speaking loop is the loop of everybody."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        self.loop.call_soon(function, *arguments)


class SimulatedCore(Core):
    """While its thread computes a step itself, it does nothing else: what there is to tell waits for the step's end."""

    def __init__(self, computes: Callable[[], bool], *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._computes = computes

    def _flush(self, is_idle: bool) -> None:
        if not self._computes():
            super()._flush(is_idle)
