"""Pairs whose two sides see the same slots: the sender gathers into them, the receiver scatters out of them.

`shm` and `cuda_ipc` provide the memory and share it by a file descriptor. This module has the meeting of two processes
of one host and the notes that they exchange, over a Unix socket of fixed-size packets:

    sender                          receiver
      HELLO + descriptor   ->                      what is shared; refused unless it is exactly what was expected
                           <-   MAPPED
      FILLED slot, bytes   ->                      for each send; a receive waits for it
                           <-   RELEASED slot      the receiver has read the slot; a send waits for it

The socket is the pair's life: a process that dies, however it dies, closes it, which wakes the other side at once.
Nothing has a name in a file system, so nothing can be left behind. A ring serves one pair once: a process that was
stopped and wakes up later finds its socket closed, and what it may still write goes where nobody reads any more.
A note that makes no sense ends the pair.

Where pages are shared, a second descriptor and the hello's number of blocks are those of the sender's KV pool, and a
slot says where in it a chunk lies. A sender closes the pair before it writes to pages that the receiver may still read,
and a note to a socket that is shut down fails at once: so a RELEASED that could be sent proves that what was read was
whole.

There is no thread here: one of the waiting threads reads the notes for all of them. It also tells of slots that a GPU
was still filling when they were sent, in the order of the sends: until a slot is full, the other side knows nothing.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor

from cluster.errors import TransferFailed
from kv_transfer.transports.interface import Meeting, PoolMemory, TransferWork, reason_of

MAGIC = b"BtRg\x01"
AT_ONCE_S, CALL_AGAIN_S, ASK_AGAIN_S = 0.1, 0.002, 0.0002
"""Seconds between checks that the pair is still wanted, between calls to a sender that is late, and between looks at a
GPU that is still filling a slot."""

_HELLO = struct.Struct("<5s11sIIQ")  # magic, kind of memory, slots, blocks of a shared pool or 0, bytes of a slot
_NOTE = struct.Struct("<BxxxIQ")  # kind, slot, bytes
_MAPPED, _FILLED, _RELEASED = 1, 2, 3
_CREDENTIALS = struct.Struct("3i")


class SharedMemory(Protocol):
    """Memory that two processes of one host can both use. Both methods raise TransferFailed."""

    kind: str
    """Up to 11 letters: the name of the transport."""

    def make(self, meeting: Meeting) -> tuple[list[Tensor], int]:
        """New slots, and a file descriptor by which the other side maps them; the caller closes the latter."""
        ...

    def attach(self, meeting: Meeting, descriptor: int) -> list[Tensor]:
        """The slots behind a descriptor from the other side, which is not to be trusted."""
        ...


class SharedPool:
    """The KV pools of both sides, of which the receiver maps the sender's."""

    def __init__(self, kind: str, pages: Tensor, memory: PoolMemory) -> None:
        """`kind`: the name of the transport. `pages` is this side's pool, [L, 2, N, B, H, D], in `memory`."""
        self.kind = kind
        self._pages = pages
        self._memory = memory

    @property
    def num_blocks(self) -> int:
        """The number of blocks of this side's pool."""
        return self._pages.shape[2]

    def export(self) -> int:
        """A descriptor of this side's pool, which the caller closes. Raises TransferFailed."""
        return self._memory.export()

    def attach(self, descriptor: int, num_blocks: int) -> Tensor:
        """The pages of a pool of so many blocks, which differs from this side's in nothing else. Raises
        TransferFailed."""
        layers, two, own_blocks, *token = self._pages.shape
        raw = self._memory.attach(descriptor, self._pages.nbytes // own_blocks * num_blocks)
        return raw.view(self._pages.dtype).view(layers, two, num_blocks, *token)


class RingPair:
    """One side. The memory is given back with the last reference to a slot."""

    def __init__(self, meeting: Meeting, memory: SharedMemory, pool: SharedPool | None = None) -> None:
        """Blocks until the other side is there. `pool`: pages are shared, and slots are its own. Raises
        TransferFailed."""
        self.name = f"{(pool or memory).kind} pair {meeting.prefix}"
        self._is_sender = meeting.is_sender
        self.pages: Tensor | None = None
        try:
            if meeting.is_sender:
                self._socket, self.slots = _offer(meeting, memory, pool)
            else:
                self._socket, self.slots, self.pages = _accept(meeting, memory, pool)
        except (OSError, RuntimeError, struct.error) as error:
            raise TransferFailed(f"{self.name} was not made: {reason_of(error)}") from error
        except TransferFailed as error:
            raise TransferFailed(f"{self.name} was not made: {error.message}") from error
        self._changed = threading.Condition()
        self._filled: dict[int, int] = {}  # slot -> bytes, of slots that are the receiver's
        self._filling: deque[tuple[int, int, Any]] = deque()  # slot, bytes, event: sent, and to be told of after it
        self._ended: str | None = None  # why
        self._is_reading = self._is_closed = False

    def __repr__(self) -> str:
        return self.name

    def send(self, slot: int, num_bytes: int, after: torch.cuda.Event | None = None) -> TransferWork:
        with self._changed:
            self._check_alive("send")
            self._filling.append((slot, num_bytes, after))
            self._tell_of_full_slots()

        def is_read() -> bool:
            return slot not in self._filled and all(slot != other for other, _, _ in self._filling)

        return _RingWork(self, f"send on {self.name}", is_read)

    def receive(self, slot: int, num_bytes: int) -> TransferWork:
        with self._changed:
            self._check_alive("receive")

        def has_landed() -> bool:
            found = self._filled.get(slot)
            if found not in (None, num_bytes):
                raise TransferFailed(f"receive on {self.name} failed: {found} bytes came, {num_bytes} were expected")
            return found is not None

        return _RingWork(self, f"receive on {self.name}", has_landed)

    def release(self, slot: int) -> None:
        with self._changed:
            self._filled.pop(slot, None)
            self._notify("release", _RELEASED, slot, 0)

    def close(self) -> None:
        with self._changed:
            self._ended = self._ended or "the pair was closed"
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            with suppress(OSError):  # the other side has gone already
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes who reads, here and there
            self._changed.wait_for(lambda: not self._is_reading)
            self._socket.close()
            self.slots, self.pages = [], None

    def wait(self, name: str, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `is_done`, which is called with the lock held. Raises TransferFailed."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                self._tell_of_full_slots()
                self._changed.wait_for(
                    lambda: is_done() or self._ended or not self._is_reading, max(0.0, deadline - time.monotonic())
                )
                if self._is_closed:
                    raise TransferFailed(f"{name} failed: {self._ended}")
                if is_done():
                    return
                if self._ended:
                    raise TransferFailed(f"{name} failed: {self._ended}")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TransferFailed(f"{name} failed: Timed out after {timeout_s:.1f} s")
                self._is_reading, is_filling = True, bool(self._filling)
            note, ended = b"", None
            if is_filling:
                time.sleep(ASK_AGAIN_S)  # a poll would take a millisecond at least
                left_s = 0.0
            try:
                if _is_readable(self._socket, left_s):
                    note = self._socket.recv(_NOTE.size + 1, socket.MSG_DONTWAIT)
                    ended = None if note else "the other side closed the pair or died"
            except OSError as error:
                ended = reason_of(error)
            with self._changed:
                self._is_reading = False
                if note:
                    ended = self._take(note)
                self._ended = self._ended or ended
                self._changed.notify_all()

    def _take(self, packet: bytes) -> str | None:
        """Records a note of the other side; returns why it is wrong, or None."""
        if len(packet) != _NOTE.size:
            return f"a note of {len(packet)} bytes came, which is none"
        kind, slot, num_bytes = _NOTE.unpack(packet)
        is_due = kind == (_RELEASED if self._is_sender else _FILLED) and slot < len(self.slots)
        if not is_due or (slot in self._filled) is not self._is_sender:
            return f"an unexpected note came: {kind} for slot {slot}"
        if self._is_sender:
            del self._filled[slot]
        else:
            self._filled[slot] = num_bytes
        return None

    def _tell_of_full_slots(self) -> None:
        """Nothing more is told by a pair that has ended."""
        while self._filling and not self._ended and (self._filling[0][2] is None or self._filling[0][2].query()):
            slot, num_bytes, _ = self._filling.popleft()
            self._filled[slot] = num_bytes
            self._notify("send", _FILLED, slot, num_bytes)

    def _notify(self, operation: str, kind: int, slot: int, num_bytes: int) -> None:
        self._check_alive(operation)
        try:
            self._socket.send(_NOTE.pack(kind, slot, num_bytes), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            self._ended = f"the other side cannot be notified: {reason_of(error)}"
            self._changed.notify_all()
            raise TransferFailed(f"{operation} on {self.name} failed: {self._ended}") from error

    def _check_alive(self, operation: str) -> None:
        if self._is_closed:
            raise TransferFailed(f"{self.name} is closed")
        if self._ended:
            raise TransferFailed(f"{operation} on {self.name} failed: {self._ended}")


class _RingWork:
    def __init__(self, pair: RingPair, name: str, is_done: Callable[[], bool]) -> None:
        self._pair = pair
        self._name = name
        self._is_done = is_done

    def wait(self, timeout_s: float) -> None:
        self._pair.wait(self._name, self._is_done, timeout_s)


def platform_obstacle() -> str | None:
    """Why two processes cannot share memory on this system, or None."""
    if sys.platform == "linux" and hasattr(socket, "SOCK_SEQPACKET"):
        return None
    return f"it shares memory in a way that {sys.platform} does not have"


def _offer(meeting: Meeting, memory: SharedMemory, pool: SharedPool | None) -> tuple[socket.socket, list[Tensor]]:
    """The sender's part of meeting: it shares the memory it has made, and its pool, with the first caller."""
    deadline = time.monotonic() + meeting.timeout_s
    slots, descriptor = memory.make(meeting)
    descriptors = [descriptor]
    try:
        if pool is not None:
            descriptors.append(pool.export())
        with _new_socket() as listener:
            listener.bind(_address(meeting))
            listener.listen(1)
            while not _is_readable(listener, AT_ONCE_S):
                _check_time(meeting, deadline)
            connection, _ = listener.accept()
        try:
            _check_peer(connection)
            kind, num_blocks = (memory.kind, 0) if pool is None else (pool.kind, pool.num_blocks)
            hello = _HELLO.pack(MAGIC, kind.encode(), meeting.num_slots, num_blocks, meeting.slot_bytes)
            socket.send_fds(connection, [hello], descriptors)
            answer = _receive(meeting, connection, _NOTE.size, deadline)[0]
            if len(answer) != _NOTE.size or _NOTE.unpack(answer)[0] != _MAPPED:
                raise TransferFailed("the other side went away while the pair was made")
        except BaseException:
            connection.close()
            raise
    finally:
        _close_all(descriptors)
    return connection, slots


def _accept(
    meeting: Meeting, memory: SharedMemory, pool: SharedPool | None
) -> tuple[socket.socket, list[Tensor], Tensor | None]:
    """The receiver's part: it maps the sender's memory, if that is what both have agreed on, and its pool, if any."""
    deadline = time.monotonic() + meeting.timeout_s
    connection = _call(meeting, deadline)
    try:
        _check_peer(connection)
        kind, count = (memory.kind, 1) if pool is None else (pool.kind, 2)
        descriptors, num_blocks = _receive_hello(connection, meeting, kind, count, deadline)
        try:
            slots = memory.attach(meeting, descriptors[0])
            pages = None if pool is None else pool.attach(descriptors[1], num_blocks)
        finally:
            _close_all(descriptors)
        connection.send(_NOTE.pack(_MAPPED, 0, 0), socket.MSG_NOSIGNAL)
    except BaseException:
        connection.close()
        raise
    return connection, slots, pages


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _call(meeting: Meeting, deadline: float) -> socket.socket:
    """Connects to the sender, which may come later than this side."""
    while True:
        connection = _new_socket()
        try:
            connection.connect(_address(meeting))
            return connection
        except ConnectionRefusedError:
            connection.close()
            _check_time(meeting, deadline)
            time.sleep(CALL_AGAIN_S)
        except BaseException:
            connection.close()
            raise


def _receive_hello(
    connection: socket.socket, meeting: Meeting, kind: str, count: int, deadline: float
) -> tuple[array.array[int], int]:
    """The so many descriptors that came with the expected hello, and its number of blocks."""
    packet, descriptors = _receive(meeting, connection, _HELLO.size, deadline)
    num_blocks = _HELLO.unpack(packet)[3] if len(packet) == _HELLO.size else 0
    expected = _HELLO.pack(MAGIC, kind.encode(), meeting.num_slots, num_blocks, meeting.slot_bytes)
    if packet != expected or len(descriptors) != count or bool(num_blocks) is not (count > 1):
        _close_all(descriptors)
        raise TransferFailed(
            f"the other side shares something else than {meeting.num_slots} {kind} slots of {meeting.slot_bytes} bytes"
        )
    return descriptors, num_blocks


def _receive(
    meeting: Meeting, connection: socket.socket, num_bytes: int, deadline: float
) -> tuple[bytes, array.array[int]]:
    """A packet of up to one byte more than `num_bytes`, none for the end, and the descriptors that came with it."""
    while not _is_readable(connection, AT_ONCE_S):
        _check_time(meeting, deadline)
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(3 * descriptors.itemsize)
    # With this flag no program that this process starts meanwhile inherits a descriptor.
    packet, ancillary, _, _ = connection.recvmsg(num_bytes + 1, room, socket.MSG_CMSG_CLOEXEC)
    for level, what, data in ancillary:
        if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return packet, descriptors


def _check_time(meeting: Meeting, deadline: float) -> None:
    if not meeting.is_wanted():
        raise TransferFailed("it is not wanted any more")
    if time.monotonic() > deadline:
        raise TransferFailed(f"Timed out after {meeting.timeout_s:.1f} s: the other side did not come, or said nothing")


def _address(meeting: Meeting) -> str:
    """Outside every file system, so it is gone with the socket. Nobody knows a pair's epoch but its two workers."""
    name = blake2b(f"{meeting.store_address} {meeting.prefix}".encode(), digest_size=16).hexdigest()
    return f"\0baton-{name}"


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _is_readable(connection: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _check_peer(connection: socket.socket) -> None:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    if uid != os.geteuid():
        raise TransferFailed(f"the other side runs as user {uid}, this one as {os.geteuid()}")
