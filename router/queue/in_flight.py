"""What workers hold now, in tokens, and what is learned of how long they hold it. Pure: the time is an argument.

Of each request two sizes are known: what it was promised (prompt and most output), and what it should take, by the
outputs of what has ended lately.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.queue.pressure import LEAST_ENDS, DrainRate
from router.routing.demand import OutputLengths
from router.routing.load_tracker import RequestLoad

LONGEST_LOOK_S = 5.0
_MEMORY = 0.95


@dataclass(frozen=True)
class _Held:
    """By one request."""

    work: RequestLoad
    num_expected_tokens: float
    began_at: float


class Mean:
    """Of what came lately: of all at first, later of some twenty."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        share = max(1 - _MEMORY, 1 / self.count)
        self.value += share * (value - self.value)


class InFlight:
    """Of one router."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        self.num_tokens = 0
        """That were promised."""
        self.num_expected_tokens = 0.0
        self.num_sequences = 0
        self._held: dict[str, _Held] = {}
        self._stay_s = Mean()
        self._first_token_s = Mean()
        self._drain = DrainRate()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def first_token_s(self) -> float:
        """From a request's workers to its first token, on average lately."""
        return self._first_token_s.value

    def expected(self, work: RequestLoad) -> float:
        """Tokens of KV that a request should hold at its end."""
        return work.num_prompt_tokens + work.num_sequences * self._lengths.expected(work.most_output)

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

    def add(self, generation_id: str, work: RequestLoad, now: float) -> None:
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
        self, generation_id: str, now: float, num_workers: int, first_token_at: float | None, *, is_complete: bool
    ) -> None:
        """It is over, and did get to its end, or did not."""
        held = self._held[generation_id]
        self.pause(generation_id)
        self._drain.note_end(now, held.work.num_output_tokens, num_workers)
        if first_token_at is not None and first_token_at >= held.began_at:
            self._first_token_s.add(first_token_at - held.began_at)
        if is_complete:
            self._stay_s.add(now - held.began_at)
