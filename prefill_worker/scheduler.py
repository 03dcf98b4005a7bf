"""Decides which prompts the next step computes, and how much of each. Pure: no clock, socket or tensor.

First come, first served, but for outputs that were begun elsewhere: their clients wait in mid-sentence, so they come
before what nobody has seen a token of. A prompt is admitted when its blocks fit as a whole, so prompts under way always
end; several are computed in one step, the last one cut to the token budget (chunked prefill).
"""

from __future__ import annotations

from collections import deque

from engine.kv.block_manager import BlockManager
from engine.sequence import ScheduledSequence, Sequence, claim_blocks, cover_blocks, take_arrived
from engine.step_budget import StepBudget


class PrefillScheduler:
    """Prompts waiting for blocks, and prompts under way."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._waiting: deque[Sequence] = deque()
        self._loading: list[Sequence] = []
        """Those whose cached blocks are on their way to the pool."""
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def first_waiting(self) -> Sequence | None:
        """The prompt whose turn it is once its blocks fit."""
        return self._waiting[0] if self._waiting else None

    def is_running(self, sequence: Sequence) -> bool:
        return sequence in self._running

    def add(self, sequence: Sequence) -> None:
        place = sum(waiting.was_begun for waiting in self._waiting) if sequence.was_begun else len(self._waiting)
        self._waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, whether it waits, runs or has ended; its blocks stay with it."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._loading:
            self._loading.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def admit(self) -> list[Sequence]:
        """Starts waiting prompts while their blocks fit, each once its cached blocks are there; returns those that
        started."""
        blocks = self._blocks
        started = self._start()
        while self._waiting and claim_blocks(self._waiting[0], blocks):
            self._loading.append(self._waiting.popleft())
        started += self._start()
        self._running += started
        return started

    def _start(self) -> list[Sequence]:
        """Returns those whose cached blocks are there; those that have lost some wait again, before all others."""
        arrived, lost = take_arrived(self._loading, self._blocks)
        self._waiting.extendleft(reversed(lost))
        return arrived

    def plan(self, budget: StepBudget) -> list[ScheduledSequence]:
        """Shares of the next step, from what is left of its budget."""
        in_turn = sorted(self._running, key=lambda sequence: not sequence.was_begun)
        shares = ((sequence, budget.prompt(sequence, cover_blocks(sequence, self._blocks))) for sequence in in_turn)
        return [ScheduledSequence(sequence, num_tokens) for sequence, num_tokens in shares if num_tokens]
