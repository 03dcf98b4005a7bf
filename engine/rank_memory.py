"""Memory that the ranks of one machine share for their collectives, and how they come to it.

Each rank says in the group's store where it runs. Where all are on one machine, rank 0 makes an anonymous file, which
the others open through its process, so that nothing has a name that could outlive them. All ranks read what all have
said and come to the same: either every one of them has the memory, or none does and all know why. The collectives
themselves are C++ (`engine/native/ranks.cpp`).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import secrets
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from cluster.errors import InternalError, Unavailable
from engine.native import Native, native
from engine.native.structures import RANK_DIED, RANK_DIFFERS, RANK_LEFT, RANK_SUMS, SharedRank

CHUNK_BYTES = 256 << 10
"""What a rank shows at once; of larger tensors as much at a time."""
MAX_RANKS = 64
_SPIN_NS = 20_000
"""How long a wait keeps looking before it sleeps, where every rank has a processor."""
_NAME_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NAMES = (*(f"all_reduce of {dtype}" for dtype in RANK_SUMS), "all_gather", "broadcast", "exchange", "all_to_all")


class RankMemory:
    """The memory as one rank has it. It is gone when the last rank's process is, or has dropped this object."""

    def __init__(self, library: Native, descriptor: int, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._library, self._timeout_s = library, timeout_s
        num_bytes = library.ranks_bytes(size, CHUNK_BYTES)
        self._map = mmap.mmap(descriptor, num_bytes)
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))
        share = num_bytes // size
        ctypes.memset(self._address + rank * share, 0, share)  # each rank's slots lie where its processors are
        self._processes = (ctypes.c_int32 * size)(*[-1] * size)
        self._group = SharedRank(
            memory=self._address,
            processes=ctypes.addressof(self._processes),
            size=size,
            rank=rank,
            chunk_bytes=CHUNK_BYTES,
            timeout=int(timeout_s * 1e9),
            spin=_SPIN_NS if len(os.sched_getaffinity(0)) >= size else 0,
        )
        # The parts, not this object; at the end of the program it stays mapped, since a thread may be inside.
        self._leave = weakref.finalize(self, _leave, library, self._group, self._map)

    @property
    def name(self) -> bytes:
        """Random bytes at the head of the memory, by which the others know it."""
        return self._map[:_NAME_BYTES]

    @name.setter
    def name(self, name: bytes) -> None:
        self._map[:_NAME_BYTES] = name

    def watch(self, pids: list[int]) -> None:
        """Looks, from now on, whether the ranks' processes have ended. Raises OSError for one that has."""
        for rank, pid in enumerate(pids):
            if pid != os.getpid():
                self._processes[rank] = os.pidfd_open(pid)
                weakref.finalize(self, os.close, self._processes[rank]).atexit = False

    def meet(
        self,
        kind: int,
        source: int | None,
        target: int,
        num_bytes: int,
        piece: int = 0,
        destination: int = 0,
        sender: int = 0,
    ) -> None:
        """Carries out a collective of all ranks, from and to addresses of this process. Raises Unavailable when a rank
        is gone or has not come in time, InternalError for ranks that call different ones; no other works then."""
        failed = self._library.ranks_meet(self._group, kind, source, target, num_bytes, piece, destination, sender)
        if failed:
            raise self._error(failed, f"{_NAMES[kind]} of {num_bytes} bytes")

    def close(self) -> None:
        """Ends the group: other ranks that wait fail, and so does whoever comes later."""
        self._leave()

    def _error(self, failed: int, what: str) -> Exception:
        who, theirs = self._group.blamed, self._group.theirs
        if failed == RANK_DIFFERS:
            called = f"{_NAMES[theirs.kind]} of {theirs.bytes} bytes"
            return InternalError(f"rank {who} calls {called} where rank {self.rank} calls {what}")
        if failed == RANK_LEFT:
            return Unavailable(f"rank {who} has closed the group; rank {self.rank} is in {what}")
        if failed == RANK_DIED:
            return Unavailable(f"the process of rank {who} has ended; rank {self.rank} is in {what}")
        if who == self.rank:
            return Unavailable(f"the others waited {self._timeout_s:g} s for rank {who}, which comes to {what}")
        return Unavailable(f"rank {who} was awaited for {self._timeout_s:g} s; rank {self.rank} is in {what}")


def share_memory(store: Store, rank: int, size: int, timeout_s: float) -> tuple[RankMemory | None, str]:
    """The memory, on all ranks of a store at once; or None on all of them, and why."""
    library, obstacle = _library(size)
    told = _Told(store, rank, size, timeout_s)
    present = told("present", obstacle=obstacle, host=_host(), pid=os.getpid())
    if len({said["host"] for said in present}) > 1:
        return None, "they are on several machines, or in containers that do not see each other's processes"
    if why := _first_obstacle(present):
        return None, why
    assert library is not None, "a rank without obstacles has the library"
    memory, descriptor, obstacle = None, -1, ""
    if rank == 0:
        try:
            descriptor = os.memfd_create("baton-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, library.ranks_bytes(size, CHUNK_BYTES))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = RankMemory(library, descriptor, rank, size, timeout_s)
            memory.name = secrets.token_bytes(_NAME_BYTES)
        except OSError as error:
            obstacle = f"it cannot make memory to share: {error.strerror}"
    try:
        name = "" if memory is None else memory.name.hex()
        made = told.of_rank_0("memory", obstacle=obstacle, descriptor=descriptor, name=name)
        if made["obstacle"]:
            return None, _because(0, made["obstacle"])
        pids = [said["pid"] for said in present]
        try:
            if memory is None:
                memory = _open(library, pids[0], made, (rank, size), timeout_s)
            memory.watch(pids)
        except (OSError, ValueError) as error:
            obstacle = f"it cannot open what rank 0 shares: {error}"
        why = _first_obstacle(told("open", obstacle=obstacle))
        return (None, why) if why else (memory, "in memory that they share")
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class _Told:
    """The words of the ranks to each other through the store: a few values under each heading."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout = timedelta(seconds=timeout_s)

    def __call__(self, heading: str, **values: Any) -> list[dict[str, Any]]:
        """Tells the values, and returns every rank's, which it waits for."""
        self._store.set(f"{heading}/{self._rank}", json.dumps(values))
        return [self._read(heading, rank) for rank in range(self._size)]

    def of_rank_0(self, heading: str, **values: Any) -> dict[str, Any]:
        """Rank 0 tells the values; returns them on every rank."""
        if self._rank == 0:
            self._store.set(f"{heading}/0", json.dumps(values))
        return self._read(heading, 0)

    def _read(self, heading: str, rank: int) -> dict[str, Any]:
        key = f"{heading}/{rank}"
        self._store.wait([key], self._timeout)
        said: dict[str, Any] = json.loads(self._store.get(key))
        return said


def _library(size: int) -> tuple[Native | None, str]:
    """What computes the collectives; or None, and why this rank cannot share memory."""
    if sys.platform != "linux":
        return None, "it does not run on Linux"
    if size > MAX_RANKS:
        return None, f"at most {MAX_RANKS} ranks share memory"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return None, f"its kernel cannot watch processes: {error.strerror}"
    library, reason = native()
    return library, "" if library is not None else f"it has none of Baton's own kernels: {reason}"


def _open(library: Native, pid: int, made: dict[str, Any], place: tuple[int, int], timeout_s: float) -> RankMemory:
    """The memory that rank 0 has made. Raises OSError, or ValueError for what is not that."""
    descriptor = os.open(f"/proc/{pid}/fd/{made['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as head:
            if seals & _SEALS != _SEALS or head[:_NAME_BYTES].hex() != made["name"]:
                raise ValueError("it is something else")
        return RankMemory(library, descriptor, *place, timeout_s)
    finally:
        os.close(descriptor)


def _host() -> str:
    """The same for processes that see each other: this boot of this machine, and the processes that are seen."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _first_obstacle(said: list[dict[str, Any]]) -> str:
    return next((_because(rank, one["obstacle"]) for rank, one in enumerate(said) if one["obstacle"]), "")


def _because(rank: int, obstacle: str) -> str:
    return f"rank {rank} says that {obstacle}"


def _leave(library: Native, group: SharedRank, _: mmap.mmap) -> None:
    library.ranks_leave(group)
