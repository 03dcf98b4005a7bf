"""The inputs of one forward pass, and their form as plain bytes for the other tensor-parallel ranks.

Legend: T tokens of all sequences in the step, S sequences, B blocks in the longest table, R rows whose logits are
wanted, P rows that are scored for their next token, which is known, C block copies, G groups of layers
(`cluster.kv_groups`). Arrays are int32 and never change.

A step may be launched before the tokens are read that the step before it led to. Such a token stands in `token_ids` as
-1 - r, where r is the row whose logits it was sampled from, in the order of the step before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.step_cost import StepSize

IntArray = npt.NDArray[np.int32]
BlockTable: TypeAlias = "array[int]"
"""Block ids of one sequence, int32, so that a step takes them as bytes and not one by one."""
_NO_COPIES: IntArray = np.zeros((0, 2), dtype=np.int32)
_NO_SCORES: IntArray = np.zeros((0, 3), dtype=np.int32)


def table_of(blocks: Iterable[int] = ()) -> BlockTable:
    """Makes the table of these blocks."""
    return array("i", blocks)


@dataclass(frozen=True)
class StepInput:
    """One ragged batch: the new tokens of S sequences, each with the KV it already has.

    Sequence s owns rows `cu_seqlens_q[s]:cu_seqlens_q[s+1]` of the flat arrays; after the step its KV covers
    `seqlens_k[s]` tokens. Before anything else, `block_copies` (source, target) pages are copied.
    """

    token_ids: IntArray  # [T] below 0: not read yet
    positions: IntArray  # [T]
    slot_mapping: IntArray  # [G*T] block_id * block_size + offset of each new token, group after group
    cu_seqlens_q: IntArray  # [S+1]
    seqlens_k: IntArray  # [S]
    block_tables: IntArray  # [G*S, B] group after group, 0 where there is no block
    logits_indices: IntArray  # [R] rows of the flat batch
    block_copies: IntArray  # [C, 2]
    scored: IntArray  # [P, 3] row of the flat batch, the token that follows it, alternatives wanted beside that

    def of_group(self, place: int) -> StepInput:
        """The same step as the layers of one group see it; its copies are not theirs."""
        num_tokens, num_seqs = len(self.token_ids), len(self.seqlens_k)
        return replace(
            self,
            slot_mapping=self.slot_mapping[place * num_tokens : (place + 1) * num_tokens],
            block_tables=self.block_tables[place * num_seqs : (place + 1) * num_seqs],
        )

    @property
    def has_unread_tokens(self) -> bool:
        """Whether it needs what the step before it led to."""
        return len(self.token_ids) > 0 and bool(self.token_ids.min() < 0)

    def token_places(self, first: int) -> IntArray:
        """Where each token lies, [T], if those of the step before lie from 0 on and `token_ids` from `first` on."""
        own = np.arange(first, first + len(self.token_ids), dtype=np.int32)
        return np.where(self.token_ids < 0, -1 - self.token_ids, own)

    def with_tokens(self, sampled: IntArray) -> StepInput:
        """The same step with every token known: `sampled` [R] are those that the step before led to."""
        every = np.concatenate([sampled, self.token_ids], dtype=np.int32)
        return replace(self, token_ids=every[self.token_places(len(sampled))])

    def to_bytes(self) -> bytes:
        """Shapes as int32 (two for each array, the second 0 for a vector), then the data, little-endian."""
        arrays = [getattr(self, f.name) for f in fields(self)]
        shapes = [(a.shape[0], a.shape[1] if a.ndim == 2 else 0) for a in arrays]
        header = np.asarray(shapes, dtype="<i4").tobytes()
        return header + b"".join(np.ascontiguousarray(a, dtype="<i4").tobytes() for a in arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepInput:
        """Raises ValueError when the length does not match the shapes."""
        names = [f.name for f in fields(cls)]
        header_bytes = len(names) * 8
        shapes = np.frombuffer(data[:header_bytes], dtype="<i4").reshape(-1, 2)
        values: dict[str, IntArray] = {}
        offset = header_bytes
        for name, (rows, columns) in zip(names, shapes.tolist(), strict=True):
            is_matrix = name in ("block_tables", "block_copies", "scored")
            count = rows * columns if is_matrix else rows
            flat = np.frombuffer(data, dtype="<i4", count=count, offset=offset)
            values[name] = flat.reshape(rows, columns) if is_matrix else flat
            offset += count * 4
        if offset != len(data):
            raise ValueError(f"a step of {len(data)} bytes does not match its header, which says {offset}")
        return cls(**values)


@dataclass(frozen=True)
class ScoredSpan:
    """Rows of a slice, one after another from `offset` on, and the token that follows each: its logprob is wanted."""

    offset: int
    next_token_ids: tuple[int, ...]
    num_top: int
    """Most likely tokens that are wanted beside each."""


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's share of a step: `token_ids` are new, at positions from `start` on."""

    token_ids: tuple[int, ...]
    """Below 0: not read yet, as in `StepInput`."""
    start: int
    block_table: Sequence[int]
    """A `BlockTable` where it should be quick; a block of each group in turn, or -1."""
    wants_logits: bool
    scored: ScoredSpan | None = None


def build_step(
    slices: list[SequenceSlice],
    block_size: int,
    block_copies: list[tuple[int, int]] | None = None,
    num_groups: int = 1,
) -> StepInput:
    """Lays slices out as one ragged batch. Logits and scored rows come in the order of the slices that want them."""
    if not block_copies and all(len(s.token_ids) == 1 and s.wants_logits and s.scored is None for s in slices):
        return _build_decode(slices, block_size, num_groups)
    lengths = np.array([len(s.token_ids) for s in slices], dtype=np.int32)
    cu_seqlens_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    starts = np.array([s.start for s in slices], dtype=np.int32)
    block_tables = _block_tables(slices, num_groups)  # -1 where there is no block: no token may have its slot there
    sequence_of_token = np.repeat(np.arange(len(slices)), lengths)
    positions = (np.arange(cu_seqlens_q[-1]) - cu_seqlens_q[sequence_of_token] + starts[sequence_of_token]).astype(
        np.int32
    )
    by_group = block_tables.reshape(num_groups, len(slices), block_tables.shape[1])
    blocks = by_group[:, sequence_of_token, positions // block_size]  # [G, T]
    return StepInput(
        token_ids=np.fromiter((t for s in slices for t in s.token_ids), dtype=np.int32, count=int(lengths.sum())),
        positions=positions,
        slot_mapping=(blocks * block_size + positions % block_size).astype(np.int32).reshape(-1),
        cu_seqlens_q=cu_seqlens_q,
        seqlens_k=(starts + lengths).astype(np.int32),
        block_tables=np.maximum(block_tables, 0),
        logits_indices=np.array(
            [cu_seqlens_q[i + 1] - 1 for i, s in enumerate(slices) if s.wants_logits], dtype=np.int32
        ),
        block_copies=np.array(block_copies or [], dtype=np.int32).reshape(-1, 2),
        scored=_scored_rows(slices, cu_seqlens_q),
    )


def _build_decode(slices: list[SequenceSlice], block_size: int, num_groups: int) -> StepInput:
    """One new token of each: in few calls, since nothing is computed meanwhile and steps are short."""
    starts = [s.start for s in slices]
    slots = [
        s.block_table[at // block_size * num_groups + place] * block_size + at % block_size
        for place in range(num_groups)
        for s, at in zip(slices, starts, strict=True)
    ]
    flat = [s.token_ids[0] for s in slices] + starts + [at + 1 for at in starts] + slots
    arrays = np.array(flat, dtype=np.int32)
    token_ids, positions, seqlens_k = arrays[: 3 * len(slices)].reshape(3, len(slices))
    every = _counting(len(slices))
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=arrays[3 * len(slices) :],
        cu_seqlens_q=every,
        seqlens_k=seqlens_k,
        block_tables=np.maximum(_block_tables(slices, num_groups), 0),
        logits_indices=every[:-1],
        block_copies=_NO_COPIES,
        scored=_NO_SCORES,
    )


def _block_tables(slices: list[SequenceSlice], num_groups: int) -> IntArray:
    """[G*S, B], as the slices have them."""
    tables = np.zeros((len(slices), max((len(s.block_table) for s in slices), default=num_groups)), dtype=np.int32)
    for row, s in enumerate(slices):
        tables[row, : len(s.block_table)] = s.block_table
    if num_groups > 1:
        by_group = tables.reshape(len(slices), tables.shape[1] // num_groups, num_groups).transpose(2, 0, 1)
        tables = by_group.reshape(num_groups * len(slices), by_group.shape[2])
    return tables


@lru_cache(maxsize=64)
def _counting(count: int) -> IntArray:
    """0 to `count`."""
    every = np.arange(count + 1, dtype=np.int32)
    every.flags.writeable = False
    return every


def _scored_rows(slices: list[SequenceSlice], cu_seqlens_q: IntArray) -> IntArray:
    """[P, 3]"""
    spans = [
        (int(first) + s.scored.offset, s.scored) for first, s in zip(cu_seqlens_q, slices, strict=False) if s.scored
    ]
    rows = [
        (first + i, token_id, span.num_top) for first, span in spans for i, token_id in enumerate(span.next_token_ids)
    ]
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


def is_decode(step: StepInput) -> bool:
    """Whether every sequence has one new token and wants its logits, and nothing is scored."""
    every = _counting(len(step.seqlens_k))
    return (
        len(step.seqlens_k) > 0
        and not len(step.scored)
        and (step.cu_seqlens_q is every or np.array_equal(step.cu_seqlens_q, every))
        and np.array_equal(step.logits_indices, every[:-1])
    )


def size_of(step: StepInput) -> StepSize:
    """The work of a step: one token of a sequence is its next one, more are a prompt's."""
    if len(step.token_ids) == len(step.seqlens_k):
        return StepSize(num_sequences=len(step.seqlens_k), num_kv_tokens=int(step.seqlens_k.sum()))
    num_new = np.diff(step.cu_seqlens_q)
    ends = step.seqlens_k.astype(np.int64)
    is_next = num_new == 1
    size = StepSize(num_sequences=int(is_next.sum()), num_kv_tokens=int(ends[is_next].sum()))
    for count, end in zip(num_new[~is_next].tolist(), ends[~is_next].tolist(), strict=True):
        size += StepSize.of_prompt(count, end - count)
    return size
