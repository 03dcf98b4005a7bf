"""Waits of tests: for an event where there is one, and for what nobody tells they look again and again."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import select
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil
import pytest

T = TypeVar("T")


class Changes:
    """Lets tests of one event loop wait for a state that others bring about and `tell` of."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, look: Callable[[], T | Awaitable[T]], limit_s: float = 20.0) -> T:
        """The first thing seen that is true: it is looked for now, and after each change."""
        async with asyncio.timeout(limit_s):
            while True:
                change, seen = self._next, look()
                found: Any = await seen if inspect.isawaitable(seen) else seen
                if found:
                    return found  # type: ignore[no-any-return]
                await change.wait()


async def until_after(owner: Any, method: str, condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Until the condition holds, which only calls of this method of `owner` can bring about."""
    call, calls = getattr(owner, method), Changes()

    def told(*arguments: Any) -> Any:
        result = call(*arguments)
        calls.tell()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, told)
        await calls.until(condition, limit_s)


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


def wait_ended(*pids: int, limit_s: float = 20.0) -> None:
    """Until these processes have ended, whoever's they are."""
    end = time.monotonic() + limit_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                ended, _, _ = select.select([process], [], [], max(0.0, end - time.monotonic()))
                assert ended, f"process {pid} has not ended within {limit_s:g} s"
            finally:
                os.close(process)


def is_running(pid: int) -> bool:
    """One that has ended may be there until its parent looks."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
