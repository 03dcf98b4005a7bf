"""What the router has handed out to each worker and not got back: its own decisions count at once.

Pure: a table of sums. Knows no policy, no connection and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.step_cost import NO_STEP, StepSize


@dataclass(frozen=True)
class RequestLoad:
    """What one request costs the workers that run it. Tokens that an earlier attempt told count as prompt."""

    num_prompt_tokens: int
    num_sequences: int
    num_output_tokens: int
    """Most tokens that decode will hold for it: prompt and all outputs."""

    @property
    def most_output(self) -> int:
        """Tokens that one sequence may get."""
        return (self.num_output_tokens - self.num_prompt_tokens) // self.num_sequences


class PlacementKind(StrEnum):
    """Why a placement is what it is, for counters."""

    DISAGGREGATED = "disaggregated"
    LOCAL_SHORT = "local_short"
    """What is not cached holds nobody up."""
    LOCAL_CACHED = "local_cached"
    """The same, and half of the prompt or more is cached there."""
    LOCAL_IDLE = "local_idle"
    """Nothing decodes there, and every prefill worker is busy."""
    LOCAL_BESIDE = "local_beside"
    """Every prefill worker is busy, and beside what decodes there it is computed sooner."""
    LOCAL_NO_PREFILL = "local_no_prefill"
    """There is no prefill worker."""
    LOCAL_NO_DECODE = "local_no_decode"
    """No decode worker is ready, and a prefill worker stands in for one."""
    SESSION = "session"
    """Elsewhere it would have ended as soon, or hardly sooner; the session's last turn decided."""
    RETRIED = "retried"
    """An attempt has failed, and another follows."""
    MOVED = "moved"
    """It ran elsewhere, and goes on here."""


@dataclass(frozen=True)
class Placement:
    """Two worker ids, and why they were chosen, in words for Timing.placement."""

    prefill_id: str | None
    """None: the decode worker computes the prompt itself."""
    decode_id: str
    reason: str
    num_cached_tokens: int = 0
    """Of the prompt, that whoever computes it should find in its prefix cache."""
    kind: PlacementKind = PlacementKind.DISAGGREGATED
    num_present_tokens: int = 0
    """Of the prompt, that the decode worker should find in its own and need not be handed."""

    @property
    def computing_id(self) -> str:
        """Who computes the prompt."""
        return self.decode_id if self.prefill_id is None else self.prefill_id


@dataclass(frozen=True)
class Load:
    """What is on one worker."""

    prompts: StepSize = NO_STEP
    """Prompt tokens to compute."""
    num_prompts: int = 0
    sequences: StepSize = NO_STEP
    """Sequences to decode, with their prompts' tokens as KV."""
    decoding: StepSize = NO_STEP
    """Of these, those whose prompt is computed."""
    num_tokens: int = 0
    """Most that those will hold."""

    def __add__(self, other: Load) -> Load:
        return Load(
            self.prompts + other.prompts,
            self.num_prompts + other.num_prompts,
            self.sequences + other.sequences,
            self.decoding + other.decoding,
            self.num_tokens + other.num_tokens,
        )

    def __neg__(self) -> Load:
        return Load(-self.prompts, -self.num_prompts, -self.sequences, -self.decoding, -self.num_tokens)


NOTHING = Load()


class LoadTracker:
    """Outstanding work of each worker by id; a worker that was never charged has none."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}

    def __getitem__(self, worker_id: str) -> Load:
        return self._loads.get(worker_id, NOTHING)

    def add(self, worker_id: str, load: Load) -> None:
        """Use `Charge`; a worker at zero is forgotten."""
        total = self[worker_id] + load
        if total == NOTHING:
            self._loads.pop(worker_id, None)
        else:
            self._loads[worker_id] = total


class Charge:
    """One request's share of the ledger, given back part by part and never twice."""

    def __init__(self, ledger: LoadTracker, placement: Placement, work: RequestLoad) -> None:
        self._ledger = ledger
        self._placement = placement
        num_new = max(0, work.num_prompt_tokens - placement.num_cached_tokens)
        self._prefill = Load(StepSize.of_prompt(num_new, placement.num_cached_tokens), 1)
        self._size = StepSize(num_sequences=1, num_kv_tokens=work.num_prompt_tokens)
        self._sequence = Load(sequences=self._size)
        self._num_sequences = work.num_sequences
        self._held = Load(num_tokens=work.num_output_tokens)
        ledger.add(placement.computing_id, self._prefill)
        for _ in range(work.num_sequences):
            ledger.add(placement.decode_id, self._sequence)
        ledger.add(placement.decode_id, self._held)

    def prefill_done(self) -> None:
        """Called for each token: all but the first time it costs nothing."""
        if self._prefill is NOTHING:
            return
        self._ledger.add(self._placement.computing_id, -self._prefill)
        self._prefill = NOTHING
        self._sequence = Load(sequences=self._size, decoding=self._size)
        for _ in range(self._num_sequences):
            self._ledger.add(self._placement.decode_id, Load(decoding=self._size))

    def sequence_done(self) -> None:
        if self._num_sequences:
            self._num_sequences -= 1
            self._ledger.add(self._placement.decode_id, -self._sequence)

    def all_done(self) -> None:
        self.prefill_done()
        while self._num_sequences:
            self.sequence_done()
        self._ledger.add(self._placement.decode_id, -self._held)
        self._held = NOTHING
