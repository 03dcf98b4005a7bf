"""Gives birth to workers and routers quickly: one parent that has imported everything forks them.

Importing torch is nine tenths of a worker's start, and tests start hundreds. A child runs what `python -m worker` or
`python -m router` runs, from its settings on, as a process of its own with its own standard streams and the session's
environment; it may enter a namespace first. `call` forks a process for a function of a test's own. When the
session that asked goes away, so does the nursery, and its children with it.

    session --(module, settings, environment, namespace; stdout and stderr)--> nursery --fork--> worker or router
    session --(function, arguments, environment; stdout, stderr and stdin)---> nursery --fork--> the function
    session <--(pid), later (pid, exit code)---------------------------------- nursery
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import importlib
import json
import logging
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
_MAX_MESSAGE_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])),
    "OMP_NUM_THREADS": "1",
}


class Child:
    """What `subprocess.Popen` offers of a process, for one that the nursery has forked."""

    def __init__(self, pid: int, stdout: Any, stdin: Any = None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stdin = stdin
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The session's end. `bear` from one thread at a time."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables that it and its children have beside this process's own."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            )
        self._born: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._children: dict[int, Child] = {}
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def bear(self, module: str, settings_json: str, stderr: int, namespace: str = "") -> Child:
        """A process of that module, `worker` or `router`, that writes its errors to `stderr`; in that namespace if one
        is given: the name of a network's, or the path of any."""
        return self._fork({"module": module, "settings": settings_json, "namespace": namespace}, stderr)

    def call(self, function: str, *arguments: str) -> Child:
        """A process that calls a function, `module:name`, with standard input and output of its own."""
        reading, writing = os.pipe()
        try:
            return self._fork({"function": function, "arguments": arguments}, 2, reading, os.fdopen(writing, "w"))
        finally:
            os.close(reading)

    def _fork(self, request: dict[str, Any], stderr: int, stdin: int | None = None, to_stdin: Any = None) -> Child:
        reading, writing = os.pipe()
        message = json.dumps({**request, "environment": {**os.environ, **_ENVIRONMENT}}).encode()
        socket.send_fds(self._socket, [message], [writing, stderr, *([] if stdin is None else [stdin])])
        os.close(writing)
        pid = self._born.get(timeout=WAIT_S)
        child = Child(pid, os.fdopen(reading, encoding="utf-8"), to_stdin)
        with self._lock:
            self._children[pid] = child
            if pid in self._codes:  # it has ended already
                self._end(pid, self._codes.pop(pid))
        return child

    def close(self) -> None:
        """Ends the nursery and every child that is left."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self._socket.close()

    def _read(self) -> None:
        while message := self._socket.recv(_MAX_MESSAGE_BYTES):
            news = json.loads(message)
            if "code" not in news:
                self._born.put(news["pid"])
                continue
            with self._lock:
                self._end(news["pid"], news["code"])

    def _end(self, pid: int, code: int) -> None:
        child = self._children.pop(pid, None)
        if child is None:
            self._codes[pid] = code
            return
        child.returncode = code
        child.ended.set()


_of_session: list[Nursery] = []


def nursery_of_session() -> Nursery:
    """The one that all tests share; `close_nursery` ends it."""
    if not _of_session:
        _of_session.append(Nursery())
    return _of_session[0]


def close_nursery() -> None:
    while _of_session:
        _of_session.pop().close()


def _serve(connection: socket.socket) -> None:
    """The parent of all: forks on request, tells who has ended. Its end, when the session is gone, is theirs."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    with selectors.DefaultSelector() as ready:
        ready.register(reading, selectors.EVENT_READ)
        ready.register(connection, selectors.EVENT_READ)
        is_open = True
        while is_open:
            for key, _ in ready.select():
                if key.fd == reading:
                    os.read(reading, 4096)
                    _reap(children, connection)
                else:
                    is_open = _bear(connection, children)


def _reap(children: set[int], connection: socket.socket) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):  # the session is gone, which the next read tells
            connection.send(json.dumps({"pid": pid, "code": code}).encode())


def _bear(connection: socket.socket, children: set[int]) -> bool:
    """False when the session is gone."""
    try:
        message, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 3)
    except ConnectionResetError:
        return False
    if not message:
        return False
    pid = os.fork()
    if pid == 0:
        connection.close()
        _live(json.loads(message), *fds)
    for fd in fds:
        os.close(fd)
    children.add(pid)
    connection.send(json.dumps({"pid": pid}).encode())
    return True


def _live(request: dict[str, Any], stdout: int, stderr: int, stdin: int = 0) -> None:
    """The child's whole life; does not return."""
    code = 70
    try:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(request["environment"])
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.dup2(stdin, 0)
        if "function" in request:
            module, _, name = request["function"].partition(":")
            getattr(importlib.import_module(module), name)(*request["arguments"])
            code = 0
        else:
            code = _host(request)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _host(request: dict[str, Any]) -> int:
    """Runs a program; returns its exit code."""
    from cluster.program import host_in_shell

    if request["namespace"]:
        _enter(request["namespace"])
    create = importlib.import_module(f"{request['module']}.program").create
    return host_in_shell(create, request["settings"])


def _enter(namespace: str) -> None:
    """What `ip netns exec` does with the network, and `nsenter` with others."""
    folder = os.getcwd()
    with open(os.path.join("/run/netns", namespace), encoding="utf-8") as file:
        _call("setns", file.fileno(), 0)
    os.chdir(folder)  # that of mounts begins at the root


def _call(function: str, *arguments: int) -> None:
    """A function of the C library that answers 0 when it is well."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {errno.errorcode[ctypes.get_errno()]}")


if __name__ == "__main__":
    import torch

    import router.program  # noqa: F401 (imported once, for every child)
    import worker.program  # noqa: F401

    torch.set_num_threads(1)
    faulthandler.enable()  # a child that is told SIGABRT writes to its stderr where each of its threads is
    _serve(socket.socket(fileno=int(sys.argv[1])))
