"""From the queue to the workers and back: admits within bounds, places, routes events, ends requests.

    submit -> [queue] -> dispatch (Admit to decode, then to prefill) -> events -> end
      a full queue, a queue timeout, a deadline -> REJECTED
      a lost worker or a failed hand-off        -> placed again (`retry`), to go on from the tokens that were told
      the third in a row, or another failure    -> FAILED, and the other worker is told to drop it
      the client                                -> CANCELLED, and both are told

Runs on one event loop; nothing here awaits but `idle`. Owns the tables of queued and running requests and the counters;
knows no gRPC call of a client, no text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from cluster.demand import Demand
from cluster.errors import Aborted, BatonError, DeadlineExceeded, InternalError, Overloaded
from cluster.lifecycle import RequestState
from cluster.pb import worker_pb2
from router.observe.metrics import Counters, RouterMetrics
from router.queue.admission import AdmissionRequest
from router.queue.limits import Limits, Objectives
from router.queue.waiting_room import WaitingRoom
from router.routing.demand import DemandWindow
from router.routing.fleet import PREFILL, Fleet, WorkerAddress
from router.routing.load_tracker import Charge, Placement
from router.routing.migration import MigrationManager
from router.routing.policies import POLICIES
from router.routing.policies.interface import Candidates, RoutingContext, RoutingRequest
from router.routing.worker_client import WorkerClient
from router.routing.worker_commands import admit_decode, admit_local, admit_prefill
from router.stream import failures
from router.stream.request import Effect, LiveRequest
from router.stream.retry import RETRYABLE, AttemptFailure, RetryState, moved, next_placement, stood_in
from router.stream.running_requests import Attempt, AttemptTable

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
EARLY = frozenset({RequestState.QUEUED, RequestState.PREFILLING, RequestState.TRANSFERRING})
"""States whose clients see heartbeats; later they see tokens."""
_OF_A_REQUEST = frozenset({"tokens", "phase", "failed", "prompt_logprobs"})
"""Kinds of events that concern one request."""


class Dispatcher:
    """Also the fleet's listener. `on_change` is called when a worker came or went."""

    def __init__(
        self, limits: Limits, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.counters = Counters()
        self.context = RoutingContext(objectives=limits.objectives)
        self.demand = DemandWindow(self.context.lengths)
        self.metrics = RouterMetrics(self)
        self._policy = POLICIES[limits.policy](self.context)
        self.fleet = Fleet(self, self.num_requests, limits.dead_after_s, needs_prefill=limits.needs_prefill)
        self._on_change = on_change
        self._keeper = MigrationManager(self, self.fleet, self.context.loads, limits.dead_after_s)
        self.waiting = WaitingRoom(limits, self.fleet, self.context, self.counters, clock, self._pump, self._refused)
        self.admission = self.waiting.admission
        self._running = AttemptTable(self.fleet.let_go)
        self._is_draining = False
        self._became_idle = asyncio.Event()
        self._next_heartbeat: asyncio.TimerHandle | None = None

    @property
    def num_queued(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, live: LiveRequest, *, time_left_s: float | None) -> None:
        """Runs it now or queues it; what cannot be is rejected, and `live` says so. `time_left_s`: to its deadline."""
        self.demand.add_arrival(self.clock())
        live.latencies = self.metrics
        if not self.waiting.submit(live, time_left_s):
            return
        self._pump()
        if live.key.request_id in self.waiting:
            live.queue_position = len(self.waiting)
            live.beat()

    def refuse_early(self, ask: AdmissionRequest) -> None:
        """Before a prompt is read: raises what even the least that the request can be is refused for."""
        try:
            self.waiting.refuse_early(ask)
        except BatonError:
            self.demand.add_arrival(self.clock())
            raise

    def find(self, generation_id: str) -> LiveRequest | None:
        """One that is queued or running."""
        running = self._running.get(generation_id)
        return running.live if running is not None else self.waiting.find(generation_id)

    def take_up(self, live: LiveRequest) -> None:
        """One that ran elsewhere goes on from its known tokens: from the head of the queue, and no bound refuses it.

        Raises Aborted when it is queued or running here.
        """
        if self.find(live.key.request_id) is not None:
            raise Aborted("this generation is under way already; try again", retry_after_s=failures.RETRY_AFTER_S)
        live.latencies = self.metrics
        if self._is_draining:
            self.counters.rejected += 1
            live.reject(failures.shutting_down(), self.clock())
        elif live.is_complete:
            self.counters.finished += 1
            live.finish(self.clock())
        else:
            self.admission.take_up(live)
            self.waiting.take_back(live, RetryState(num_tokens=live.num_tokens))
            self._pump()

    def cancel(self, generation_id: str, why: str) -> bool:
        """False when it is not queued or running, which includes one that has ended."""
        live = self.waiting.leave(generation_id)
        if live is None:
            running = self._running.get(generation_id)
            if running is None:
                return False
            running.tell_to_drop()
            self._leave(running)
            live = running.live
        self.counters.cancelled += 1
        live.cancel(self.clock(), why)
        self._pump()
        return True

    def demand_now(self) -> tuple[float, Demand]:
        """What was asked for in the last so many seconds."""
        return self.demand.sums(self.clock())

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new; gives what is there `timeout_s` to end, then fails the rest."""
        self._is_draining = self.waiting.is_closed = True
        self._keeper.stop()
        try:
            async with asyncio.timeout(timeout_s):
                while self.waiting or self._running:
                    self._became_idle.clear()
                    await self._became_idle.wait()
        except TimeoutError:
            self.waiting.is_over = True
            for live in list(self.waiting):
                self.waiting.turn_away(live.key.request_id, failures.shutting_down())
            for running in self._running:
                self._fail(running, failures.shutting_down())
        if self._next_heartbeat is not None:
            self._next_heartbeat.cancel()

    def set_workers(self, addresses: Iterable[WorkerAddress]) -> None:
        """Makes these the complete set, with their roles of now."""
        self.fleet.set_workers(addresses)
        self._keeper.start()
        self._on_change()
        self._pump()

    def set_objectives(self, objectives: Objectives) -> None:
        """Takes effect for requests that are placed from now on."""
        self.context.objectives = objectives

    def handing_over(self) -> Counter[tuple[str, str]]:
        return self._running.handing_over()

    def num_requests(self, worker: WorkerClient) -> int:
        """That are on it now."""
        return self._running.num_on(worker)

    def on_ready(self, worker: WorkerClient) -> None:
        self._on_change()
        self._pump()

    def on_lost(self, worker: WorkerClient) -> None:
        self._policy.on_worker_lost(worker.worker_id)
        setback = AttemptFailure("WORKER_LOST", failures.worker_lost(worker.worker_id), worker.worker_id)
        for running in self._running.on(worker):
            try:
                self.set_back(running, setback, by=worker)
            except Exception:
                log.exception("a request of worker %s, which is lost, could not be placed again", worker.worker_id)
                self._give_up(running.live)
        self.fleet.let_go()
        self._on_change()

    def on_events(self, worker: WorkerClient, events: worker_pb2.EventBatch) -> None:
        """Each event concerns one request, and a fault in handling it only that one."""
        now = self.clock()
        self._keeper.heard(worker, events)
        for event in events.events:
            kind = event.WhichOneof("event")
            message: Any = getattr(event, kind) if kind in _OF_A_REQUEST else None
            running = self._running.find(worker, message.key) if message is not None else None
            if running is None:
                continue
            try:
                self._on_event(worker, running, kind, message, now)
            except Exception:
                log.exception("an event of worker %s could not be handled", worker.worker_id)
                self._give_up(running.live)

    def _on_event(self, worker: WorkerClient, running: Attempt, kind: str, message: Any, now: float) -> None:
        live = running.live
        if kind == "tokens":
            self._on_tokens(running, message, now)
        elif kind == "phase":
            live.on_phase(message, now)
        elif kind == "prompt_logprobs":
            live.on_prompt_logprobs(message)
        else:
            self._on_failed(running, worker, message)
        if running.prefill in running.workers and not live.is_over and live.has_left_prefill:
            if live.key.attempt == 1:
                self._policy.on_handoff(running.placement, live.work, live.exposed_s)
            self._running.part(running, running.prefill)
            if running.is_move:
                self._keeper.move_away()  # one that has moved makes way for the next

    def _on_failed(self, running: Attempt, worker: WorkerClient, failed: worker_pb2.Failed) -> None:
        error = failures.error_of(failed, worker.worker_id)
        if failed.reason not in RETRYABLE:
            self._fail(running, error, by=worker)
        else:
            reason = worker_pb2.Failed.Reason.Name(failed.reason).removeprefix("REASON_")
            is_unheard = failed.reason == worker_pb2.Failed.REASON_PEER_LOST and worker is running.prefill
            unheard_id = running.placement.decode_id if is_unheard else None
            self.set_back(running, AttemptFailure(reason, error, unheard_id=unheard_id), by=worker)

    def _on_tokens(self, running: Attempt, tokens: worker_pb2.Tokens, now: float) -> None:
        live = running.live
        effect = live.on_tokens(tokens, now)
        self.admission.output_came(live, now)
        if live.first_token_at is not None:
            running.charge.prefill_done()
        if effect is Effect.OPEN:
            if live.first_token_at == now and self.waiting:
                self._pump()
            return
        running.charge.sequence_done()
        num_tokens = live.sequences[tokens.sequence_index].num_tokens
        self.context.lengths.add(num_tokens, live.request.sampling.max_output_tokens)
        if not live.is_complete:
            if effect is Effect.STOPPED:
                running.tell_to_drop(tokens.sequence_index)
            return
        if live.is_stopped_here:
            running.tell_to_drop()
        self._leave(running)
        self.counters.finished += 1
        first_s, most = (live.first_token_at or now) - live.arrived_at, max(s.num_tokens for s in live.sequences)
        self.demand.add_end(now, is_kept=self.context.objectives.are_kept(first_s, now - live.arrived_at, most))
        self.metrics.finished(live, now)
        live.finish(now)
        self._pump()

    def _pump(self) -> None:
        """Dispatches from the head of the queue while there is room and someone to run it."""
        while (waiter := self.waiting.next()) is not None:
            self._dispatch(waiter.live, waiter.trail or RetryState())
        self._keeper.move_away()
        if self._next_heartbeat is None and (self.waiting or self._running):
            self._next_heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
        if not self.waiting and not self._running:
            self._became_idle.set()

    def _dispatch(self, live: LiveRequest, trail: RetryState) -> None:
        placement = self._choose(live.to_place, *self.fleet.who_can())
        if trail.num_attempts == 1:
            work, sampling = live.to_place.work, live.request.sampling
            prompt, cached, most = work.num_prompt_tokens, placement.num_cached_tokens, sampling.max_output_tokens
            self.demand.add_placement(self.clock(), prompt, cached, sampling.n, most)
        self._place(live, placement, trail)

    def _choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        begun = time.perf_counter()
        placement = self._policy.choose(request, prefill, decode)
        self.metrics.decided(time.perf_counter() - begun)
        return placement

    def _place(self, live: LiveRequest, placement: Placement, trail: RetryState, *, is_move: bool = False) -> None:
        """Decode first, as it has to reserve before prefill can send."""
        self.fleet.has_served = True
        decode = self.fleet[placement.decode_id]
        prefill = self.fleet[placement.prefill_id] if placement.prefill_id is not None else None
        if decode.role == PREFILL:
            placement = stood_in(placement)
        live.place(placement, self.clock())
        self.metrics.placed(placement.kind)
        self._policy.on_placed(live.to_place, placement)
        workers = [decode] if prefill is None else [prefill, decode]
        charge = Charge(self.context.loads, placement, live.to_place.work)
        running = Attempt(live, placement, charge, prefill, workers, trail, is_move)
        self._running.add(running)
        self.admission.started(live, self.clock())
        if prefill is None:
            self.counters.local_prefills += 1
            decode.send(admit_local(live))
        else:
            decode.send(admit_decode(live))
            prefill.send(admit_prefill(live, decode))
        for sequence in live.sequences:
            if sequence.end is not None:  # by an earlier attempt
                running.tell_to_drop(sequence.index)

    def running_on(self, worker: WorkerClient) -> list[Attempt]:
        return self._running.on(worker)

    def move(self, running: Attempt, to_id: str, why: str) -> None:
        """It leaves the worker that decodes it, which hands it over as it is."""
        live = running.live
        running.tell_to_drop()
        self._pause(running)
        self.counters.moved += 1
        live.move(self.clock(), why)
        self._place(live, moved(running.placement, to_id, why, live.to_place.work), running.trail, is_move=True)

    def serve_waiting(self) -> None:
        self._on_change()
        self._pump()

    def set_back(self, running: Attempt, setback: AttemptFailure, *, by: WorkerClient | None = None) -> None:
        """An attempt cannot go on: places the request again where that can help, else fails it."""
        live, trail = running.live, running.trail
        if not trail.may_go_on(live.num_tokens) or self._is_draining:
            self._fail(running, setback.error, by=by)
            return
        log.warning("%s is placed again: %s", live.key.request_id, setback.error.message)
        running.tell_to_drop(by=by)
        self._pause(running)
        self.counters.retried[setback.reason] += 1
        trail.note(running.placement, setback)
        live.restart(self.clock(), setback.reason)
        prefill, decode = self.fleet.who_can()
        last = running.placement
        placement = next_placement(trail, last, setback, live.to_place, prefill, decode, self._choose)
        if placement is not None:
            self._place(live, placement, trail)
        else:
            self.waiting.take_back(live, trail)
        self._pump()

    def _fail(self, running: Attempt, error: BatonError, *, by: WorkerClient | None = None) -> None:
        running.tell_to_drop(by=by)
        self._leave(running)
        self._end_failed(running.live, error)
        self._pump()

    def _give_up(self, live: LiveRequest) -> None:
        """After a fault of the router's own, wherever that left the request. One that waits goes on waiting."""
        error = InternalError("the router failed on this request; its log says why")
        running = self._running.get(live.key.request_id)
        if running is not None:
            self._fail(running, error)
        elif not live.is_over and live.key.request_id not in self.waiting:
            self._end_failed(live, error)

    def _refused(self, error: BatonError) -> None:
        if isinstance(error, (Overloaded, DeadlineExceeded)):  # with more room it might have run
            self.demand.add_end(self.clock(), is_kept=False)

    def _end_failed(self, live: LiveRequest, error: BatonError) -> None:
        self.counters.failed += 1
        self.demand.add_end(self.clock(), is_kept=False)
        live.fail(failures.given_up(error, live.num_tokens), self.clock())

    def _pause(self, running: Attempt) -> None:
        """It leaves its workers, for others."""
        self._running.leave(running)
        self.admission.paused(running.live)

    def _leave(self, running: Attempt) -> None:
        """It leaves its workers, and is over."""
        self._running.leave(running)
        self.admission.ended(running.live, self.clock())

    def _beat(self) -> None:
        """Tells clients of requests without tokens where they stand."""
        self._next_heartbeat = None
        for position, live in enumerate(self.waiting, start=1):
            live.queue_position = position
            live.beat()
        for running in self._running:
            if running.live.lifecycle.state in EARLY:
                running.live.beat()
        self._pump()
