"""For tests of what nobody tells: they look again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str, limit_s: float, every_s: float = 0.5) -> T:
    """The first thing seen that is true. `what`: that is waited for."""
    end, never = time.monotonic() + limit_s, threading.Event()
    while not (found := look()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        never.wait(every_s)
    return found
