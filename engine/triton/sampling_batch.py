"""What the kernels of sampling read beside the logits, kept on the device from step to step.

A batch is a table with one row of numbers for each sequence, copied when a sequence comes or goes; the kernels count
positions in it. Masks, biases and token counts are rows [V] for those sequences only that want them. Counts are written
when a sequence comes and grow on the device: so no token must be read before the next one is chosen. Tokens that are
read later are held against what the device has counted, and a sequence that has others is written again.

Legend: R rows, V vocabulary, W words of a mask, one bit a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.copies import upload
from engine.sampling.params import SampleRow
from engine.sampling.rng import sequence_keys
from engine.sampling.rules import check_rules, stops_to_ban

IntArray = npt.NDArray[np.int32]
FIELDS = (
    "flags",
    "position",
    "key_low",
    "key_high",
    "temperature",
    "top_k",
    "top_p",
    "floor",
    "counts",
    "repetition",
    "presence",
    "frequency",
    "bias",
    "mask",
    "early_mask",
    "early_until",
    "place",
    "num_top",
)
"""Columns of the table, int32; a float's has its bits. `position` is the number of output tokens so far, `floor` the
logarithm of min_p, `place` the row's among those that want logprobs. `counts`, `bias` and the masks are rows of
memory, or -1; masks below -1 are those of the step: -2 is its first."""
DRAWN, FILTERED, NESTED, SCORED, IDLE = 1, 2, 4, 8, 16
"""Bits of `flags`: not greedy; top_k, top_p or min_p; top_p within a top_k; logprobs; nothing is chosen."""
IN_PROMPT = -(1 << 31)
"""Bit of a token's count; the others are how often it is in the output."""
_COLUMN = {name: column for column, name in enumerate(FIELDS)}
_MEMORY_COLUMNS = [_COLUMN[name] for name in ("bias", "counts", "mask", "early_mask")]


def mask_of(is_allowed: npt.NDArray[np.bool_]) -> IntArray:
    """[V] as [W] words."""
    padded = np.zeros(-(-len(is_allowed) // 32) * 32, dtype=np.bool_)
    padded[: len(is_allowed)] = is_allowed
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)


def only(token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.bool_]:
    """True for those, or for every token if there are none: [V]."""
    ids = list(token_ids)
    allowed = np.full(vocab_size, not ids)
    allowed[ids] = True
    return allowed


class SampledSequence:
    """One sequence of a batch, and what the device knows of it."""

    def __init__(self, row: SampleRow, vocab_size: int) -> None:
        """Raises ValueError for a rule that names a token outside the vocabulary."""
        params = self.params = row.params
        check_rules(params, vocab_size)
        self.sequence_index = row.sequence_index
        self.position = row.position
        self.fields = _fields_of(row, vocab_size)
        self.is_constrained, self.is_counted = params.constraint is not None, params.has_penalties
        has_ban = params.min_output_tokens > 0 and not self.is_constrained
        self.banned = stops_to_ban(params, vocab_size) if has_ban else []
        """Stop tokens that must wait; those of a constrained row are left out of its masks."""
        self._known: list[int | None] = []
        """Output tokens that the device has counted since those were written; None: not read yet."""
        self._num_written = 0
        self._num_checked = 0

    @property
    def is_banning(self) -> bool:
        return bool(self.banned) and self.position < self.params.min_output_tokens

    def goes_on(self, row: SampleRow) -> bool:
        """Whether this is the row of its next token, and its tokens are those that the device has chosen."""
        is_same = row.params is self.params and row.sequence_index == self.sequence_index
        return is_same and row.position == self.position and (not self.is_counted or self._agrees(row))

    def step(self) -> list[int | None]:
        """A token has been set off; once it is read, it belongs in the last place of what is returned."""
        self.position += 1
        if self.is_counted:
            self._known.append(None)
        return self._known

    def written(self, row: SampleRow) -> None:
        """The device has just those tokens."""
        assert not row.num_unread, f"{row.num_unread} tokens of a sequence are not read, and it has penalties"
        self._known, self._num_written, self._num_checked = [], row.position, row.position

    def _agrees(self, row: SampleRow) -> bool:
        tokens, first = row.output_token_ids, self._num_written
        if len(tokens) < self._num_checked:
            return False
        seen = [self._known[at - first] == tokens[at] for at in range(self._num_checked, len(tokens))]
        self._num_checked = len(tokens)
        return all(seen)


def _fields_of(row: SampleRow, vocab_size: int) -> IntArray:
    """Those that never change, [FIELDS]."""
    params = row.params
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    is_nested = top_k < vocab_size and params.top_p < 1
    is_filtered = top_k < vocab_size or params.top_p < 1 or params.min_p > 0
    flags = 0 if params.is_greedy else DRAWN | FILTERED * is_filtered | NESTED * is_nested
    low, high = sequence_keys([params.seed], [row.sequence_index])[0].tolist()
    integers = {
        "flags": flags | SCORED * (params.top_logprobs is not None),
        "key_low": low,
        "key_high": high,
        "top_k": top_k,
        "counts": -1,
        "bias": -1,
        "mask": -1,
        "early_mask": -1,
        "num_top": min(params.top_logprobs or 0, vocab_size),
    }
    floats = {
        "temperature": params.temperature or 1.0,
        "top_p": params.top_p if params.top_p < 1 else math.inf,
        "floor": math.log(params.min_p) if params.min_p > 0 else -math.inf,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
    }
    fields = np.zeros(len(FIELDS), dtype=np.int32)
    for name, value in integers.items():
        fields[_COLUMN[name]] = value
    for name, number in floats.items():
        fields[_COLUMN[name]] = np.float32(number).view(np.int32)
    return fields


class DeviceRows:
    """Rows of device memory, each with an owner."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty((0, width), dtype=dtype, device=device)
        self._rows: dict[Hashable, int] = {}

    def reserve(self, size: int) -> None:
        """Takes memory for so many owners at once, before there is any: it stays where it is up to as many."""
        self.memory = self.memory.new_empty((size, self.memory.shape[1]))

    def give(self, owners: Sequence[Hashable]) -> tuple[list[int], list[int]]:
        """Each owner's row, and which of the owners have a new one; who is not among them loses theirs."""
        kept = {owner: self._rows[owner] for owner in owners if owner in self._rows}
        new = [i for i, owner in enumerate(owners) if owner not in kept]
        if len(owners) > len(self.memory):
            size = 1 << (len(owners) - 1).bit_length()
            memory = self.memory.new_empty((size, self.memory.shape[1]))
            memory[: len(self.memory)].copy_(self.memory)
            self.memory = memory
        taken = set(kept.values())
        free = (row for row in range(len(self.memory)) if row not in taken)
        self._rows = kept | {owners[i]: next(free) for i in new}
        return [self._rows[owner] for owner in owners], new


class SamplingMemory:
    """Rows [V] of the sequences that want them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.bias = DeviceRows(vocab_size, torch.float32, device)
        self.counts = DeviceRows(vocab_size, torch.int32, device)
        self.masks = DeviceRows(-(-vocab_size // 32), torch.int32, device)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What kernels read: biases, counts, masks."""
        return self.bias.memory, self.counts.memory, self.masks.memory

    def place_rules(self, members: Sequence[SampledSequence], table: IntArray) -> None:
        """Gives the members the biases and masks that they want, and writes into the table where those are."""
        biased = [r for r, m in enumerate(members) if m.params.logit_bias]
        at, new = self.bias.give([members[r] for r in biased])
        table[biased, _COLUMN["bias"]] = at
        for i in new:
            bias = members[biased[i]].params.logit_bias
            ids, values = upload(list(bias), self.device, np.int64), list(bias.values())
            self.bias.memory[at[i]].zero_().index_add_(0, ids, upload(values, self.device, np.float32))
        masked = [(r, "mask") for r, m in enumerate(members) if m.params.allowed_token_ids and not m.is_constrained]
        banning = [r for r, m in enumerate(members) if m.is_banning]
        table[banning, _COLUMN["early_until"]] = [members[r].params.min_output_tokens for r in banning]
        masked += [(r, "early_mask") for r in banning]
        at, new = self.masks.give([(members[r], column) for r, column in masked])
        for (r, column), row in zip(masked, at, strict=True):
            table[r, _COLUMN[column]] = row
        if new:
            bits = np.stack([self._mask(members[masked[i][0]], masked[i][1]) for i in new])
            places = upload([at[i] for i in new], self.device, np.int64)
            self.masks.memory.index_copy_(0, places, upload(bits, self.device))

    def _mask(self, member: SampledSequence, column: str) -> IntArray:
        allowed = only(member.params.allowed_token_ids, self.vocab_size)
        if column == "early_mask":
            allowed[member.banned] = False
        return mask_of(allowed)

    def place_counts(self, members: Sequence[SampledSequence], rows: Sequence[SampleRow], table: IntArray) -> None:
        """Gives the members with penalties their counts, and writes those anew that are not of just these tokens."""
        counted = [r for r, m in enumerate(members) if m.is_counted]
        at, new = self.counts.give([members[r] for r in counted])
        table[counted, _COLUMN["counts"]] = at
        for i, r in enumerate(counted):
            if i in new or not members[r].goes_on(rows[r]):
                counts, row = self.counts.memory[at[i]].zero_(), rows[r]
                if row.params.repetition_penalty != 1:
                    counts.index_fill_(0, upload(row.prompt_token_ids, self.device, np.int64), IN_PROMPT)
                output = upload(row.output_token_ids, self.device, np.int64)
                counts.index_add_(0, output, torch.ones(len(output), dtype=torch.int32, device=self.device))
                members[r].written(row)


class SamplingBatch:
    """The sequences of one step, and of the next ones until one comes or goes."""

    def __init__(self, rows: Sequence[SampleRow], last: SamplingBatch | None, memory: SamplingMemory) -> None:
        """Keeps the members of the last batch that go on."""
        known = {(id(m.params), m.sequence_index): m for m in last.members} if last is not None else {}
        self.members: list[SampledSequence] = [
            known.get((id(row.params), row.sequence_index)) or SampledSequence(row, memory.vocab_size) for row in rows
        ]
        table = np.stack([member.fields for member in self.members])
        memory.place_counts(self.members, rows, table)
        for member, row in zip(self.members, rows, strict=True):
            member.position = row.position
        memory.place_rules(self.members, table)
        table[:, _COLUMN["position"]] = [member.position for member in self.members]
        self.constrained = [r for r, m in enumerate(self.members) if m.is_constrained]
        table[self.constrained, _COLUMN["mask"]] = [-2 - i for i in range(len(self.constrained))]
        flags = table[:, _COLUMN["flags"]]
        self.is_drawn = bool((flags & DRAWN).any())
        scored = np.flatnonzero(flags & SCORED).tolist()
        table[scored, _COLUMN["place"]] = range(len(scored))
        self.wanted = [(r, int(table[r, _COLUMN["num_top"]])) for r in scored]
        """Rows with logprobs, and how many of the most likely tokens each asked for."""
        self.num_most = max((num_top for _, num_top in self.wanted), default=0)
        self.reads_memory = bool((table[:, _MEMORY_COLUMNS] >= 0).any())
        """Whether a row has a bias, counts or a mask of its own."""
        self.table = upload(table, memory.device)

    def goes_on(self, rows: Sequence[SampleRow]) -> bool:
        """Whether these are the rows of the step after the last one."""
        return len(rows) == len(self.members) and all(map(SampledSequence.goes_on, self.members, rows))

    def step(self) -> Callable[[list[int]], None]:
        """Tokens have been set off; what is returned is to be called with them, once they are read."""
        known = [member.step() for member in self.members]
        noted = [(r, known[r], len(known[r]) - 1) for r, member in enumerate(self.members) if member.is_counted]

        def note(token_ids: list[int]) -> None:
            for r, tokens, at in noted:
                tokens[at] = token_ids[r]

        return note
