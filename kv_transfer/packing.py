"""How the KV of one chunk lies in a slot, for one pair of workers, seen from one rank.

A part is a run of this rank's heads that travels as one contiguous [L, 2, T, h, D] tensor; the parts lie one after
another for the actual number of tokens T. Remote ranks that replicate one another share a part: its bytes are packed
once and sent to each. Pure geometry: it copies nothing and knows no pages and no transport.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kv_transfer.layout import KvLayout, Route, routes


@dataclass(frozen=True)
class Part:
    """Local heads `heads` of this rank, after `heads_before` others in the slot."""

    heads: slice
    heads_before: int

    @property
    def num_heads(self) -> int:
        heads: slice[int, int, None] = self.heads
        return heads.stop - heads.start


class Packing:
    """The parts of a slot and the routes that carry them."""

    def __init__(self, local: KvLayout, tp_rank: int, remote: KvLayout, *, is_sender: bool) -> None:
        """Raises LayoutMismatch. A sender that lower ranks replicate has no routes and no parts."""
        every = routes(local, remote) if is_sender else routes(remote, local)
        self._num_layers, self._head_dim = local.num_layers, local.head_dim
        self.routes = tuple(r for r in every if (r.src_rank if is_sender else r.dst_rank) == tp_rank)
        first_head = local.head_range(tp_rank).start
        self._part_at: dict[int, Part] = {}
        heads_before = 0
        for start, end in sorted({(route.head_start, route.head_end) for route in self.routes}):
            self._part_at[start] = Part(slice(start - first_head, end - first_head), heads_before)
            heads_before += end - start
        self._num_heads = heads_before

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._part_at.values())

    def part_of(self, route: Route) -> Part:
        return self._part_at[route.head_start]

    def num_elements(self, num_tokens: int) -> int:
        """Elements of a slot that a chunk fills."""
        return self._num_heads * self._elements_per_head(num_tokens)

    def view(self, buffer: Tensor, part: Part, num_tokens: int) -> Tensor:
        """The part of a flat slot buffer as [L, 2, T, h, D], contiguous."""
        start = part.heads_before * self._elements_per_head(num_tokens)
        piece = buffer[start : start + part.num_heads * self._elements_per_head(num_tokens)]
        return piece.view(self._num_layers, 2, num_tokens, part.num_heads, self._head_dim)

    def _elements_per_head(self, num_tokens: int) -> int:
        return self._num_layers * 2 * num_tokens * self._head_dim
