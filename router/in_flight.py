"""What workers hold now, in tokens, and what is learned of how long they hold it. Pure: the time is an argument.

Of each request two sizes are known: what it was promised (prompt and most output), and what it should take, by the
outputs of what has ended lately.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.ledger import Work
from router.pressure import LEAST_ENDS, DrainRate

FIRST_GUESS_TOKENS = 128
"""Of one sequence's output, before any has ended."""
LONGEST_LOOK_S = 5.0
_MEMORY = 0.95


@dataclass(frozen=True)
class _Held:
    """By one request."""

    work: Work
    num_expected_tokens: float
    began_at: float


class Mean:
    """Of what came lately: of all at first, later of some twenty."""

    def __init__(self, guess: float, num_guessed: int = 1) -> None:
        self.value = guess
        self.count = 0
        self._num_guessed = num_guessed

    def add(self, value: float) -> None:
        self.count += 1
        share = max(1 - _MEMORY, 1 / (self.count + self._num_guessed))
        self.value += share * (value - self.value)


class InFlight:
    """Of one router."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """That were promised."""
        self.num_expected_tokens = 0.0
        self.num_sequences = 0
        self._held: dict[str, _Held] = {}
        self._output = Mean(FIRST_GUESS_TOKENS)
        self._stay_s = Mean(0.0, 0)
        self._first_token_s = Mean(0.0, 0)
        self._drain = DrainRate()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def first_token_s(self) -> float:
        """From a request's workers to its first token, on average lately."""
        return self._first_token_s.value

    def expected(self, work: Work) -> float:
        """Tokens of KV that a request should hold at its end."""
        most = work.num_output_tokens - work.num_prompt_tokens
        return work.num_prompt_tokens + min(most, work.num_sequences * self._output.value)

    def tokens_per_s(self, num_workers: int) -> float | None:
        """Promised tokens that are given back each second; None while that is not known.

        What was measured under pressure, once that has lasted for as long as requests stay; before, a burst of requests
        that all began together has not ended yet, and it is what is held over how long requests stayed (Little's law).
        """
        if self._stay_s.count < LEAST_ENDS or not num_workers:
            return None
        if self._drain.num_seconds >= min(self._stay_s.value, LONGEST_LOOK_S):
            measured = self._drain.tokens_per_s(num_workers)
            if measured is not None:
                return measured
        return max(1.0, self.num_tokens / max(self._stay_s.value, 1e-3))

    def press(self, now: float, *, is_pressed: bool) -> None:
        """From now on, something waits or is turned away, or not."""
        self._drain.press(now, is_pressed=is_pressed)

    def add(self, generation_id: str, work: Work, now: float) -> None:
        held = _Held(work, self.expected(work), now)
        self._held[generation_id] = held
        self.num_tokens += work.num_output_tokens
        self.num_expected_tokens += held.num_expected_tokens
        self.num_sequences += work.num_sequences

    def pause(self, generation_id: str) -> None:
        """Workers hold nothing for it, and it is not over: that says nothing of how fast room is made."""
        held = self._held.pop(generation_id)
        self.num_tokens -= held.work.num_output_tokens
        self.num_sequences -= held.work.num_sequences
        self.num_expected_tokens = self.num_expected_tokens - held.num_expected_tokens if self._held else 0.0

    def remove(
        self, generation_id: str, now: float, num_workers: int, first_token_at: float | None, num_finished: int | None
    ) -> None:
        """It is over. `num_finished`: its output tokens; None: it did not get to its end."""
        held = self._held[generation_id]
        self.pause(generation_id)
        self._drain.note_end(now, held.work.num_output_tokens, num_workers)
        if first_token_at is not None and first_token_at >= held.began_at:
            self._first_token_s.add(first_token_at - held.began_at)
        if num_finished is not None:
            self._stay_s.add(now - held.began_at)
            self._output.add(num_finished / held.work.num_sequences)
