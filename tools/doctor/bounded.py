"""Work on a thread of its own, which is waited for no longer than it may take.

The thread is a daemon: what hangs (in a driver, on a dead network file system) is left to itself and holds up nobody,
the end of the program included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def on_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Its result raises what the work raised."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
