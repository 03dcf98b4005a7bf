"""How much one step may compute: a number of tokens, and beside decoding sequences no more than their TPOT allows.

A decoding sequence gets its next token when the step ends, so the prompt tokens computed beside it are bounded by time
as well: by the step costs that the worker has learned, the step must end within the time that one token may take.
The client of a sequence that was preempted, or that another worker began, waits for its next token too: beside such a
prompt a step may take as long as a few tokens. Pure: knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from cluster.step_cost import PACE_SHARE, StepCost, StepSize
from engine.sequence import Sequence

LEAST_PROMPT_TOKENS = 16
"""Prompt tokens that every step computes, however slow, so that prompts make progress."""
BEGUN_PACES = 4
"""How many times the time of one token a step may take for outputs that were begun before."""


class StepBudget:
    """The budget of one step: `decode` begins a new one, `prompt` hands out what is left of it."""

    def __init__(
        self, num_tokens: int, tpot_s: float = math.inf, learned: Callable[[], StepCost | None] = lambda: None
    ) -> None:
        """`tpot_s`: seconds that one token may take. `learned` is called when a prompt runs beside decoding sequences;
        while it returns None, time is not bounded."""
        self._num_tokens = num_tokens
        self._most_s = PACE_SHARE * tpot_s
        self._learned = learned
        self.decode([])

    def decode(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Begins a step; returns the sequences that get their next token, in their order."""
        self._decoding = list(sequences[: self._num_tokens])
        self._tokens_left = self._num_tokens - len(self._decoding)
        self._least_left = LEAST_PROMPT_TOKENS
        self._cost: StepCost | None = None
        self._seconds_left = math.inf
        return self._decoding

    def prompt(self, sequence: Sequence, most: int | None = None) -> int:
        """Returns how many of a sequence's tokens, at most `most`, the step computes, and takes them from what is
        left."""
        if self._decoding and self._cost is None:
            self._bound_time()
        num_before, num_tokens = sequence.num_computed_tokens, min(sequence.num_remaining, self._tokens_left)
        num_tokens = num_tokens if most is None else min(num_tokens, most)
        if self._cost is not None:
            more_s = (BEGUN_PACES - 1) * self._most_s if sequence.was_begun else 0.0
            in_time = self._in_time(self._cost, num_before, self._seconds_left + more_s)
            num_tokens = min(num_tokens, max(in_time, self._least_left))
            self._seconds_left -= self._cost.of(StepSize.of_prompt(num_tokens, num_before))
        self._tokens_left -= num_tokens
        self._least_left = max(0, self._least_left - num_tokens)
        return num_tokens

    def _bound_time(self) -> None:
        cost = self._learned()
        if cost is not None and not math.isinf(self._most_s):
            held = sum(s.num_computed_tokens + 1 for s in self._decoding)
            size = StepSize(num_sequences=len(self._decoding), num_kv_tokens=held)
            self._seconds_left = self._most_s - cost.of(size)
            self._cost = replace(cost, fixed_s=0.0)  # is paid already

    def _in_time(self, cost: StepCost, num_before: int, seconds_left: float) -> int:
        """How many tokens, after `num_before` others of their prompt, the time left is enough for."""
        if seconds_left <= 0:
            return 0
        # n tokens take n * linear + n * n * square; the positive root is the most that fits.
        linear = cost.prompt_token_s + cost.attended_s * (num_before + 0.5)
        square = cost.attended_s / 2
        slope = linear + math.sqrt(linear * linear + 4 * square * seconds_left)
        return int(min(2 * seconds_left / slope, self._tokens_left)) if slope > 0 else self._tokens_left
