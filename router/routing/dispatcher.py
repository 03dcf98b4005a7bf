"""From the queue to the workers and back: admits within bounds, places, routes events, ends requests.

    submit -> [queue] -> dispatch (Admit to decode, then to prefill) -> events -> end
      a full queue, a queue timeout, a deadline -> REJECTED
      a lost worker or a failed hand-off        -> placed again (`retry`), to go on from the tokens that have come
      the third in a row, or another failure    -> FAILED, and cancelled on the other worker
      the client                                -> CANCELLED, on both workers

Runs on one event loop; nothing here awaits but `idle`. Owns the tables of queued and running requests and the counters;
knows no gRPC call of a client, no text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from cluster.demand import Demand
from cluster.errors import Aborted, BatonError, DeadlineExceeded, InternalError, Overloaded
from cluster.lifecycle import RequestState
from cluster.pb import worker_pb2
from router.observe.activity import Activity
from router.observe.counters import Counters
from router.observe.metrics import RouterMetrics
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
from router.stream.request import Attempt, Effect, LiveRequest
from router.stream.retry import RETRYABLE, AttemptFailure, moved, next_placement, stood_in
from router.stream.running_requests import RunningRequests

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
        self._policy = POLICIES[limits.policy](self.context)
        self.fleet = Fleet(self, self.num_requests, limits.dead_after_s, needs_prefill=limits.needs_prefill)
        self.metrics = RouterMetrics(self.counters, self.fleet, lambda: self.num_queued, lambda: self.num_running)
        self.activity = Activity()
        self._on_change = on_change
        self._keeper = MigrationManager(self, self.fleet, self.context.loads, limits.dead_after_s)
        self.waiting = WaitingRoom(limits, self.fleet, self.context, self.counters, clock, self._pump, self._refused)
        self.admission = self.waiting.admission
        self._running = RunningRequests(self.fleet.let_go)
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
        live.observers += (self.metrics, self.activity)
        if not self.waiting.submit(live, time_left_s):
            return
        self._pump()
        if live.key.request_id in self.waiting:
            live.queue_position = len(self.waiting)
            live.output.heartbeat()

    def refuse_early(self, ask: AdmissionRequest) -> None:
        """Before a prompt is read: raises what even the least that the request can be is refused for."""
        try:
            self.waiting.refuse_early(ask)
        except BatonError:
            self.demand.add_arrival(self.clock())
            raise

    def find(self, generation_id: str) -> LiveRequest | None:
        """One that is queued or running."""
        return self._running.get(generation_id) or self.waiting.find(generation_id)

    def adopt(self, live: LiveRequest) -> None:
        """Goes on with a request that ran elsewhere: it waits at the head of the queue, and no bound refuses it.

        Raises Aborted when it is queued or running here.
        """
        if self.find(live.key.request_id) is not None:
            raise Aborted("this generation is under way already; try again", retry_after_s=failures.RETRY_AFTER_S)
        live.observers += (self.metrics, self.activity)
        if self._is_draining:
            self.counters.rejected += 1
            live.reject(failures.shutting_down(), self.clock())
        elif live.is_complete:
            self.counters.finished += 1
            live.finish(self.clock())
        else:
            self.admission.take_up(live)
            live.retry.num_tokens = live.num_tokens
            self.waiting.take_back(live)
            self._pump()

    def cancel(self, generation_id: str, why: str) -> bool:
        """False when it is not queued or running, which includes one that has ended."""
        live = self.waiting.leave(generation_id)
        if live is None:
            live = self._running.get(generation_id)
            if live is None:
                return False
            live.attempt.cancel()
            self._remove(live)
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
            for live in self._running:
                self._fail(live, failures.shutting_down())
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
        failure = AttemptFailure("WORKER_LOST", failures.worker_lost(worker.worker_id), worker.worker_id)
        for live in self._running.on(worker):
            try:
                self.retry(live, failure, by=worker)
            except Exception:
                log.exception("a request of worker %s, which is lost, could not be placed again", worker.worker_id)
                self._fail_internally(live)
        self.fleet.let_go()
        self._on_change()

    def on_events(self, worker: WorkerClient, events: worker_pb2.EventBatch) -> None:
        """Each event concerns one request, and a fault in handling it only that one."""
        now = self.clock()
        self._keeper.heard(worker, events)
        for event in events.events:
            kind = event.WhichOneof("event")
            message: Any = getattr(event, kind) if kind in _OF_A_REQUEST else None
            live = self._running.find(worker, message.key) if message is not None else None
            if live is None:
                continue
            try:
                self._on_event(worker, live, kind, message, now)
            except Exception:
                log.exception("an event of worker %s could not be handled", worker.worker_id)
                self._fail_internally(live)

    def _on_event(self, worker: WorkerClient, live: LiveRequest, kind: str, message: Any, now: float) -> None:
        attempt = live.attempt
        if kind == "tokens":
            self._on_tokens(live, message, now)
        elif kind == "phase":
            live.on_phase(message, now)
        elif kind == "prompt_logprobs":
            live.on_prompt_logprobs(message)
        else:
            self._on_failed(live, worker, message)
        if attempt.prefill in attempt.workers and not live.is_over and live.has_left_prefill:
            if not live.has_run:
                self._policy.on_handoff(attempt.placement, live.work, live.exposed_s)
            self._running.release(live, attempt.prefill)
            if attempt.is_move:
                self._keeper.move_away()  # one that has moved makes way for the next

    def _on_failed(self, live: LiveRequest, worker: WorkerClient, failed: worker_pb2.Failed) -> None:
        error = failures.error_of(failed, worker.worker_id)
        if failed.reason not in RETRYABLE:
            self._fail(live, error, by=worker)
        else:
            reason, attempt = worker_pb2.Failed.Reason.Name(failed.reason).removeprefix("REASON_"), live.attempt
            is_unreachable = failed.reason == worker_pb2.Failed.REASON_PEER_LOST and worker is attempt.prefill
            unreachable_id = attempt.placement.decode_id if is_unreachable else None
            self.retry(live, AttemptFailure(reason, error, unreachable_id=unreachable_id), by=worker)

    def _on_tokens(self, live: LiveRequest, tokens: worker_pb2.Tokens, now: float) -> None:
        effect, charge = live.on_tokens(tokens, now), live.attempt.charge
        self.admission.output_came(live, now)
        if live.first_token_at is not None:
            charge.prefill_done()
        if effect is Effect.OPEN:
            if live.first_token_at == now and self.waiting:
                self._pump()
            return
        charge.sequence_done()
        num_tokens = live.sequences[tokens.sequence_index].num_tokens
        self.context.lengths.add(num_tokens, live.request.sampling.max_output_tokens)
        if not live.is_complete:
            if effect is Effect.STOPPED:
                live.attempt.cancel(tokens.sequence_index)
            return
        if live.is_stopped_here:
            live.attempt.cancel()
        self._remove(live)
        self.counters.finished += 1
        first_s, most = (live.first_token_at or now) - live.arrived_at, max(s.num_tokens for s in live.sequences)
        self.demand.add_end(now, is_kept=self.context.objectives.are_kept(first_s, now - live.arrived_at, most))
        live.finish(now)
        self._pump()

    def _pump(self) -> None:
        """Dispatches from the head of the queue while there is room and someone to run it."""
        while (waiter := self.waiting.next()) is not None:
            self._dispatch(waiter.live)
        self._keeper.move_away()
        if self._next_heartbeat is None and (self.waiting or self._running):
            self._next_heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._send_heartbeats)
        if not self.waiting and not self._running:
            self._became_idle.set()

    def _dispatch(self, live: LiveRequest) -> None:
        placement = self._choose(live.to_place, *self.fleet.who_can())
        if live.retry.num_attempts == 1:
            work, sampling = live.to_place.work, live.request.sampling
            prompt, cached, most = work.num_prompt_tokens, placement.num_cached_tokens, sampling.max_output_tokens
            self.demand.add_placement(self.clock(), prompt, cached, sampling.n, most)
        self._place(live, placement)

    def _choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        begun = time.perf_counter()
        placement = self._policy.choose(request, prefill, decode)
        self.metrics.decided(time.perf_counter() - begun)
        return placement

    def _place(self, live: LiveRequest, placement: Placement, *, is_move: bool = False) -> None:
        """Decode first, as it has to reserve before prefill can send."""
        self.fleet.has_served = True
        decode = self.fleet[placement.decode_id]
        prefill = self.fleet[placement.prefill_id] if placement.prefill_id is not None else None
        if decode.role == PREFILL:
            placement = stood_in(placement)
        charge = Charge(self.context.loads, placement, live.to_place.work)
        workers = [decode] if prefill is None else [prefill, decode]
        attempt = Attempt(live.key, placement, self.clock(), charge, prefill, workers, is_move)
        live.place(attempt)
        self.metrics.placed(placement.kind)
        self._policy.on_placed(live.to_place, placement)
        self._running.add(live)
        self.admission.started(live, self.clock())
        if prefill is None:
            self.counters.local_prefills += 1
            decode.send(admit_local(live))
        else:
            decode.send(admit_decode(live))
            prefill.send(admit_prefill(live, decode))
        for sequence in live.sequences:
            if sequence.end is not None:  # by an earlier attempt
                attempt.cancel(sequence.index)

    def running_on(self, worker: WorkerClient) -> list[LiveRequest]:
        return self._running.on(worker)

    def move(self, live: LiveRequest, to_id: str, why: str) -> None:
        """Moves a request from the worker that decodes it, which hands it over as it is."""
        last = live.attempt
        last.cancel()
        self._pause(live)
        self.counters.moved += 1
        live.move(self.clock(), why)
        self._place(live, moved(last.placement, to_id, why, live.to_place.work), is_move=True)

    def serve_waiting(self) -> None:
        self._on_change()
        self._pump()

    def retry(self, live: LiveRequest, failure: AttemptFailure, *, by: WorkerClient | None = None) -> None:
        """After a failed attempt: places the request again where that can help, else fails it."""
        if not live.retry.may_retry(live.num_tokens) or self._is_draining:
            self._fail(live, failure.error, by=by)
            return
        log.warning("%s is placed again: %s", live.key.request_id, failure.error.message)
        last = live.attempt
        last.cancel(by=by)
        self._pause(live)
        self.counters.retried[failure.reason] += 1
        live.retry.add(last.placement, failure)
        live.restart(self.clock(), failure.reason)
        prefill, decode = ({worker.worker_id: worker for worker in workers} for workers in self.fleet.who_can())
        choose = partial(self._choose, live.to_place)
        placement = next_placement(live.retry, last.placement, failure, prefill, decode, choose)
        if placement is not None:
            self._place(live, placement)
        else:
            self.waiting.take_back(live)
        self._pump()

    def _fail(self, live: LiveRequest, error: BatonError, *, by: WorkerClient | None = None) -> None:
        live.attempt.cancel(by=by)
        self._remove(live)
        self._end_failed(live, error)
        self._pump()

    def _fail_internally(self, live: LiveRequest) -> None:
        """After a fault of the router's own, wherever that left the request. One that waits goes on waiting."""
        error = InternalError("the router failed on this request; its log says why")
        if self._running.get(live.key.request_id) is not None:
            self._fail(live, error)
        elif not live.is_over and live.key.request_id not in self.waiting:
            self._end_failed(live, error)

    def _refused(self, error: BatonError) -> None:
        if isinstance(error, (Overloaded, DeadlineExceeded)):  # with more room it might have run
            self.demand.add_end(self.clock(), is_kept=False)

    def _end_failed(self, live: LiveRequest, error: BatonError) -> None:
        self.counters.failed += 1
        self.demand.add_end(self.clock(), is_kept=False)
        live.fail(failures.given_up(error, live.num_tokens), self.clock())

    def _pause(self, live: LiveRequest) -> None:
        """Removes it from its workers, to be placed on others."""
        self._running.remove(live)
        self.admission.paused(live)

    def _remove(self, live: LiveRequest) -> None:
        """Removes it from its workers, as it is over."""
        self._running.remove(live)
        self.admission.ended(live, self.clock())

    def _send_heartbeats(self) -> None:
        """Sends the clients of requests without tokens where they stand."""
        self._next_heartbeat = None
        for position, live in enumerate(self.waiting, start=1):
            live.queue_position = position
            live.output.heartbeat()
        for live in self._running:
            if live.lifecycle.state in EARLY:
                live.output.heartbeat()
        self._pump()
