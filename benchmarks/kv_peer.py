"""One rank of one worker without a model: `python -m benchmarks.kv_peer`, the sender or the receiver of a benchmark.

Has a paged KV cache, the real transfer engine, and the rank's threads for it (gather, issue, wait), so that what is
measured is the path of a worker's data without its control plane: one byte on a socket stands for a grant. Takes orders
on stdin, one JSON line each, answers with one on stdout, and ends when stdin does.

For comparison it also copies its cache within its own memory, sends it as it is through a plain TCP socket, and sends
a transport's slots as they are.
"""

from __future__ import annotations

import json
import math
import random
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from cluster.errors import BatonError
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, rank_pb2
from cluster.settings import JsonSettings
from engine.kv.pool import choose_page_copies, choose_pool_copies
from kv_transfer.actions import Chunk, Range
from kv_transfer.layout import KvLayout
from kv_transfer.transfer_engine import Landing, Sending, TransferEngine
from kv_transfer.transports.interface import Meeting, Pair, StoreClients, TransferWork
from kv_transfer.transports.selection import make_pair, pool_memory

HOST = "127.0.0.1"
KEY = RequestKey("benchmark", 1)
TIMEOUT_S = 20.0
BLOCK_SIZE = 16
SPARE_BLOCKS = 8
LAYOUT = KvLayout(
    num_layers=12, num_kv_heads=12, head_dim=64, dtype="float32", tp_size=1, block_size=BLOCK_SIZE, model="benchmark"
)
TOKEN_BYTES = 2 * LAYOUT.num_layers * LAYOUT.num_kv_heads * LAYOUT.head_dim * 4


@dataclass(frozen=True)
class PeerSettings(JsonSettings):
    """One side of the benchmark."""

    is_sender: bool
    device: str
    num_tokens: int
    """Tokens of the prompt that lies in the cache, a multiple of the block size."""
    num_slots: int
    digest: str
    store_address: str
    grants_fd: int
    """One end of a socket pair: the receiver writes a byte for each chunk that may come."""
    tcp_fd: int
    """One end of a TCP connection over loopback."""
    pool_of: str
    """The transport that shares pages, if one does: the cache lies in its memory."""


class Peer:
    """The rank, and what it is told to do. Times are of the machine's one monotonic clock, in seconds."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings
        num_blocks = settings.num_tokens // BLOCK_SIZE
        # Sender and receiver scatter the same prompt differently over pools of the same size.
        order = list(range(num_blocks + SPARE_BLOCKS))
        random.Random(settings.is_sender).shuffle(order)
        self._table = order[:num_blocks]
        shape = (LAYOUT.num_layers, 2, len(order), BLOCK_SIZE, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        device = torch.device(settings.device)
        self._memory = pool_memory((settings.pool_of,), device) if settings.pool_of else None
        if self._memory is None:
            self._kv = torch.zeros(shape, device=device)
        else:
            self._kv = self._memory.allocate(4 * math.prod(shape)).view(torch.float32).view(shape)
        self._copy = torch.zeros_like(self._kv)
        self._grants = socket.socket(fileno=settings.grants_fd)
        self._tcp = socket.socket(fileno=settings.tcp_fd)
        for connection in (self._grants, self._tcp):
            connection.settimeout(TIMEOUT_S)
        self._engine = TransferEngine(
            self._kv,
            LAYOUT,
            0,
            timeout_s=TIMEOUT_S,
            host=HOST,
            digest=settings.digest,
            page_kernel=choose_page_copies("auto", self._kv.device),
            pool_kernel=choose_pool_copies("auto", self._kv.device),
            memory=self._memory,
        )
        self._stores = StoreClients(TIMEOUT_S)
        self._pairs: dict[str, Pair] = {}
        if settings.is_sender:
            self._kv[:, :, self._table] = self._prompt()

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carries out one command; returns its answer."""
        match command["do"]:
            case "open":
                self._open(command["pair"], command["transport"], command["chunk_tokens"])
            case "move":
                move = self._send if self._settings.is_sender else self._receive
                return move(command["pair"], self._ranges(command["chunk_tokens"], command["passes"]))
            case "check":
                return {"is_whole": bool((self._kv[:, :, self._table] == self._prompt()).all())}
            case "open slots":
                self._open_slots(command["pair"], command["transport"], command["chunk_tokens"])
            case "move slots":
                return self._move_slots(command["pair"], command["chunk_tokens"], command["passes"])
            case "copy":
                return self._copy_cache(command["passes"])
            case "stream":
                return self._stream(command["chunk_tokens"], command["passes"])
        return {}

    def _open(self, pair: str, transport: str, chunk_tokens: int) -> None:
        settings = self._settings
        agreed = handoff_pb2.ReceiverHello(
            store_address=settings.store_address,
            transport=transport,
            wire_format="native",
            chunk_tokens=chunk_tokens,
            num_slots=settings.num_slots,
        )
        remote = LAYOUT.to_proto()
        spec = rank_pb2.OpenPair(pair_epoch=pair, is_sender=settings.is_sender, remote=remote, agreed=agreed)
        self._engine.open_pair(self._engine.add_pair(spec))

    def _ranges(self, chunk_tokens: int, passes: int) -> list[Range]:
        """The prompt in chunks of all layers, several times over."""
        end = self._settings.num_tokens
        starts = range(0, end, chunk_tokens)
        return [Range(t, min(t + chunk_tokens, end), 0, LAYOUT.num_layers) for t in starts] * passes

    def _prompt(self) -> torch.Tensor:
        """What the prompt's KV is: each element tells its layer and token. [L, 1, T / B, B, 1, 1]."""
        numbers = torch.arange(LAYOUT.num_layers * self._settings.num_tokens, device=self._settings.device)
        return numbers.view(LAYOUT.num_layers, 1, -1, BLOCK_SIZE, 1, 1).to(torch.float32)

    # Moving. Slots are used in turn, and their operations end in the order in which they were posted.

    def _send(self, pair: str, ranges: list[Range]) -> dict[str, Any]:
        num_slots = self._settings.num_slots
        free = threading.Semaphore(num_slots)
        gathered: SimpleQueue[int | None] = SimpleQueue()
        posted: SimpleQueue[Sending | None] = SimpleQueue()

        def issue() -> None:
            try:
                while (slot := gathered.get()) is not None:
                    if not self._grants.recv(1):
                        raise ConnectionError("the receiver has gone")
                    posted.put(self._engine.send(pair, slot))
            finally:
                posted.put(None)

        def complete() -> None:
            while (sending := posted.get()) is not None:
                self._engine.complete_send(sending)
                free.release()

        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(issue), pool.submit(complete)]
            try:
                for number, where in enumerate(ranges):
                    if not free.acquire(timeout=TIMEOUT_S):
                        break  # one of the jobs has failed and tells why
                    slot = number % num_slots
                    self._engine.gather(Chunk(KEY, pair, number, slot, where), self._table)
                    gathered.put(slot)
            finally:
                gathered.put(None)
        for job in jobs:
            job.result()
        return {"began": began, "ended": time.monotonic()}

    def _receive(self, pair: str, ranges: list[Range]) -> dict[str, Any]:
        num_slots = self._settings.num_slots
        free = threading.Semaphore(num_slots)
        posted: SimpleQueue[Landing | None] = SimpleQueue()

        def complete() -> None:
            while (landing := posted.get()) is not None:
                self._engine.complete_receive(landing)
                free.release()

        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(complete)
            try:
                for number, where in enumerate(ranges):
                    if not free.acquire(timeout=TIMEOUT_S):
                        break
                    what = Chunk(KEY, pair, number, number % num_slots, where)
                    posted.put(self._engine.post_receive(what, self._table))
                    self._grants.send(b"\1")
            finally:
                posted.put(None)
        job.result()
        return {"began": began, "ended": time.monotonic()}

    # The transport by itself: slots are sent as they are, again and again

    def _open_slots(self, pair: str, transport: str, chunk_tokens: int) -> None:
        meeting = Meeting(
            store_address=self._settings.store_address,
            stores=self._stores,
            prefix=pair,
            is_sender=self._settings.is_sender,
            host=HOST,
            device=self._kv.device,
            num_slots=self._settings.num_slots,
            slot_bytes=chunk_tokens * TOKEN_BYTES,
            timeout_s=TIMEOUT_S,
            is_wanted=lambda: True,
        )
        self._pairs[pair] = make_pair(transport, meeting)
        for slot in self._pairs[pair].slots:
            slot.fill_(1)

    def _move_slots(self, name: str, chunk_tokens: int, passes: int) -> dict[str, Any]:
        pair, num_slots, posted = self._pairs[name], self._settings.num_slots, deque[TransferWork]()
        began = time.monotonic()
        for number, where in enumerate(self._ranges(chunk_tokens, passes)):
            if len(posted) == num_slots:
                posted.popleft().wait(TIMEOUT_S)
            slot, num_bytes = number % num_slots, where.num_tokens * TOKEN_BYTES
            if self._settings.is_sender:
                if not self._grants.recv(1):
                    raise ConnectionError("the receiver has gone")
                posted.append(pair.send(slot, num_bytes))
            else:
                posted.append(pair.receive(slot, num_bytes))
                self._grants.send(b"\1")
        while posted:
            posted.popleft().wait(TIMEOUT_S)
        return {"began": began, "ended": time.monotonic()}

    # What it is compared with

    def _copy_cache(self, passes: int) -> dict[str, Any]:
        """Plain copies of as much memory as the prompt fills; on the CPU by one thread."""
        num_elements = self._settings.num_tokens * TOKEN_BYTES // self._kv.itemsize
        source, target = self._kv.flatten()[:num_elements], self._copy.flatten()[:num_elements]
        began = time.monotonic()
        for _ in range(passes):
            target.copy_(source)
        if self._kv.is_cuda:
            torch.cuda.synchronize()
        return {"began": began, "ended": time.monotonic()}

    def _stream(self, chunk_tokens: int, passes: int) -> dict[str, Any]:
        """The bytes of the prompt, as they lie in the sender's cache, to the receiver's memory, in chunks."""
        memory = self._kv if self._settings.is_sender else self._copy
        whole = memory.flatten().view(torch.uint8).numpy().data[: self._settings.num_tokens * TOKEN_BYTES]
        size = chunk_tokens * TOKEN_BYTES
        began = time.monotonic()
        for _ in range(passes):
            for start in range(0, len(whole), size):
                piece = whole[start : start + size]
                if self._settings.is_sender:
                    self._tcp.sendall(piece)
                    continue
                while piece:
                    num_bytes = self._tcp.recv_into(piece)
                    if not num_bytes:
                        raise ConnectionError("the sender has gone")
                    piece = piece[num_bytes:]
        return {"began": began, "ended": time.monotonic()}


def main() -> int:
    torch.set_num_threads(1)
    peer = Peer(PeerSettings.from_json(sys.argv[sys.argv.index("--settings") + 1]))
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        try:
            answer = peer.do(json.loads(line))
        except (BatonError, OSError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        print(json.dumps({"event": "done", **answer}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
