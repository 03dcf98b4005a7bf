"""Which workers have stalled: alive to the network, and yet nothing comes of them. Pure: the clock is the caller's.

Two silences are held against a worker, counted in ticks of the router's own (`cluster.failure_detector` says why):

    its loop's     it has said nothing at all, though it beats twice a second: the process stands still
    its tokens'    it decodes for somebody and has told no token in ten of its own steps: its engine stands still

Either makes it a suspect, but only when another worker has been as lively as ever all the while: on a machine that is
overloaded everybody is slow together, and nobody is better off elsewhere. A suspect is trusted again once it tells
something: anything when its loop was silent, else something of its engine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TICK_S = 0.125
MOST_TICKS_AT_ONCE = 2
"""A tick that came late counts for so many at most."""
STEPS_OF_SILENCE = 10
LIVELY = 0.75
"""Of what a worker's silence may last: less is usual."""


@dataclass(frozen=True)
class Watched:
    """A worker that is ready, as of now."""

    worker_id: str
    owes_tokens: bool
    """A request decodes there."""
    step_s: float | None
    """That its next step is predicted to take, with the prompts that it is to compute. None: nobody knows."""


@dataclass
class _Record:
    """Of one worker."""

    loop_s: float = 0.0
    """So long nothing was heard at all."""
    tokens_s: float = 0.0
    """So long it has owed tokens and told none."""
    lively_s: float = 0.0
    """So long no silence of it was unusual."""
    lateness: float = 0.0
    """The longer of both silences; 1: as long as it may last."""
    was_heard: bool = False
    has_told: bool = False
    has_told_tokens: bool = False
    suspicion: str = ""
    """Why it is a suspect, or nothing."""
    is_loop_silent: bool = False
    """What made it one."""


@dataclass(frozen=True)
class Findings:
    """Of one tick."""

    suspected: Mapping[str, str] = field(default_factory=dict)
    """Workers that are suspects now and were not before: why."""
    trusted: frozenset[str] = frozenset()
    """Workers that are suspects no more."""


class Stalls:
    """`limit_s`: a worker is a suspect after saying nothing for so long, or no token, unless ten steps take longer."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._records: dict[str, _Record] = {}

    def heard(self, worker_id: str, *, has_told: bool, has_told_tokens: bool) -> None:
        """Something came: a sign of life, or (`has_told`) events of its engine, maybe with tokens among them."""
        record = self._records.get(worker_id)
        if record is not None:
            record.was_heard = True
            record.has_told |= has_told
            record.has_told_tokens |= has_told_tokens

    def tick(self, elapsed_s: float, watched: Iterable[Watched]) -> Findings:
        """`elapsed_s` after the tick before. Workers that are not watched are forgotten."""
        elapsed_s = min(elapsed_s, MOST_TICKS_AT_ONCE * TICK_S)
        now = {w.worker_id: w for w in watched}
        self._records = {worker_id: self._records.get(worker_id, _Record()) for worker_id in now}
        trusted = frozenset(i for i, record in self._records.items() if _is_trusted_again(record))
        for worker_id, record in self._records.items():
            self._count(record, now[worker_id], elapsed_s)
        suspected = {}
        for worker_id, record in self._records.items():
            if not record.suspicion and record.lateness >= 1 and self._is_alone(worker_id, now):
                record.is_loop_silent = record.loop_s >= self._limit_s
                record.suspicion = suspected[worker_id] = self._why(record, now[worker_id])
        return Findings(suspected, trusted)

    def _count(self, record: _Record, worker: Watched, elapsed_s: float) -> None:
        record.loop_s = elapsed_s + (0.0 if record.was_heard else record.loop_s)
        record.tokens_s = (
            elapsed_s + (0.0 if record.has_told_tokens else record.tokens_s) if worker.owes_tokens else 0.0
        )
        record.lateness = max(record.loop_s / self._limit_s, record.tokens_s / self._token_limit_s(worker))
        record.lively_s = record.lively_s + elapsed_s if record.lateness <= LIVELY else 0.0
        record.was_heard = record.has_told = record.has_told_tokens = False

    def _token_limit_s(self, worker: Watched) -> float:
        return math.inf if worker.step_s is None else max(self._limit_s, STEPS_OF_SILENCE * worker.step_s)

    def _is_alone(self, worker_id: str, now: Mapping[str, Watched]) -> bool:
        """Whether others were lively for as long as this one was silent. Who owes tokens is compared with its like."""
        record = self._records[worker_id]
        is_loop = record.loop_s >= self._limit_s
        silence_s = record.loop_s if is_loop else record.tokens_s
        others = [r for i, r in self._records.items() if i != worker_id and not r.suspicion]
        if not is_loop:
            alike = [i for i, w in now.items() if i != worker_id and w.owes_tokens and not self._records[i].suspicion]
            others = [self._records[i] for i in alike] or others
        return any(other.lively_s >= silence_s for other in others)

    def _why(self, record: _Record, worker: Watched) -> str:
        if record.is_loop_silent:
            return f"it has said nothing for {record.loop_s:.1f} s"
        step_ms = 1000 * (worker.step_s or 0.0)
        return f"it has told no token for {record.tokens_s:.1f} s, and its step takes {step_ms:.0f} ms"


def _is_trusted_again(record: _Record) -> bool:
    if not record.suspicion or not (record.was_heard if record.is_loop_silent else record.has_told):
        return False
    record.suspicion = ""
    record.has_told_tokens = True  # what it owes is counted anew
    return True
