"""Single pairs over real sockets on 127.0.0.1: what tests of the transports share."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from nursery import Child, nursery_of_session

from kv_transfer.transports.interface import Meeting, Pair, StoreClients, TransferWork
from kv_transfer.transports.selection import make_pair

HOST = "127.0.0.1"
QUICK_S = 5.0  # on a busy machine; what it is held against takes 30 s and more
HOST_TRANSPORTS = ("shm", "gloo")
SLOT_BYTES = 1 << 16

_stores = StoreClients(10.0)


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

    def __init__(self, process: Child) -> None:
        self.process = process

    def expect(self, line: str) -> None:
        assert self.process.stdout.readline() == f"{line}\n"

    def send(self, num_bytes: int) -> None:
        self.process.stdin.write(f"{num_bytes}\n")
        self.process.stdin.flush()
        self.expect("sent")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def closed_at(self) -> float:
        """When its files were closed, its side of the pair among them. Blocks until then."""
        assert self.process.stdout.read() == ""
        return time.monotonic()


@contextmanager
def running_peer(transport: str, address: str, prefix: str = "e1/0-0") -> Iterator[Peer]:
    process = nursery_of_session().call("pair_harness:send_on_request", transport, address, prefix)
    with process.stdin, process.stdout:
        try:
            yield Peer(process)
        finally:
            process.kill()
            process.wait(10)


def send_on_request(transport: str, address: str, prefix: str) -> None:
    """The life of a peer: the sender of a pair, which sends as many bytes as each line asks for and then says so."""
    pair = make_side(transport, address, prefix, True, 30.0)
    print("paired", flush=True)
    works = []
    for line in sys.stdin:
        works.append(pair.send(0, int(line)))
        print("sent", flush=True)


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
