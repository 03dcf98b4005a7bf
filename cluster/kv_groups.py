"""Groups of layers that keep the same of a sequence: the KV of all of it, or of a window, or a recurrent state; and
which of a block's tokens a rank keeps.

The blocks of one pool serve every group: a block holds so many tokens of one group's layers, and a sequence has a table
of blocks for each group (docs/adr/0012-one-pool-for-groups-of-layers.md). A block of layers with a state holds the
state behind the last of its tokens (docs/adr/0014-states-lie-in-blocks.md). Pure: knows no pool, no tensors and no
model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

STATE_WINDOW = 2
"""Tokens that a token sees in a layer with a state: itself, and the one before it, behind which the state is."""
STATE_VALUE_BYTES = 4
"""States are float32, whatever the pool's type."""


class StateRun(NamedTuple):
    """Values [start, stop) of a plane of a block that hold values [at, at + stop - start) of what is looked for."""

    plane: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class StateShape:
    """The recurrent state of one layer: parts with as many values for each of its heads, which ranks divide evenly.

    A rank's part of it lies in the planes of its block as if these followed one another: all its heads of the first
    part, all its heads of the second.
    """

    num_heads: int
    """Heads of the whole model."""
    part_sizes: tuple[int, ...]
    """Values of one head in each part."""

    def num_local_heads(self, tp_size: int) -> int:
        return self.num_heads // tp_size

    def head_range(self, tp_rank: int, tp_size: int) -> range:
        """Global ids of the heads that a rank holds."""
        count = self.num_local_heads(tp_size)
        return range(tp_rank * count, (tp_rank + 1) * count)

    def num_values(self, num_heads: int) -> int:
        """Values of so many heads."""
        return num_heads * sum(self.part_sizes)

    def size_bytes(self, num_heads: int) -> int:
        """Bytes of so many heads."""
        return self.num_values(num_heads) * STATE_VALUE_BYTES

    def runs(self, num_heads: int, plane_values: int, heads: range, part: int | None = None) -> list[StateRun]:
        """Returns where these local heads of a rank with `num_heads` of them lie, in one part or in all of them, one
        part after another. A plane has room for `plane_values`."""
        found: list[StateRun] = []
        first = at = 0
        for number, size in enumerate(self.part_sizes):
            if part in (None, number):
                start, stop = first + heads.start * size, first + heads.stop * size
                for run in _cut(start, stop, plane_values):
                    found.append(StateRun(*run, at))
                    at += run[2] - run[1]
            first += num_heads * size
        return found


def _cut(start: int, stop: int, plane_values: int) -> Iterator[tuple[int, int, int]]:
    """Planes, and the values of each, that [start, stop) of all planes lie in."""
    while start < stop:
        plane, inner = divmod(start, plane_values)
        count = min(stop - start, plane_values - inner)
        yield plane, inner, inner + count
        start += count


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV lies in one block: row i of the block is `layers[i]`, numbered within the model."""

    layers: tuple[int, ...]
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    has_state: bool = False
    """The layers keep a state; then `window` is `STATE_WINDOW`."""

    def first_seen(self, num_tokens: int) -> int:
        """The first token that is seen by the one behind the first `num_tokens`: `num_tokens` itself, if no other."""
        return 0 if self.window is None else max(0, num_tokens + 1 - self.window)

    def first_whole(self, num_tokens: int, block_size: int) -> int:
        """The first block that holds all it should, if no more than `first_seen` is kept of the first `num_tokens`."""
        first = self.first_seen(num_tokens)
        return first // block_size if self.has_state else -(-first // block_size)


@dataclass(frozen=True)
class TokenShare:
    """The tokens that a rank keeps of each block: one of equal runs, of which each rank has its own; or all of them.

    So what a rank keeps of a sequence is a sequence in blocks of `size` tokens, with the same table.
    """

    block_size: int
    num_shares: int = 1
    place: int = 0

    @property
    def size(self) -> int:
        """Tokens of a block that the rank keeps."""
        return self.block_size // self.num_shares

    def num_before(self, position: int) -> int:
        """Tokens of the share before a position of the sequence: the place of the next one in what the rank keeps."""
        block, offset = divmod(position, self.block_size)
        return block * self.size + min(max(offset - self.place * self.size, 0), self.size)

    def meets(self, other: TokenShare) -> bool:
        """Whether some token of a long sequence is in both, whose blocks may differ in size.

        A run of either begins so many tokens behind one of the other as the places say, give or take any multiple of
        both block sizes' greatest common divisor.
        """
        apart = self.place * self.size - other.place * other.size
        least = -self.size + 1 + (apart + self.size - 1) % gcd(self.block_size, other.block_size)
        return least < other.size


def all_layers(num_layers: int) -> tuple[KvGroup, ...]:
    """The one group of a model that keeps everything in each layer."""
    return (KvGroup(tuple(range(num_layers))),)


def group_layers(windows: Sequence[int | None], states: Collection[int] = ()) -> tuple[KvGroup, ...]:
    """Divides layers, given the window of each, into groups of equal size; those that keep everything come first, and
    those with a state, which `states` names, last.

    A group has as many layers as the rarest kind. Where another kind's layers do not divide by that, some of its groups
    have fewer, and their blocks an unused rest. A kind's layers are dealt out in turn, so that the first rows of all
    groups are the model's first layers.
    """
    every = [(window, layer in states) for layer, window in enumerate(windows)]
    kinds: dict[tuple[int | None, bool], list[int]] = {(None, False): []}
    for layer, kind in sorted(enumerate(every), key=lambda one: one[1][1]):
        kinds.setdefault(kind, []).append(layer)
    present = {kind: layers for kind, layers in kinds.items() if layers}
    size = min(map(len, present.values()))
    groups = []
    for (window, has_state), layers in present.items():
        count = -(-len(layers) // size)
        groups += [KvGroup(tuple(layers[first::count]), window, has_state) for first in range(count)]
    return tuple(groups)


def num_rows(groups: Sequence[KvGroup]) -> int:
    """Layers that a block has room for."""
    return max(len(group.layers) for group in groups)


DISK_PAGE = 4096
LOOK_TIMEOUT_S = 60.0
"""The most that a look at all objects of a KV store is waited for where nobody writes; a flush of it is such a look."""


def slot_bytes_of(block_bytes: int) -> int:
    """Bytes of a slot on a disk: a page that says what is in it, and whole pages of the block."""
    return DISK_PAGE + -(-block_bytes // DISK_PAGE) * DISK_PAGE
