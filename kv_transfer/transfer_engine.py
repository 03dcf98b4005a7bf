"""One rank's part in every hand-off: gathers into slots, sends them, receives them, scatters.

    sender:    gather -> send -> complete_send             (the pages may be released once gather has returned)
    receiver:  post_receive -> (grant) -> complete_receive     (only this rank's own scatter writes its pages)

It carries out what was decided above it: who may use which slot, when pages are free, when a pair is opened or closed.
A `RankPair` is this rank's share of one pair of workers, named by the pair's epoch: one transport pair, with slots of
its own, for each route between this rank and a remote one. Any failure retires the whole RankPair: its routes are
closed at once, and every later call for the epoch raises TransferFailed. A slot is never another pair's. A rank whose
heads lower ranks replicate has no route to send on; there, gather and send do nothing.

Where pages are shared (`page_lists`), gather copies nothing: it says where they lie, and complete_receive copies them.
The sender then keeps them until complete_send or close_pair has returned. What was read has landed only if the sender
could be told so: one that has closed the pair may have written to them.

On a GPU gather only launches the copy; `kv_transfer.copy_streams` orders it with steps, sends and scatters.

Threads: adding, opening and closing from any. For each pair: gather from one, send and post_receive from one in the
order that both sides agreed on, complete_send and complete_receive from one in the order of the posts.
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

from cluster.errors import TransferFailed
from cluster.kv_groups import num_rows
from cluster.pb import rank_pb2
from cluster.transports import shares_pages
from kv_transfer import pages
from kv_transfer.actions import Chunk, Range
from kv_transfer.codec import ChunkCodec, SlotCodec
from kv_transfer.copy_streams import CopyStreams
from kv_transfer.fault_injection import Faults
from kv_transfer.layout import KvLayout, Route, routes
from kv_transfer.page_lists import PageListCodec
from kv_transfer.rank_pair import RankPair, RouteEnd
from kv_transfer.shares import RouteTokens
from kv_transfer.states import StateHeads
from kv_transfer.tier_copies import TierCopies
from kv_transfer.timed_wire import TimedWire
from kv_transfer.transports.interface import Meeting, PoolMemory, StoreClients, TransferWork
from kv_transfer.transports.selection import make_pair

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Sending:
    """A posted send, for `complete_send`. It keeps its slots alive."""

    pair: RankPair
    slot: int
    routes: list[RouteEnd]
    works: list[TransferWork]


@dataclass(eq=False)
class Landing:
    """A posted receive, for `complete_receive`. It keeps its slots alive."""

    pair: RankPair
    chunk: Chunk
    block_table: tuple[int, ...]
    routes: list[RouteEnd]
    works: list[TransferWork]


class TransferEngine:
    """Moves the KV of one rank. `kv` is [L, P, N, B, H, D], L the layers of the largest group."""

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
        page_kernel: pages.PageKernel | None = None,
        pool_kernel: pages.PoolKernel | None = None,
        memory: PoolMemory | None = None,
        wire: TimedWire | None = None,
        num_tier_slots: int = 0,
    ) -> None:
        """`host` is this machine's address as the peers see it; `digest` is `on`, `sampled` or `off`; `page_kernel`
        copies pages where torch would, `pool_kernel` those of another pool. `memory`: what `kv` lies in, if others can
        map it. `wire` holds chunks back that arrive. `num_tier_slots`: of blocks in host memory.

        `compute_stream` writes and reads the pages; None: the device's default. Raises ValueError.
        """
        heads = layout.num_local_heads, layout.head_dim
        expected = (num_rows(layout.groups), layout.num_planes, kv.shape[2], layout.num_local_tokens, *heads)
        if tuple(kv.shape) != expected or kv.dtype != getattr(torch, layout.dtype):
            raise ValueError(f"the KV cache is {tuple(kv.shape)} {kv.dtype}; its layout says {expected} {layout.dtype}")
        self._kv = kv
        self._layout = layout
        self._tp_rank = tp_rank
        self._timeout_s, self._host = timeout_s, host
        self._digest, self._faults = digest, faults
        self._page_kernel, self._pool_kernel = page_kernel, pool_kernel
        self._memory, self._wire = memory, wire
        self._stores = StoreClients(timeout_s)
        is_default = kv.is_cuda and compute_stream is None
        compute: Any = torch.cuda.default_stream(kv.device) if is_default else compute_stream
        self._streams = CopyStreams(kv.device, compute)
        self.tier = TierCopies(kv, num_tier_slots, self._streams, page_kernel) if num_tier_slots else None
        self._lock = threading.Lock()
        self._pairs: dict[str, RankPair] = {}
        self._ending: set[RankPair] = set()  # whose slots may be in quarantine
        self._is_closed = False

    def warm_up(self) -> None:
        """Copies a token to and fro, so that the kernels for all heads are compiled before the first hand-off."""
        if self._page_kernel is None:
            return
        what, heads = Range(0, 1, 0, self._kv.shape[0]), slice(0, self._layout.num_local_heads)
        buffer = self._kv.new_empty((what.layer_end, self._kv.shape[1], 1, *self._kv.shape[4:]))
        pages.gather(self._kv, [0], what, heads, buffer, self._page_kernel)
        pages.scatter(self._kv, [0], what, heads, buffer, self._page_kernel)
        if self._memory is not None:
            pages.copy_across(self._kv, [0], self._kv, [0], what, self._pool_kernel)

    @property
    def num_landed_slots(self) -> int:
        """Slots whose chunk has arrived and is being checked and written to the pages."""
        with self._lock:
            pairs = list(self._pairs.values())
        return sum(pair.num_landed for pair in pairs)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots that a pair may still touch because it is not closed yet, or could not be."""
        return sum(slot.nbytes for slot in self._quarantined())

    # Pairs

    def add_pair(self, spec: rank_pb2.OpenPair) -> RankPair:
        """Takes a pair in, to be opened (`open_pair`) or closed. Raises ValueError for an epoch that is in use, and
        TransferFailed when this worker is stopping."""
        pair = RankPair(spec, self._streams.new_stream())
        with self._lock:
            if self._is_closed:
                raise TransferFailed(f"pair {pair.epoch} cannot be opened: this worker is stopping")
            if pair.epoch in self._pairs:
                raise ValueError(f"pair {pair.epoch} is open already; every pair needs an epoch of its own")
            self._pairs[pair.epoch] = pair
        return pair

    def open_pair(self, pair: RankPair) -> None:
        """Meets the remote ranks that share heads with this one, at the receiving worker's store.

        Blocks until they are there. Raises LayoutMismatch, and TransferFailed after the timeout or a close_pair.
        """
        started = time.monotonic()
        try:
            pair.check_wanted()
            remote = KvLayout.from_proto(pair.spec.remote)
            num_routes = self._make_routes(pair, remote)
        except BaseException as error:
            self._end(pair, str(error) or type(error).__name__)
            self._forget(pair)
            raise
        took_ms = (time.monotonic() - started) * 1000
        side = "sender" if pair.spec.is_sender else "receiver"
        made = f"{num_routes} {pair.spec.agreed.transport} connections"
        logger.info("pair %s opened as %s: %s with %s in %.0f ms", pair.epoch, side, made, remote, took_ms)

    def close_pair(self, epoch: str) -> None:
        """Ends a pair, wakes whoever waits on it, and forgets its epoch. An unknown epoch is no error.

        One that is still being opened fails at once, or as soon as the connection it is making is made or timed out.
        """
        with self._lock:
            pair = self._pairs.get(epoch)
        if pair is None:
            logger.debug("pair %s is not open: nothing to close", epoch)
            return
        self._end(pair, "it was closed")
        pair.await_closed()
        self._forget(pair)
        logger.info("pair %s closed", epoch)

    def close(self) -> None:
        """Closes every pair, and lets none be added after it."""
        with self._lock:
            self._is_closed = True
            epochs = list(self._pairs)
        for epoch in epochs:
            self.close_pair(epoch)
        self._stores.clear()

    def find_pair(self, epoch: str) -> RankPair:
        """Raises TransferFailed for an epoch that is not open."""
        with self._lock:
            pair = self._pairs.get(epoch)
        if pair is None:
            raise TransferFailed(f"pair {epoch} cannot be used: it was never opened, or closed")
        return pair

    def _routes_of(self, spec: rank_pb2.OpenPair, remote: KvLayout) -> list[Route]:
        """This rank's, in the one order in which all ranks of both sides meet."""
        if spec.is_sender:
            return [route for route in routes(self._layout, remote) if route.src_rank == self._tp_rank]
        return [route for route in routes(remote, self._layout) if route.dst_rank == self._tp_rank]

    def _codec(self, spec: rank_pb2.OpenPair, remote: KvLayout, route: Route) -> ChunkCodec:
        if shares_pages(spec.agreed.transport):
            place, how = self._tp_rank, spec.agreed.wire_format
            return PageListCodec(self._layout, remote, tp_rank=place, wire_format=how, kernel=self._pool_kernel)
        first = self._layout.head_range(self._tp_rank).start if route.head_end > route.head_start else 0
        heads = slice(route.head_start - first, route.head_end - first)
        return SlotCodec(
            self._layout,
            remote,
            heads,
            states=StateHeads.of(route, self._layout, self._tp_rank),
            tokens=RouteTokens.of(route, self._layout, remote, is_sender=spec.is_sender),
            is_sender=spec.is_sender,
            wire_format=spec.agreed.wire_format,
            digest=self._digest,
            kernel=self._page_kernel,
        )

    def _make_routes(self, pair: RankPair, remote: KvLayout) -> int:
        """Returns how many there are."""
        spec, agreed = pair.spec, pair.spec.agreed
        codecs = [(route, self._codec(spec, remote, route)) for route in self._routes_of(spec, remote)]
        deadline = time.monotonic() + self._timeout_s
        for route, codec in codecs:
            meeting = Meeting(
                store_address=agreed.store_address,
                stores=self._stores,
                prefix=f"{pair.epoch}/{route.src_rank}-{route.dst_rank}",
                is_sender=spec.is_sender,
                host=self._host,
                device=self._kv.device,
                num_slots=agreed.num_slots,
                slot_bytes=codec.slot_bytes(self._slot_cells(pair)),
                timeout_s=max(0.001, deadline - time.monotonic()),
                is_wanted=lambda: pair.ended is None,
                pages=self._kv,
                memory=self._memory,
            )
            made = make_pair(agreed.transport, meeting)
            for slot in made.slots:
                if slot.is_cuda and pair.stream is not None:
                    slot.record_stream(pair.stream)  # memory is used again when what copies there has ended
            pair.add_route(codec, made if self._faults is None else self._faults.wrap(made))
            if isinstance(codec, PageListCodec) and made.pages is not None:
                codec.attach(made.pages, self._kv.device)
        pair.open()
        return len(codecs)

    def _slot_cells(self, pair: RankPair) -> int:
        """Tokens times layers that one slot holds."""
        return pair.spec.agreed.chunk_tokens * self._layout.num_layers

    def num_layers_of(self, what: Range) -> int:
        """Layers of the model, from the first on, that are written when the range is."""
        return self._layout.groups[what.group].layers[what.layer_end - 1] + 1

    # Sender

    def gather(self, chunk: Chunk, block_table: Sequence[int], ready: torch.cuda.Event | None = None) -> int:
        """Copies pages into the chunk's slot; returns the bytes that sending it will move.

        On a GPU the copy is launched, and what must have happened before it is `ready`; None: all that was launched so
        far. Steps launched after it (`before_step`) begin when it has ended, so the pages may be released.
        """
        pair = self.find_pair(chunk.epoch)
        self._check(pair, chunk, is_sender=True)
        ends, tag = pair.begin_gather(chunk.slot), chunk.tag
        with self._streams.gathering(pair.stream, ready) as gathered:
            sizes = [end.codec.pack(self._kv, block_table, chunk.range, tag, end.slots[chunk.slot]) for end in ends]
        pair.end_gather(chunk.slot, sizes, gathered)
        return sum(end.codec.moved_bytes(chunk.range) for end in ends)

    def send(self, epoch: str, slot: int) -> Sending:
        """Posts the sends of a slot to every remote rank with a route; they begin when its gather has ended."""
        pair = self.find_pair(epoch)
        pair.check(is_sender=True, slot=slot)
        with self._retiring_on_failure(pair):
            ends, sizes, gathered = pair.post_send(slot)
            works = [end.pair.send(slot, size, gathered) for end, size in zip(ends, sizes, strict=True)]
        return Sending(pair, slot, ends, works)

    def complete_send(self, sending: Sending) -> None:
        """Waits until a posted slot is sent and may be gathered into again."""
        with self._retiring_on_failure(sending.pair):
            self._wait(sending.works)
        sending.pair.free(sending.slot)

    # Receiver

    def post_receive(self, chunk: Chunk, block_table: Sequence[int]) -> Landing:
        """Posts the receives of a chunk; the sender may be granted as soon as this returns."""
        pair = self.find_pair(chunk.epoch)
        self._check(pair, chunk, is_sender=False)
        # Refused before anything is on its way.
        pages.check_range(self._kv, block_table, chunk.range, self._layout.num_token_shares)
        with self._retiring_on_failure(pair):
            ends = pair.post_receive(chunk.slot)
            works = [end.pair.receive(chunk.slot, end.codec.num_bytes(chunk.range)) for end in ends]
        return Landing(pair, chunk, tuple(block_table), ends, works)

    def complete_receive(self, landing: Landing, ready: torch.cuda.Event | None = None) -> int:
        """Waits for a posted chunk, checks it and scatters it into the pages; returns the bytes that arrived.

        `ready`: on a GPU, what must have happened before the pages are written; None: all that was launched so far.
        Raises TransferFailed, of which Corrupted, with the pair retired; ValueError when it was completed before.
        """
        pair, chunk, works = landing.pair, landing.chunk, landing.works
        if not works:
            raise ValueError(f"a landing of pair {chunk.epoch} was completed already")
        landing.works, tag = [], chunk.tag
        with self._retiring_on_failure(pair):
            self._wait(works)
            if self._wire is not None:
                self._wire.carry(chunk.range.num_cells)
            pair.arrived(chunk.slot)
            with self._streams.scattering(pair.stream, ready):
                for end in landing.routes:
                    end.codec.unpack(end.slots[chunk.slot], self._kv, landing.block_table, chunk.range, tag)
            self._release(pair, chunk.slot, landing.routes)
        return sum(end.codec.moved_bytes(chunk.range) for end in landing.routes)

    # Slots and steps

    def before_step(self) -> None:
        """To be called before each step is launched: on a GPU it waits there for the gathers launched so far."""
        self._streams.before_step()

    def _check(self, pair: RankPair, chunk: Chunk, *, is_sender: bool) -> None:
        pair.check(is_sender=is_sender, slot=chunk.slot)
        size = self._slot_cells(pair)
        if not 0 < chunk.range.num_cells <= size:
            raise ValueError(f"a chunk of {chunk.range.num_cells} tokens x layers does not fit a slot of {size}")

    def _release(self, pair: RankPair, slot: int, ends: list[RouteEnd]) -> None:
        """Lets the sender know that a slot was read. What came out of it stays landed, even if the sender is gone; what
        came out of the sender's pages does not: raises TransferFailed then."""
        pair.free(slot)
        try:
            for end in ends:
                end.pair.release(slot)
        except TransferFailed as error:
            if shares_pages(pair.spec.agreed.transport):
                raise
            self._retire(pair, error)

    def _wait(self, works: list[TransferWork]) -> None:
        deadline = time.monotonic() + self._timeout_s
        for work in works:
            work.wait(max(0.0, deadline - time.monotonic()))

    # Ends

    @contextmanager
    def _retiring_on_failure(self, pair: RankPair) -> Iterator[None]:
        try:
            yield
        except TransferFailed as error:
            self._retire(pair, error)
            raise

    def _retire(self, pair: RankPair, error: TransferFailed) -> None:
        if self._end(pair, error.message):
            logger.warning("pair %s retired: %s", pair.epoch, error.message)

    def _end(self, pair: RankPair, why: str) -> bool:
        with self._lock:
            self._ending.add(pair)
        is_first = pair.end(why)
        with self._lock:
            if not pair.quarantined:
                self._ending.discard(pair)
        return is_first

    def _quarantined(self) -> list[Tensor]:
        with self._lock:
            pairs = list(self._ending)
        return [slot for pair in pairs for slot in pair.quarantined]

    def _forget(self, pair: RankPair) -> None:
        with self._lock:
            if self._pairs.get(pair.epoch) is pair:
                del self._pairs[pair.epoch]
