"""Inputs that the device keeps from one decode step to the next, against inputs that are made anew for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from interpreted_kernels import DEVICE

from engine import decode_inputs
from engine.decode_inputs import IDLE, Advance, InputMemory, advance_rows
from engine.step_input import IntArray, SequenceSlice, StepInput, build_step
from engine.triton.decode_rows import advance_rows as advance_by_triton

MOST, WIDTH, BLOCK_SIZE, SCRATCH = 9, 6, 4, 9999
ADVANCES = [advance_rows, advance_by_triton]


class Memory(InputMemory):
    """Counts what is sent."""

    def __init__(self, advance: Advance, num_groups: int = 1) -> None:
        super().__init__(MOST, WIDTH, BLOCK_SIZE, SCRATCH, DEVICE, advance, num_groups)
        self.num_sent = 0

    def run(self, step: StepInput, size: int, sampled: torch.Tensor | None = None) -> None:
        """As a recording does, up to the model; what was sent is counted anew."""
        self.num_sent = 0
        self.fill(step, size, sampled)
        self.advance(size)
        self.check(step, size, sampled)

    def _send(self, target: torch.Tensor, places: npt.NDArray[np.int64], values: IntArray) -> None:
        self.num_sent += values.size
        super()._send(target, places, values)

    def check(self, step: StepInput, size: int, sampled: torch.Tensor | None) -> None:
        """Against the step itself; rows beyond it are in the scratch block."""
        assert self._kept.tolist() == self._mirror.tolist(), "the host does not know what the device has"
        step = step if sampled is None else step.with_tokens(sampled.cpu().numpy())
        num, inputs, spare = len(step.seqlens_k), self.of(size), size - len(step.seqlens_k)
        assert inputs.token_ids.tolist() == [*step.token_ids, *[0] * spare]
        assert inputs.positions.tolist() == [*step.positions, *[0] * spare]
        assert inputs.token_ids.is_contiguous()
        for place, (slots, batch) in enumerate(zip(inputs.slots, inputs.batches, strict=True)):
            own, paged = step.of_group(place), batch.paged
            assert slots.tolist() == [*own.slot_mapping, *[SCRATCH * BLOCK_SIZE] * spare]
            assert slots.dtype == torch.int64
            assert paged.seqlens_k.tolist() == [*own.seqlens_k, *[1] * spare]
            assert paged.cu_seqlens_k.tolist() == [0, *np.cumsum(paged.seqlens_k.tolist())]
            assert paged.cu_seqlens_q.tolist() == list(range(size + 1))
            columns = own.block_tables.shape[1]
            assert paged.block_table[:num, :columns].tolist() == own.block_tables.tolist()
            assert paged.block_table[num:, 0].tolist() == [SCRATCH] * spare


@dataclass
class Running:
    """A sequence of the batch."""

    table: list[int]
    position: int

    def slice(self, token_id: int, num_groups: int = 1) -> SequenceSlice:
        """Each group of layers has blocks of its own."""
        table = tuple(block * num_groups + place for block in self.table for place in range(num_groups))
        return SequenceSlice((token_id,), self.position, table, True)


class Batch:
    """Sequences that come, go, grow and are preempted, as a scheduler would have it."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._free: Iterator[int] = count()
        self.rows: list[Running] = []

    def change(self) -> None:
        """What happens between two steps that are recorded."""
        what = self._random.choice(["goes on", "joins", "leaves", "moves", "is preempted", "is computed elsewhere"])
        at = self._random.randrange(max(1, len(self.rows)))
        if what == "leaves" or len(self.rows) == MOST:
            del self.rows[at : at + self._random.randint(1, 3)]
        elif what == "joins":
            self.rows.insert(at, self._newcomer())
        elif what == "moves":
            self.rows.append(self.rows.pop(at)) if self.rows else None
        elif what == "is preempted" and self.rows:
            row = self.rows.pop(at)
            row.table = []
            self._allocate(row)
            self.rows.append(row)
        elif what == "is computed elsewhere":
            self.grow()
        if not self.rows:
            self.rows.append(self._newcomer())

    def grow(self) -> None:
        """Every sequence has one token more, and blocks for it; those that are full are over."""
        for row in self.rows:
            row.position += 1
        self.rows = [row for row in self.rows if row.position < WIDTH * BLOCK_SIZE]
        for row in self.rows:
            self._allocate(row)

    def _newcomer(self) -> Running:
        """Its first blocks may be another's, too."""
        start = self._random.randrange(WIDTH * BLOCK_SIZE)
        other: list[int] = self._random.choice([[], *(row.table for row in self.rows)])
        row = Running(other[: start // BLOCK_SIZE], start)
        self._allocate(row)
        return row

    def _allocate(self, row: Running) -> None:
        ahead = self._random.randint(0, 1)
        while len(row.table) < min(WIDTH, row.position // BLOCK_SIZE + 1 + ahead):
            row.table.append(next(self._free))


@pytest.mark.parametrize("advance", ADVANCES, ids=["torch", "triton"])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_kept_inputs_are_those_of_a_step_that_is_made_anew(
    advance: Advance, seed: int, num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of up to nine sequences, with tokens that are known, and that the step before or another one led to;
    rows of tables are sent whole in every other run."""
    monkeypatch.setattr(decode_inputs, "_MANY", 1 + 1024 * (seed % 2))
    random, memory, num_rows = Random(seed), Memory(advance, num_groups), 0
    batch = Batch(random)
    for _ in range(20):
        batch.change()
        lowest = -num_rows if random.random() < 0.5 else 0
        tokens = [random.randint(lowest, 3) for _ in batch.rows]
        sampled = torch.arange(500, 500 + num_rows, dtype=torch.int32, device=DEVICE)
        if random.random() < 0.5:
            memory.sampled[:num_rows] = sampled
            sampled = memory.sampled[:num_rows]
        slices = [row.slice(token, num_groups) for row, token in zip(batch.rows, tokens, strict=True)]
        step = build_step(slices, BLOCK_SIZE, num_groups=num_groups)
        size = random.randint(len(batch.rows), MOST)
        memory.run(step, size, sampled if step.has_unread_tokens else None)
        num_rows = len(batch.rows)
        batch.grow()


@pytest.mark.parametrize("advance", ADVANCES, ids=["torch", "triton"])
def test_a_step_that_goes_on_sends_its_new_blocks_and_nothing_else(advance: Advance) -> None:
    memory, rows = Memory(advance), [Running([10], 1), Running([20, 21], 4), Running([30], 0)]
    sampled, sent = memory.sampled[:3], []
    for _ in range(8):
        for row in rows:
            while len(row.table) <= row.position // BLOCK_SIZE:
                row.table.append(row.table[-1] + 1)
        step = build_step([row.slice(-1 - r) for r, row in enumerate(rows)], BLOCK_SIZE)
        memory.run(step, 4, sampled)
        sent.append(memory.num_sent)
        for row in rows:
            row.position += 1
    joined = 3 * 2 + 4  # a token's place and a position each, and four blocks
    assert sent == [joined, 0, 0, 1, 2, 0, 0, 1]


def test_a_row_that_leaves_is_two_numbers_and_those_behind_it_send_what_differs() -> None:
    memory = Memory(advance_rows)
    rows = [Running([10 * r, 10 * r + 1], 5) for r in range(4)]
    step = build_step([row.slice(-1 - r) for r, row in enumerate(rows)], BLOCK_SIZE)
    memory.run(step, 4, memory.sampled[:4])
    memory.run(step, 4, memory.sampled[:4])
    assert memory.num_sent == 4, "the same positions once more"

    gone = build_step([replace(row, position=6).slice(-1 - r) for r, row in enumerate(rows[:3])], BLOCK_SIZE)
    memory.run(gone, 4, memory.sampled[:4])
    assert memory.num_sent == 3, "its token, its position and its first block"
    behind = build_step([replace(row, position=7).slice(-2 - r) for r, row in enumerate(rows[1:3])], BLOCK_SIZE)
    memory.run(behind, 2, memory.sampled[:4])
    assert memory.num_sent == 2 * 3, "two rows: a token's place and two blocks each"


@pytest.mark.parametrize("many", [1, 1024], ids=["rows", "entries"])
def test_more_than_one_copy_holds_is_sent_in_several(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_inputs, "_MANY", many)
    monkeypatch.setattr(decode_inputs, "_MOST_SENT", 15)
    memory = Memory(advance_rows)
    rows = [Running(list(range(6 * r, 6 * r + 6)), 20) for r in range(MOST)]
    memory.run(build_step([row.slice(7) for row in rows], BLOCK_SIZE), MOST)
    assert memory.num_sent == MOST * (1 + 1 + 6)  # a token, a position and six blocks each


def test_a_step_without_the_tokens_that_it_needs_is_refused() -> None:
    memory = Memory(advance_rows)
    with pytest.raises(AssertionError, match="tokens of the step before are missing"):
        memory.fill(build_step([Running([1], 0).slice(-1)], BLOCK_SIZE), 1)
    assert memory._kept[MOST : 2 * MOST].tolist() == [IDLE] * MOST
