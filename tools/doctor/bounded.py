"""Work that may hang, done where it holds up nobody: functions on daemon threads, Baton's programs in processes.

A thread that hangs (in a driver, on a dead network file system) is left alone; a program that hangs is killed when its
time is up. Neither delays the end of this process.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from cluster.errors import BatonError
from cluster.program import child_environment

T = TypeVar("T")
Part = Mapping[str, Any]
"""One entry of a program's answer: `{"found": ...}` or `{"refused": "why"}`."""


def on_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Starts `work` on a daemon thread. The future raises what `work` raised."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class NoAnswer(BatonError):
    """A program ended or was killed without an answer. The check `programs` reports it; other checks are skipped."""


class ProgramRun:
    """Runs `python -m MODULE` with `request` as JSON on stdin, and reads JSON from its stdout.

    The program starts at once; `answer` waits for it and `close` kills it. Both may be called from any thread.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), request: object = None, *, limit_s: float = 30.0
    ) -> None:
        """`limit_s`: seconds from now within which the program must answer."""
        self.name = f"python -m {module}"
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self._lock = threading.Lock()
        self._answer: Any = None
        self._failure = ""
        self._is_read = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        # A program that has died already explains itself on its stderr.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(request))
        self._process.stdin = None

    def answer(self) -> Any:
        """Waits for the answer, which every caller gets. Raises NoAnswer."""
        with self._lock:
            if not self._is_read:
                self._read()
                self._is_read = True
            if self._failure:
                raise NoAnswer(self._failure)
            return self._answer

    def close(self) -> None:
        """Kills the program if it still runs; whoever waits for its answer gets NoAnswer."""
        if self._process.poll() is None:
            self._process.kill()
        with self._lock:
            if not self._is_read:
                self._process.communicate()
                self._failure, self._is_read = "it was ended", True

    def _read(self) -> None:
        try:
            out, errors = self._process.communicate(timeout=max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            self._failure = f"`{self.name}` did not answer within {self._limit_s:g} s"
            return
        last = errors.strip().rpartition("\n")[2]
        try:
            self._answer = json.loads(out)
        except ValueError:
            self._failure = f"`{self.name}` ended with code {self._process.returncode} instead of an answer: {last}"
