"""Single pairs over real sockets on 127.0.0.1: what tests of the transports share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from kv_transfer.transports.interface import Meeting, Pair, StoreClients, TransferWork
from kv_transfer.transports.selection import make_pair

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]
QUICK_S = 5.0  # on a busy machine; what it is held against takes 30 s and more
HOST_TRANSPORTS = ("shm", "gloo")
SLOT_BYTES = 1 << 16

_stores = StoreClients(10.0)

# Transport, store, prefix: the sender of a pair, which does what it is told and says when it is done.
PEER = """
import sys
from pair_harness import make_side
pair = make_side(sys.argv[1], sys.argv[2], sys.argv[3], True, 30.0)
print("paired", flush=True)
for line in sys.stdin:
    work = pair.send(0, int(line))
    print("sent", flush=True)
"""


def make_meeting(
    address: str,
    prefix: str,
    is_sender: bool,
    timeout_s: float = 10.0,
    num_slots: int = 3,
    slot_bytes: int = SLOT_BYTES,
) -> Meeting:
    return Meeting(
        store_address=address,
        stores=_stores,
        prefix=prefix,
        is_sender=is_sender,
        host=HOST,
        device=torch.device("cpu"),
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        timeout_s=timeout_s,
    )


def make_side(transport: str, address: str, prefix: str, is_sender: bool, timeout_s: float = 10.0) -> Pair:
    return make_pair(transport, make_meeting(address, prefix, is_sender, timeout_s))


def make_both(transport: str, address: str, prefix: str = "e1/0-0", timeout_s: float = 10.0) -> tuple[Pair, Pair]:
    """The sender's side and the receiver's."""
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(make_side, transport, address, prefix, False, timeout_s)
        sender = make_side(transport, address, prefix, True, timeout_s)
        return sender, receiver.result()


def put(pair: Pair, slot: int, data: bytes) -> None:
    pair.slots[slot][: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def read(pair: Pair, slot: int, num_bytes: int) -> bytes:
    return pair.slots[slot][:num_bytes].numpy().tobytes()


class Peer:
    """A process that holds the sending side of a pair."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def send(self, num_bytes: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_bytes}\n")
        self.process.stdin.flush()
        self.expect("sent")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def closed_at(self) -> float:
        """When its files were closed, its side of the pair among them. Blocks until then."""
        assert self.process.stdout is not None
        assert self.process.stdout.read() == ""
        return time.monotonic()


@contextmanager
def running_peer(transport: str, address: str, prefix: str = "e1/0-0") -> Iterator[Peer]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    command = [sys.executable, "-c", PEER, transport, address, prefix]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


class Waiter:
    """Waits for a work on a thread of its own."""

    def __init__(self, work: TransferWork, timeout_s: float) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._is_waiting = threading.Event()
        self._future = self._pool.submit(self._wait, work, timeout_s)
        assert self._is_waiting.wait(5)

    def outcome(self) -> tuple[Exception | None, float]:
        """The error, and when the wait ended."""
        try:
            return self._future.result(60)
        finally:
            self._pool.shutdown()

    def _wait(self, work: TransferWork, timeout_s: float) -> tuple[Exception | None, float]:
        self._is_waiting.set()
        try:
            work.wait(timeout_s)
        except Exception as error:
            return error, time.monotonic()
        return None, time.monotonic()
