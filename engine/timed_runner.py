"""A rank whose steps take the time that a cost says and compute nothing (`engine.timed_steps`).

The next token is a hash of those before it (`engine.token_hash`). The state after each token lies in the KV pool, at
the token's own place, and each step reads the state before its first token there: a block that was handed over, reused
or copied wrongly leads to other tokens. Layer p % L holds the state of position p, its key the lower half and its value
the upper, so that each group of layers matters.

A step begins when the one before it ends if it is launched by then or soon after, as on a device that has it queued:
the time that a host takes between two steps does not add up. One that goes on with a sequence of the step before was
queued behind it even where this machine was busy with something else for a while.

Legend: T new tokens of a step, S its sequences, R rows whose next token is wanted, L layers, N blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cluster.step_cost import StepCost
from engine.kv.pool import KvCache
from engine.model_runner import StepOutput
from engine.models.config import ModelConfig
from engine.models.experts import ExpertLoad
from engine.sampling.params import SampleRow
from engine.sampling.samples import Samples
from engine.step_input import IntArray, StepInput, size_of
from engine.token_hash import StateArray, TokenHash, states_after

HOST_S = 0.005
"""A step that is launched so long after the end of the one before it was queued behind it: on a GPU the host launches
it meanwhile."""
STALL_S = 0.05
"""The same for a step that goes on with a sequence of the one before; after more the process was stopped."""
_DTYPE = torch.float32
"""The pool's type: 4 bytes for each half of a state, which nobody computes with."""


def timed_config(config: ModelConfig) -> ModelConfig:
    """A model with these layers, tokens and positions, whose weights take nothing and whose KV is one state, kept of
    all tokens in all layers."""
    return replace(
        config,
        hidden_size=1,
        intermediate_size=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        dtype=str(_DTYPE).removeprefix("torch."),
        packing=None,
        layer_windows=(None,) * config.num_hidden_layers,
        delta_net=None,
        latent=None,
    )


class TimedRunner:
    """The KV pool, and one step at a time (`worker.rank.Runner`)."""

    device = torch.device("cpu")

    def __init__(
        self,
        config: ModelConfig,
        cost: StepCost,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """There is no KV pool until `make_pool`."""
        self._cost = cost
        self._block_size = block_size
        self._clock, self._sleep = clock, sleep
        self._num_layers, self._groups = config.num_hidden_layers, config.kv_groups
        self._ended_at = -math.inf
        self._last_slots: IntArray = np.zeros(0, dtype=np.int32)
        """The slots of the newest token of each sequence of the latest step, [S]."""

    def make_pool(self, num_blocks: int, memory: Callable[[int], Tensor] | None = None) -> None:
        """To be called once, before the first step. `memory`: as of `engine.kv.pool.KvCache`."""
        self._kv = KvCache(self._groups, num_blocks, self._block_size, 1, 1, _DTYPE, self.device, memory)
        self._halves = self._kv.pool.numpy().view(np.uint32).reshape(self._num_layers, 2, -1)  # [L, 2, slots]

    @property
    def kv(self) -> Tensor:
        """The pool: [L, 2, N, block_size, 1, 1]."""
        return self._kv.pool

    def expert_load(self) -> ExpertLoad:
        """Returns nothing: no expert computes."""
        return ExpertLoad()

    def prepare(self, step: StepInput, sampled: Tensor | None, rows: Callable[[], Sequence[SampleRow]]) -> None:
        """Nothing: tokens are chosen by themselves."""

    def run(
        self, step: StepInput, on_layer: Callable[[int], None] | None = None, sampled: Tensor | None = None
    ) -> StepOutput:
        """Copies blocks, writes the new tokens' states, waits until the step is over, and returns the states of the
        rows in place of logits, int64 [R]. As of `ModelRunner.run`."""
        size = size_of(step)
        launched_at = self._clock()
        lag_s = launched_at - self._ended_at
        begun_at = self._ended_at if lag_s <= (STALL_S if self._goes_on(step) else HOST_S) else launched_at
        if len(step.block_copies):
            self._kv.copy_blocks(torch.from_numpy(step.block_copies.astype(np.int64)))
        states = self._write(step if sampled is None else step.with_tokens(sampled.numpy()))
        seconds = self._cost.of(size)
        if seconds:
            self._ended_at = begun_at + seconds
            self._last_slots = step.slot_mapping[step.cu_seqlens_q[1:] - 1]
        if on_layer is not None:
            for layer in range(1, self._num_layers + 1):
                self._wait_until(begun_at + seconds * layer / self._num_layers)
                on_layer(layer)
        self._wait_until(begun_at + seconds)
        return StepOutput(torch.from_numpy(states[step.logits_indices].view(np.int64)))

    def _wait_until(self, due: float) -> None:
        if (remaining := due - self._clock()) > 0:
            self._sleep(remaining)

    def _write(self, step: StepInput) -> StateArray:
        """The state after each new token, [T], which it writes to the token's place."""
        firsts = step.cu_seqlens_q[:-1]
        before = self._states_before(step, step.positions[firsts])
        states = states_after(before, step.token_ids, step.cu_seqlens_q)
        layers = step.positions % self._num_layers
        self._halves[layers, 0, step.slot_mapping] = states & np.uint64(0xFFFFFFFF)
        self._halves[layers, 1, step.slot_mapping] = states >> np.uint64(32)
        return states

    def _goes_on(self, step: StepInput) -> bool:
        """Whether a sequence of the step before is in it."""
        return bool(np.isin(self._slots_before(step), self._last_slots).any())

    def _slots_before(self, step: StepInput) -> IntArray:
        """The slot of the token before each sequence's first new one, [S]; any slot where there is none."""
        last = np.maximum(step.positions[step.cu_seqlens_q[:-1]] - 1, 0)
        blocks = step.block_tables[np.arange(len(last)), last // self._block_size]
        slots: IntArray = blocks * self._block_size + last % self._block_size
        return slots

    def _states_before(self, step: StepInput, positions: IntArray) -> StateArray:
        """The state before each sequence's first new token, at these positions, [S]."""
        slots, layers = self._slots_before(step), np.maximum(positions - 1, 0) % self._num_layers
        low, high = (self._halves[layers, half, slots].astype(np.uint64) for half in (0, 1))
        found = low | high << np.uint64(32)
        return np.where(positions > 0, found, np.uint64(0))


class HashChooser:
    """Chooses tokens by the states of a `TimedRunner` (`worker.group.TokenChooser`). It is always sure: temperature,
    filters, penalties and seed change nothing. Stop tokens are never chosen, so outputs are as long as they may be."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> Samples:
        """`logits`: int64 [R], the state before each row's token."""
        chosen = [
            TokenHash(state=state % 2**64).next_token(self.vocab_size, row.sequence_index, row.params.stop_token_ids)
            for state, row in zip(logits.tolist(), rows, strict=True)
        ]
        return Samples(torch.tensor(chosen, dtype=torch.int64))
