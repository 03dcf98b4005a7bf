"""The record of what a worker was computing when its process ended by itself.

    CrashRecord, in the worker     names the requests of each step before it runs; a fatal signal or `failed` adds why
    CrashReader, in a router       opened while the worker lives, read once the session with it has ended

The record is a memory file (memfd), opened by routers of the same machine through /proc: it stays readable after the
death of the worker for as long as somebody holds it open, and leaves nothing behind. A process that was killed from
outside, or whose machine was lost, adds no cause. The kernel's out-of-memory killer leaves none either, but counts: a
worker that is gone while its control group's count has risen since it was last known to live, ended by itself. Where a
router cannot open the record (another machine, another container), nothing is known of the cause.

    0..8 magic · 8..40 incarnation · 40..44 bytes of names · 44.. names, one a line · SIZE_BYTES.. the cause
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 256 * 1024
"""Bytes of the part before the cause: some 8,000 requests."""
MOST_CAUSE_BYTES = 16 * 1024
_MOST_COUNT_BYTES = 16 * 1024
_MAGIC = b"batoncr1"
_HEADER = struct.Struct("<8s32sI")


class CrashRecord:
    """The record of this process, written by its engine thread."""

    def __init__(self, incarnation: str) -> None:
        self._fd = os.memfd_create("baton-crash-record")
        os.ftruncate(self._fd, SIZE_BYTES)
        self._map = mmap.mmap(self._fd, SIZE_BYTES)
        _HEADER.pack_into(self._map, 0, _MAGIC, incarnation.encode(), 0)
        os.lseek(self._fd, SIZE_BYTES, os.SEEK_SET)
        self._names: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        """The path at which a process of the same machine and user opens it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def follow_signals(self) -> None:
        """Adds a traceback when a fatal signal (SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL) ends the process."""
        faulthandler.enable(self._fd)

    def step_begins(self, request_ids: Iterable[str]) -> None:
        """Names the requests of a step that is launched."""
        names = frozenset(request_ids)
        if names == self._names:
            return
        data = "\n".join(names).encode()[: SIZE_BYTES - _HEADER.size]
        self._set_length(0)
        self._map[_HEADER.size : _HEADER.size + len(data)] = data
        self._set_length(len(data))
        self._names = names

    def rests(self) -> None:
        """No step runs."""
        if self._names:
            self._set_length(0)
            self._names = frozenset()

    def failed(self, cause: str) -> None:
        """The step that runs ends the process."""
        os.write(self._fd, cause.encode())

    def _set_length(self, num_bytes: int) -> None:
        struct.pack_into("<I", self._map, _HEADER.size - 4, num_bytes)


@dataclass(frozen=True)
class Crash:
    """The record of a process that ended by itself."""

    request_ids: frozenset[str]
    """The requests of the step that ran; empty: none ran."""
    cause: str
    """A traceback, or the error of the step."""


class CrashReader:
    """The record of a worker of this machine."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._oom_fd = _open_oom_count(path.split("/")[2])
        self._num_oom_kills = self._count_oom_kills()

    @classmethod
    def open(cls, path: str, incarnation: str) -> CrashReader | None:
        """None where it cannot be opened, or is another process's."""
        if not path.startswith("/proc/"):
            return None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            header = os.pread(fd, _HEADER.size, 0)
            if len(header) == _HEADER.size:
                magic, found, _ = _HEADER.unpack(header)
                if magic == _MAGIC and found.rstrip(b"\0") == incarnation.encode():
                    return cls(fd, path)
        os.close(fd)
        return None

    def lives(self) -> None:
        """The worker has just been heard of: the kernel has not ended it for want of memory before."""
        self._num_oom_kills = self._count_oom_kills()

    def read(self) -> Crash | None:
        """None: the process lives, or did not end by itself."""
        cause = os.pread(self._fd, MOST_CAUSE_BYTES, SIZE_BYTES).decode(errors="replace") or self._out_of_memory()
        if not cause:
            return None
        _, _, num_bytes = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))
        names = os.pread(self._fd, num_bytes, _HEADER.size).decode(errors="replace")
        return Crash(frozenset(names.splitlines()), cause)

    def close(self) -> None:
        os.close(self._fd)
        if self._oom_fd is not None:
            os.close(self._oom_fd)

    def _out_of_memory(self) -> str:
        """The cause, if it was that; else empty. A process that ends leaves its descriptors before they are closed."""
        if os.path.lexists(self._path) or self._count_oom_kills() == self._num_oom_kills:
            return ""
        return "the kernel's out-of-memory killer ended it: give it more memory, or less to do at a time"

    def _count_oom_kills(self) -> int:
        """Processes of the worker's control group that the kernel has killed for want of memory; 0: it does not say."""
        if self._oom_fd is None:
            return 0
        with contextlib.suppress(OSError):  # the group may be gone with its last process
            for line in os.pread(self._oom_fd, _MOST_COUNT_BYTES, 0).splitlines():
                name, _, value = line.partition(b" ")
                if name == b"oom_kill":
                    return int(value)
        return 0


def _open_oom_count(pid: str) -> int | None:
    """Opens the file that counts them for the process's control group, else the machine's; None where there is none."""
    paths = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                paths.append(f"/sys/fs/cgroup{group}/memory.events")
            elif "memory" in controllers.split(","):
                paths.append(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
    for path in (*paths, "/proc/vmstat"):
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
