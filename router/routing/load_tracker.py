"""Outstanding work of each worker, by what the router has placed there: its own decisions count at once.

Pure: a table of sums. Knows no policy, no connection and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cluster.step_cost import NO_STEP, StepSize


class RequestLoad(NamedTuple):
    """Size of one request. Output tokens of earlier attempts count as prompt."""

    num_prompt_tokens: int
    num_sequences: int
    num_output_tokens: int
    """Most tokens that decode will hold for it: the prompt and the largest outputs."""

    @property
    def most_output(self) -> int:
        """Largest output of one sequence."""
        return (self.num_output_tokens - self.num_prompt_tokens) // self.num_sequences


class PlacementKind(StrEnum):
    """Why a placement was chosen, for counters."""

    DISAGGREGATED = "disaggregated"
    LOCAL_SHORT = "local_short"
    """The part of the prompt that is not cached is too short to delay other sequences."""
    LOCAL_CACHED = "local_cached"
    """LOCAL_SHORT, with half of the prompt or more cached there."""
    LOCAL_IDLE = "local_idle"
    """Every prefill worker is busy, and nothing decodes on this worker."""
    LOCAL_BESIDE = "local_beside"
    """Every prefill worker is busy, and the prompt is computed sooner beside the sequences that decode here."""
    LOCAL_NO_PREFILL = "local_no_prefill"
    """There is no prefill worker."""
    LOCAL_NO_DECODE = "local_no_decode"
    """No decode worker is ready, and a prefill worker stands in for one."""
    SESSION = "session"
    """The session's last turn decided; elsewhere the request would have ended as soon, or hardly sooner."""
    RETRIED = "retried"
    """An earlier attempt failed."""
    MOVED = "moved"
    """The request moved here from another decode worker."""


class Fetch(NamedTuple):
    """The beginning of a prompt that one worker is to have from another."""

    holder_id: str
    num_tokens: int
    """Tokens from the first on that the holder has."""
    num_useful: int
    """Those of them that fill blocks of the target."""
    seconds: float
    """Prediction."""
    limit_s: float
    """It is given up after that."""


class FetchedPrefix(NamedTuple):
    """What a worker has of a prefix after a fetch; both 0: it failed."""

    num_tokens: int = 0
    num_before: int = 0
    """Tokens that it had before."""


NOT_FETCHED = FetchedPrefix()


class Placement(NamedTuple):
    """The workers of a request, by id, and the reason that Timing.placement gives."""

    prefill_id: str | None
    """None: the decode worker computes the prompt itself."""
    decode_id: str
    reason: str
    num_cached_tokens: int = 0
    """Prompt tokens that the computing worker should find in its prefix cache."""
    kind: PlacementKind = PlacementKind.DISAGGREGATED
    num_present_tokens: int = 0
    """Prompt tokens that the decode worker should find in its own cache, so that they are not transferred."""
    fetch: Fetch | None = None
    """What the computing worker gets from another one first."""

    @property
    def computing_id(self) -> str:
        """The worker that computes the prompt."""
        return self.decode_id if self.prefill_id is None else self.prefill_id


@dataclass(slots=True)
class Load:
    """Outstanding work of one worker. Never changed, as `StepSize` is not."""

    prompts: StepSize = NO_STEP
    """Prompt tokens to compute."""
    num_prompts: int = 0
    num_retries: int = 0
    """Part of `num_prompts` that an earlier attempt had computed already."""
    sequences: StepSize = NO_STEP
    """Sequences to decode, with their prompts' tokens as KV."""
    decoding: StepSize = NO_STEP
    """Part of `sequences` whose prompt is computed."""
    num_tokens: int = 0
    """Most tokens that its sequences will hold."""

    def __add__(self, other: Load) -> Load:
        return Load(
            self.prompts + other.prompts,
            self.num_prompts + other.num_prompts,
            self.num_retries + other.num_retries,
            self.sequences + other.sequences,
            self.decoding + other.decoding,
            self.num_tokens + other.num_tokens,
        )

    def __sub__(self, other: Load) -> Load:
        return Load(
            self.prompts - other.prompts,
            self.num_prompts - other.num_prompts,
            self.num_retries - other.num_retries,
            self.sequences - other.sequences,
            self.decoding - other.decoding,
            self.num_tokens - other.num_tokens,
        )


NOTHING = Load()


class LoadTracker:
    """Outstanding work by worker id; a worker that was never charged has none."""

    def __init__(self) -> None:
        self.num_retries = 0
        """Sum over all workers."""
        self.on_change: Callable[[str], None] = lambda worker_id: None
        """Called with each worker whose load has changed."""
        self._loads: dict[str, Load] = {}

    def __getitem__(self, worker_id: str) -> Load:
        return self._loads.get(worker_id, NOTHING)

    def add(self, worker_id: str, load: Load) -> None:
        """Called by `Charge`."""
        self.num_retries += load.num_retries
        self._loads[worker_id] = self[worker_id] + load
        self.on_change(worker_id)

    def remove(self, worker_id: str, load: Load) -> None:
        """Called by `Charge`, for what it has added; a worker at zero is forgotten."""
        self.num_retries -= load.num_retries
        left = self[worker_id] - load
        if left == NOTHING:
            self._loads.pop(worker_id, None)
        else:
            self._loads[worker_id] = left
        self.on_change(worker_id)


class Charge:
    """One request's share of the loads, given back part by part and never twice. `is_retry`: it is computed again."""

    def __init__(self, loads: LoadTracker, placement: Placement, work: RequestLoad, *, is_retry: bool = False) -> None:
        self._loads = loads
        self._placement = placement
        self.is_prefilling = True
        """Its prompt is not computed yet."""
        num_new = max(0, work.num_prompt_tokens - placement.num_cached_tokens)
        self._prefill = Load(StepSize.of_prompt(num_new, placement.num_cached_tokens), 1, int(is_retry))
        self._size = StepSize(num_sequences=1, num_kv_tokens=work.num_prompt_tokens)
        self._sequence = Load(sequences=self._size)
        self._num_sequences = work.num_sequences
        self._held = Load(num_tokens=work.num_output_tokens)
        loads.add(placement.computing_id, self._prefill)
        self.queued = loads[placement.computing_id].prompts
        """Its prompt and those before it."""
        all_sequences = StepSize(
            num_sequences=work.num_sequences, num_kv_tokens=work.num_sequences * work.num_prompt_tokens
        )
        loads.add(placement.decode_id, Load(sequences=all_sequences, num_tokens=work.num_output_tokens))

    def prefill_done(self) -> None:
        """Only the first call does anything."""
        if not self.is_prefilling:
            return
        self.is_prefilling = False
        self._loads.remove(self._placement.computing_id, self._prefill)
        self._sequence = Load(sequences=self._size, decoding=self._size)
        size, count = self._size, self._num_sequences
        decoding = StepSize(num_sequences=count, num_kv_tokens=count * size.num_kv_tokens)
        self._loads.add(self._placement.decode_id, Load(decoding=decoding))

    def sequence_done(self) -> None:
        if self._num_sequences:
            self._num_sequences -= 1
            self._loads.remove(self._placement.decode_id, self._sequence)

    def all_done(self) -> None:
        self.prefill_done()
        while self._num_sequences:
            self.sequence_done()
        self._loads.remove(self._placement.decode_id, self._held)
        self._held = NOTHING
