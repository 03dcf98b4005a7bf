"""Chooses the tokens of a batch on a GPU, in three launches at most and without waiting for anything.

Legend: R rows, V vocabulary, W words of a mask, N tiles of a row, G groups of a row, L rows with logprobs, K most
alternatives that any of them wants.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
import triton

from engine.copies import upload
from engine.sampling.constraint import Words
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.rules import can_do_without, follow_constraints, stops_to_ban, without
from engine.sampling.samples import Logprobs, Samples
from engine.triton.sampling_batch import FIELDS, IDLE, SamplingBatch, SamplingMemory, mask_of, only
from engine.triton.sampling_rows import settle
from engine.triton.sampling_tiles import TILE, draw, find_largest
from engine.triton.target import Case

_MOST_GROUPS = 4096
_NUM_WARPS = 8
_MOST_TOP = 20
"""Most alternatives that a recording tells of a token."""
_MOST_KEPT = 64
"""Sequences with penalties, and with biases, whose numbers recordings can read: once there are more, those numbers move
and such sequences are chosen for outside."""


class _Scratch(NamedTuple):
    """Memory between the kernels of one step."""

    largest: torch.Tensor  # [R, N]
    largest_at: torch.Tensor  # int32 [R, N]
    drawn: tuple[torch.Tensor, ...]  # scores, int32 tokens, their tempered logits, masses [R, N] each
    of_groups: torch.Tensor  # [R, G]
    raw: tuple[torch.Tensor, ...]  # largest [R, N], sums [R, N], largest of groups [R, G]
    listed: torch.Tensor  # int32 [R, G]


class _Places(NamedTuple):
    """Where the kernels read and write, beside logits and tokens. Those of recordings stay for good."""

    table: torch.Tensor  # [R, FIELDS]; rows that nothing is chosen for are idle
    rules: tuple[torch.Tensor, ...]
    scratch: _Scratch
    logprobs: Logprobs


class TritonChooser:
    """`engine.sampling.sampler.Chooser`, and its `RecordedChooser`. Rows of logits are contiguous.

    The table of a batch lies in fixed memory (`_placed`) while recordings choose for it. It goes on being counted there
    when some of its tokens are chosen outside of them.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._group = 32
        """Tokens of a group."""
        while vocab_size > self._group * _MOST_GROUPS:
            self._group *= 2
        self._num_tiles, self._num_groups = -(-vocab_size // TILE), -(-vocab_size // self._group)
        self._memory = SamplingMemory(vocab_size, device)
        self._batch: SamplingBatch | None = None
        self._scratch = self._make_scratch(1)
        self._staged = np.empty((0, 0), dtype=np.int32)
        """Masks of a step's rows, which lie apart; kept, since new memory costs as much again."""
        self._fixed: _Places | None = None
        self._placed: SamplingBatch | None = None

    def launch(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Samples:
        batch, num_rows = self._batch_of(rows), len(rows)
        allowed, problems = follow_constraints(rows, batch.constrained)
        own_masks = batch.table
        if allowed:
            masks = [self._mask(rows[r], allowed.get(r)) for r in batch.constrained]
            if len(masks) > len(self._staged):
                self._staged = np.empty((len(masks), len(masks[0])), dtype=np.int32)
            own_masks = upload(np.stack(masks, out=self._staged[: len(masks)]), self._device)
        if num_rows > len(self._scratch.listed):
            self._scratch = self._make_scratch(num_rows)
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=self._device)
        logprobs = self._make_logprobs(len(batch.wanted), batch.num_most)
        work = _Places(batch.table, (*self._memory.parts, own_masks), self._scratch, logprobs)
        self._run(logits, token_ids, work, batch.is_drawn)
        return Samples(token_ids, batch.wanted, logprobs if batch.wanted else None, problems, batch.step())

    def reserve(self, most: int) -> Self:
        assert self._fixed is None, "memory for recordings is there already"
        num_kept = min(most, _MOST_KEPT)
        for part, size in ((self._memory.bias, num_kept), (self._memory.counts, num_kept)):
            part.reserve(size)
        self._memory.masks.reserve(2 * num_kept)
        table = torch.zeros((most, len(FIELDS)), dtype=torch.int32, device=self._device)
        table[:, 0] = IDLE
        self._scratch = self._make_scratch(most)
        logprobs = self._make_logprobs(most, min(_MOST_TOP, self._vocab_size))
        self._fixed = _Places(table, (*self._memory.parts, table), self._scratch, logprobs)
        return self

    def record(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        assert self._fixed is not None, "recordings need memory that is reserved"
        self._run(logits, token_ids, self._fixed, is_drawn=True)

    def place(self, rows: Sequence[SampleRow]) -> bool:
        assert self._fixed is not None, "recordings need memory that is reserved"
        table = self._fixed.table
        if not rows or len(rows) > len(table) or any(row.params.constraint is not None for row in rows):
            return self._take_away()
        batch = self._batch_of(rows)
        is_there = all(ours is theirs for ours, theirs in zip(self._memory.parts, self._fixed.rules, strict=False))
        if (batch.reads_memory and not is_there) or batch.num_most > self._fixed.logprobs.top_ids.shape[1]:
            return self._take_away()
        if batch is not self._placed:
            num_before = 0 if self._placed is None else len(self._placed.members)
            table[: len(rows)].copy_(batch.table)
            if num_before > len(rows):
                table[len(rows) : num_before, 0] = IDLE
            batch.table, self._placed = table[: len(rows)], batch
        return True

    def samples(self, token_ids: torch.Tensor) -> Samples:
        assert self._placed is not None and self._fixed is not None, "no rows are placed"
        batch = self._placed
        logprobs = Logprobs(*(part[: len(batch.wanted)] for part in self._fixed.logprobs)) if batch.wanted else None
        return Samples(token_ids, batch.wanted, logprobs, when_read=batch.step(), is_rewritten=True)

    def _batch_of(self, rows: Sequence[SampleRow]) -> SamplingBatch:
        if self._batch is None or not self._batch.goes_on(rows):
            self._batch = SamplingBatch(rows, self._batch, self._memory)
        return self._batch

    def _take_away(self) -> bool:
        """Nothing is chosen in recordings; the batch that was goes on elsewhere. False."""
        if self._placed is not None and self._fixed is not None:
            self._placed.table = self._placed.table.clone()
            self._fixed.table[: len(self._placed.members), 0] = IDLE
            self._placed = None
        return False

    def _run(self, logits: torch.Tensor, token_ids: torch.Tensor, work: _Places, is_drawn: bool) -> None:
        assert logits.stride(1) == 1, f"the logits of a row lie {logits.stride(1)} apart"
        num_rows, scratch = len(token_ids), work.scratch
        inputs, stride = (logits, work.table, work.rules, scratch.largest), logits.stride(0)
        sizes = (self._vocab_size, -(-self._vocab_size // 32), self._num_tiles, self._num_groups)
        tiles, groups = (triton.next_power_of_2(number) for number in sizes[2:])
        grid, tile = (num_rows, self._num_tiles), (TILE, self._group)
        find_largest[grid](*inputs, scratch.largest_at, scratch.raw, stride, *sizes, *tile, num_warps=_NUM_WARPS)
        if is_drawn:
            drawn = (scratch.drawn, scratch.of_groups)
            draw[grid](*inputs, *drawn, stride, *sizes, *tile, tiles, num_warps=_NUM_WARPS)
        settle[(num_rows,)](
            *inputs,
            scratch.largest_at,
            scratch.drawn,
            scratch.of_groups,
            scratch.raw,
            scratch.listed,
            token_ids,
            tuple(work.logprobs),
            work.logprobs.top_ids.shape[1],
            stride,
            *sizes,
            tiles,
            groups,
            self._group,
            TILE // self._group,
            num_warps=_NUM_WARPS,
        )

    def _mask(self, row: SampleRow, allowed: Words | None) -> Words:
        """What may follow a row with a constraint, after its other rules; all where it cannot be followed."""
        params, words = row.params, allowed
        if words is None or params.allowed_token_ids:
            chosen = mask_of(only(params.allowed_token_ids, self._vocab_size))
            words = chosen if words is None else chosen & words
        if allowed is not None and row.position < params.min_output_tokens:
            stops = stops_to_ban(params, self._vocab_size)
            words = without(stops, words) if can_do_without(stops, allowed) else words
        return words

    def _make_scratch(self, num_rows: int) -> _Scratch:
        def empty(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty((num_rows, width), dtype=dtype, device=self._device)

        tiles, groups = self._num_tiles, self._num_groups
        drawn = (empty(tiles), empty(tiles, torch.int32), empty(tiles), empty(tiles))
        raw = (empty(tiles), empty(tiles), empty(groups))
        return _Scratch(empty(tiles), empty(tiles, torch.int32), drawn, empty(groups), raw, empty(groups, torch.int32))

    def _make_logprobs(self, num_rows: int, num_most: int) -> Logprobs:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        ids = empty(num_rows, num_most, dtype=torch.int32)
        return Logprobs(empty(num_rows), empty(num_rows, dtype=torch.int32), ids, empty(num_rows, num_most))


def cases() -> Iterator[Case]:
    """Vocabularies of common models: the kernels do not depend on what the rows want."""
    for vocab_size in (128_256, 32_000, 50_257, 151_936, 262_208):
        yield _case(vocab_size)


def _case(vocab_size: int) -> Case:
    def launch() -> None:
        row = SampleRow(SamplingParams(), 0, (1,), ())
        TritonChooser(vocab_size, torch.device("cpu")).launch(torch.zeros(1, vocab_size), [row])

    return Case(f"sampling of {vocab_size} tokens", launch)
