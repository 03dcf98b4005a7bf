"""Finds workers that have stalled: their connection is alive, and yet they make no progress.

Two silences count, in ticks of the router's own (`cluster.failure_detector` explains why):

    of its process    no message at all, although a worker sends one twice a second: the process stands still
    of its engine     requests decode there, and no token has come in ten of its own steps: the engine stands still

Either makes a worker a suspect, but only when another worker has been as lively as ever all the while: on an overloaded
machine everything is slow together, and no request would be better off elsewhere. A suspect is trusted again once it
makes progress: any message ends the silence of a process, an event of its requests that of an engine.

`StallDetector` decides and knows no clock; `StallWatch` ticks on the dispatcher's event loop and marks the workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.step_cost import StepCost, usual
from router.routing.fleet import Fleet
from router.routing.load_tracker import LoadTracker
from router.routing.worker_client import HEARTBEAT_S, Event, WorkerClient

log = logging.getLogger(__name__)

TICK_S = 0.125
MOST_TICKS_AT_ONCE = 2
"""A tick that came late counts as this many at most."""
STEPS_OF_SILENCE = 10
LIVELY = 0.75
"""A worker is lively while its silences stay below this share of their limits."""
SILENT_PART = 3
"""A worker is a suspect after this part of the time after which a silent one is lost..."""
FEWEST_BEATS = 2
"""... but not before it has missed this many of its own heartbeats."""


class Watched(NamedTuple):
    """A ready worker, as of now."""

    worker_id: str
    owes_tokens: bool
    """A request decodes there."""
    step_s: float | None
    """Predicted length of its next step, queued prompts included; None: unknown, or its engine is not silent."""


@dataclass
class _Record:
    """Silences of one worker."""

    process_s: float = 0.0
    """Time without any message."""
    engine_s: float = 0.0
    """Time for which it has owed tokens and sent none."""
    lively_s: float = 0.0
    """Time since it was last not lively."""
    lateness: float = 0.0
    """The longer of both silences over its limit."""
    has_message: bool = False
    has_progress: bool = False
    has_tokens: bool = False
    suspicion: str = ""
    """Why it is a suspect; empty: it is none."""
    is_process_silent: bool = False
    """The silence of the process made it a suspect, not that of the engine."""


@dataclass(frozen=True)
class Findings:
    """Result of one tick."""

    suspected: Mapping[str, str] = field(default_factory=dict)
    """New suspects, each with the reason."""
    trusted: frozenset[str] = frozenset()
    """Workers that are suspects no more."""


class StallDetector:
    """`limit_s`: how long a process may be silent; an engine may be for as long, or for ten of its steps."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._records: dict[str, _Record] = {}

    def on_message(self, worker_id: str, *, has_progress: bool, has_tokens: bool) -> None:
        """A batch came: a heartbeat, or (`has_progress`) with events, tokens perhaps among them."""
        record = self._records.get(worker_id)
        if record is not None:
            record.has_message = True
            record.has_progress |= has_progress
            record.has_tokens |= has_tokens

    def is_silent(self, worker_id: str) -> bool:
        """Whether the engine of a worker may have been silent for so long by the next tick that its step matters."""
        record = self._records.get(worker_id)
        longest_s = MOST_TICKS_AT_ONCE * TICK_S
        return record is not None and record.engine_s + longest_s > LIVELY * self._limit_s

    @property
    def suspects(self) -> list[str]:
        """Ids, as of the last tick."""
        return [worker_id for worker_id, record in self._records.items() if record.suspicion]

    def tick(self, elapsed_s: float, watched: Iterable[Watched]) -> Findings:
        """`elapsed_s`: since the tick before. Workers that are not watched are forgotten."""
        elapsed_s = min(elapsed_s, MOST_TICKS_AT_ONCE * TICK_S)
        now = {w.worker_id: w for w in watched}
        last = self._records
        self._records = {worker_id: last.get(worker_id) or _Record() for worker_id in now}
        trusted = [i for i, record in self._records.items() if record.suspicion and _is_trusted_again(record)]
        for record, worker in zip(self._records.values(), now.values(), strict=True):
            self._count(record, worker, elapsed_s)
        suspected = {}
        for worker_id, record in self._records.items():
            if record.lateness >= 1 and not record.suspicion and self._is_alone(worker_id, now):
                record.is_process_silent = record.process_s >= self._limit_s
                record.suspicion = suspected[worker_id] = self._why(record, now[worker_id])
        return Findings(suspected, frozenset(trusted))

    def _count(self, record: _Record, worker: Watched, elapsed_s: float) -> None:
        record.process_s = elapsed_s if record.has_message else record.process_s + elapsed_s
        record.lateness = record.process_s / self._limit_s
        if worker.owes_tokens:
            record.engine_s = elapsed_s if record.has_tokens else record.engine_s + elapsed_s
            record.lateness = max(record.lateness, record.engine_s / self._engine_limit_s(worker))
        else:
            record.engine_s = 0.0
        record.lively_s = record.lively_s + elapsed_s if record.lateness <= LIVELY else 0.0
        record.has_message = record.has_progress = record.has_tokens = False

    def _engine_limit_s(self, worker: Watched) -> float:
        return math.inf if worker.step_s is None else max(self._limit_s, STEPS_OF_SILENCE * worker.step_s)

    def _is_alone(self, worker_id: str, now: Mapping[str, Watched]) -> bool:
        """Whether another worker was lively all the while. Engines are compared with others that owe tokens."""
        record = self._records[worker_id]
        is_process = record.process_s >= self._limit_s
        silence_s = record.process_s if is_process else record.engine_s
        others = [r for i, r in self._records.items() if i != worker_id and not r.suspicion]
        if not is_process:
            alike = [i for i, w in now.items() if i != worker_id and w.owes_tokens and not self._records[i].suspicion]
            others = [self._records[i] for i in alike] or others
        return any(other.lively_s >= silence_s for other in others)

    def _why(self, record: _Record, worker: Watched) -> str:
        if record.is_process_silent:
            return f"it has sent nothing for {record.process_s:.1f} s"
        step_ms = 1000 * (worker.step_s or 0.0)
        return f"it has sent no token for {record.engine_s:.1f} s, and its step takes {step_ms:.0f} ms"


def _is_trusted_again(record: _Record) -> bool:
    if not record.suspicion or not (record.has_message if record.is_process_silent else record.has_progress):
        return False
    record.suspicion = ""
    record.has_tokens = True  # the silence of its engine starts over
    return True


class StallWatch:
    """Marks workers as suspects, or trusted again, from `start` to `stop`.

    `on_suspect` is called for each suspect at every tick, `on_change` after a tick that found a change.
    """

    def __init__(
        self,
        fleet: Fleet,
        loads: LoadTracker,
        dead_after_s: float,
        owes_tokens: Callable[[WorkerClient], bool],
        on_suspect: Callable[[WorkerClient], None],
        on_change: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._loads = loads
        self._owes_tokens = owes_tokens
        self._on_suspect = on_suspect
        self._on_change = on_change
        self._detector = StallDetector(max(dead_after_s / SILENT_PART, FEWEST_BEATS * HEARTBEAT_S))
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0
        self._is_stopped = False

    def start(self) -> None:
        """No effect while it runs, or after `stop`."""
        if self._timer is None and not self._is_stopped:
            self._last_tick = asyncio.get_running_loop().time()
            self._schedule()

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def on_batch(self, worker: WorkerClient, events: Sequence[Event]) -> None:
        """A ready worker has sent a batch, if only an empty one."""
        has_tokens = any(kind == "tokens" for kind, _ in events)
        self._detector.on_message(worker.worker_id, has_progress=bool(events), has_tokens=has_tokens)

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed_s, self._last_tick = now - self._last_tick, now
        self._schedule()
        findings = self._detector.tick(elapsed_s, self._watched())
        for worker_id in sorted(findings.trusted):
            log.info("worker %s makes progress again", worker_id)
            self._fleet[worker_id].is_suspect = False
        for worker_id, why in findings.suspected.items():
            log.warning("worker %s is suspected to stall: %s", worker_id, why)
            self._fleet[worker_id].is_suspect = True
        for worker in [self._fleet[worker_id] for worker_id in self._detector.suspects]:
            if worker.is_suspect:
                self._on_suspect(worker)
        if findings.trusted or findings.suspected:
            self._on_change()

    def _watched(self) -> Iterator[Watched]:
        mean: StepCost | None = None
        for worker in self._fleet:
            if not worker.is_ready:
                continue
            load, step_s = self._loads[worker.worker_id], None
            owes_tokens = load.decoding.num_sequences > 0 and self._owes_tokens(worker)
            if owes_tokens and self._detector.is_silent(worker.worker_id):
                mean = mean or self._mean_cost()
                if mean is not None:
                    step_s = (worker.step_cost or mean).filled(mean).of(load.sequences + load.prompts)
            yield Watched(worker.worker_id, owes_tokens, step_s)

    def _mean_cost(self) -> StepCost | None:
        known = [cost for worker in self._fleet if worker.is_ready and (cost := worker.step_cost) is not None]
        return usual(known) if known else None
