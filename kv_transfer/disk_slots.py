"""Slots of KV blocks in a file: one rank's part of the tier on a disk. Each names what it holds, and what it holds is
checked when it is read.

The file outlives its worker. A page at its begin says for which KV it is (`namespace`: the weights, the layout, the
rank) and which `epoch` counts; a file of other KV is begun anew, and a flush begins a new epoch, so that nothing from
before is found. A slot is a page with its header, then the block's bytes. Headers have a checksum of themselves and one
of the block: a write that was cut off, a bit that has changed, another block or another file are all Corrupted.

Only its owner may read the file. Reads and writes go past the system's page cache where the file system lets them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from copy import copy
from itertools import chain, count, cycle, zip_longest
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from cluster.errors import Corrupted
from cluster.kv_groups import DISK_PAGE as PAGE
from cluster.kv_groups import slot_bytes_of
from kv_transfer.layout import KvLayout
from kv_transfer.sealed import BlockCipher, Key, KvSecret, sealed, unsealed

_MOST_BYTES = 2 << 20
"""Of slots that lie side by side, read or written at a time, while others are copied to or from their buffers."""
_HUGE = 2 << 20
"""Bytes of a huge page."""
_DEPTH = 4
"""Reads or writes under way."""
_HEADERS = 256
"""Read by one thread, one after the other, when a file is taken up."""
_MAGIC = b"BATON-KV"
_VERSION = 1
_FILE = Struct("<8sII32sQ")  # magic, version, bytes of a block, namespace, epoch
_SLOT = Struct("<8sQI16sQQ")  # magic, epoch, group, digest, bytes of the block, their checksum
_LEFT = "left"


class DiskFolder:
    """The files of the workers of one layout, by number. Each worker has a number for itself while it lives, by the
    lock of a file that says its role, and that it was left for good once the worker has ended in peace."""

    def __init__(
        self, folder: Path, layout: KvLayout, number: int = 0, role: str = "", secret: KvSecret | None = None
    ) -> None:
        """`number`: what rank 0 has claimed; 0: claims the first one that nobody has, of this role if there is one.
        `secret`: blocks are encrypted with it. Raises OSError."""
        self.namespace = hashlib.sha256(layout.to_proto().SerializeToString(deterministic=True)).digest()
        self._secret = secret
        if secret is not None:
            self.namespace = secret.namespace(self.namespace)
        self._folder = folder.expanduser() / self.namespace.hex()[:16]
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.number, self._role = number, role
        self._claim: int | None = None
        known = sorted(self._numbers(), key=lambda each: (self._said(each)[:1] != [role], each))
        for each in chain(known, count(1)) if not number else ():
            if (claim := self._claimed(each)) is not None:
                self.number, self._claim = each, claim
                break
        self.is_new = self._size(self.number) <= PAGE
        """Whether nothing was found."""

    def _numbers(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.lock") if path.stem.isdecimal()]

    def _lock(self, number: int) -> Path:
        return self._folder / f"{number}.lock"

    def _said(self, number: int) -> list[str]:
        """The role of whoever has or had a number, and whether it has left it."""
        return self._lock(number).read_bytes()[:64].decode(errors="replace").split()

    def _size(self, number: int) -> int:
        return sum(path.stat().st_size for path in self._folder.glob(f"{number}.rank*"))

    def _claimed(self, number: int, said: str | None = None) -> int | None:
        """The lock of a number, which ends with the process; None where somebody has it, or (`said`) it says something
        else."""
        claim = os.open(self._lock(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(claim)
            return None
        if said is not None and " ".join(self._said(number)) != said:
            os.close(claim)
            return None
        _say(claim, self._role)
        return claim

    def left_behind(self) -> DiskFolder | None:
        """The largest files that a worker of this role has left, if they are larger than these: claims them. Raises
        OSError."""
        left = [each for each in self._numbers() if each != self.number and self._said(each) == [self._role, _LEFT]]
        sizes = {each: self._size(each) for each in left}
        for each in sorted(sizes, key=lambda each: -sizes[each]):
            if sizes[each] > self._size(self.number) and (claim := self._claimed(each, f"{self._role} {_LEFT}")):
                other = copy(self)
                other.number, other._claim = each, claim
                return other
        return None

    def remove(self) -> None:
        """Deletes the files, and lets others have the number."""
        for path in self._folder.glob(f"{self.number}.rank*"):
            path.unlink()
        if self._claim is not None:
            _say(self._claim, "")
        self.close()

    def leave(self) -> None:
        """Says that the worker will not come back for its files, and lets others have them."""
        if self._claim is not None:
            _say(self._claim, f"{self._role} {_LEFT}")
        self.close()

    def close(self) -> None:
        """Lets others have the files."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def open(self, number: int, tp_rank: int, num_slots: int, block_bytes: int) -> DiskSlots:
        """The slots of one rank in the files of a number. Raises OSError."""
        namespace = hashlib.sha256(self.namespace + tp_rank.to_bytes(4, "little")).digest()
        cipher = None if self._secret is None else self._secret.cipher(namespace)
        return DiskSlots(self._folder / f"{number}.rank{tp_rank}", namespace, num_slots, block_bytes, cipher)


class DiskSlots:
    """Slots [0, num_slots) of `block_bytes` each. Used from one thread."""

    def __init__(
        self, path: Path, namespace: bytes, num_slots: int, block_bytes: int, cipher: BlockCipher | None = None
    ) -> None:
        """Opens the file, or begins it. `cipher`: of the blocks. Raises OSError."""
        self.num_slots, self.block_bytes, self._cipher = num_slots, block_bytes, cipher
        self._path = path
        self._slot_bytes = slot_bytes_of(block_bytes)
        self._most = max(1, _MOST_BYTES // self._slot_bytes)
        size = max(PAGE, self._most * self._slot_bytes)
        self._buffers = _buffers(_DEPTH, size)
        self._helpers = ThreadPoolExecutor(_DEPTH, "kv-disk-io")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = _open(path)
        self._namespace, self._epoch = namespace, 0
        begun = self._read_page(0)
        if begun is None or begun[:4] != (_MAGIC, _VERSION, block_bytes, namespace):
            os.ftruncate(self._fd, 0)
            self.flush()
        else:
            self._epoch = begun[4]
            os.ftruncate(self._fd, min(os.fstat(self._fd).st_size, PAGE + num_slots * self._slot_bytes))

    def close(self) -> None:
        self._helpers.shutdown()
        os.close(self._fd)

    def flush(self) -> None:
        """Nothing that is in the file counts any more."""
        self._epoch += 1
        page = _FILE.pack(_MAGIC, _VERSION, self.block_bytes, self._namespace, self._epoch)
        self._buffers[0][:PAGE] = sealed(page)
        _write(self._fd, self._buffers[0][:PAGE], 0)

    def keys(self) -> Iterator[tuple[int, Key]]:
        """Yields the slots whose header counts, with what they should hold; the blocks themselves are not read."""
        num = min(self.num_slots, max(0, os.fstat(self._fd).st_size - PAGE) // self._slot_bytes)
        parts = [range(begin, min(begin + _HEADERS, num)) for begin in range(0, num, _HEADERS)]
        for found in self._helpers.map(self._keys_of, parts):
            yield from found

    def _keys_of(self, slots: range) -> list[tuple[int, Key]]:
        found, buffer = [], memoryview(mmap.mmap(-1, PAGE))
        for slot in slots:
            _read(self._fd, buffer, self._at(slot))
            header = unsealed(bytes(buffer), _SLOT)
            if header is not None and header[:2] == (_MAGIC, self._epoch) and header[4] == self.block_bytes:
                found.append((slot, (header[2], header[3])))
        return found

    def write(self, slots: Sequence[int], keys: Sequence[Key], blocks: Sequence[Tensor]) -> None:
        """Writes blocks, contiguous uint8 [block_bytes], to slots. Raises OSError, as of a full disk."""
        with self._under_way() as under_way:
            for run, buffer in zip(_runs(slots, self._most), cycle(self._buffers)):
                if len(under_way) == _DEPTH:
                    under_way.popleft().result()
                for at, place in enumerate(run):
                    payload = self._payload(buffer, at)
                    block, box = blocks[place].numpy(), b""
                    group, digest = keys[place]
                    if self._cipher is not None:
                        box, content = self._cipher.encrypt(block.data, _about(keys[place]))
                        block = np.frombuffer(content, np.uint8)
                    payload[:] = block
                    checksum = xxhash.xxh3_64_intdigest(payload.data)
                    header = _SLOT.pack(_MAGIC, self._epoch, group, digest, self.block_bytes, checksum)
                    begin = at * self._slot_bytes
                    buffer[begin : begin + PAGE] = sealed(header, box)
                under_way.append(self._begin(_write, run, slots, buffer))
            while under_way:
                under_way.popleft().result()

    def read(self, slots: Sequence[int], keys: Sequence[Key]) -> Iterator[tuple[int, Tensor]]:
        """Yields places and their blocks, uint8 [block_bytes], each good until the next one. Raises Corrupted for what
        is not the block that its key names, and OSError."""
        runs = list(zip(_runs(slots, self._most), cycle(self._buffers)))
        with self._under_way() as under_way:
            under_way.extend(self._begin(_read, run, slots, buffer) for run, buffer in runs[:_DEPTH])
            for (run, buffer), later in zip_longest(runs, runs[_DEPTH:]):
                under_way.popleft().result()
                for at, place in enumerate(run):
                    self._check(buffer, at, slots[place], keys[place])
                    yield place, self._block(buffer, at, keys[place])
                if later is not None:
                    under_way.append(self._begin(_read, later[0], slots, later[1]))

    @contextmanager
    def _under_way(self) -> Iterator[deque[Future[None]]]:
        """Transfers, the oldest first; behind the block none touches a buffer any more."""
        under_way = deque[Future[None]]()
        try:
            yield under_way
        finally:
            wait(under_way)

    def _begin(
        self, how: Callable[[int, memoryview, int], None], run: range, slots: Sequence[int], buffer: memoryview
    ) -> Future[None]:
        part = buffer[: len(run) * self._slot_bytes]
        return self._helpers.submit(how, self._fd, part, self._at(slots[run.start]))

    def _check(self, buffer: memoryview, at: int, slot: int, key: Key) -> None:
        """Raises Corrupted."""
        begin = at * self._slot_bytes
        header = unsealed(bytes(buffer[begin : begin + PAGE]), _SLOT)
        if header is None or header[:5] != (_MAGIC, self._epoch, *key, self.block_bytes):
            raise Corrupted(f"slot {slot} of {self._path.name} does not hold the block that it should")
        if xxhash.xxh3_64_intdigest(self._payload(buffer, at).data) != header[5]:
            raise Corrupted(f"the block in slot {slot} of {self._path.name} is damaged")

    def _block(self, buffer: memoryview, at: int, key: Key) -> Tensor:
        """Raises Corrupted."""
        payload, begin = self._payload(buffer, at), at * self._slot_bytes
        if self._cipher is None:
            return torch.from_numpy(payload)
        content = self._cipher.decrypt(bytes(buffer[begin : begin + PAGE]), _SLOT, payload.data, _about(key))
        return torch.frombuffer(content, dtype=torch.uint8)

    def _payload(self, buffer: memoryview, at: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(buffer, np.uint8, self.block_bytes, at * self._slot_bytes + PAGE)

    def _at(self, slot: int) -> int:
        return PAGE + slot * self._slot_bytes

    def _read_page(self, at: int) -> tuple[Any, ...] | None:
        _read(self._fd, self._buffers[0][:PAGE], at)
        return unsealed(bytes(self._buffers[0][:PAGE]), _FILE)


def _buffers(num: int, size: int) -> list[memoryview]:
    """Memory for transfers past the page cache, which have a piece for each range of it that is not contiguous: in huge
    pages, where there are some, a disk reads up to three times as much in the same time. A process that is forked does
    not get it: to share huge pages would split them."""
    memory = mmap.mmap(-1, num * size + _HUGE - PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE  # many kernels begin where no huge page can
    return [memoryview(memory)[first + at * size :][:size] for at in range(num)]


def _about(key: Key) -> bytes:
    """What no other encrypted block may be taken for."""
    return key[0].to_bytes(8, "little") + key[1]


def _say(claim: int, what: str) -> None:
    os.ftruncate(claim, 0)
    os.pwrite(claim, what.encode(), 0)


def _runs(slots: Sequence[int], most: int) -> Iterator[range]:
    """Places of slots that lie side by side, in order, at most so many at a time."""
    begin = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1 or place - begin == most:
            yield range(begin, place)
            begin = place


def _open(path: Path) -> int:
    """Past the page cache where the file system takes that."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600)


def _read(fd: int, buffer: memoryview, at: int) -> None:
    """Fills the buffer; with zeros behind the file's end."""
    done = 0
    while done < len(buffer):
        num = os.preadv(fd, [buffer[done:]], at + done)
        if num == 0:
            buffer[done:] = bytes(len(buffer) - done)
            return
        done += num


def _write(fd: int, buffer: memoryview, at: int) -> None:
    done = 0
    while done < len(buffer):
        done += os.pwritev(fd, [buffer[done:]], at + done)
