"""The recurrent states of one layer in the blocks of the KV pool, read and written for several sequences at a time.

A step begins with the state that lies in the block of a sequence's last token, and leaves the new one in the block of
the last token it takes in: that is the same block, or the next one. So a block that is full holds the state at its end,
as the prefix cache needs it. Knows no tokens and no mathematics.

Legend: S sequences, N blocks, H heads of this rank, P planes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.kv_groups import StateShape


class StatePages:
    """`planes` is [P, N, ...] of one layer, whatever the pool's type; a plane of a block is contiguous."""

    def __init__(self, planes: Tensor, shape: StateShape, num_heads: int) -> None:
        self._values = planes.flatten(2).view(torch.float32)  # [P, N, values of a plane of a block]
        heads, room = range(num_heads), self._values.shape[2]
        assert shape.num_values(num_heads) <= room * len(planes), "a block is too small for a state"
        self._runs = [shape.runs(num_heads, room, heads, part) for part in range(len(shape.part_sizes))]
        self.size_bytes = shape.size_bytes(num_heads)
        """Bytes of the state of one sequence."""
        self._sizes = [num_heads * size for size in shape.part_sizes]

    def read(self, blocks: Tensor) -> list[Tensor]:
        """The parts of the states in blocks int64 [S]: copies, float32 [S, H * part size] each."""
        return [self._read(part, blocks) for part in range(len(self._sizes))]

    def write(self, blocks: Tensor, parts: list[Tensor]) -> None:
        """Writes what `read` would return."""
        for runs, part in zip(self._runs, parts, strict=True):
            for plane, start, stop, at in runs:
                self._values[plane, :, start:stop].index_copy_(0, blocks, part[:, at : at + stop - start])

    def _read(self, part: int, blocks: Tensor) -> Tensor:
        runs = self._runs[part]
        found = [self._values[plane, :, start:stop].index_select(0, blocks) for plane, start, stop, _ in runs]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)
