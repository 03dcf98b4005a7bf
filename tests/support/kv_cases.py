"""Cases for what lies in a slot: caches filled by rank from one truth, and the test whether a call lets others run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch

from kv_transfer.actions import Range
from kv_transfer.codec import SlotCodec
from kv_transfer.layout import KvLayout, routes
from kv_transfer.shares import RouteTokens

POISON = -77.0


def lets_other_threads_run(call: Callable[[], object], timeout_s: float = 5.0) -> bool:
    """Whether `call`, over and over, ever lets a waiting thread run of its own accord. It must not touch torch."""
    go, ran, interval = threading.Event(), threading.Event(), sys.getswitchinterval()

    def other() -> None:
        go.wait()
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(2 * timeout_s)
    try:
        deadline = time.monotonic() + timeout_s
        go.set()
        while not ran.is_set() and time.monotonic() < deadline:
            call()
        return ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


class RankCaches:
    """One worker's caches [L, P, N, B, H, D], one for each rank, with a shuffled block table for `num_tokens`."""

    def __init__(self, layout: KvLayout, num_tokens: int, seed: int = 0) -> None:
        self.layout = layout
        used = -(-num_tokens // layout.block_size)
        generator = torch.Generator().manual_seed(seed * 1000 + layout.tp_size * 31 + layout.block_size)
        self.table = torch.randperm(used + 2, generator=generator).tolist()[:used]
        shape = (
            layout.num_layers,
            layout.num_planes,
            used + 2,
            layout.num_local_tokens,
            layout.num_local_heads,
            layout.head_dim,
        )
        dtype = getattr(torch, layout.dtype)
        self.caches = [torch.full(shape, POISON, dtype=dtype) for _ in range(layout.tp_size)]

    def rows(self, rank: int) -> torch.Tensor:
        """[L, P, T, h, D]: what a rank holds of every token, copied."""
        cache = self.caches[rank]
        return cache[:, :, self.table].flatten(2, 3)

    def load(self, truth: torch.Tensor) -> None:
        """Writes `truth` [L, P, T, H, D], all heads of the model, token by token."""
        for rank, cache in enumerate(self.caches):
            heads = self.layout.head_range(rank)
            for t in range(truth.shape[2]):
                place, offset = divmod(t % self.layout.block_size, self.layout.num_local_tokens)
                if place == rank or self.layout.num_token_shares == 1:
                    block = self.table[t // self.layout.block_size]
                    cache[:, :, block, offset] = truth[:, :, t, heads.start : heads.stop].to(cache.dtype)

    def held(self, num_tokens: int) -> torch.Tensor:
        """[L, P, T, H, D] put together again from the lowest rank that holds each head, or from the shares of all."""
        if self.layout.num_token_shares > 1:
            blocks = torch.cat([cache[:, :, self.table] for cache in self.caches], dim=3)  # [L, P, n, B, H, D]
            return blocks.flatten(2, 3)[:, :, :num_tokens]
        parts = []
        for head in range(self.layout.num_kv_heads):
            rank = self.layout.first_holder(head)
            local = head - self.layout.head_range(rank).start
            parts.append(self.rows(rank)[:, :, :num_tokens, local])
        return torch.stack(parts, dim=3)


def make_slot(codec: SlotCodec, num_cells: int = 63) -> torch.Tensor:
    return torch.full((codec.slot_bytes(num_cells),), 0xAB, dtype=torch.uint8)


def move(
    sender: RankCaches, receiver: RankCaches, ranges: list[Range], wire_format: str = "native", digest: str = "on"
) -> None:
    """Through one slot for each route, range after range."""
    for route in routes(sender.layout, receiver.layout):
        codecs, kvs = [], []
        for side, rank, other in ((sender, route.src_rank, receiver), (receiver, route.dst_rank, sender)):
            first = side.layout.head_range(rank).start
            heads = slice(route.head_start - first, route.head_end - first)
            codecs.append(
                SlotCodec(
                    side.layout,
                    other.layout,
                    heads,
                    is_sender=side is sender,
                    tokens=RouteTokens.of(route, side.layout, other.layout, is_sender=side is sender),
                    wire_format=wire_format,
                    digest=digest,
                )
            )
            kvs.append(side.caches[rank])
        slot = make_slot(codecs[0], max(what.num_cells for what in ranges))
        assert len(slot) == len(make_slot(codecs[1], max(what.num_cells for what in ranges)))
        for tag, what in enumerate(ranges):
            size = codecs[0].pack(kvs[0], sender.table, what, tag, slot)
            assert size == codecs[0].num_bytes(what) == codecs[1].num_bytes(what)
            codecs[1].unpack(slot[:size].clone(), kvs[1], receiver.table, what, tag)


def decoded(truth: torch.Tensor, wire_format: str, dtype: str) -> torch.Tensor:
    """What `truth` looks like after the wire: rows of D values are coded on their own, so all at once will do."""
    target: torch.dtype = getattr(torch, dtype)
    if wire_format == "native":
        return truth.to(target)
    largest = 127.0 if wire_format == "int8" else 448.0
    scales = truth.float().abs().amax(-1, keepdim=True) / largest
    scaled = truth.float() * scales.reciprocal()
    codes = scaled.round() if wire_format == "int8" else scaled.to(torch.float8_e4m3fn).float()
    return (codes * scales).to(target)
