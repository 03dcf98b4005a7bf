"""One rank's part of a store of KV blocks that all workers of a cluster share, and that outlives them: an object for
each block, which names what it holds and is checked when it is read.

An object's name has the namespace (the version of this format, the weights and their revision, the type and layout of
the KV), the rank, the group of layers and the block's digest, which covers the tenant's salt; its header has them in
full, with a checksum of itself and one of the block. What was cut off, has changed, or is another block is Corrupted,
and deleted. Nothing is unpickled.

The store bounds itself: who writes looks now and then what there is, and deletes what was read or written least
recently. Any number may do so at once. Whoever waits for the store does so for a bounded time, and then leaves it
alone for a while: what a call that is stuck still reads or writes is memory of its own. Loads no torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from struct import Struct
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import xxhash

from cluster.errors import Corrupted
from cluster.kv_groups import DISK_PAGE as PAGE
from cluster.kv_groups import LOOK_TIMEOUT_S
from kv_transfer.layout import KvLayout
from kv_transfer.sealed import Key, KvSecret, sealed, unsealed

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOVE_TIMEOUT_S = 5.0
"""The most that one move of blocks to the store or from it takes, half of it for a look at all objects; beyond it they
are computed."""
AWAY_S = 10.0
"""A store that did not answer in time is left alone for so long."""
FULL_SHARE = 7 / 8
"""Of its room, what is left in a store that was too full."""
_LOOKS = 32
"""A writer looks anew what there is when it has written one of so many parts of the room."""
_OLD_S = 600.0
"""Files of writes under way that are so old were left by a writer that was killed."""
_TOUCH_EVERY_S = 60.0
_THREADS = 8
_MOST_PUTS = 4
"""At a time, so that reads find a thread."""
_MAGIC = b"BATON-OB"
_VERSION = 1
_OBJECT = Struct("<8sI32sIQ16sQQ")
"""Magic, version, namespace, rank, group, digest, bytes of the block, their checksum."""
_PART = ".part"
_NAME = re.compile(rf"[0-9a-f]{{64}}/[0-9a-f]{{2}}/[0-9a-f]{{32}}\.g\d+\.r\d+(\..*\{_PART})?")
"""Whatever else lies in a store is not Baton's."""


_numbers = count()


class StoredObject(NamedTuple):
    """One object of a store."""

    name: str
    size_bytes: int
    used_at: float
    """Seconds since the epoch."""


class BlockStore(Protocol):
    """Named bytes that many processes read and write at once. Methods raise OSError; any thread calls them."""

    def put(self, name: str, content: bytes) -> bool:
        """Makes an object readable as a whole; False: one of this name and size was there, and is used now."""
        ...

    def get(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    def has(self, name: str) -> bool: ...

    def objects(self) -> Iterator[StoredObject]:
        """Yields all there are, those included whose writers were killed."""
        ...

    def delete(self, *names: str) -> None:
        """Does nothing for those that are not there."""
        ...


class FolderStore:
    """Files in a folder of this machine or of a network, readable by their owner only."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if there is none, in one that is there: a mount may be missing. Raises OSError."""
        self._folder = folder.expanduser()
        self._folder.mkdir(exist_ok=True, mode=0o700)

    def put(self, name: str, content: bytes) -> bool:
        path = self._folder / name
        with suppress(FileNotFoundError):
            if path.stat().st_size == len(content):
                os.utime(path)
                return False
        part = path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}-{next(_numbers)}{_PART}")
        try:
            descriptor = self._create(part)
        except FileNotFoundError:  # a folder that vanished as a whole is not made again: it may be a mount that is gone
            path.parent.parent.mkdir(exist_ok=True, mode=0o700)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            descriptor = self._create(part)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                left = memoryview(content)
                while left:
                    left = left[file.write(left) :]
            part.rename(path)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise
        return True

    def _create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def get(self, name: str) -> bytes:
        path = self._folder / name
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb", buffering=0) as file:
            content = file.readall()
            if time.time() - os.fstat(file.fileno()).st_mtime > _TOUCH_EVERY_S:
                with suppress(OSError):
                    os.utime(file.fileno())
        return content

    def has(self, name: str) -> bool:
        try:
            return (self._folder / name).stat().st_size > 0
        except FileNotFoundError:
            if not self._folder.exists():
                raise
            return False

    def objects(self) -> Iterator[StoredObject]:
        self._folder.stat()  # one that is gone is not empty
        for namespace in _entries(self._folder):
            for part in _entries(namespace):
                for path in _entries(part):
                    with suppress(FileNotFoundError):
                        said = path.stat()
                        name = path.relative_to(self._folder).as_posix()
                        yield StoredObject(name, said.st_size, said.st_mtime)

    def delete(self, *names: str) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)


def _entries(folder: Path) -> Iterator[Path]:
    """What lies in a folder; nothing where it is gone, or none."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from (folder / entry.name for entry in entries)


class StoreSilent(OSError):
    """The store does not answer in time, or did not a moment ago."""


class _Call(Generic[T]):
    """A call that a thread of the store makes, unless it is given up before."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call: Callable[[], T] | None = call

    def make(self) -> None:
        call = self._call
        if call is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(call())
        except BaseException as error:
            self.future.set_exception(error)

    def give_up(self) -> None:
        """Nobody waits any more: what it was to write is held no longer."""
        self.future.cancel()
        self._call = None


class StoreObjects:
    """The blocks of one rank in a store. `push` is called from one thread, the other methods from any."""

    def __init__(
        self,
        store: BlockStore,
        layout: KvLayout,
        wire_format: str,
        tp_rank: int,
        block_bytes: int,
        limit_bytes: int,
        secret: KvSecret | None = None,
    ) -> None:
        """`wire_format`: KV that was handed over is rounded by it. `limit_bytes`: of all that is in the store, of
        whomever. `secret`: blocks are encrypted with it."""
        said = layout.to_proto().SerializeToString(deterministic=True)
        self._namespace = hashlib.sha256(f"{_VERSION} {wire_format} ".encode() + said).digest()
        if secret is not None:
            self._namespace = secret.namespace(self._namespace)
        self._cipher = None if secret is None else secret.cipher(self._namespace)
        self._store, self._tp_rank, self.limit_bytes = store, tp_rank, limit_bytes
        self._block_bytes = block_bytes
        self.object_bytes = PAGE + block_bytes
        self.num_ranks = layout.tp_size
        self.used_bytes = 0
        """Of all objects, when this rank looked last, with what it has written since."""
        self._num_unseen = limit_bytes  # bytes written since that look, at least
        self._away_until = 0.0
        self._looking = threading.Lock()
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()
        for number in range(_THREADS):
            threading.Thread(target=self._help, name=f"kv-store-{number}", daemon=True).start()

    def name_of(self, key: Key, rank: int | None = None) -> str:
        """`rank`: None: this one."""
        group, digest = key
        text = digest.hex()
        return f"{self._namespace.hex()}/{text[:2]}/{text}.g{group}.r{self._tp_rank if rank is None else rank}"

    def push(self, keys: Sequence[Key], blocks: Iterable[bytes]) -> None:
        """Writes blocks of `block_bytes` that are not there. Raises OSError, of which StoreSilent."""
        deadline = time.monotonic() + MOVE_TIMEOUT_S
        self._make_room(len(keys) * self.object_bytes)
        puts = (partial(self._put, key, block) for key, block in zip(keys, blocks, strict=True))
        for is_new in self._made(puts, _MOST_PUTS, deadline - time.monotonic()):
            self.used_bytes += self.object_bytes * is_new
            self._num_unseen += self.object_bytes * is_new

    def _put(self, key: Key, payload: bytes) -> bool:
        box = b""
        if self._cipher is not None:
            box, payload = self._cipher.encrypt(payload, self.name_of(key).encode())
        sizes = self._block_bytes, xxhash.xxh3_64_intdigest(payload)
        header = _OBJECT.pack(_MAGIC, _VERSION, self._namespace, self._tp_rank, *key, *sizes)
        return self._store.put(self.name_of(key), sealed(header, box) + payload)

    def fetch(self, keys: Sequence[Key]) -> Iterator[memoryview]:
        """Yields the blocks, in memory of their own. Raises Corrupted for what is not the block that its key names, and
        OSError, of which FileNotFoundError and StoreSilent."""
        gets = (partial(self._store.get, self.name_of(key)) for key in keys)
        for key, content in zip(keys, self._made(gets, _THREADS, MOVE_TIMEOUT_S), strict=True):
            yield self._checked(key, content)

    def _checked(self, key: Key, content: bytes) -> memoryview:
        """Raises Corrupted."""
        header = unsealed(content[:PAGE], _OBJECT) if len(content) == self.object_bytes else None
        wanted = (_MAGIC, _VERSION, self._namespace, self._tp_rank, *key, self._block_bytes)
        payload = memoryview(bytearray(content))[PAGE:]
        try:
            if header is None or header[:-1] != wanted or xxhash.xxh3_64_intdigest(payload) != header[-1]:
                raise Corrupted("its checksum or its name is another one")
            if self._cipher is not None:
                about = self.name_of(key).encode()
                payload = memoryview(self._cipher.decrypt(content[:PAGE], _OBJECT, payload, about))
        except Corrupted:
            with suppress(OSError):
                self._store.delete(self.name_of(key))
            raise Corrupted(f"the object {self.name_of(key)} of the KV store is damaged, or another block") from None
        return payload

    def find(self, keys: Sequence[Key], timeout_s: float) -> list[bool]:
        """Whether the object of every rank is there, for each block. Raises OSError, of which StoreSilent."""
        return list(self._made((partial(self._has, key) for key in keys), _THREADS, timeout_s))

    def _has(self, key: Key) -> bool:
        return all(self._store.has(self.name_of(key, rank)) for rank in range(self.num_ranks))

    def flush(self) -> int:
        """Deletes all of this rank in this namespace; returns the number of objects. Raises OSError."""
        first, last = f"{self._namespace.hex()}/", f".r{self._tp_rank}"

        def delete() -> int:
            names = [name for name, *_ in self._store.objects() if name.startswith(first) and name.endswith(last)]
            self._store.delete(*names)
            return len(names)

        return sum(self._made([delete], 1, LOOK_TIMEOUT_S))

    def look(self) -> None:
        """Sums up what is there, and deletes what is too much, those used least recently. Raises OSError."""
        self._look_for(0, LOOK_TIMEOUT_S)

    def _look_for(self, num_bytes: int, timeout_s: float) -> None:
        """A look that takes longer goes on, and is no sign of a store that answers nothing."""
        self._leave_alone()
        if self._looking.locked():
            raise StoreSilent("the KV store is being listed, which takes long")
        call = _Call(partial(self._look, num_bytes))
        self._calls.put(call)
        try:
            call.future.result(timeout_s)
        except TimeoutError:
            if call.future.done():
                raise  # the store's own
            call.give_up()
            raise StoreSilent(f"the KV store is being listed, which takes more than {timeout_s:g} s") from None

    def _look(self, num_bytes: int) -> None:
        """`num_bytes`: are to have room."""
        with self._looking:
            self._list(num_bytes)

    def _list(self, num_bytes: int) -> None:
        now, found = time.time(), list[StoredObject]()
        for each in filter(lambda each: _NAME.fullmatch(each.name), self._store.objects()):
            if each.name.endswith(_PART) and now - each.used_at > _OLD_S:
                self._store.delete(each.name)
            else:
                found.append(each)
        used = sum(each.size_bytes for each in found)
        if used + num_bytes > self.limit_bytes:
            found = [each for each in found if not each.name.endswith(_PART)]  # others are being written
            found.sort(key=lambda each: each.used_at)
            names = list[str]()
            while len(names) < len(found) and used + num_bytes > FULL_SHARE * self.limit_bytes:
                used -= found[len(names)].size_bytes
                names.append(found[len(names)].name)
            self._store.delete(*names)
            logger.info("the KV store was full: deleted the %d objects used least recently", len(names))
        self.used_bytes, self._num_unseen = used, 0

    def _make_room(self, num_bytes: int) -> None:
        if self.used_bytes + num_bytes > self.limit_bytes or (self._num_unseen + num_bytes) * _LOOKS > self.limit_bytes:
            self._look_for(num_bytes, MOVE_TIMEOUT_S / 2)
        if self.used_bytes + num_bytes > self.limit_bytes:
            raise OSError(f"the KV store has no room for {num_bytes} bytes, of {self.limit_bytes}")

    # Waiting

    def _leave_alone(self) -> None:
        """Raises StoreSilent for a while after the store did not answer."""
        if (left_s := self._away_until - time.monotonic()) > 0:
            raise StoreSilent(f"the KV store did not answer in time, and is left alone for {left_s:.0f} s more")

    def _made(self, calls: Iterable[Callable[[], T]], most: int, timeout_s: float) -> Iterator[T]:
        """Yields the results of calls in their order, `most` of which are under way at a time. When it ends, none is
        under way unless the time is over. A store that answers none in time is left alone for a while."""
        self._leave_alone()
        deadline, under_way, num_made = time.monotonic() + timeout_s, deque[_Call[T]](), 0
        try:
            for call in calls:
                under_way.append(_Call(call))
                self._calls.put(under_way[-1])
                if len(under_way) == most:
                    yield self._result(under_way.popleft(), deadline, num_made)
                    num_made += 1
            while under_way:
                yield self._result(under_way.popleft(), deadline, num_made)
                num_made += 1
        finally:
            for made in under_way:
                made.give_up()
            for made in under_way:
                with suppress(TimeoutError, CancelledError):
                    made.future.exception(max(0.0, deadline - time.monotonic()))

    def _result(self, call: _Call[T], deadline: float, num_before: int) -> T:
        try:
            return call.future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            if call.future.done() and call.future.exception() is error:
                raise  # the store's own
            call.give_up()
            if num_before:
                raise StoreSilent("the KV store took too long for all that it was asked") from error
            self._away_until = time.monotonic() + AWAY_S
            raise StoreSilent(f"the KV store did not answer in time, and is left alone for {AWAY_S:g} s") from error

    def _help(self) -> None:
        while True:
            self._calls.get().make()
