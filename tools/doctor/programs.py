"""Questions to Baton's own programs, each a process: what torch, NCCL and the tokenizer say is found out apart.

A program that hangs (in a driver, on a dead network file system) is killed when its time is up; `close` kills whatever
runs. Answers are JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import BatonError
from cluster.program import child_environment

Part = Mapping[str, Any]
"""`{"found": ...}` or `{"refused": "why"}`."""


class NoAnswer(BatonError):
    """A program ended without an answer, or was ended. The check `programs` says so; others are skipped."""


class Question:
    """A program that runs from now on, in a process of its own."""

    def __init__(
        self, module: str, arguments: Sequence[str] = (), asked: object = None, *, limit_s: float = 30.0
    ) -> None:
        """`limit_s`: from now on, for its answer."""
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self.name = f"python -m {module}"
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
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # one that died says why on its stderr
            stdin.write(json.dumps(asked))
        self._process.stdin = None

    def answer(self) -> Any:
        """From any thread; all get the same one. Raises NoAnswer."""
        with self._lock:
            if not self._is_read:
                self._read()
                self._is_read = True
            if self._failure:
                raise NoAnswer(self._failure)
            return self._answer

    def close(self) -> None:
        """From any thread, whoever waits for the answer."""
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
