"""The simulated model: its KV is a hash of the tokens, and its next token is a hash of its KV (`engine.token_hash`).

One number in each slot of the pool stands for a whole prefix, a step reads it where the step before it (or a hand-off)
left it, and KV that was lost, overwritten or landed in the wrong place leads to other tokens than those of the
undisturbed run. No tensors. Arrays are short: `count_nonzero` takes a third of the time of their `any`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.pb import rank_pb2
from engine.sampling.params import SampledToken, SampleRow, SamplingParams
from engine.step_input import IntArray, StepInput
from engine.token_hash import StateArray, TokenHash, states_after

VOCAB = 65_521
"""Tokens of the simulated model, but for its end."""
END_TOKEN = VOCAB
"""Ends an output before its client's limit."""

LayerArray = npt.NDArray[np.int64]
Content = tuple[Any, ...]
"""Arrays of what is in one block; empty: nothing."""
Done = Callable[..., None]
"""Called when a transfer has ended, with how."""


MOST_LAYERS = 62
"""Each is a bit."""


class PageAlarm(AssertionError):
    """KV is read that was not written, or that another sequence has written over."""


def seed_of(number: int, num_output_tokens: int) -> int:
    """The sampling seed of a request, from which the model knows where its output ends."""
    return number << 32 | num_output_tokens


def sampled_token(state: int, row: SampleRow) -> int:
    """The token that follows a prefix with this KV; the end, where the output is long enough and may end early."""
    params = row.params
    if params.stop_token_ids and row.position + 1 >= output_length(params):
        return END_TOKEN
    return TokenHash(state=state).next_token(VOCAB, row.sequence_index)


def output_length(params: SamplingParams) -> int:
    """Tokens of an output, its end included."""
    return params.seed & 0xFFFFFFFF if params.stop_token_ids else params.max_output_tokens


def undisturbed(prompt: Sequence[int], num_tokens: int, sequence_index: int = 0) -> list[int]:
    """The output of one sequence as it must come."""
    prefix = TokenHash(prompt)
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(prefix.next_token(VOCAB, sequence_index))
        prefix.extend(output[-1:])
    return output


class SimulatedStep:
    """A step that was launched (`worker.step_pipeline.Launched`)."""

    span = None

    def __init__(self, step: StepInput, states: StateArray, begun_at: float, seconds: float) -> None:
        self.step = step
        self.begun_at = begun_at
        self.seconds = seconds
        self.states = states
        self.num_layers = 0
        """Layers that are computed, on shared cores."""
        self.is_done = False
        self._sampled: list[SampledToken] = []

    @property
    def token_ids(self) -> list[int]:
        """The tokens that it led to."""
        return [token.token_id for token in self._sampled]

    def sample(self, rows: Sequence[Sequence[SampleRow]]) -> None:
        ends = self.step.cu_seqlens_q.searchsorted(self.step.logits_indices, side="right") - 1
        states = self.states[ends].tolist()
        self._sampled = [
            SampledToken(sampled_token(state, row))
            for state, of_one in zip(states, rows, strict=True)
            for row in of_one
        ]

    def tokens(self) -> list[SampledToken]:
        return self._sampled

    def scores(self) -> list[SampledToken]:
        return []


class KvPages:
    """The KV pool of one worker: a number for each token slot, and which of its layers are there."""

    def __init__(
        self, num_blocks: int, block_size: int, num_layers: int, num_slots: int = 0, num_disk_slots: int = 0
    ) -> None:
        """With slots of tiers below it. Raises ValueError for more than `MOST_LAYERS`."""
        if not 0 < num_layers <= MOST_LAYERS:
            raise ValueError(f"simulated KV has 1 to {MOST_LAYERS} layers, not {num_layers}")
        self.block_size = block_size
        self.num_layers = num_layers
        self._states: StateArray = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self._all_layers = (1 << num_layers) - 1
        self._layers: LayerArray = np.zeros(num_blocks * block_size, dtype=np.int64)
        self._host: list[Content] = [()] * num_slots
        self._disk: list[Content] = [()] * num_disk_slots
        """Contents of the slots of the tiers below."""

    def write_step(self, step: StepInput) -> StateArray:
        """Computes a step's tokens; returns the KV of each sequence's last one, [S]."""
        for source, target in step.block_copies.tolist():
            self._copy_block(source, target)
        states = states_after(self._before(step), step.token_ids, step.cu_seqlens_q)
        self._store(step.slot_mapping, states, self._all_layers)
        last: StateArray = states[step.cu_seqlens_q[1:] - 1]
        return last

    def move(self, kind: rank_pb2.BlockMove.Kind, source: int, target: int) -> None:
        """Copies a block; from the pool whatever is in it, for it may have been used again."""
        match kind:
            case rank_pb2.BlockMove.KIND_SAVE:
                self._host[target] = self._content(source)
            case rank_pb2.BlockMove.KIND_SPILL:
                self._disk[target] = self._host[source]
            case rank_pb2.BlockMove.KIND_LOAD:
                self._load(target, self._host[source])
            case rank_pb2.BlockMove.KIND_READ:
                self._load(target, self._disk[source])

    def _content(self, block: int) -> Content:
        rows = self._rows(block)
        return self._states[rows].copy(), self._layers[rows].copy()

    def _load(self, block: int, content: Content) -> None:
        if not content or np.count_nonzero(content[1] != self._all_layers):
            raise PageAlarm(f"block {block} is loaded from a slot in which not all of it was saved")
        rows = self._rows(block)
        self._store(np.arange(rows.start, rows.stop), content[0], content[1])

    def _rows(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def check_step(self, step: StepInput, last: StateArray) -> None:
        """Raises PageAlarm where something else has written over what a step wrote."""
        slots = step.slot_mapping[step.cu_seqlens_q[1:] - 1]
        if np.count_nonzero(self._states[slots] != last) or np.count_nonzero(self._layers[slots] != self._all_layers):
            raise PageAlarm("pages of a step were written over before it had ended")

    def tear(self, block_table: Sequence[int], start: int, end: int) -> None:
        """Leaves what a landing leaves that failed half-way: nothing that anybody may read."""
        self._layers[self._slots(block_table, start, end)] = 0

    def check_apart(self, step: StepInput, block_table: Sequence[int], start: int, end: int) -> None:
        """Raises PageAlarm where tokens are read that a step has not written yet, which is under way."""
        if np.count_nonzero(np.isin(self._slots(block_table, start, end), step.slot_mapping)):
            raise PageAlarm("a gather reads layers that its step has not written yet")

    def read(self, block_table: Sequence[int], start: int, end: int) -> StateArray:
        """The KV of the token before `start` (0: there is none) and of tokens [start, end) of a sequence; a copy."""
        slots = self._slots(block_table, max(0, start - 1), end)
        if np.count_nonzero(self._layers[slots] != self._all_layers):
            raise PageAlarm("KV is handed over that was never written, or of which some layers have not landed")
        states: StateArray = self._states[slots]
        return states if start else np.concatenate([np.zeros(1, dtype=np.uint64), states])

    def land(self, block_table: Sequence[int], start: int, states: StateArray, layers: tuple[int, int]) -> None:
        """Writes what another worker has `read`: layers [first, end) of tokens from `start` on."""
        slots = self._slots(block_table, start, start + len(states) - 1)
        first, end = layers
        before = np.where(self._states[slots] == states[1:], self._layers[slots], 0)
        self._store(slots, states[1:], before | ((1 << end) - (1 << first)))

    def guarded(self, block_table: Sequence[int], start: int, end: int, done: Done) -> Done:
        """Returns what is called in place of `done` when a transfer that began now has done with these tokens."""
        return done

    def _store(self, slots: IntArray, states: StateArray, layers: LayerArray | int) -> None:
        """Writes some tokens, of which these layers are there then."""
        self._states[slots] = states
        self._layers[slots] = layers

    def _before(self, step: StepInput) -> StateArray:
        """The KV of the token before each sequence's first new one, [S]."""
        places = step.positions[step.cu_seqlens_q[:-1]] - 1
        rows = np.arange(len(places))
        slots = step.block_tables[rows, places // self.block_size] * self.block_size + places % self.block_size
        has_none = places < 0
        slots[has_none] = 0
        if np.count_nonzero((self._layers[slots] != self._all_layers) & ~has_none):
            raise PageAlarm("a step reads KV that was never written, or of which some layers have not landed")
        before: StateArray = self._states[slots]
        before[has_none] = 0
        return before

    def _copy_block(self, source: int, target: int) -> None:
        size = self.block_size
        for pages in (self._states, self._layers):
            pages[target * size : (target + 1) * size] = pages[source * size : (source + 1) * size]

    def _slots(self, block_table: Sequence[int], start: int, end: int) -> IntArray:
        places = np.arange(start, end, dtype=np.int64)
        table = np.fromiter(block_table, dtype=np.int64, count=len(block_table))
        slots: IntArray = table[places // self.block_size] * self.block_size + places % self.block_size
        return slots
