"""A real Redis: Debian's redis-server on a free port, that is killed, started again, stopped and flushed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import redis

_START_S = 20.0


def find_redis_server() -> str:
    """Beside this Python (where `make setup` may have put it), or on the path."""
    beside = Path(sys.executable).parent / "redis-server"
    found = shutil.which("redis-server") or (str(beside) if beside.exists() else None)
    assert found, "there is no redis-server: install Debian's package redis-server, or run `make setup`"
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """Keeps nothing on disk: one that was killed comes back empty."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        flags = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--daemonize",
            "no",
        ]
        # A title would overwrite the environment, by which a process that was left behind is found.
        flags += ["--set-proc-title", "no"]
        self._process = subprocess.Popen(
            [find_redis_server(), *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/"
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"eady to accept connections" in line:
                return
        raise AssertionError(f"redis-server ended with {self._process.wait(_START_S)} instead of starting")

    def kill(self) -> None:
        """As kill -9 does, whatever state it is in."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_START_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def pause(self) -> None:
        """It stands still, with its connections open; returns when it does."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)
        assert stopped is not None and stopped.si_code == os.CLD_STOPPED

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def flush(self) -> None:
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            client.flushall()

    def num_keys(self) -> int:
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            return int(client.dbsize())  # type: ignore[arg-type]


@contextlib.contextmanager
def running_redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    try:
        yield server
    finally:
        server.kill()
