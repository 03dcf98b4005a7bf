"""Reads linear layers that a checkpoint holds as packed integers: AWQ, GPTQ and compressed-tensors' `pack-quantized`.

What `quantization_config` says of them is a `Packing`. Each int32 holds several codes, the first in its lowest bits.
GPTQ and compressed-tensors pack along the inputs; AWQ along the outputs, and interleaves the eight of a word; all pack
zero points along the outputs. compressed-tensors has outputs first, the others inputs. A slice is read in whole words
and whole groups around it.

Legend: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.native.structures import INT4_SPAN
from engine.quantization.integers import Quantized, keep
from engine.quantization.stored import WORD_BITS, Packing

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in its word at which AWQ puts each of eight outputs."""
_ROWS_AT_ONCE = 256
_CPU = torch.device("cpu")


def read_weight(checkpoint: Checkpoint, packing: Packing, part: TensorSlice, out: Tensor) -> None:
    """Copies a slice of a weight [O, I] into `out`, packed or plain. Raises CheckpointError as `read_codes`."""
    if part.name in checkpoint:
        checkpoint.read(part, out)
    else:
        read_codes(checkpoint, packing, part, out.device).decode(out)


def kept_group(packing: Packing, num_inputs: int, num_ranks: int) -> int | None:
    """Returns the inputs of a group where codes are kept, in a layer of so many inputs on each rank; None where they
    cannot be.

    `num_ranks`: how many divide the layer's inputs among them.
    """
    group = math.gcd(packing.group_size or num_inputs, num_inputs)
    if packing.bits != 4 or (num_ranks > 1 and packing.is_scattered(num_inputs * num_ranks)) or group % INT4_SPAN:
        return None
    return group


@dataclass(frozen=True)
class Codes:
    """A slice of a linear layer: weight [o, i] is (codes[o, i] - zeros[o, g]) * scales[o, g] with g = groups[i].

    All but the groups, by which is decided, lie on the device that multiplies.
    """

    codes: Tensor  # uint8 [O, I]
    zeros: Tensor  # uint8 [O, G]
    scales: Tensor  # float32 [O, G]
    groups: Tensor  # int64 [I], on the CPU
    bits: int

    def reorder(self, order: Tensor | None) -> Codes:
        """Returns the same outputs in another order."""
        codes, zeros, scales = (reorder(rows, order) for rows in (self.codes, self.zeros, self.scales))
        return replace(self, codes=codes, zeros=zeros, scales=scales)

    def decode(self, out: Tensor) -> None:
        """Writes the weight [O, I]: exact in float32, to nearest in another type."""
        groups = self.groups.to(self.codes.device)
        for start in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            weight = self.codes[rows].float()
            weight.sub_(self.zeros[rows].float()[:, groups]).mul_(self.scales[rows][:, groups])
            out[rows].copy_(weight)


def reorder(rows: Tensor, order: Tensor | None) -> Tensor:
    """Rows in an order, int64; None: as they are."""
    return rows if order is None else rows.index_select(0, order)


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
    columns = [of_inputs[::group].to(first.codes.device) for of_inputs in groups]
    wide = torch.cat([part.scales[:, at] for part, at in zip(parts, columns, strict=True)])
    scales = wide.to(torch.float16)
    if not torch.equal(scales.float(), wide):
        return None
    zeros = torch.cat([part.zeros[:, at] for part, at in zip(parts, columns, strict=True)])
    codes = torch.cat([part.codes for part in parts])
    order = None if order is None else order.to(codes.device)
    return keep(codes if order is None else codes[:, order], zeros, scales, group), order


def _run_length(groups: Tensor) -> int:
    """The most inputs by which all stretches of one group can be divided."""
    ends = (groups.diff().nonzero().flatten() + 1).tolist()
    return math.gcd(*ends, len(groups))


def read_codes(checkpoint: Checkpoint, packing: Packing, part: TensorSlice, device: torch.device = _CPU) -> Codes:
    """`part` names the slice of the plain weight [O, I] that is not there, `<layer>.weight`. Unpacks on `device`.

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
    scale_slice = _cut(packing, packing.name(layer, "scales"), shape, *cut)
    scales = torch.empty(scale_slice.local_shape, device=device)
    checkpoint.read(scale_slice, scales)
    code_name = packing.name(layer, "codes")
    code_slice = _cut(packing, code_name, (num_inputs, num_outputs), 1 - part.dim, part.start, stop)
    packed_dim = 0 if packing.method == "gptq" else 1
    return Codes(
        codes=_unpack(packing, *_read_words(checkpoint, packing, code_slice, packed_dim, device)),
        zeros=_read_zeros(checkpoint, packing, _cut(packing, packing.name(layer, "zeros"), shape, *cut), device),
        scales=scales if packing.is_outputs_first else scales.T.contiguous(),
        groups=groups,
        bits=packing.bits,
    )


def _cut(packing: Packing, name: str, shape: tuple[int, int], dim: int, start: int, stop: int) -> TensorSlice:
    """Returns a slice of a tensor whose shape and `dim` are given with outputs last, as it is stored."""
    if packing.is_outputs_first:
        return TensorSlice(name, shape[::-1], 1 - dim, start, stop)
    return TensorSlice(name, shape, dim, start, stop)


def _read_groups(checkpoint: Checkpoint, packing: Packing, layer: str, num_inputs: int) -> Tensor:
    """The group of each input of the whole layer: int64 [I]."""
    name, num_groups = packing.name(layer, "groups"), packing.num_groups(num_inputs)
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


def _read_zeros(checkpoint: Checkpoint, packing: Packing, part: TensorSlice, device: torch.device) -> Tensor:
    """Zero points [O, G] of a slice."""
    if packing.is_outputs_first and packing.is_symmetric:  # has none
        return torch.full(part.local_shape, 1 << packing.bits - 1, dtype=torch.uint8, device=device)
    words, cut = _read_words(checkpoint, packing, part, 0 if packing.is_outputs_first else 1, device)
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
    """The wanted part of unpacked values: `count` from `start` along `dim`."""

    packed_dim: int
    dim: int
    start: int
    count: int


def _read_words(
    checkpoint: Checkpoint, packing: Packing, part: TensorSlice, packed_dim: int, device: torch.device
) -> tuple[Tensor, _Cut]:
    """The words that hold a slice of integers, which `part` describes as if they were not packed along `packed_dim`."""
    size, per_word = part.shape[packed_dim], packing.per_word
    num_words = packing.num_words(part.name, size)
    shape = tuple(num_words if dim == packed_dim else size for dim, size in enumerate(part.shape))
    start, stop = part.start, part.shape[part.dim] if part.stop is None else part.stop
    cut = _Cut(packed_dim, part.dim, 0, stop - start)
    if part.dim == packed_dim:
        cut = _Cut(packed_dim, part.dim, start % per_word, stop - start)
        start, stop = start // per_word, -(-stop // per_word)
    stored = TensorSlice(part.name, shape, part.dim, start, stop)
    words = torch.empty(stored.local_shape, dtype=torch.int32, device=device)
    checkpoint.read(stored, words)
    return words, cut


def _unpack(packing: Packing, words: Tensor, cut: _Cut) -> Tensor:
    """uint8, outputs first."""
    lines, at = words.T.contiguous(), 1 - cut.packed_dim
    places = _AWQ_PLACES if packing.method == "awq" else range(packing.per_word)
    largest = (1 << packing.bits) - 1
    values = [(lines >> packing.bits * place & largest).to(torch.uint8) for place in places]
    whole = torch.stack(values, dim=at + 1).flatten(at, at + 1)
    wanted = whole.narrow(1 - cut.dim, cut.start, cut.count)
    return (wanted.T if packing.is_outputs_first else wanted).contiguous()
