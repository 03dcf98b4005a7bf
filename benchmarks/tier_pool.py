"""A KV pool above host memory and a disk, without a model: the real books and the real copies, one after the other.

    python -m benchmarks.tier_pool --sessions 10000
    python -m benchmarks.tier_pool --speeds --rounds 5

The first holds sessions in 1 GB of host memory and 10 GB of disk (blocks of the bundled model) and has some come back.
It prints what the process takes of memory, what a block takes in the books and in a router's table (resident bytes),
and the processor time of the books for a session, without copies, while few are held and when all are. The second
compares copies of one thread with memcpy, and the disk with the same file read and written raw (O_DIRECT), by turns.

What a block holds is its digest, again and again, so that every block can be told from every other one, and each byte
of it can be checked. Chaos tests damage its files (tests/chaos/test_chaos_tiers.py).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import torch

from cluster.errors import Corrupted
from cluster.kv_groups import slot_bytes_of
from cluster.pb import worker_pb2
from cluster.prefix_hash import prefix_hashes
from engine.kv.kv_tier import BlockMove, MoveKind
from engine.kv.stored_blocks import StoredBlocks
from engine.kv.tiered_blocks import TieredBlocks
from kv_transfer.block_store import FolderStore, StoreObjects
from kv_transfer.copy_streams import CopyStreams
from kv_transfer.disk_slots import DiskSlots
from kv_transfer.layout import KvLayout
from kv_transfer.tier_copies import TierCopies
from router.routing.prefix_index import Holders, PrefixIndex

NAMESPACE = b"tier pool".ljust(32)


@dataclass(frozen=True)
class Shape:
    """Of a block: layers, tokens, heads, and values of 4 bytes in a head; keys and values."""

    layers: int = 2
    tokens: int = 16
    heads: int = 1
    head_dim: int = 16

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.tokens * self.heads * self.head_dim * 4


class TieredPool:
    """`wrong` counts blocks that were found with another content than their tokens'."""

    def __init__(
        self,
        shape: Shape,
        num_blocks: int,
        num_slots: int,
        num_disk_slots: int,
        file: Path,
        store: tuple[Path, int] | None = None,
    ) -> None:
        """`store`: the folder of one, and its room in bytes; everything is pushed there."""
        self.shape, self.file, self.store = shape, file, store
        self._kv = torch.zeros(shape.layers, 2, num_blocks, shape.tokens, shape.heads, shape.head_dim)
        self._rows = self._kv.flatten(3).view(torch.uint8).numpy()  # [L, P, N, bytes]
        self._copies = TierCopies(self._kv, num_slots, CopyStreams(self._kv.device, None))
        sizes = {"num_slots": num_slots, "num_disk_slots": num_disk_slots}
        self.blocks = TieredBlocks(num_blocks, shape.tokens, **sizes)
        if store is not None:
            self.blocks = StoredBlocks(num_blocks, shape.tokens, policy="all", **sizes)
        self._num_disk_slots = num_disk_slots
        self.wrong = 0
        self.errors: list[str] = []
        """What copies failed of."""
        self._open()

    def _open(self) -> None:
        if self._num_disk_slots:
            disk = DiskSlots(self.file, NAMESPACE, self._num_disk_slots, self._copies.block_bytes)
            self._copies.disk = disk
            self.blocks.find_again(disk.keys())

        if self.store is not None:
            shape, (folder, limit) = self.shape, self.store
            layout = KvLayout(shape.layers, shape.heads, shape.head_dim, "float32", 1, shape.tokens, "tier pool")
            objects = StoreObjects(FolderStore(folder), layout, "native", 0, shape.block_bytes, limit)
            self._copies.store = objects

    def close(self) -> None:
        if self._copies.disk is not None:
            self._copies.disk.close()

    def again(self) -> TieredPool:
        """Another life: what the file holds is all that is left."""
        self.close()
        sizes = self.blocks.num_total, self.blocks.host.num_total, self._num_disk_slots
        pool = TieredPool(self.shape, *sizes, self.file, self.store)
        pool.wrong = self.wrong
        return pool

    def ask(self, tokens: Sequence[int]) -> int:
        """A prompt comes, is loaded as far as it is there, computed behind that, and goes; returns the tokens that were
        loaded or cached."""
        blocks = self.blocks
        self.look_up(tokens)
        while (arrived := blocks.have_arrived(table := blocks.match_prefix(tokens))) is not True:
            if arrived is None:
                self.move()
            if blocks.have_arrived(table):
                break
            blocks.release(table)
        num_found = len(table)
        table = table + blocks.allocate(-(-len(tokens) // self.shape.tokens) - num_found)
        self.compute(tokens, table, num_found)
        blocks.publish(tokens, table, b"", num_computed=len(tokens))
        blocks.release(table)
        self.move()
        return num_found * self.shape.tokens

    def look_up(self, tokens: Sequence[int]) -> None:
        """Tells the books what the store has of a prompt; nothing of one that cannot be asked."""
        blocks, objects = self.blocks, self._copies.store
        if objects is None or not isinstance(blocks, StoredBlocks):
            return
        keys = [key for row in blocks.to_look_up(tokens, b"") for key in row]
        try:
            are_there = dict(zip(keys, objects.find(keys, 5.0), strict=True))
            blocks.learn(filter(are_there.get, keys), [key for key in keys if not are_there[key]])
        except OSError as error:
            self.errors.append(str(error))

    def compute(self, tokens: Sequence[int], table: Sequence[int], num_found: int) -> None:
        """Counts what is wrong in the blocks that were found, and writes the others."""
        for at, digest in enumerate(islice(prefix_hashes(tokens, self.shape.tokens, b""), len(table))):
            content = self._content(digest)
            if at < num_found:
                self.wrong += bool((self._rows[:, :, table[at]] != content).any())
            else:
                self._rows[:, :, table[at]] = content

    def copy(self, move: BlockMove) -> None:
        """Raises Corrupted and OSError."""
        match move.kind:
            case MoveKind.SAVE:
                self._copies.save(move.sources, move.targets)
            case MoveKind.LOAD:
                self._copies.load(move.targets, move.sources)
            case MoveKind.SPILL:
                self._copies.spill(move.sources, move.targets, move.keys)
            case MoveKind.READ:
                self._copies.read(move.targets, move.sources, move.keys)
            case MoveKind.PUSH:
                self._copies.push(move.sources, move.keys)
            case MoveKind.FETCH:
                self._copies.fetch(move.targets, move.keys)

    def move(self) -> None:
        """Makes all copies that are wanted now."""
        while moves := self.blocks.take_moves():
            for move in moves:
                try:
                    self.copy(move)
                except (Corrupted, OSError) as error:
                    self.errors.append(str(error))
                    self.blocks.moved(move, str(error))
                else:
                    self.blocks.moved(move)

    def _content(self, digest: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        row = np.frombuffer(digest, np.uint8)
        return np.resize(row, self._rows.shape[3])


class Books(TieredPool):
    """Without any copy."""

    def __init__(self, shape: Shape, num_blocks: int, num_slots: int, num_disk_slots: int) -> None:
        self.shape = shape
        self.blocks = TieredBlocks(num_blocks, shape.tokens, num_slots=num_slots, num_disk_slots=num_disk_slots)

    def look_up(self, tokens: Sequence[int]) -> None:
        pass

    def compute(self, tokens: Sequence[int], table: Sequence[int], num_found: int) -> None:
        pass

    def copy(self, move: BlockMove) -> None:
        pass


BUNDLED = Shape(layers=4, heads=4, head_dim=32)
FEW = 100
"""Sessions that the first and the last figure are a mean of; of fewer than 200, half of them."""
TURNS = 1000


def prompt_of(session: int, num_tokens: int) -> list[int]:
    return random.Random(session).choices(range(1000), k=num_tokens)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def hold(args: argparse.Namespace) -> dict[str, float]:
    """The sessions come one after the other; then some of them, drawn at random, come back."""
    sizes = args.pool_blocks, int(args.host_bytes) // BUNDLED.block_bytes
    sizes = (*sizes, int(args.disk_bytes) // slot_bytes_of(BUNDLED.block_bytes))
    before = resident()
    books, times = Books(BUNDLED, *sizes), list[float]()

    def turn(pool: TieredPool, session: int) -> int:
        prompt = prompt_of(session, args.tokens)
        begun = time.thread_time()
        num_found = pool.ask(prompt)
        times.append(time.thread_time() - begun)
        return num_found

    for session in range(args.sessions):
        turn(books, session)
    hashes, few = books.blocks.cached_hashes, min(FEW, args.sessions // 2)
    index_bytes, before = resident() - before, resident()
    index = PrefixIndex(BUNDLED.tokens, len(hashes), Holders(), "worker")
    index.apply(worker_pb2.CacheEvents(snapshot=True, stored=list(hashes)))
    found = {
        "blocks": len(hashes),
        "books_bytes_a_block": index_bytes / len(hashes),
        "router_bytes_a_block": (resident() - before) / len(hashes),
        "books_ms_first": 1000 * statistics.mean(times[few : 2 * few]),
        "books_ms_last": 1000 * statistics.mean(times[-few:]),
    }
    del books, index, hashes
    back = random.Random(1).choices(range(args.sessions), k=TURNS)
    with tempfile.TemporaryDirectory(prefix="baton-tiers-", dir=args.folder) as folder:
        before = resident()
        pool = TieredPool(BUNDLED, *sizes, Path(folder) / "1.rank0")
        for session in range(args.sessions):
            turn(pool, session)
        grown = resident() - before
        num_found = sum(turn(pool, session) for session in back)
        pool.blocks.check()
        found |= {
            "resident_gb": grown / 1e9,
            "resident_gb_after": (resident() - before) / 1e9,
            "file_gb": pool.file.stat().st_size / 1e9,
            "found": num_found / (TURNS * ((args.tokens - 1) // BUNDLED.tokens * BUNDLED.tokens)),
            "wrong": pool.wrong,
            "failed": len(pool.errors),
        }
        pool.close()
    return {name: round(value, 3) for name, value in found.items()}


def speeds(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """GB/s of the reference and the share of it, medians of the rounds, by bytes of a block and copy."""
    found = {}
    for layers, heads, head_dim in ((32, 8, 64), (16, 2, 64), (4, 4, 32)):
        shape = Shape(layers=layers, heads=heads, head_dim=head_dim)
        with tempfile.TemporaryDirectory(prefix="baton-tiers-", dir=args.folder) as folder:
            found[f"{shape.block_bytes:,}"] = _speeds_of(shape, Path(folder), args.rounds)
    return found


def _speeds_of(shape: Shape, folder: Path, rounds: int) -> dict[str, float]:
    num = max(64, (256 << 20) // shape.block_bytes)
    pool = TieredPool(shape, num, num, num, folder / "1.rank0")
    copies, size = pool._copies, num * shape.block_bytes
    order = random.Random(2).sample(range(num), num)
    keys = [(0, number.to_bytes(16, "little")) for number in range(num)]
    source, target = (torch.ones(size, dtype=torch.uint8).numpy() for _ in range(2))
    raw = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        raw.madvise(mmap.MADV_HUGEPAGE)  # what a disk fills most quickly
    raw[:] = bytes([1]) * size
    file = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
    step = 8 << 20

    def memcpy() -> None:
        target[:] = source

    def write() -> None:
        for at in range(0, size, step):
            os.pwritev(file, [memoryview(raw)[at : at + step]], at)

    def read() -> None:
        for at in range(0, size, step):
            os.preadv(file, [memoryview(raw)[at : at + step]], at)

    runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "save": (memcpy, lambda: copies.save(order, range(num))),
        "load": (memcpy, lambda: copies.load(order, range(num))),
        "save_in_a_row": (memcpy, lambda: copies.save(range(num), range(num))),
        "load_in_a_row": (memcpy, lambda: copies.load(range(num), range(num))),
        "spill": (write, lambda: copies.spill(range(num), range(num), keys)),
        "read": (read, lambda: copies.read(order, range(num), keys)),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (reference, copy) in runs.items():
            clock = time.perf_counter if name in ("spill", "read") else time.thread_time
            both = _seconds(reference, clock), _seconds(copy, clock)
            if number:  # the first touches memory and makes files
                taken[name].append(both)
    os.close(file)
    pool.close()
    rates = {}
    for name, pairs in taken.items():
        rates[f"{name}_of"] = round(statistics.median(size / 1e9 / reference for reference, _ in pairs), 2)
        rates[name] = round(statistics.median(reference / own for reference, own in pairs), 2)
    return rates


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    begun = clock()
    call()
    return clock() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=224, help="of a session")
    parser.add_argument("--pool-blocks", type=int, default=1024)
    parser.add_argument("--host-bytes", type=float, default=1e9)
    parser.add_argument("--disk-bytes", type=float, default=1e10)
    parser.add_argument("--folder", help="where the disk is; else that of temporary files")
    parser.add_argument("--speeds", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.sessions < 2:
        parser.error(f"--sessions: the first are compared with the last; at least 2 are needed (got {args.sessions})")
    print(json.dumps(speeds(args) if args.speeds else hold(args), indent=1))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
