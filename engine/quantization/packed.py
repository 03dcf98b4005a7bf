"""Reads linear layers that a checkpoint holds as packed integers (`engine.quantization.packing`), the slice that is
asked for.

Each int32 holds several codes, the first in its lowest bits. GPTQ packs along the inputs; AWQ along the outputs, and
interleaves the eight of a word; both pack zero points along the outputs. A slice is read in whole words and whole
groups around it.

Legend: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.native.tiles import INT4_SPAN
from engine.quantization.formats import Quantized, keep
from engine.quantization.packing import WORD_BITS, Packing

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word AWQ puts each of eight outputs."""
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Codes:
    """A slice of a linear layer: weight [o, i] is (codes[o, i] - zeros[o, g]) * scales[o, g] with g = groups[i]."""

    codes: Tensor  # uint8 [O, I]
    zeros: Tensor  # uint8 [O, G]
    scales: Tensor  # float32 [O, G]
    groups: Tensor  # int64 [I]
    bits: int

    def decode(self, out: Tensor) -> None:
        """Writes the weight [O, I]: exact in float32, to nearest in another type."""
        for start in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            weight = self.codes[rows].float()
            weight.sub_(self.zeros[rows].float()[:, self.groups]).mul_(self.scales[rows][:, self.groups])
            out[rows].copy_(weight)


def keep_codes(parts: Sequence[Codes]) -> tuple[Quantized, Tensor | None] | None:
    """All parts' outputs in one weight that is still in four bits and exact, and the order of its inputs.

    The order is int64 [I], None where it is the natural one. None for the whole: it cannot be done, since parts differ
    in their order, a slice cuts groups finer than a kernel multiplies, or a scale has no float16.
    """
    first = parts[0]
    order = None if bool((first.groups.diff() >= 0).all()) else first.groups.argsort(stable=True)
    groups = [part.groups if order is None else part.groups[order] for part in parts]
    group = math.gcd(*(_run_length(of_inputs) for of_inputs in groups))
    if any(part.bits != 4 for part in parts) or group % INT4_SPAN:
        return None
    columns = [of_inputs[::group] for of_inputs in groups]
    wide = torch.cat([part.scales[:, at] for part, at in zip(parts, columns, strict=True)])
    scales = wide.to(torch.float16)
    if not torch.equal(scales.float(), wide):
        return None
    zeros = torch.cat([part.zeros[:, at] for part, at in zip(parts, columns, strict=True)])
    codes = torch.cat([part.codes for part in parts])
    return keep(codes if order is None else codes[:, order], zeros, scales, group), order


def _run_length(groups: Tensor) -> int:
    """The most inputs by which all stretches of one group can be divided."""
    ends = (groups.diff().nonzero().flatten() + 1).tolist()
    return math.gcd(*ends, len(groups))


def read_codes(checkpoint: Checkpoint, packing: Packing, part: TensorSlice) -> Codes:
    """`part` names the slice of the plain weight [O, I] that is not there, `<layer>.weight`.

    Raises CheckpointError for tensors that are missing, or of another shape or type, and for groups that cannot be.
    """
    layer = part.name.removesuffix(".weight")
    num_outputs, num_inputs = part.shape
    stop = part.shape[part.dim] if part.stop is None else part.stop
    groups = _read_groups(checkpoint, packing, layer, num_inputs)
    cut = (1, part.start, stop)
    if part.dim == 1:
        groups = groups[part.start : stop]
        first, last = int(groups.min()), int(groups.max())
        groups = groups - first
        cut = (0, first, last + 1)
    shape = (packing.num_groups(num_inputs), num_outputs)
    scale_slice = TensorSlice(f"{layer}.scales", shape, *cut)
    scales = torch.empty(scale_slice.local_shape)
    checkpoint.read(scale_slice, scales)
    code_slice = TensorSlice(f"{layer}.qweight", (num_inputs, num_outputs), 1 - part.dim, part.start, stop)
    packed_dim = 0 if packing.method == "gptq" else 1
    return Codes(
        codes=_unpack(packing, *_read_words(checkpoint, packing, code_slice, packed_dim)),
        zeros=_read_zeros(checkpoint, packing, TensorSlice(f"{layer}.qzeros", shape, *cut)),
        scales=scales.T.contiguous(),
        groups=groups,
        bits=packing.bits,
    )


def _read_groups(checkpoint: Checkpoint, packing: Packing, layer: str, num_inputs: int) -> Tensor:
    """The group of each input of the whole layer: int64 [I]."""
    name, num_groups = f"{layer}.g_idx", packing.num_groups(num_inputs)
    group_size = min(packing.group_size or num_inputs, num_inputs)
    if name not in checkpoint and not packing.has_order:
        return torch.arange(num_inputs) // group_size
    groups = torch.empty(num_inputs, dtype=torch.int32)
    checkpoint.read(TensorSlice(name, (num_inputs,)), groups)
    lowest, highest = int(groups.min()), int(groups.max())
    if lowest < 0 or highest >= num_groups:
        wrong = lowest if lowest < 0 else highest
        raise CheckpointError(f"{checkpoint.describe(name)} names group {wrong}; there are {num_groups}, from 0 on")
    most, largest = groups.bincount().max(0)
    if most > group_size:
        raise CheckpointError(
            f"{checkpoint.describe(name)} puts {most} inputs into group {largest}; config.json's group_size is "
            f"{group_size}"
        )
    return groups.long()


def _read_zeros(checkpoint: Checkpoint, packing: Packing, part: TensorSlice) -> Tensor:
    """Zero points [O, G] of a slice of [G, O]."""
    words, cut = _read_words(checkpoint, packing, part, 1)
    zeros = _unpack(packing, words, cut)
    if not packing.has_lowered_zeros:
        return zeros
    # Some writers name the first layout and store zero points as they are. Symmetry gives them away.
    if packing.is_symmetric and bool((zeros == 1 << packing.bits - 1).all()):
        return zeros
    # One was taken from every zero point of a word in one subtraction, which may have borrowed from its neighbours.
    ones = sum(1 << shift for shift in range(0, WORD_BITS, packing.bits))
    return _unpack(packing, words + ones, cut)


@dataclass(frozen=True)
class _Cut:
    """Of values that were unpacked, those that are wanted: `count` from `start` along `dim`; 0 is what was packed."""

    packed_dim: int
    dim: int
    start: int
    count: int


def _read_words(checkpoint: Checkpoint, packing: Packing, part: TensorSlice, packed_dim: int) -> tuple[Tensor, _Cut]:
    """The words that hold a slice of integers, which `part` describes as if they were not packed along `packed_dim`."""
    size, per_word = part.shape[packed_dim], packing.per_word
    if size % per_word:
        raise CheckpointError(
            f"{part.name}: {packing.method} packs {per_word} values of {packing.bits} bits in a word, which do not "
            f"divide the {size} that config.json asks for"
        )
    shape = tuple(size // per_word if dim == packed_dim else size for dim, size in enumerate(part.shape))
    start, stop = part.start, part.shape[part.dim] if part.stop is None else part.stop
    cut = _Cut(packed_dim, part.dim, 0, stop - start)
    if part.dim == packed_dim:
        cut = _Cut(packed_dim, part.dim, start % per_word, stop - start)
        start, stop = start // per_word, -(-stop // per_word)
    stored = TensorSlice(part.name, shape, part.dim, start, stop)
    words = torch.empty(stored.local_shape, dtype=torch.int32)
    checkpoint.read(stored, words)
    return words, cut


def _unpack(packing: Packing, words: Tensor, cut: _Cut) -> Tensor:
    """uint8, outputs first: the transpose of what was packed."""
    lines, at = words.T.contiguous(), 1 - cut.packed_dim
    places = _AWQ_PLACES if packing.method == "awq" else range(packing.per_word)
    largest = (1 << packing.bits) - 1
    values = [(lines >> packing.bits * place & largest).to(torch.uint8) for place in places]
    whole = torch.stack(values, dim=at + 1).flatten(at, at + 1)
    return whole.narrow(1 - cut.dim, cut.start, cut.count).contiguous()
