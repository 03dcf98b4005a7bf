"""SIGINT and SIGTERM of a program that has much to end: the first asks, the second does not wait.

A thread reads the signals from a pipe that Python writes at C level, so that the second one works even while the main
thread is inside a long call of a library.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Self

from cluster.program import ExitCode

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context; enter it on the main thread. `on_second` runs on another thread just before the program exits."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        self._asked = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        self.take_over()
        return self

    def take_over(self) -> None:
        """Puts the handlers in place, again after a library has set its own."""
        for number in _NUMBERS:
            signal.signal(number, lambda *_: None)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()

    def _listen(self) -> None:
        while data := self._reader.recv(64):
            for number in data:
                if number in _NUMBERS:
                    self._on_signal()
        self._reader.close()

    def _on_signal(self) -> None:
        if not self._asked.is_set():
            self._asked.set()
            return
        self._on_second()
        os._exit(ExitCode.FAILED)
