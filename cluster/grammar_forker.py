"""The process that forks one for each grammar (`cluster.grammar_process`), as the process that started it sees it.

It loads the tokenizer's tokens once. It has a socket here, and ends when that closes; a thread here hears from it how
its children ended. Questions to all children go to it in one message, and it passes them on: a step costs the thread
that asks one wake-up, however many grammars its rows have.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
from array import array
from concurrent.futures import CancelledError, Future

from cluster.grammar_protocol import CONTROL, CONTROL_BYTES, FORK, FRAME, HELLO, KILL
from cluster.program import child_environment

START_TIMEOUT_S = 60.0
_SEND_TIMEOUT_S = 5.0


class GrammarForker:
    """The process that forks, and how its children ended."""

    def __init__(self, definition: str, vocab_size: int) -> None:
        """Raises ValueError for a tokenizer that the library does not take, or without the library."""
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError("output cannot be constrained without llguidance: pip install llguidance")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self._their_socket = socket.socketpair()
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self.questions = array("I")
        """Rows of questions to children that `flush` sends."""
        self._answers_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._has_answers = select.poll()
        self._has_answers.register(self._answers_fd, select.POLLIN)
        command = [sys.executable, "-m", "cluster.grammar_process", str(theirs.fileno())]
        with theirs:
            self._popen = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=child_environment(),
            )
        self._numbers = itertools.count(1)
        self._exits: dict[int, Future[int]] = {}
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        try:
            self.end_token_ids = self._greet(definition, vocab_size)
        except BaseException:
            self._popen.kill()
            self._popen.wait()
            self._control.close()
            raise
        threading.Thread(target=self._listen, name="grammar-exits", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set() or self._popen.poll() is not None

    @property
    def num_live(self) -> int:
        return len(self._exits)

    def fork(self, fds: list[int]) -> int:
        """Returns the number of the new child, which gets copies of the descriptors. Raises OSError where this process
        has ended."""
        with self._lock:
            number = next(self._numbers)
            self._exits[number] = Future()
        try:
            socket.send_fds(self._control, [CONTROL.pack(FORK, number, 0)], fds)
        except OSError:
            self._has_ended.set()
            raise
        return number

    def kill(self, number: int) -> None:
        """Ends a child that has not ended; nobody asks about it any more."""
        self._exits.pop(number, None)
        with contextlib.suppress(OSError):
            self._control.send(CONTROL.pack(KILL, number, 0))

    def exit_status(self, number: int) -> int | None:
        """Returns how a child ended, as `os.waitpid` says; None: unknown, since this process has ended."""
        future = self._exits.get(number)
        try:
            return None if future is None else future.result(1.0)
        except (TimeoutError, CancelledError):
            return None

    def has_exited(self, number: int) -> bool:
        """Whether a child, or this process, is known to have ended."""
        future = self._exits.get(number)
        return self.has_ended or future is None or future.done()

    def flush(self) -> None:
        """Sends the questions that were noted; a failure shows where answers are missing. By the thread that asks."""
        if self.questions:
            frame = FRAME.pack(self.questions.itemsize * len(self.questions)) + self.questions.tobytes()
            del self.questions[:]
            try:
                self._socket.sendall(frame)
            except TimeoutError:  # it reads nothing any more, and has half a frame
                self._popen.kill()
            except OSError:
                self._has_ended.set()

    def wait(self, timeout_s: float) -> None:
        """Waits for an answer, or for the end of a child: any since the last call. By the thread that asks."""
        if self._has_answers.poll(1000 * timeout_s):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._answers_fd)

    def close(self) -> None:
        self._control.shutdown(socket.SHUT_RDWR)
        self._popen.wait()

    def __del__(self) -> None:
        if hasattr(self, "_answers_fd"):
            os.close(self._answers_fd)
            self._socket.close()
            self._their_socket.close()

    def _greet(self, definition: str, vocab_size: int) -> list[int]:
        fd = os.memfd_create("tokenizer")
        try:
            with open(fd, "w", encoding="utf-8", closefd=False) as file:
                file.write(definition)
            fds = [fd, self._their_socket.fileno(), self._answers_fd]
            socket.send_fds(self._control, [HELLO.pack(vocab_size)], fds)
            self._their_socket.close()
        finally:
            os.close(fd)
        self._control.settimeout(START_TIMEOUT_S)
        reply = self._control.recv(CONTROL_BYTES)
        self._control.settimeout(None)
        if not reply:
            raise OSError("the process that compiles grammars ended while it started")
        found = json.loads(reply)
        if "error" in found:
            raise ValueError(found["error"])
        return list(found["end_token_ids"])

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while message := self._control.recv(CONTROL_BYTES):
                _, number, status = CONTROL.unpack(message)
                future = self._exits.get(number)
                if future is not None:
                    future.set_result(status)
                    os.eventfd_write(self._answers_fd, 1)
        self._has_ended.set()
        for future in list(self._exits.values()):
            future.cancel()
        os.eventfd_write(self._answers_fd, 1)
        self._popen.wait()
        self._control.close()
