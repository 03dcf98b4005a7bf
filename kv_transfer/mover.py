"""One rank's hands in every hand-off: gathers into send slots, sends them, receives into landing slots, scatters.

    sender:    gather -> send               (the pages are free again once gather has returned)
    receiver:  post_receive -> (grant) -> complete_receive       (only this rank's own scatter writes its pages)

It carries out what was decided above it: who may use which slot, when pages are free, when a pair is opened or closed.
A link is this rank's share of one pair of workers, named by the pair's epoch: one transport pair for each route between
this rank and a remote one. Any failure retires the whole link: its transport pairs are closed at once, buffers with
operations posted on them are quarantined until that is done, their slots get fresh ones, and every later call for the
epoch raises TransferFailed, until close_pair forgets it. A rank whose heads lower ranks replicate has no route to send
on; there, gather and send do nothing.

Threads: `open_pair` and the closing calls may come from any thread; gather, send and post_receive from one thread in
the order that both sides agreed on; complete_receive from that thread or from one other, in the order of the posts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_transfer import pages
from kv_transfer.layout import KvLayout
from kv_transfer.packing import Packing, Part
from kv_transfer.slots import Lane, Slot
from kv_transfer.transport import Pair, TransferFailed, Work, connect_store, make_pair

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Link:
    pair_epoch: str
    is_sender: bool
    packing: Packing
    pairs: list[tuple[Part, Pair]] = field(default_factory=list)
    is_open: bool = False
    ended: str | None = None  # why


@dataclass(eq=False)
class Landing:
    """A posted receive, for `complete_receive`. It keeps its buffer alive."""

    link: _Link
    slot: Slot
    buffer: Tensor
    works: list[Work]
    token_start: int
    token_end: int
    block_table: tuple[int, ...]


class KvMover:
    """Moves the KV of one rank. `kv` is [L, 2, N, B, H, D]; slots hold up to `chunk_tokens` tokens."""

    def __init__(
        self,
        kv: Tensor,
        layout: KvLayout,
        tp_rank: int,
        *,
        num_slots: int,
        chunk_tokens: int,
        timeout_s: float,
        transport: str,
        host: str,
        compute_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`transport` is `gloo` or `nccl`; `host` is this machine's address as the peers see it. Raises ValueError."""
        expected = (layout.num_layers, 2, kv.shape[2], layout.block_size, layout.num_local_heads, layout.head_dim)
        if tuple(kv.shape) != expected or kv.dtype != getattr(torch, layout.dtype):
            raise ValueError(f"the KV cache is {tuple(kv.shape)} {kv.dtype}; its layout says {expected} {layout.dtype}")
        self._kv = kv
        self._layout = layout
        self._tp_rank = tp_rank
        self._num_slots = num_slots
        self._chunk_tokens = chunk_tokens
        self._timeout_s = timeout_s
        self._transport = transport
        self._host = host
        self._compute_stream = compute_stream
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._lanes: dict[bool, Lane] = {}  # True: send slots, False: landing slots
        self._quarantine: dict[_Link, list[Tensor]] = {}
        self._is_closed = False

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of buffers that a pair may still touch because it is not closed yet, or could not be."""
        with self._lock:
            return sum(buffer.nbytes for buffers in self._quarantine.values() for buffer in buffers)

    def open_pair(self, pair_epoch: str, store_address: str, is_sender: bool, remote: KvLayout) -> None:
        """Meets the remote ranks that share heads with this one, at the receiving worker's store.

        Blocks until they are there. Raises LayoutMismatch, and TransferFailed after the timeout or a close_pair.
        """
        started = time.monotonic()
        link = _Link(pair_epoch, is_sender, Packing(self._layout, self._tp_rank, remote, is_sender=is_sender))
        with self._lock:
            if self._is_closed:
                raise TransferFailed(f"pair {pair_epoch} cannot be opened: this worker is stopping")
            if pair_epoch in self._links:
                raise ValueError(f"pair {pair_epoch} is open already; every pair needs an epoch of its own")
            if link.packing.routes and is_sender not in self._lanes:
                self._lanes[is_sender] = self._new_lane()
            self._links[pair_epoch] = link
        try:
            self._make_pairs(link, store_address)
        except BaseException as error:
            self._end(link, str(error) or type(error).__name__)
            self._forget(link)
            raise
        took_ms = (time.monotonic() - started) * 1000
        side, made = ("sender" if is_sender else "receiver"), f"{len(link.pairs)} {self._transport} connections"
        logger.info("pair %s opened as %s: %s with %s in %.0f ms", pair_epoch, side, made, remote, took_ms)

    def close_pair(self, pair_epoch: str) -> None:
        """Ends a link, wakes whoever waits on it, and forgets its epoch. An unknown epoch is no error.

        A link that is still being opened is given up as soon as the connection it is making is made or timed out.
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

    def gather(self, pair_epoch: str, slot: int, token_start: int, token_end: int, block_table: Sequence[int]) -> int:
        """Copies tokens from the pages into a send slot; returns the bytes that sending it will move."""
        link = self._open_link(pair_epoch, is_sender=True)
        num_tokens = self._check_size(token_end - token_start)
        if not link.pairs:
            return 0
        lane = self._lanes[True]
        target = lane.slot(slot)
        self._check_idle(target, slot)
        target.gathered = None
        packing = link.packing
        with lane.packing(target.buffer, packing.num_elements(num_tokens)) as buffer:
            for part in packing.parts:
                view = packing.view(buffer, part, num_tokens)
                pages.gather(self._kv, block_table, token_start, token_end, part.heads, view)
        target.gathered = (pair_epoch, num_tokens)
        return sum(packing.view(target.buffer, part, num_tokens).nbytes for part, _ in link.pairs)

    def send(self, pair_epoch: str, slot: int, num_tokens: int) -> None:
        """Sends a gathered slot to every remote rank with a route; returns once the slot may be used again."""
        link = self._open_link(pair_epoch, is_sender=True)
        self._check_size(num_tokens)
        if not link.pairs:
            return
        lane = self._lanes[True]
        source = lane.slot(slot)
        if source.gathered != (pair_epoch, num_tokens):
            raise ValueError(f"slot {slot} holds {source.gathered}, not {(pair_epoch, num_tokens)}; gather it first")
        with self._retiring_on_failure(link):
            self._post(link, source, slot)
            with lane.posting():
                views = [(link.packing.view(source.buffer, part, num_tokens), pair) for part, pair in link.pairs]
                works = [pair.send(view) for view, pair in views]
            self._wait(lane, works)
        self._release(link, source)

    def post_receive(
        self, pair_epoch: str, slot: int, token_start: int, token_end: int, block_table: Sequence[int]
    ) -> Landing:
        """Posts the receives of a chunk into a landing slot; the sender may be granted as soon as this returns."""
        link = self._open_link(pair_epoch, is_sender=False)
        num_tokens = self._check_size(token_end - token_start)
        pages.row_index(self._kv, block_table, token_start, token_end)  # refused before anything is on its way
        lane = self._lanes[False]
        target = lane.slot(slot)
        with self._retiring_on_failure(link):
            self._post(link, target, slot)
            buffer = target.buffer
            with lane.posting():
                works = [pair.receive(link.packing.view(buffer, part, num_tokens)) for part, pair in link.pairs]
        return Landing(link, target, buffer, works, token_start, token_end, tuple(block_table))

    def complete_receive(self, landing: Landing) -> int:
        """Waits for a posted chunk and scatters it into the pages; returns the bytes that arrived."""
        link, works = landing.link, landing.works
        if not works:
            raise ValueError(f"a landing of pair {link.pair_epoch} was completed already")
        landing.works = []
        lane = self._lanes[False]
        with self._retiring_on_failure(link):
            self._wait(lane, works)
        num_tokens = landing.token_end - landing.token_start
        num_elements = link.packing.num_elements(num_tokens)
        try:
            with lane.unpacking(landing.buffer, num_elements) as buffer:
                for part in link.packing.parts:
                    view = link.packing.view(buffer, part, num_tokens)
                    start, end = landing.token_start, landing.token_end
                    pages.scatter(self._kv, landing.block_table, start, end, part.heads, view)
        finally:
            self._release(link, landing.slot)
        return num_elements * landing.buffer.element_size()

    def receive(self, pair_epoch: str, slot: int, token_start: int, token_end: int, block_table: Sequence[int]) -> int:
        """post_receive and complete_receive in one."""
        return self.complete_receive(self.post_receive(pair_epoch, slot, token_start, token_end, block_table))

    def _new_lane(self) -> Lane:
        elements = (
            self._chunk_tokens * self._layout.num_local_heads * self._layout.num_layers * 2 * self._layout.head_dim
        )
        is_host_staged = self._transport == "gloo"
        return Lane(
            self._kv, self._num_slots, elements, is_host_staged=is_host_staged, compute_stream=self._compute_stream
        )

    def _make_pairs(self, link: _Link, store_address: str) -> None:
        if not link.packing.routes:
            link.is_open = True
            return
        deadline = time.monotonic() + self._timeout_s
        store = connect_store(store_address, self._timeout_s)
        for route in link.packing.routes:
            pair = make_pair(
                self._transport,
                store,
                f"{link.pair_epoch}/{route.src_rank}-{route.dst_rank}",
                is_sender=link.is_sender,
                host=self._host,
                device=self._kv.device,
                timeout_s=max(0.001, deadline - time.monotonic()),
            )
            with self._lock:
                link.pairs.append((link.packing.part_of(route), pair))
                link.is_open = len(link.pairs) == len(link.packing.routes)
                ended = link.ended
            if ended is not None:
                pair.close()
                raise TransferFailed(f"pair {link.pair_epoch} was given up while it opened: {ended}")

    def _open_link(self, pair_epoch: str, *, is_sender: bool) -> _Link:
        with self._lock:
            link = self._links.get(pair_epoch)
        if link is None or link.ended is not None or not link.is_open:
            why = "it was never opened, or closed" if link is None else link.ended or "it is still being opened"
            raise TransferFailed(f"pair {pair_epoch} cannot be used: {why}")
        if link.is_sender is not is_sender:
            raise ValueError(f"pair {pair_epoch} was opened as the {'sender' if link.is_sender else 'receiver'}")
        return link

    def _check_size(self, num_tokens: int) -> int:
        if not 0 < num_tokens <= self._chunk_tokens:
            raise ValueError(f"a chunk of {num_tokens} tokens does not fit a slot of {self._chunk_tokens}")
        return num_tokens

    @staticmethod
    def _check_idle(slot: Slot, index: int) -> None:
        if slot.posted_by is not None:
            raise ValueError(f"slot {index} has operations posted on it; wait for them before it is used again")

    def _post(self, link: _Link, slot: Slot, index: int) -> None:
        with self._lock:
            self._check_idle(slot, index)
            if link.ended is not None:
                raise TransferFailed(f"pair {link.pair_epoch} cannot be used: {link.ended}")
            slot.posted_by = link

    def _release(self, link: _Link, slot: Slot) -> None:
        with self._lock:
            if slot.posted_by is link:
                slot.posted_by = slot.gathered = None

    def _wait(self, lane: Lane, works: list[Work]) -> None:
        deadline = time.monotonic() + self._timeout_s
        with lane.waiting():
            for work in works:
                work.wait(max(0.0, deadline - time.monotonic()))

    @contextmanager
    def _retiring_on_failure(self, link: _Link) -> Iterator[None]:
        try:
            yield
        except TransferFailed as error:
            if self._end(link, error.message):
                logger.warning("pair %s retired: %s", link.pair_epoch, error.message)
            raise

    def _end(self, link: _Link, why: str) -> bool:
        """Closes a link's transport pairs once; True for the call that did it."""
        with self._lock:
            if link.ended is not None:
                return False
            link.ended = why
            quarantined = [buffer for lane in self._lanes.values() for buffer in lane.replace_buffers(link)]
            self._quarantine[link] = quarantined
            pairs = [pair for _, pair in link.pairs]
        all_closed = True
        for pair in pairs:
            try:
                pair.close()
            except TransferFailed as error:
                all_closed = False
                logger.error("pair %s: %s; its buffers stay quarantined", link.pair_epoch, error.message)
        if all_closed:
            with self._lock:
                del self._quarantine[link]
        return True

    def _forget(self, link: _Link) -> None:
        with self._lock:
            if self._links.get(link.pair_epoch) is link:
                del self._links[link.pair_epoch]
