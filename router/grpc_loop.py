"""An event loop that hears of many gRPC operations at once.

gRPC's thread puts each operation that is done into a queue and writes a byte into a socket. Its handler, which this
loop calls when the socket can be read, reads one byte and handles all that is in the queue. Under load most bytes then
stand for nothing any more, and each costs a turn of the loop. Here a handler finds the last byte only: what the bytes
before it stand for is in the queue already, as it was put there first.

Under load gRPC's thread also takes the processor from the loop's for each operation, to tell of it, though the loop is
still busy with those before. So while there are many, that thread waits until a processor is free, or its turn comes
(SCHED_BATCH); with few it is woken at once, as every thread is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

_QUEUE = "PollerCompletionQueue"
"""gRPC's class whose handler is meant; with any other name, each byte is handled by itself, as in every loop."""
_THREAD = "_poll_wrapper"
"""The function that gRPC's thread runs, of which its name is made; with any other name, it is left as it is."""
_MOST_BYTES = 4096
MANY_PER_S = 10_000
"""Operations. A router beside workers that compute on the same processors, where to wait for its turn could take long,
has a tenth of that."""
WINDOW_S = 0.1
"""They are counted for so long, and at least as long as none is done."""


class GrpcLoop(asyncio.SelectorEventLoop):
    """Any loop of a process may be one: gRPC has a socket for each."""

    def add_reader(  # type: ignore[override]  # which names the types of `args`
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        handler = callback.func if isinstance(callback, functools.partial) else callback
        if isinstance(fd, socket.socket) and type(getattr(handler, "__self__", None)).__name__ == _QUEUE:
            callback = functools.partial(_handle_all, fd, callback, Deference(grpc_threads()), self.time)
        super().add_reader(fd, callback, *args)


class Deference:
    """Has gRPC's threads give way while many operations are done."""

    def __init__(self, thread_ids: list[int]) -> None:
        self.is_on = False
        self._thread_ids = thread_ids
        self._deferring: list[int] = []
        """The threads among them that give way: a thread with a policy of its own keeps it."""
        self._num_done = 0
        self._since = 0.0

    def add(self, num_done: int, now: float) -> None:
        self._num_done += num_done
        elapsed_s = now - self._since
        if elapsed_s < WINDOW_S:
            return
        are_many = self._num_done > MANY_PER_S * elapsed_s
        self._num_done, self._since = 0, now
        if are_many is not self.is_on:
            self.is_on = are_many
            if are_many:
                self._deferring = [i for i in self._thread_ids if _change_policy(i, os.SCHED_OTHER, os.SCHED_BATCH)]
            else:
                for thread_id in self._deferring:
                    _change_policy(thread_id, os.SCHED_BATCH, os.SCHED_OTHER)


def grpc_threads() -> list[int]:
    """The system's ids of the threads that tell of operations."""
    return [t.native_id for t in threading.enumerate() if _THREAD in t.name and t.native_id is not None]


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine as `asyncio.run` does, in such a loop."""
    with asyncio.Runner(loop_factory=GrpcLoop) as runner:
        runner.run(main)


def _change_policy(thread_id: int, usual: int, wanted: int) -> bool:
    with contextlib.suppress(OSError):  # the thread has ended, or a container forbids it
        if os.sched_getscheduler(thread_id) == usual:
            os.sched_setscheduler(thread_id, wanted, os.sched_param(0))
            return True
    return False


def _handle_all(
    done: socket.socket,
    handle: Callable[..., None],
    deference: Deference,
    clock: Callable[[], float],
    *args: Any,
) -> None:
    num_bytes = len(done.recv(_MOST_BYTES, socket.MSG_PEEK))
    if num_bytes > 1:
        done.recv(num_bytes - 1)
    deference.add(num_bytes, clock())
    handle(*args)
