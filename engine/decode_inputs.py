"""The inputs of captured decode steps: kept on the device from step to step, and sent only where they differ.

The device keeps the rows of a decode step: of each its token (or where the step before has put it), its position and
its block table. A recording begins with `advance`: every row is one token further than in the step before, and slots
and lengths follow from positions and tables. So a step that goes on with the rows of the one before needs nothing from
the host but the blocks that its sequences have got since.

The host has the same memory (`_mirror`) and takes the same step in it. What a step wants and the mirror does not have
is sent, a place and a value each; a table whole where many have changed much, as when a row leaves and those behind it
move up. Nobody has to say what has happened between two recordings (prompts, preemptions, forks, steps that were
launched otherwise): invariant is alone that mirror and device are equal. Knows no model and no graphs.

Legend: n rows of a padded step, S sequences, B blocks of the longest sequence, E entries that are sent, G groups of
layers, whose blocks are in tables of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.interface import AttentionBatch, PagedBatch
from engine.quantization.interface import Kernels, TritonProducts
from engine.step_input import IntArray, SequenceSlice, StepInput, build_step

IDLE = -2
"""Position of a row that belongs to no sequence; -1 is that before a sequence's first token."""
_MOST_SENT = 3 << 16
"""int32 that are sent in one copy: 65,536 entries, say."""
_MANY = 1024
"""Entries of tables from which on it is worth while to look for rows."""


@dataclass(frozen=True)
class DecodeInputs:
    """One forward pass over n sequences of one token each, all of it in fixed memory."""

    token_ids: torch.Tensor  # int32 [n]
    positions: torch.Tensor  # int32 [n]
    slots: tuple[torch.Tensor, ...]  # int64 [n] of each group of layers
    logits_indices: torch.Tensor  # int32 [n], every row
    batches: tuple[AttentionBatch, ...]
    """Of each group of layers."""


@dataclass(frozen=True)
class DecodeRows:
    """The memory of up to N rows on the device: what is kept, and below it what `advance` makes of that."""

    sampled: torch.Tensor  # int32 [N], the tokens that the step before led to
    kept_tokens: torch.Tensor  # int32 [N], as in a step: -1 - r is the token at r of `sampled`
    kept_positions: torch.Tensor  # int32 [N], or IDLE
    tables: torch.Tensor  # int32 [G, N, B]; an idle row's first block is the scratch block
    token_ids: torch.Tensor  # int32 [N]
    positions: torch.Tensor  # int32 [N], 0 of idle rows
    slots: torch.Tensor  # int64 [G, N]
    lengths: torch.Tensor  # int32 [N]
    length_sums: torch.Tensor  # int32 [N + 1], the first 0


Advance = Callable[[DecodeRows, int, int], None]
"""Takes the first so many rows one token further, in blocks of so many tokens. Takes no memory outside of a recording's
pool and waits for nothing."""


def advance_rows(rows: DecodeRows, size: int, block_size: int) -> None:
    """`Advance` in plain torch."""
    kept, positions, lengths = rows.kept_positions[:size], rows.positions[:size], rows.lengths[:size]
    kept.add_(kept > IDLE)
    torch.clamp(kept, min=0, out=positions)
    at = (positions // block_size).long()[None, :, None].expand(len(rows.tables), -1, -1)
    blocks = rows.tables[:, :size].gather(2, at)[:, :, 0]
    rows.slots[:, :size].copy_(blocks.long() * block_size + positions % block_size)
    torch.add(positions, 1, out=lengths)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=rows.length_sums[1 : size + 1])
    tokens = rows.kept_tokens[:size]
    sampled = rows.sampled.index_select(0, (-1 - tokens).clamp(min=0))
    torch.where(tokens < 0, sampled, tokens, out=rows.token_ids[:size])


def choose_advance(kernels: Kernels | None) -> Advance:
    """One launch where Baton's kernels compute on a GPU, 18 in plain torch."""
    if isinstance(kernels, TritonProducts):
        found: Advance = importlib.import_module("engine.triton.decode_rows").advance_rows
        return found
    return advance_rows


class InputMemory:
    """The fixed memory that the recordings of all sizes read, and the way there.

    A recording leaves the tokens that it leads to in `sampled`, where the next one looks for them.
    """

    def __init__(
        self,
        most: int,
        width: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        advance: Advance = advance_rows,
        num_groups: int = 1,
    ) -> None:
        """`most` rows of `width` blocks of each group. Idle rows write to and read from the scratch block."""
        self._most, self._width, self._block_size, self._scratch_block = most, width, block_size, scratch_block
        self._device, self._advance = device, advance

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._mirror: IntArray = np.zeros(most * (2 + num_groups * width), dtype=np.int32)
        self._mirror_vectors = self._mirror[: 2 * most].reshape(2, most)
        self._mirror_tables = self._mirror[2 * most :].reshape(num_groups, most, width)
        self._mirror_vectors[1] = IDLE
        self._mirror_tables[:, :, 0] = scratch_block
        self._kept = torch.from_numpy(self._mirror).to(device, copy=True)
        tokens, positions = self._kept[: 2 * most].view(2, most)
        slots = zeros(num_groups, most, dtype=torch.int64)
        made = (zeros(most), zeros(most), slots, zeros(most), zeros(most + 1))
        self.sampled = zeros(most)
        tables = self._kept[2 * most :].view(num_groups, most, width)
        self._rows = DecodeRows(self.sampled, tokens, positions, tables, *made)
        self._every = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._arrived = zeros(max(min(_MOST_SENT, 3 * len(self._kept)), 2 + width))
        self._staging = cycle([_Staging(len(self._arrived), device), _Staging(len(self._arrived), device)])

    def fill(self, step: StepInput, size: int, sampled: torch.Tensor | None = None) -> None:
        """Has the next recording of `size` rows, which must follow, compute this decode step; rows beyond it are idle.

        `sampled` [R], no more than the largest size: the tokens that the step before led to, if it needs them.
        """
        count = len(step.seqlens_k)
        assert count <= size, f"{count} sequences do not fit in a step of {size}"
        assert sampled is not None or not step.has_unread_tokens, "tokens of the step before are missing"
        if sampled is not None and sampled.data_ptr() != self.sampled.data_ptr():
            self.sampled[: len(sampled)].copy_(sampled)
        of_groups = step.block_tables.reshape(len(self._mirror_tables), count, step.block_tables.shape[1])
        tables = of_groups[:, :, : self._width]
        places, values = self._missing(step, tables, self._send_rows(tables), size)
        if len(places):
            self._mirror[places] = values
            self._send(self._kept[:, None], places, values[:, None])
        positions = self._mirror_vectors[1, :size]
        positions += positions > IDLE

    def advance(self, size: int) -> None:
        """Makes the inputs of a step out of what is kept; the beginning of a recording."""
        self._advance(self._rows, size, self._block_size)

    def of(self, size: int) -> DecodeInputs:
        """Returns what a recording of this size reads."""
        rows = self._rows
        anything = build_step([SequenceSlice((0,), 0, (self._scratch_block,), True)] * size, self._block_size)
        batches = []
        for tables in rows.tables:
            paged = PagedBatch(
                cu_seqlens_q=self._every[: size + 1],
                cu_seqlens_k=rows.length_sums[: size + 1],
                seqlens_k=rows.lengths[:size],
                block_table=tables[:size],
                max_seqlen_q=1,
                max_seqlen_k=self._width * self._block_size,
            )
            batches.append(AttentionBatch(anything, self._block_size, self._device, paged))
        slots = tuple(of_group[:size] for of_group in rows.slots)
        return DecodeInputs(rows.token_ids[:size], rows.positions[:size], slots, self._every[:size], tuple(batches))

    def _send_rows(self, tables: IntArray) -> npt.NDArray[np.bool_]:
        """Sends the rows of [G, S, B] of which much differs, if there are many. Returns what differs then."""
        _, count, num_columns = tables.shape
        different: npt.NDArray[np.bool_] = self._mirror_tables[:, :count, :num_columns] != tables
        if np.count_nonzero(different) >= _MANY:
            groups, rows = np.nonzero(3 * np.count_nonzero(different, axis=2) > num_columns)
            values = tables[groups, rows]
            self._mirror_tables[groups, rows, :num_columns] = values
            self._send(self._rows.tables.flatten(0, 1)[:, :num_columns], groups * self._most + rows, values)
            different[groups, rows] = False
        return different

    def _missing(
        self, step: StepInput, tables: IntArray, different_tables: npt.NDArray[np.bool_], size: int
    ) -> tuple[npt.NDArray[np.int64], IntArray]:
        """Places of what is kept that must change before this step, and their values, [E] each.

        Columns behind a step's tables, and tables of idle rows behind their first block, are read by nobody.
        """
        num_groups, count, _ = tables.shape
        vectors = np.zeros((2, size), dtype=np.int32)
        vectors[0, :count], vectors[1, :count], vectors[1, count:] = step.token_ids, step.positions - 1, IDLE
        scratch = np.full((num_groups, size - count, 1), self._scratch_block, dtype=np.int32)
        places, values, first_idle = [], [], 2 * self._most + count * self._width
        of_group = self._most * self._width
        for first, strides, different, wanted in (
            (0, (0, self._most), (self._mirror_vectors[:, :size] != vectors)[None], vectors[None]),
            (2 * self._most, (of_group, self._width), different_tables, tables),
            (first_idle, (of_group, self._width), self._mirror_tables[:, count:size, :1] != scratch, scratch),
        ):
            at = np.flatnonzero(different)
            if len(at):
                groups, rows, columns = np.unravel_index(at, wanted.shape)
                places.append(first + groups * strides[0] + rows * strides[1] + columns)
                values.append(wanted[groups, rows, columns])
        if not places:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        return np.concatenate(places), np.concatenate(values)

    def _send(self, target: torch.Tensor, places: npt.NDArray[np.int64], values: IntArray) -> None:
        """Writes [E, C] to those rows of [*, C] on the device. Places are sent first, as int64, and values behind."""
        num_columns = values.shape[1]
        most = len(self._arrived) // (2 + num_columns)
        for first in range(0, len(places), most):
            some, staging = slice(first, first + most), next(self._staging)
            num_rows, host = len(places[some]), staging.writable()
            num_sent, begin = num_rows * (2 + num_columns), 2 * num_rows
            host[:begin].view(np.int64)[:] = places[some]
            host[begin:num_sent] = values[some].reshape(-1)
            arrived = self._arrived[:num_sent]
            staging.copy_to(arrived)
            at, new = arrived[:begin].view(torch.int64), arrived[begin:].view(num_rows, num_columns)
            target.index_copy_(0, at, new)


class _Staging:
    """Host memory from which entries are copied; on the way to a GPU page-locked, since only such a copy is queued.

    A queued copy may still be read from its host memory while the next step is laid out: so there are two, in turn.
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._memory = torch.empty(num_elements, dtype=torch.int32, pin_memory=is_cuda)
        self._array: npt.NDArray[np.int32] = self._memory.numpy()
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def writable(self) -> npt.NDArray[np.int32]:
        """The memory, once the last copy from it is over."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._array

    def copy_to(self, target: torch.Tensor) -> None:
        """Queues a copy of the first elements."""
        target.copy_(self._memory[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(target.device))
