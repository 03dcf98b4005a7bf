"""SIGINT and SIGTERM, heard whichever thread they come to and whatever the main thread is doing.

A handler in Python runs on the main thread alone, once that returns to Python. While it waits for a lock, nothing wakes
it when the kernel has interrupted another thread with the signal, and the handler never runs. So the handlers here do
nothing; what Python writes at C level to a socket, on the thread that was interrupted, is what a thread waits for.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from typing import Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """`start` it, or enter it as a context, on the main thread. `on_signal` is called on a thread of its own, once for
    each signal."""

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def start(self) -> None:
        """Hears signals until the context is left, or the process ends."""
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        self.take_over()

    def take_over(self) -> None:
        """Puts the handlers in place, again after a library has set its own."""
        for number in _NUMBERS:
            signal.signal(number, lambda *_: None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()

    def _listen(self) -> None:
        with self._reader:
            while data := self._reader.recv(64):
                for number in data:
                    if number in _NUMBERS:
                        self._on_signal()
