"""One rank's hands in every hand-off: gathers into slots, sends them, receives them, scatters.

    sender:    gather -> send -> complete_send             (the pages are free again once gather has returned)
    receiver:  post_receive -> (grant) -> complete_receive     (only this rank's own scatter writes its pages)

It carries out what was decided above it: who may use which slot, when pages are free, when a pair is opened or closed.
A link is this rank's share of one pair of workers, named by the pair's epoch: one transport pair, with slots of its
own, for each route between this rank and a remote one. Any failure retires the whole link: its pairs are closed at
once, and every later call for the epoch raises TransferFailed. A slot is never another link's. A rank whose heads lower
ranks replicate has no route to send on; there, gather and send do nothing.

Threads: opening and closing from any. For each link: gather from one, send and post_receive from one in the order that
both sides agreed on, complete_send and complete_receive from one in the order of the posts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kv_transfer import pages
from kv_transfer.codec import SlotCodec
from kv_transfer.failures import TransferFailed
from kv_transfer.fault_injection import Faults
from kv_transfer.layout import KvLayout, Route, routes
from kv_transfer.link import Lane, Link
from kv_transfer.link import PairSpec as PairSpec
from kv_transfer.link import SlotRange as SlotRange
from kv_transfer.transports.interface import Meeting, StoreClients, TransferWork
from kv_transfer.transports.registry import make_pair

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Sending:
    """A posted send, for `complete_send`. It keeps its slots alive."""

    link: Link
    slot: int
    lanes: list[Lane]
    works: list[TransferWork]


@dataclass(eq=False)
class Landing:
    """A posted receive, for `complete_receive`. It keeps its slots alive."""

    link: Link
    what: SlotRange
    block_table: tuple[int, ...]
    lanes: list[Lane]
    works: list[TransferWork]


class TransferEngine:
    """Moves the KV of one rank. `kv` is [L, 2, N, B, H, D]."""

    def __init__(
        self,
        kv: Tensor,
        layout: KvLayout,
        tp_rank: int,
        *,
        timeout_s: float,
        host: str,
        digest: str = "on",
        faults: Faults | None = None,
        compute_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`host` is this machine's address as the peers see it; `digest` is `on`, `sampled` or `off`.

        `compute_stream` writes and reads the pages; None: the device's default. Raises ValueError.
        """
        expected = (layout.num_layers, 2, kv.shape[2], layout.block_size, layout.num_local_heads, layout.head_dim)
        if tuple(kv.shape) != expected or kv.dtype != getattr(torch, layout.dtype):
            raise ValueError(f"the KV cache is {tuple(kv.shape)} {kv.dtype}; its layout says {expected} {layout.dtype}")
        self._kv = kv
        self._layout = layout
        self._tp_rank = tp_rank
        self._timeout_s = timeout_s
        self._host = host
        self._digest = digest
        self._faults = faults
        self._stores = StoreClients(timeout_s)
        self._compute_stream: Any = compute_stream
        if kv.is_cuda and compute_stream is None:
            self._compute_stream = torch.cuda.default_stream(kv.device)
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._ending: set[Link] = set()  # whose slots may be in quarantine
        self._is_closed = False

    @property
    def num_landed_slots(self) -> int:
        """Slots whose chunk has arrived and is being checked and written to the pages."""
        with self._lock:
            links = list(self._links.values())
        return sum(link.num_landed for link in links)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots that a pair may still touch because it is not closed yet, or could not be."""
        return sum(slot.nbytes for slot in self._quarantined())

    @property
    def num_quarantined_slots(self) -> int:
        """How many slots those are, on all routes."""
        return len(self._quarantined())

    # Pairs

    def open_pair(self, spec: PairSpec) -> None:
        """Meets the remote ranks that share heads with this one, at the receiving worker's store.

        Blocks until they are there. Raises LayoutMismatch, and TransferFailed after the timeout or a close_pair.
        """
        started = time.monotonic()
        codecs = [(route, self._codec(spec, route)) for route in self._routes(spec)]
        new_stream: Any = torch.cuda.Stream
        link = Link(spec, new_stream(self._kv.device) if self._kv.is_cuda else None)
        with self._lock:
            if self._is_closed:
                raise TransferFailed(f"pair {spec.pair_epoch} cannot be opened: this worker is stopping")
            if spec.pair_epoch in self._links:
                raise ValueError(f"pair {spec.pair_epoch} is open already; every pair needs an epoch of its own")
            self._links[spec.pair_epoch] = link
        try:
            self._make_pairs(link, codecs)
        except BaseException as error:
            self._end(link, str(error) or type(error).__name__)
            self._forget(link)
            raise
        took_ms = (time.monotonic() - started) * 1000
        side, made = ("sender" if spec.is_sender else "receiver"), f"{len(codecs)} {spec.transport} connections"
        logger.info("pair %s opened as %s: %s with %s in %.0f ms", spec.pair_epoch, side, made, spec.remote, took_ms)

    def close_pair(self, pair_epoch: str) -> None:
        """Ends a link, wakes whoever waits on it, and forgets its epoch. An unknown epoch is no error.

        One that is still being opened gives up at once, or as soon as the connection it is making is made or timed out.
        """
        with self._lock:
            link = self._links.get(pair_epoch)
        if link is None:
            logger.debug("pair %s is not open: nothing to close", pair_epoch)
            return
        self._end(link, "it was closed")
        self._forget(link)
        logger.info("pair %s closed", pair_epoch)

    def close(self) -> None:
        """Closes every pair, and lets none be opened after it."""
        with self._lock:
            self._is_closed = True
            epochs = list(self._links)
        for pair_epoch in epochs:
            self.close_pair(pair_epoch)
        self._stores.clear()

    def _routes(self, spec: PairSpec) -> list[Route]:
        """This rank's, in the one order in which all ranks of both sides meet."""
        if spec.is_sender:
            return [route for route in routes(self._layout, spec.remote) if route.src_rank == self._tp_rank]
        return [route for route in routes(spec.remote, self._layout) if route.dst_rank == self._tp_rank]

    def _codec(self, spec: PairSpec, route: Route) -> SlotCodec:
        first = self._layout.head_range(self._tp_rank).start
        heads = slice(route.head_start - first, route.head_end - first)
        return SlotCodec(
            self._layout,
            spec.remote,
            heads,
            is_sender=spec.is_sender,
            wire_format=spec.wire_format,
            digest=self._digest,
        )

    def _make_pairs(self, link: Link, codecs: list[tuple[Route, SlotCodec]]) -> None:
        spec = link.spec
        deadline = time.monotonic() + self._timeout_s
        for route, codec in codecs:
            meeting = Meeting(
                store_address=spec.store_address,
                stores=self._stores,
                prefix=f"{spec.pair_epoch}/{route.src_rank}-{route.dst_rank}",
                is_sender=spec.is_sender,
                host=self._host,
                device=self._kv.device,
                num_slots=spec.num_slots,
                slot_bytes=codec.slot_bytes(spec.chunk_tokens * self._layout.num_layers),
                timeout_s=max(0.001, deadline - time.monotonic()),
                is_wanted=lambda: link.ended is None,
            )
            pair = make_pair(spec.transport, meeting)
            link.add(codec, pair if self._faults is None else self._faults.wrap(pair))
        link.open()

    # Sender

    def gather(self, what: SlotRange, block_table: Sequence[int], ready: torch.cuda.Event | None = None) -> int:
        """Copies pages into a slot; returns the bytes that sending it will move.

        `ready`: on a GPU, what must have happened before the pages are read; None: all that was launched so far.
        """
        link = self._link(what.pair_epoch)
        self._check(link, what, is_sender=True)
        lanes = link.begin_gather(what.slot)
        with self._copying(link, ready):
            sizes = [
                lane.codec.pack(self._kv, block_table, what.range, what.tag, lane.slots[what.slot]) for lane in lanes
            ]
        link.end_gather(what.slot, sizes)
        return sum(sizes)

    def send(self, pair_epoch: str, slot: int) -> Sending:
        """Posts the sends of a gathered slot to every remote rank with a route."""
        link = self._link(pair_epoch)
        link.check(is_sender=True, slot=slot)
        with self._retiring_on_failure(link):
            sizes = link.post_send(slot)
            works = [lane.pair.send(slot, size) for lane, size in sizes]
        return Sending(link, slot, [lane for lane, _ in sizes], works)

    def complete_send(self, sending: Sending) -> None:
        """Waits until a posted slot is sent and may be gathered into again."""
        with self._retiring_on_failure(sending.link):
            self._wait(sending.works)
        sending.link.free(sending.slot)

    # Receiver

    def post_receive(self, what: SlotRange, block_table: Sequence[int]) -> Landing:
        """Posts the receives of a chunk; the sender may be granted as soon as this returns."""
        link = self._link(what.pair_epoch)
        self._check(link, what, is_sender=False)
        pages.check_range(self._kv, block_table, what.range)  # refused before anything is on its way
        with self._retiring_on_failure(link):
            lanes = link.post_receive(what.slot)
            works = [lane.pair.receive(what.slot, lane.codec.num_bytes(what.range)) for lane in lanes]
        return Landing(link, what, tuple(block_table), lanes, works)

    def complete_receive(self, landing: Landing) -> int:
        """Waits for a posted chunk, checks it and scatters it into the pages; returns the bytes that arrived.

        Raises TransferFailed, of which Corrupted, with the link retired; ValueError when it was completed before.
        """
        link, what, works = landing.link, landing.what, landing.works
        if not works:
            raise ValueError(f"a landing of pair {what.pair_epoch} was completed already")
        landing.works = []
        with self._retiring_on_failure(link):
            self._wait(works)
            link.arrived(what.slot)
            with self._copying(link, None):
                for lane in landing.lanes:
                    slot = lane.slots[what.slot]
                    lane.codec.unpack(slot, self._kv, landing.block_table, what.range, what.tag)
        self._release(link, what.slot, landing.lanes)
        return sum(lane.codec.num_bytes(what.range) for lane in landing.lanes)

    # Slots and streams

    def _link(self, pair_epoch: str) -> Link:
        with self._lock:
            link = self._links.get(pair_epoch)
        if link is None:
            raise TransferFailed(f"pair {pair_epoch} cannot be used: it was never opened, or closed")
        return link

    def _check(self, link: Link, what: SlotRange, *, is_sender: bool) -> None:
        link.check(is_sender=is_sender, slot=what.slot)
        room = link.spec.chunk_tokens * self._layout.num_layers
        if not 0 < what.range.num_cells <= room:
            raise ValueError(f"a chunk of {what.range.num_cells} tokens x layers does not fit a slot of {room}")

    def _release(self, link: Link, slot: int, lanes: list[Lane]) -> None:
        """Tells the sender that a slot was read. What has landed has landed, also where nobody is left to be told."""
        link.free(slot)
        try:
            for lane in lanes:
                lane.pair.release(slot)
        except TransferFailed as error:
            self._retire(link, error)

    def _wait(self, works: list[TransferWork]) -> None:
        deadline = time.monotonic() + self._timeout_s
        for work in works:
            work.wait(max(0.0, deadline - time.monotonic()))

    @contextmanager
    def _copying(self, link: Link, ready: Any) -> Iterator[None]:
        """For copies of pages: when the block ends they have ended, on a GPU too."""
        if link.stream is None:
            yield
            return
        # Kernels launched so far write the pages to gather, or still read what the pages held before.
        with torch.cuda.device(self._kv.device):
            link.stream.wait_event(self._compute_stream.record_event() if ready is None else ready)
            try:
                with torch.cuda.stream(link.stream):
                    yield
            finally:
                link.stream.synchronize()

    # Ends

    @contextmanager
    def _retiring_on_failure(self, link: Link) -> Iterator[None]:
        try:
            yield
        except TransferFailed as error:
            self._retire(link, error)
            raise

    def _retire(self, link: Link, error: TransferFailed) -> None:
        if self._end(link, error.message):
            logger.warning("pair %s retired: %s", link.spec.pair_epoch, error.message)

    def _end(self, link: Link, why: str) -> bool:
        with self._lock:
            self._ending.add(link)
        is_first = link.end(why)
        with self._lock:
            if not link.quarantined:
                self._ending.discard(link)
        return is_first

    def _quarantined(self) -> list[Tensor]:
        with self._lock:
            links = list(self._ending)
        return [slot for link in links for slot in link.quarantined]

    def _forget(self, link: Link) -> None:
        with self._lock:
            if self._links.get(link.spec.pair_epoch) is link:
                del self._links[link.spec.pair_epoch]
