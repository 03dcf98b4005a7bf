"""The interface between a program and its host, a shell (`python -m worker`) or a Ray actor (`controller.ray_actors`),
and what Baton's programs need of the operating system: signals, priority, exit codes, files replaced at once.

A program package (`worker`, `router`) offers `program.create(settings_json, report)`; the host calls `prepare`,
`start`, `wait`, and `stop` from any thread. Nothing here knows which program it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self

from cluster.errors import BatonError, CheckpointError, ConfigError

MOST_LOG_BYTES = 64 * 1024 * 1024
"""Size of a log file at which another one is begun; one older file is kept."""
Report = Callable[[str], None]
"""Called with one line of progress at a time, such as `loading weights: 3 of 8 files`."""
SOURCE_ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds Baton's packages."""


class Program(Protocol):
    """One process's work. Errors at start are raised by `start` as `cluster.errors.BatonError`."""

    def prepare(self) -> str:
        """Binds what others need before `start`; returns it as JSON (rank 0: `{"rank_address": "host:port"}`)."""
        ...

    def start(self) -> str:
        """Blocks until ready to serve; returns the program's address card as JSON (`{"address": "host:port", ...}`)."""
        ...

    def wait(self) -> None:
        """Blocks until stopped; raises what ended the program if it failed."""
        ...

    def stop(self) -> None:
        """Asks for a clean end; returns at once; idempotent."""
        ...


@dataclass(frozen=True)
class ExitCode:
    """Exit codes of every Baton program."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    BAD_CONFIG = 3
    NOT_REACHABLE = 4


def child_environment() -> dict[str, str]:
    """This process's environment, with Baton's packages on PYTHONPATH: `python -m worker` works from any folder."""
    path = os.pathsep.join(filter(None, [str(SOURCE_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def replace_text(path: Path, text: str, mode: int) -> None:
    """Replaces a file whole or not at all: a reader sees the old text or the new one. It has this mode from the start;
    where root writes, it stays its owner's. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            if os.geteuid() == 0 and path.exists():
                old = path.stat()
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def raise_file_limit() -> int:
    """Lets this process open as many files and connections as the system allows it; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems say "no limit" and do not mean it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


_LEAST_NICE = 19
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Calls `on_signal` for each SIGINT and SIGTERM, on a thread of its own. `start` it, or enter it as a context, on
    the main thread.

    Python runs its handlers on the main thread alone, once that returns to Python: while it waits for a lock, nothing
    wakes it when the kernel has interrupted another thread, and the handler never runs. So the handlers here do
    nothing; a thread waits for what Python writes at C level to a socket, on whichever thread was interrupted.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def start(self) -> None:
        """Begins; until the context is left, or the process ends."""
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        self.take_over()

    def take_over(self) -> None:
        """Puts the handlers in place, again after a library has set its own."""
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()

    def _listen(self) -> None:
        with self._reader:
            while data := self._reader.recv(64):
                for number in data:
                    if number in _SIGNALS:
                        self._on_signal()


def give_way() -> None:
    """Gives the calling thread, and those that it makes from now on, the lowest priority (on Linux, where niceness is a
    thread's; elsewhere it is the process's, and nothing happens).

    Where steps take every core, a token reaches its client over some seven threads of three processes, each of which
    would otherwise wait a few milliseconds for its turn.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_NICE)


def import_behind(name: str) -> ModuleType:
    """Imports a module at the lowest priority, and raises what the import raises. torch alone is seconds of work, which
    would slow the other workers while one is started again."""
    failures: list[BaseException] = []

    def load() -> None:
        give_way()
        try:
            importlib.import_module(name)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=load, name="import", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return sys.modules[name]


def host_in_shell(create: Callable[[str, Report], Program], settings_json: str) -> int:
    """Runs a program in the foreground: progress on stderr, one JSON line on stdout when ready, SIGTERM/SIGINT end it.

    Returns an exit code.
    """

    def report(line: str) -> None:
        with contextlib.suppress(OSError):  # stderr is a file on a full disk, or a pipe that nobody reads any more
            print(line, file=sys.stderr, flush=True)

    try:
        program = create(settings_json, report)
        Signals(program.stop).start()
        prepared = json.loads(program.prepare())
        if prepared:
            print(json.dumps({"event": "prepared", **prepared}), flush=True)
        ready = json.loads(program.start())
        print(json.dumps({"event": "ready", **ready}), flush=True)
        program.wait()
    except (ConfigError, CheckpointError) as error:
        report(f"error: {error}")
        return ExitCode.BAD_CONFIG
    except BatonError as error:
        report(f"error: {error}")
        return ExitCode.FAILED
    finally:
        _drop_what_stderr_does_not_take()
    return ExitCode.DONE


def free_memory_bytes() -> int:
    """Returns the memory of this machine, or of the container, that processes can still take."""
    free = [_system_bytes(), _container_bytes()]
    return min(count for count in free if count is not None)


def _system_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_bytes() -> int | None:
    """Bytes that a cgroup (version 2) leaves; None where there is no limit."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not (limit.exists() and used.exists()) or (text := limit.read_text().strip()) == "max":
        return None
    return max(0, int(text) - int(used.read_text()))


def _drop_what_stderr_does_not_take() -> None:
    """Empties stderr's buffer: Python would try to write it once more at its exit, and end with code 120."""
    try:
        sys.stderr.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)
