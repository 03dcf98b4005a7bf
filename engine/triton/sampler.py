"""Chooses the tokens of a batch on a GPU, in three launches at most and without waiting for anything.

Legend: R rows, V vocabulary, W words of a mask, N tiles of a row, G groups of a row, L rows with logprobs, K most
alternatives that any of them wants.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from engine.copies import upload
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.rules import can_do_without, follow_constraints, stops_to_ban
from engine.sampling.samples import Logprobs, Samples
from engine.triton.sampling_batch import IntArray, SamplingBatch, SamplingMemory, mask_of, only
from engine.triton.sampling_rows import settle
from engine.triton.sampling_tiles import TILE, draw, find_largest
from engine.triton.target import Case

_MOST_GROUPS = 4096
_NUM_WARPS = 8
_MOST_SPILLED = 8  # bytes of a thread: 80 registers leave room for a third thread block, 88 do not


class _Scratch(NamedTuple):
    """Memory between the kernels of one step."""

    largest: torch.Tensor  # [R, N]
    largest_at: torch.Tensor  # int32 [R, N]
    drawn: tuple[torch.Tensor, ...]  # scores, int32 tokens, their tempered logits, masses [R, N] each
    of_groups: torch.Tensor  # [R, G]
    raw: tuple[torch.Tensor, ...]  # largest [R, N], sums [R, N], largest of groups [R, G]
    listed: torch.Tensor  # int32 [R, G]


class TritonChooser:
    """`engine.sampling.sampler.Chooser`. Rows of logits are contiguous."""

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

    def launch(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Samples:
        assert logits.stride(1) == 1, f"the logits of a row lie {logits.stride(1)} apart"
        batch = self._batch
        if batch is None or not batch.goes_on(rows):
            batch = self._batch = SamplingBatch(rows, batch, self._memory)
        allowed, problems = follow_constraints(rows, batch.constrained)
        own_masks = batch.table
        if allowed:
            masks = [self._mask(rows[r], allowed.get(r)) for r in batch.constrained]
            own_masks = upload(np.stack(masks), self._device)
        token_ids, logprobs = self._run(logits, batch, own_masks)
        return Samples(token_ids, batch.wanted, logprobs, problems, batch.step())

    def _run(
        self, logits: torch.Tensor, batch: SamplingBatch, own_masks: torch.Tensor
    ) -> tuple[torch.Tensor, Logprobs | None]:
        num_rows, memory = len(batch.members), self._memory
        if num_rows > len(self._scratch.listed):
            self._scratch = self._make_scratch(num_rows)
        scratch = self._scratch
        rules = (memory.bias.memory, memory.counts.memory, memory.masks.memory, own_masks)
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=self._device)
        logprobs = self._make_logprobs(len(batch.wanted), batch.num_most)
        inputs, stride = (logits, batch.table, rules, scratch.largest), logits.stride(0)
        sizes = (self._vocab_size, -(-self._vocab_size // 32), self._num_tiles, self._num_groups)
        tiles, groups = (triton.next_power_of_2(number) for number in sizes[2:])
        grid = (num_rows, self._num_tiles)
        find_largest[grid](
            *inputs, scratch.largest_at, scratch.raw, stride, *sizes, TILE, self._group, num_warps=_NUM_WARPS
        )
        if batch.is_drawn:
            draw[grid](
                *inputs,
                scratch.drawn,
                scratch.of_groups,
                stride,
                *sizes,
                TILE,
                self._group,
                tiles,
                num_warps=_NUM_WARPS,
            )
        settle[(num_rows,)](
            *inputs,
            scratch.largest_at,
            scratch.drawn,
            scratch.of_groups,
            scratch.raw,
            scratch.listed,
            token_ids,
            tuple(logprobs),
            batch.num_most,
            stride,
            *sizes,
            tiles,
            groups,
            self._group,
            TILE // self._group,
            num_warps=_NUM_WARPS,
        )
        return token_ids, logprobs if batch.wanted else None

    def _mask(self, row: SampleRow, allowed: Any) -> IntArray:
        """What may follow a row with a constraint, after its other rules, [W]; all where it cannot be followed."""
        params = row.params
        may_follow = only(params.allowed_token_ids, self._vocab_size)
        if allowed is None:
            return mask_of(may_follow)
        may_follow &= allowed
        stops = stops_to_ban(params, self._vocab_size)
        if row.position < params.min_output_tokens and can_do_without(stops, allowed):
            may_follow[stops] = False
        return mask_of(may_follow)

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

    return Case(f"sampling of {vocab_size} tokens", launch, _MOST_SPILLED)
