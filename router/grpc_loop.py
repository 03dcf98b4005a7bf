"""An event loop that hears of many gRPC operations at once.

gRPC's thread puts each operation that is done into a queue and writes a byte into a socket. Its handler, which this
loop calls when the socket can be read, reads one byte and handles all that is in the queue. Under load most bytes then
stand for nothing any more, and each costs a turn of the loop. Here a handler finds the last byte only: what the bytes
before it stand for is in the queue already, as it was put there first.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Coroutine
from typing import Any

_QUEUE = "PollerCompletionQueue"
"""gRPC's class whose handler is meant; with any other name, each byte is handled by itself, as in every loop."""
_MOST_BYTES = 4096


class GrpcLoop(asyncio.SelectorEventLoop):
    """Any loop of a process may be one: gRPC has a socket for each."""

    def add_reader(  # type: ignore[override]  # which names the types of `args`
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        handler = callback.func if isinstance(callback, functools.partial) else callback
        if isinstance(fd, socket.socket) and type(getattr(handler, "__self__", None)).__name__ == _QUEUE:
            callback = functools.partial(_handle_all, fd, callback)
        super().add_reader(fd, callback, *args)


def run(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, in such a loop."""
    with asyncio.Runner(loop_factory=GrpcLoop) as runner:
        runner.run(main)


def _handle_all(done: socket.socket, handle: Callable[..., None], *args: Any) -> None:
    num_bytes = len(done.recv(_MOST_BYTES, socket.MSG_PEEK))
    if num_bytes > 1:
        done.recv(num_bytes - 1)
    handle(*args)
