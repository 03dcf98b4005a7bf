"""Who lets others go first where processes share cores: threads that compute, and programs that are just starting.

Niceness is a thread's on Linux, and new threads have that of who made them. Elsewhere it is a process's, and nothing
happens here.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from types import ModuleType

_LEAST_NICE = 19


def give_way() -> None:
    """The calling thread, and those that it makes from now on, go after whoever else wants their core.

    Where steps take every core, what a step led to reaches its client over some seven threads of three processes, each
    of which would wait a few milliseconds for its turn.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_NICE)


def import_behind(name: str) -> ModuleType:
    """Imports a module without taking cores from those that compute: torch alone is seconds of work, which streams that
    lost a worker would otherwise wait for while another one starts in its place. Raises what the import raises."""
    failures: list[BaseException] = []

    def load() -> None:
        give_way()
        try:
            importlib.import_module(name)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=load, name="import", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return sys.modules[name]
