"""Copies recurrent states between blocks of a paged KV cache and a contiguous buffer, the heads of a route at a time.

Where the values of a head lie in a block is what `cluster.kv_groups.StateShape` says; they are copied bit for bit. It
runs on the tensors' device, in the current stream, and does not synchronize.

Shapes: l layers of the range, V float32 values of the route's heads. kv is [L, P, N, B, H, D] of any type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from cluster.kv_groups import StateShape
from kv_transfer import pages
from kv_transfer.actions import Range
from kv_transfer.layout import KvLayout, Route


@dataclass(frozen=True)
class StateHeads:
    """The heads of states that one route carries, as a rank with `num_heads` of them numbers its own."""

    shape: StateShape
    num_heads: int
    heads: range

    @classmethod
    def of(cls, route: Route, layout: KvLayout, tp_rank: int) -> Self | None:
        """Returns the heads of a rank at either end of the route; None where the model keeps no states."""
        state, tp_size = layout.state, layout.tp_size
        if state is None:
            return None
        first = state.head_range(tp_rank, tp_size).start
        heads = range(route.state_start - first, route.state_end - first) if route.state_end else range(0)
        return cls(state, state.num_local_heads(tp_size), heads)

    def size_bytes(self, num_layers: int) -> int:
        """Bytes of the states of so many layers."""
        return num_layers * self.shape.size_bytes(len(self.heads))

    def gather(self, kv: Tensor, block_table: Sequence[int], what: Range, out: Tensor) -> None:
        """Copies the states behind the range's last token into `out`, float32 [l, V]. Raises ValueError."""
        for block, values in self._runs(kv, block_table, what, out):
            values.copy_(block)

    def scatter(self, kv: Tensor, block_table: Sequence[int], what: Range, source: Tensor) -> None:
        """Copies `source` to the states behind the range's last token. Raises ValueError."""
        for block, values in self._runs(kv, block_table, what, source):
            block.copy_(values)

    def _runs(
        self, kv: Tensor, block_table: Sequence[int], what: Range, values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the block, and of the buffer, that hold the same."""
        pages.check_range(kv, block_table, what)
        block = block_table[(what.token_end - 1) // kv.shape[3]]
        planes = kv[what.layer_start : what.layer_end].flatten(3).view(torch.float32)[:, :, block]  # [l, P, values]
        for plane, start, stop, at in self.shape.runs(self.num_heads, planes.shape[2], self.heads):
            yield planes[:, plane, start:stop], values[:, at : at + stop - start]
