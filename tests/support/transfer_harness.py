"""Whole workers' ranks in one process, over real sockets: what tests of the transfer engine share."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from nursery import Child, nursery_of_session

from cluster.errors import TransferFailed
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, rank_pb2
from kv_transfer.actions import Chunk, Range
from kv_transfer.fault_injection import Faults
from kv_transfer.layout import KvLayout, Route, routes
from kv_transfer.transfer_engine import Landing, TransferEngine

HOST = "127.0.0.1"
LAYERS, HEADS, DIM, TOKENS = 2, 4, 3, 45
POISON = -77.0
QUICK_S = 5.0  # on a busy machine; what it is held against takes 10 s and more
TP_SIZES = (1, 2, 4, 8)
HOST_TRANSPORTS = ("shm", "gloo")


@dataclass
class Worker:
    """The ranks of one worker, each with a poisoned cache of its own; all use one block table."""

    layout: KvLayout
    timeout_s: float = 10.0
    num_slots: int = 2
    chunk_tokens: int = 16
    digest: str = "on"
    faults: Faults | None = None
    table: list[int] = field(default_factory=list)
    caches: list[torch.Tensor] = field(default_factory=list)
    engines: list[TransferEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.layout.block_size
        used = -(-TOKENS // size)
        order = torch.randperm(used + 3, generator=torch.Generator().manual_seed(self.layout.tp_size * size)).tolist()
        self.table = order[:used]
        shape = (LAYERS, 2, used + 3, self.layout.num_local_tokens, self.layout.num_local_heads, DIM)
        for rank in range(self.layout.tp_size):
            cache = torch.full(shape, POISON, dtype=getattr(torch, self.layout.dtype))
            self.caches.append(cache)
            self.engines.append(
                TransferEngine(
                    cache,
                    self.layout,
                    rank,
                    timeout_s=self.timeout_s,
                    host=HOST,
                    digest=self.digest,
                    faults=self.faults,
                )
            )

    @property
    def engine(self) -> TransferEngine:
        """The only rank's."""
        (engine,) = self.engines
        return engine

    def all_routes(self, receiver: KvLayout) -> tuple[Route, ...]:
        """Every route of all ranks to a receiver."""
        return routes(self.layout, receiver)

    def fill(self, truth: torch.Tensor, start: int, end: int, layers: range = range(LAYERS)) -> list[torch.Tensor]:
        """What each rank's cache holds with the range of `truth` [L, 2, T, H, D] in it, the rest as it is."""
        filled = []
        for rank, cache in enumerate(self.caches):
            heads = self.layout.head_range(rank)
            expected = cache.clone()
            for t in range(start, end):
                block = self.table[t // self.layout.block_size]
                place, offset = divmod(t % self.layout.block_size, self.layout.num_local_tokens)
                if place != self.layout.share_of(rank).place:
                    continue
                for layer in layers:
                    expected[layer, :, block, offset] = truth[layer, :, t, heads.start : heads.stop]
            filled.append(expected)
        return filled

    def load(self, truth: torch.Tensor) -> None:
        for cache, filled in zip(self.caches, self.fill(truth, 0, TOKENS), strict=True):
            cache.copy_(filled)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def spec(
        self, epoch: str, address: str, remote: KvLayout, *, is_sender: bool, transport: str = "shm"
    ) -> rank_pb2.OpenPair:
        agreed = handoff_pb2.ReceiverHello(
            store_address=address,
            transport=transport,
            wire_format="native",
            chunk_tokens=self.chunk_tokens,
            num_slots=self.num_slots,
        )
        return rank_pb2.OpenPair(pair_epoch=epoch, is_sender=is_sender, remote=remote.to_proto(), agreed=agreed)


def make_layout(
    tp_size: int = 1, block_size: int = 4, dtype: str = "float32", model: str = "m", heads: int = HEADS, shares: int = 1
) -> KvLayout:
    return KvLayout(
        num_layers=LAYERS,
        num_kv_heads=heads,
        head_dim=DIM,
        dtype=dtype,
        tp_size=tp_size,
        block_size=block_size,
        model=model,
        num_token_shares=shares,
    )


def make_truth(dtype: str = "float32") -> torch.Tensor:
    return torch.randn(LAYERS, 2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(7)).to(
        getattr(torch, dtype)
    )


def chunk(epoch: str, slot: int, start: int, end: int, layers: tuple[int, int] = (0, LAYERS), index: int = 0) -> Chunk:
    return Chunk(RequestKey("r", 1), epoch, index, slot, Range(start, end, *layers))


def open_pair(engine: TransferEngine, spec: rank_pb2.OpenPair) -> None:
    engine.open_pair(engine.add_pair(spec))


def run_all(jobs: Sequence[Callable[[], object]]) -> list[object]:
    """Every rank has its own thread; the first error is raised."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(60) for future in [pool.submit(job) for job in jobs]]


def open_both(sender: Worker, receiver: Worker, epoch: str, address: str, transport: str = "shm") -> None:
    outgoing = sender.spec(epoch, address, receiver.layout, is_sender=True, transport=transport)
    incoming = receiver.spec(epoch, address, sender.layout, is_sender=False, transport=transport)
    run_all(
        [lambda m=m: open_pair(m, outgoing) for m in sender.engines]
        + [lambda m=m: open_pair(m, incoming) for m in receiver.engines]
    )


def move(
    sender: Worker, receiver: Worker, epoch: str, chunks: Sequence[tuple[int, ...]], first_index: int = 0
) -> tuple[int, int]:
    """Moves chunks (token start, end and, unless all, layer start, end) one after another, slots in turn.

    Returns the bytes gathered and those received.
    """
    ranges = [Range(*piece) if len(piece) == 4 else Range(*piece, 0, LAYERS) for piece in chunks]
    key, num_slots = RequestKey("r", 1), sender.num_slots
    numbered = [Chunk(key, epoch, first_index + i, i % num_slots, piece) for i, piece in enumerate(ranges)]

    def send(engine: TransferEngine) -> int:
        gathered = 0
        for what in numbered:
            gathered += engine.gather(what, sender.table)
            engine.complete_send(engine.send(epoch, what.slot))
        return gathered

    def receive(engine: TransferEngine) -> int:
        return sum(engine.complete_receive(engine.post_receive(what, receiver.table)) for what in numbered)

    jobs: list[Callable[[], int]] = [lambda m=m: send(m) for m in sender.engines]  # type: ignore[misc]
    jobs += [lambda m=m: receive(m) for m in receiver.engines]  # type: ignore[misc]
    done = [size for size in run_all(jobs) if isinstance(size, int)]
    return sum(done[: len(sender.engines)]), sum(done[len(sender.engines) :])


def make_workers(workers: list[Worker], receiver_timeout_s: float = 10.0, tp_size: int = 1) -> tuple[Worker, Worker]:
    sender, receiver = Worker(make_layout()), Worker(make_layout(tp_size), timeout_s=receiver_timeout_s)
    workers += [sender, receiver]
    sender.load(make_truth())
    return sender, receiver


@contextmanager
def running_peer(receiver: Worker, epoch: str, address: str, transport: str) -> Iterator[Child]:
    """A process that has opened a pair towards the receiver and gathered a chunk for it."""
    peer = nursery_of_session().call("transfer_harness:gather_and_send", epoch, address, transport)
    with peer.stdin, peer.stdout:
        try:
            incoming = receiver.spec(epoch, address, make_layout(), is_sender=False, transport=transport)
            open_pair(receiver.engine, incoming)
            assert peer.stdout.readline() == "open\n"
            yield peer
        finally:
            peer.kill()
            peer.wait(10)


def gather_and_send(epoch: str, address: str, transport: str) -> None:
    """The life of a peer: opens a pair as its sender, gathers a chunk, and posts it when a line asks for that."""
    layout = make_layout()
    engine = TransferEngine(torch.ones(LAYERS, 2, 16, 4, HEADS, DIM), layout, 0, timeout_s=30, host=HOST)
    agreed = handoff_pb2.ReceiverHello(
        store_address=address, transport=transport, wire_format="native", chunk_tokens=16, num_slots=2
    )
    open_pair(engine, rank_pb2.OpenPair(pair_epoch=epoch, is_sender=True, remote=layout.to_proto(), agreed=agreed))
    engine.gather(chunk(epoch, 0, 0, 16), range(4))
    print("open", flush=True)
    sent = []
    for _ in sys.stdin:
        sent.append(engine.send(epoch, 0))
        print("sent", flush=True)


class Completing:
    """Completes a landing on a thread of its own."""

    def __init__(self, engine: TransferEngine, landing: Landing) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._is_waiting = threading.Event()
        self._future = self._pool.submit(self._complete, engine, landing)
        assert self._is_waiting.wait(5)

    def failure(self) -> tuple[TransferFailed, float]:
        """The failure, and when it was raised."""
        try:
            return self._future.result(60)
        finally:
            self._pool.shutdown()

    def _complete(self, engine: TransferEngine, landing: Landing) -> tuple[TransferFailed, float]:
        self._is_waiting.set()
        with pytest.raises(TransferFailed) as caught:
            engine.complete_receive(landing)
        return caught.value, time.monotonic()


def assert_untouched(worker: Worker) -> None:
    assert not any(cache.ne(POISON).any() for cache in worker.caches)


def assert_nothing_is_held(*workers: Worker) -> None:
    for worker in workers:
        for engine in worker.engines:
            assert (engine.quarantined_bytes, len(engine._quarantined())) == (0, 0)


def mapped_rings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")
