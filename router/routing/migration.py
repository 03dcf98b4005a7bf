"""Looks after what runs: moves it off workers that are not to decode any more, and away from those that stall.

`moves` and `stalls` decide; here they are told how things stand, and what they decide is asked of the dispatcher. Ticks
on the dispatcher's event loop from `start` to `stop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

from cluster.lifecycle import RequestState
from cluster.pb import worker_pb2
from cluster.step_cost import usual
from router.routing.fleet import DECODE, Fleet
from router.routing.load_tracker import LoadTracker
from router.routing.migration_plan import DecodeRoom, Resident, choose_moves
from router.routing.stalls import TICK_S, Stalls, Watched
from router.routing.worker_client import HEARTBEAT_S, WorkerClient
from router.stream import failures
from router.stream.request import LiveRequest
from router.stream.retry import AttemptFailure

log = logging.getLogger(__name__)

SILENT_PART = 3
"""Of the time after which a silent worker is lost: after so small a part of it, the worker is a suspect..."""
FEWEST_BEATS = 2
"""... but not before it has missed so many of its own beats."""


class Residents(Protocol):
    """What the dispatcher does for the keeper."""

    def running_on(self, worker: WorkerClient) -> Iterable[LiveRequest]:
        """A copy: what is done to one of them may take it away."""
        ...

    def move(self, live: LiveRequest, to_id: str, why: str) -> None: ...

    def retry(self, live: LiveRequest, failure: AttemptFailure) -> None: ...

    def serve_waiting(self) -> None:
        """Others may be used now than before."""
        ...


class MigrationManager:
    """Of one dispatcher. A suspect is marked as such and gets nothing new."""

    def __init__(self, residents: Residents, fleet: Fleet, ledger: LoadTracker, dead_after_s: float) -> None:
        self._residents = residents
        self._fleet = fleet
        self._ledger = ledger
        self._stalls = Stalls(max(dead_after_s / SILENT_PART, FEWEST_BEATS * HEARTBEAT_S))
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0
        self._is_stopped = False

    def start(self) -> None:
        """No effect while it runs, or after `stop`."""
        if self._timer is None and not self._is_stopped:
            self._last_tick = asyncio.get_running_loop().time()
            self._schedule()

    def stop(self) -> None:
        """From now on nobody moves and nobody is suspected."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def heard(self, worker: WorkerClient, batch: worker_pb2.EventBatch) -> None:
        """A worker that is ready has said something, if only that it lives."""
        has_tokens = any(event.HasField("tokens") for event in batch.events)
        self._stalls.heard(worker.worker_id, has_told=bool(batch.events), has_told_tokens=has_tokens)

    def move_away(self) -> None:
        """Whatever decodes where it should not, and finds room where it should, begins to move."""
        others = [] if self._is_stopped else self._fleet.ready(DECODE)
        if not others:
            return
        for worker in self._fleet:
            why = _why_emptied(worker)
            if why:
                self._empty(worker, others, why)

    def _empty(self, worker: WorkerClient, others: list[WorkerClient], why: str) -> None:
        running = {live.key.request_id: live for live in self._residents.running_on(worker)}
        num_under_way = sum(r.attempt.is_move and r.attempt.prefill is worker for r in running.values())
        residents = [_resident_of(r) for r in running.values() if r.attempt.workers == [worker] and _can_move(r)]
        if residents:
            for move in choose_moves(residents, map(self._room_of, others), num_under_way):
                self._residents.move(running[move.request_id], move.to_id, why)

    def _room_of(self, worker: WorkerClient) -> DecodeRoom:
        load, info = self._ledger[worker.worker_id], worker.info
        num_sequences = load.sequences.num_sequences
        most = info.max_num_seqs if info is not None else 0
        return DecodeRoom(worker.worker_id, worker.kv_tokens - load.num_tokens, most - num_sequences, num_sequences)

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed_s, self._last_tick = now - self._last_tick, now
        self._schedule()
        findings = self._stalls.tick(elapsed_s, self._watched())
        for worker in [w for w in self._fleet if w.worker_id in findings.trusted]:
            log.info("worker %s is heard again", worker.worker_id)
            worker.is_suspect = False
        for worker in [w for w in self._fleet if w.worker_id in findings.suspected]:
            log.warning("worker %s is suspected to stall: %s", worker.worker_id, findings.suspected[worker.worker_id])
            worker.is_suspect = True
        for worker in [w for w in self._fleet if w.is_suspect]:
            self._take_from(worker)
        if findings.trusted or findings.suspected:
            self._residents.serve_waiting()

    def _take_from(self, worker: WorkerClient) -> None:
        """Its requests go on elsewhere, if anybody can take them; else they wait for it."""
        for live in self._residents.running_on(worker):
            if not self._fleet.who_can()[1]:
                return
            if not live.retry.may_retry(live.num_tokens):
                continue  # it would fail elsewhere: its last attempt may yet go well here
            error = failures.worker_stalled(worker.worker_id)
            self._residents.retry(live, AttemptFailure("STALLED", error, worker.worker_id))

    def _watched(self) -> Iterator[Watched]:
        ready = [worker for worker in self._fleet if worker.is_ready]
        known = [cost for worker in ready if (cost := worker.step_cost) is not None]
        mean = usual(known) if known else None
        for worker in ready:
            load, step_s = self._ledger[worker.worker_id], None
            if mean is not None:
                step_s = (worker.step_cost or mean).filled(mean).of(load.sequences + load.prompts)
            yield Watched(worker.worker_id, self._owes_tokens(worker), step_s)

    def _owes_tokens(self, worker: WorkerClient) -> bool:
        return any(
            live.attempt.placement.decode_id == worker.worker_id and live.lifecycle.state is RequestState.DECODING
            for live in self._residents.running_on(worker)
        )


def _why_emptied(worker: WorkerClient) -> str:
    """Why what decodes there should go elsewhere, or nothing. A suspect's requests cannot be handed over."""
    if not worker.is_ready or worker.is_suspect:
        return ""
    if worker.is_draining:
        return "the worker drains"
    return "" if worker.role == DECODE else "the worker is there to prefill"


def _can_move(live: LiveRequest) -> bool:
    return live.lifecycle.state is RequestState.DECODING and live.has_left_prefill


def _resident_of(live: LiveRequest) -> Resident:
    work = live.work
    open_tokens = [s.num_tokens for s in live.sequences if s.end is None]
    num_left = live.request.sampling.max_output_tokens - min(open_tokens, default=0)
    return Resident(live.key.request_id, work.num_sequences, work.num_output_tokens, num_left if open_tokens else 0)
