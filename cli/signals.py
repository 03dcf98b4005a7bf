"""SIGINT and SIGTERM of a program that has much to end: the first asks, the second does not wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from cluster.program import ExitCode
from cluster.signals import Signals


class StopSignals(Signals):
    """A context; enter it on the main thread. `on_second` runs on another thread just before the program exits."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        super().__init__(self._heard)
        self._on_second = on_second
        self._asked = threading.Event()

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def _heard(self) -> None:
        if not self._asked.is_set():
            self._asked.set()
            return
        self._on_second()
        os._exit(ExitCode.FAILED)
