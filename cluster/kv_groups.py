"""Groups of layers that keep the same KV of a sequence: all of it, or a window.

The blocks of one pool serve every group: a block holds so many tokens of one group's layers, and a sequence has a table
of blocks for each group (docs/adr/0012-one-pool-for-groups-of-layers.md). Pure: knows no pool, no tensors and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV lies in one block: row i of the block is `layers[i]`, numbered within the model."""

    layers: tuple[int, ...]
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""

    def first_seen(self, num_tokens: int) -> int:
        """The first token that is seen by the one behind the first `num_tokens`: `num_tokens` itself, if no other."""
        return 0 if self.window is None else max(0, num_tokens + 1 - self.window)


def all_layers(num_layers: int) -> tuple[KvGroup, ...]:
    """The one group of a model that keeps everything in each layer."""
    return (KvGroup(tuple(range(num_layers))),)


def group_layers(windows: Sequence[int | None]) -> tuple[KvGroup, ...]:
    """Divides layers, given the window of each, into groups of equal size; those that keep everything come first.

    A group has as many layers as the rarest kind. Where another kind's layers do not divide by that, some of its groups
    have fewer, and their blocks an unused rest. A kind's layers are dealt out in turn, so that the first rows of all
    groups are the model's first layers.
    """
    kinds = {window: [i for i, w in enumerate(windows) if w == window] for window in (None, *windows)}
    present = {window: layers for window, layers in kinds.items() if layers}
    size = min(map(len, present.values()))
    groups = []
    for window, layers in present.items():
        count = -(-len(layers) // size)
        groups += [KvGroup(tuple(layers[first::count]), window) for first in range(count)]
    return tuple(groups)


def num_rows(groups: Sequence[KvGroup]) -> int:
    """Layers that a block has room for."""
    return max(len(group.layers) for group in groups)
