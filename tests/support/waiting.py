"""For tests of what nobody tells: they look again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str, limit_s: float, every_s: float = 0.5) -> T:
    """The first thing seen that is true. `what`: that is waited for."""
    end, never = time.monotonic() + limit_s, threading.Event()
    while not (found := look()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        never.wait(every_s)
    return found


def wait_stopped(pid: int) -> None:
    """Until the process stands still, as SIGSTOP has it."""
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"process {pid} stands still", 10.0, 0.001)


def is_running(pid: int) -> bool:
    """One that has ended may be there until its parent looks."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
