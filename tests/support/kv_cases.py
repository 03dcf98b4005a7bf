"""Cases for what lies in a slot: caches filled by rank from one truth, and the test whether a call lets others run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch

from kv_transfer.layout import KvLayout

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
            layout.block_size,
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
                block, offset = self.table[t // self.layout.block_size], t % self.layout.block_size
                cache[:, :, block, offset] = truth[:, :, t, heads.start : heads.stop].to(cache.dtype)

    def held(self, num_tokens: int) -> torch.Tensor:
        """[L, P, T, H, D] put together again from the lowest rank that holds each head."""
        parts = []
        for head in range(self.layout.num_kv_heads):
            rank = self.layout.first_holder(head)
            local = head - self.layout.head_range(rank).start
            parts.append(self.rows(rank)[:, :, :num_tokens, local])
        return torch.stack(parts, dim=3)
