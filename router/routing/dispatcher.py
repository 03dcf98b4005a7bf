"""From the queue to the workers and back: admits requests, follows the workers' events and ends requests.

    submit -> [queue] -> placed on workers -> events -> end
      a full queue, a queue timeout, a deadline -> REJECTED
      a lost worker or a failed hand-off        -> placed again (`lost_workers`), from the tokens that have come
      the third in a row, or another failure    -> FAILED, and cancelled on the other worker
      the client                                -> CANCELLED, on both workers

Runs on one event loop; nothing here awaits but `drain`. Knows no gRPC call of a client, no text.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from cluster import rpc
from cluster.demand import Demand
from cluster.errors import Aborted, BatonError, DeadlineExceeded, Overloaded
from cluster.lifecycle import RequestKey, RequestState
from cluster.pb import worker_pb2
from cluster.settings import RouterSettings
from router.observe.counters import Counters
from router.queue.admission import AdmissionRequest
from router.queue.waiting_queue import WaitingQueue
from router.routing.demand import DemandWindow
from router.routing.fleet import Fleet, MakeClient, WorkerAddress
from router.routing.hot_prefixes import Copy, HotPrefixes
from router.routing.load_tracker import Charge, FetchedPrefix, Placement
from router.routing.lost_workers import RequestRecovery
from router.routing.migration import MOST_ROOMS, DecodeRoom, choose_moves, residents_of, why_emptied
from router.routing.policies import policy_class
from router.routing.policies.interface import Objectives, RoutingContext
from router.routing.prefix_fetches import EVENTS as FETCH_EVENTS
from router.routing.running_requests import RunningRequests
from router.routing.slow_workers import SlowWatch
from router.routing.stalls import StallWatch
from router.routing.worker_client import Event, WorkerCallbacks, WorkerClient
from router.stream import failures
from router.stream.request import Effect, LiveRequest, RequestObserver

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
EARLY = frozenset({RequestState.QUEUED, RequestState.PREFILLING, RequestState.TRANSFERRING})
"""States in which clients receive heartbeats; later they receive tokens."""
_REQUEST_EVENTS = frozenset({"tokens", "phase", "failed", "prompt_logprobs"})
"""Kinds of events that concern one request."""


class Dispatcher:
    """`on_change` is called when a worker came or went, or is usable again; `observers` follow every request."""

    def __init__(
        self,
        settings: RouterSettings,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        open_channel: rpc.OpenChannel = rpc.create_channel,
        make_client: MakeClient = WorkerClient,
        rng: random.Random | None = None,
    ) -> None:
        """`open_channel` and `make_client` lead to workers; `rng` gives all that is drawn at random."""
        self.clock = clock
        self.counters = Counters()
        self.observers: list[RequestObserver] = []
        self.context = RoutingContext(rng=rng or random.Random(), clock=clock)
        self.apply_settings(settings)
        self._demand = DemandWindow()
        self._policy = policy_class(settings.router.policy)(self.context)
        dead_after_s = settings.transfer.dead_after_s
        callbacks = WorkerCallbacks(self._on_ready, self._on_lost, self._on_events)
        self.fleet = Fleet(
            callbacks,
            self.num_requests,
            dead_after_s,
            needs_prefill=settings.needs_prefill,
            open_channel=open_channel,
            make_client=make_client,
            rng=self.context.rng,
        )
        self.context.loads.on_change = self.fleet.on_load
        self._to_empty: dict[str, WorkerClient] = {}
        """Workers on which requests decode that should move away, as of the last pump."""
        self._on_change = on_change
        self.waiting = WaitingQueue(
            self.context,
            self.fleet.ready,
            lambda: self.fleet.can_serve,
            lambda revision: bool(self.fleet.candidates(revision)[1]),
            self.counters,
            clock,
            self._pump,
            self._on_refused,
        )
        self.admission = self.waiting.admission
        self.running = RunningRequests(
            self.fleet, self._policy, self.admission, self.counters, clock, settings.router.session_ttl_s
        )
        self._hot = HotPrefixes(self.context)
        self._recovery = RequestRecovery(
            self.fleet, self.waiting, self.running, self.counters, self._demand, clock, self._pump
        )
        self._stalls = StallWatch(
            self.fleet,
            self.context.loads,
            dead_after_s,
            self._owes_tokens,
            self._recovery.on_worker_stalled,
            self._on_usable,
        )
        self._slow = SlowWatch(self.fleet, self.running, self.context, self.counters, self._on_usable)
        self._became_idle = asyncio.Event()
        self._next_heartbeat: asyncio.TimerHandle | None = None

    @property
    def num_queued(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, live: LiveRequest, *, time_left_s: float | None) -> None:
        """Runs, queues or rejects a request. `time_left_s`: to its deadline."""
        self._demand.add_arrival(self.clock())
        live.observers += self.observers
        if not self.waiting.submit(live, time_left_s):
            return
        self._pump()
        if live.key.request_id in self.waiting:
            live.queue_position = len(self.waiting)
            live.output.heartbeat()

    def refuse_early(self, request: AdmissionRequest) -> None:
        """Raises the error for which a request would be refused, before its prompt is read."""
        try:
            self.waiting.refuse_early(request)
        except BatonError:
            self._demand.add_arrival(self.clock())
            raise

    def find(self, generation_id: str) -> LiveRequest | None:
        """A queued or running request."""
        return self.running.get(generation_id) or self.waiting.find(generation_id)

    def adopt(self, live: LiveRequest) -> None:
        """Goes on with a request that ran elsewhere: it waits at the head of the queue, and no bound refuses it.

        Raises Aborted when it is queued or running here.
        """
        if self.find(live.key.request_id) is not None:
            raise Aborted("this generation is under way already; try again", retry_after_s=failures.RETRY_AFTER_S)
        live.observers += self.observers
        if self.waiting.is_closed:
            self.counters.rejected += 1
            live.reject(failures.shutting_down(), self.clock())
        elif live.is_complete:
            self.counters.finished += 1
            live.finish(self.clock())
        else:
            live.retry.num_tokens = live.num_tokens
            self.waiting.adopt(live)
            self._pump()

    def cancel(self, generation_id: str, why: str) -> bool:
        """False when it is not queued or running, which includes one that has ended."""
        live = self.waiting.remove(generation_id)
        if live is None:
            live = self.running.get(generation_id)
            if live is None:
                return False
            live.attempt.cancel()
            self.running.end(live)
        self.counters.cancelled += 1
        live.cancel(self.clock(), why)
        self._pump()
        return True

    def demand(self) -> tuple[float, Demand]:
        """Length of the recent window in seconds, and the sums of requests over it."""
        return self._demand.sums(self.clock())

    async def drain(self, timeout_s: float) -> None:
        """Accepts nothing new; waits `timeout_s` for requests to end, then fails the rest."""
        self.waiting.is_closed = True
        self._stalls.stop()
        self._slow.stop()
        try:
            async with asyncio.timeout(timeout_s):
                while self.waiting or self.running:
                    self._became_idle.clear()
                    await self._became_idle.wait()
        except TimeoutError:
            self.waiting.is_over = True
            for live in list(self.waiting):
                self.waiting.fail(live.key.request_id, failures.shutting_down())
            for live in self.running:
                self._recovery.fail(live, failures.shutting_down())
        if self._next_heartbeat is not None:
            self._next_heartbeat.cancel()

    def set_workers(self, addresses: Iterable[WorkerAddress]) -> None:
        """Makes these the complete set, with these roles."""
        self.fleet.set_workers(addresses)
        self.fleet.start()
        self._stalls.start()
        self._slow.start()
        self._on_usable()

    def apply_settings(self, settings: RouterSettings) -> None:
        """Takes over what the settings say of latencies and limits; it holds for the next decision."""
        self.context.objectives, self.context.limits = Objectives.of(settings.slo), settings.router

    def handing_over(self) -> Counter[tuple[str, str]]:
        """Counts, for each prefill and decode worker, the requests that both hold."""
        return self.running.handing_over()

    def num_requests(self, worker: WorkerClient) -> int:
        return self.running.num_on(worker)

    # Reactions to workers

    def _on_ready(self, worker: WorkerClient) -> None:
        self._on_usable()

    def _on_usable(self) -> None:
        """Workers may be usable that were not before."""
        self._on_change()
        self._pump()

    def _on_lost(self, worker: WorkerClient) -> None:
        self._policy.on_worker_lost(worker.worker_id)
        self.running.fetches.on_worker_lost(worker)
        self._recovery.on_worker_lost(worker)
        self.fleet.close_idle()
        self._on_change()

    def _owes_tokens(self, worker: WorkerClient) -> bool:
        decode_id = worker.worker_id
        return any(
            live.attempt.placement.decode_id == decode_id and live.lifecycle.state is RequestState.DECODING
            for live in self.running.iterate_on(worker)
        )

    def _move_away(self) -> None:
        """Moves requests off workers that should not decode, to where there is room and the weights are the same."""
        if self.waiting.is_closed:
            return
        for worker_id, worker in self.fleet.take_changed().items():
            if worker is not None and self.context.loads[worker_id].decoding.num_sequences and why_emptied(worker):
                self._to_empty[worker_id] = worker
            else:
                self._to_empty.pop(worker_id, None)
        for worker_id in sorted(self._to_empty):
            self._empty(self._to_empty[worker_id])

    def _empty(self, worker: WorkerClient) -> None:
        """Moves what can move off one worker."""
        others = self.fleet.candidates(worker.weights_revision)[1]
        if not others or worker in others:
            return
        residents, num_under_way = residents_of(worker, self.running.on(worker))
        loads, why = self.context.loads, why_emptied(worker)
        rooms = [DecodeRoom.of(w, loads[w.worker_id]) for w in islice(others.ranked(self._num_decoding), MOST_ROOMS)]
        for move in choose_moves(residents, rooms, num_under_way):
            live = self.running.get(move.request_id)
            assert live is not None, move.request_id
            self.running.move(live, move.to_id, why)

    def _num_decoding(self, worker: WorkerClient) -> int:
        return self.context.loads[worker.worker_id].sequences.num_sequences

    def _on_events(self, worker: WorkerClient, events: Sequence[Event]) -> None:
        """Each event concerns one request, and an error in handling it fails only that one."""
        now = self.clock()
        self._stalls.on_batch(worker, events)
        find = self.running.find
        for kind, message in events:
            if kind in FETCH_EVENTS and self.running.fetches.on_event(worker, kind, message):
                continue
            if kind not in _REQUEST_EVENTS or (live := find(worker, message.key)) is None:
                continue
            try:
                self._on_event(worker, live, kind, message, now)
            except Exception:
                log.exception("an event of worker %s could not be handled", worker.worker_id)
                self._recovery.fail_internally(live)

    def _on_event(self, worker: WorkerClient, live: LiveRequest, kind: str, message: Any, now: float) -> None:
        attempt = live.attempts[-1]
        if kind == "tokens":
            self._on_tokens(live, attempt.charge, message, now)
        elif kind == "phase":
            live.on_phase(message, now)
        elif kind == "prompt_logprobs":
            live.on_prompt_logprobs(message)
        else:
            self._recovery.on_request_failed(live, worker, message)
        if attempt.prefill in attempt.workers and not live.is_over and live.has_left_prefill:
            if not live.has_run:
                self._policy.on_handoff(attempt.placement, live.work, live.exposed_s)
            self.running.release(live, attempt.prefill)
            self._slow.on_decoding(live, now)
            if attempt.is_move:
                self._move_away()  # a finished move makes way for the next

    def _on_tokens(self, live: LiveRequest, charge: Charge, tokens: worker_pb2.Tokens, now: float) -> None:
        effect, most_tokens = live.on_tokens(tokens, now), live.request.sampling.stopping.max_output_tokens
        self._demand.lengths.add_tokens(len(tokens.token_ids), most_tokens)
        has_begun = charge.is_prefilling and live.first_token_at is not None
        if has_begun:
            charge.prefill_done()
            self._slow.on_prompt(live, now)
        if live.retry.num_crashes and live.retry.clears(live.num_tokens):
            self._pump()
        if effect is Effect.OPEN:
            if has_begun and self.waiting:
                self._pump()
            return
        charge.sequence_done()
        for lengths in (self.context.lengths, self._demand.lengths):
            lengths.add(live.sequences[tokens.sequence_index].num_tokens, most_tokens)
        if not live.is_complete:
            if effect is Effect.STOPPED:
                live.attempt.cancel(tokens.sequence_index)
            return
        if live.is_stopped_here:
            live.attempt.cancel()
        self._slow.time_output(live, now)
        self.running.end(live)
        self.counters.finished += 1
        first_s, most = (live.first_token_at or now) - live.arrived_at, max(s.num_tokens for s in live.sequences)
        self._demand.add_end(now, is_kept=self.context.objectives.are_kept(first_s, now - live.arrived_at, most))
        live.finish(now)
        self._pump()

    def _pump(self) -> None:
        """Places requests from the head of the queue while there is room, and moves others to where they belong."""
        self._recovery.place_suspects()
        while (live := self.waiting.next()) is not None:
            placement = self.running.start(live)
            self._copy_ahead(live, placement)
            if live.retry.num_attempts == 1:
                work, sampling = live.to_place.work, live.request.sampling
                prompt, cached = work.num_prompt_tokens, placement.num_cached_tokens
                most = sampling.stopping.max_output_tokens
                self._demand.add_placement(self.clock(), prompt, cached, sampling.params.n, most)
        self._recovery.fail_without_weights()
        self._move_away()
        if self._next_heartbeat is None and (self.waiting or self.running):
            self._next_heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._send_heartbeats)
        if not self.waiting and not self.running:
            self._became_idle.set()

    def _copy_ahead(self, live: LiveRequest, placement: Placement) -> None:
        """Has a prefix that a request shares with many copied to one more worker, if it is time for that."""
        copy = self._hot.placed(live.to_place, placement, self.fleet.candidates(live.placed_revision)[0])
        if copy is None:
            return
        key = RequestKey(f"{live.key.request_id}/hot-{live.key.attempt}", 1)
        fetch, holder, target = copy.fetch, self.fleet[copy.fetch.holder_id], self.fleet[copy.target_id]
        self.counters.copies_ahead[copy.why] += 1
        text = "a prefix of %d tokens is copied ahead of requests from %s to %s: %s"
        log.info(text, fetch.num_tokens, holder.worker_id, target.worker_id, copy.explanation)
        over = partial(self._copied_ahead, copy)
        self.running.fetches.begin(copy, key, fetch, holder, target, live.to_place.prompt, over)

    def _copied_ahead(self, copy: Copy, fetched: FetchedPrefix) -> None:
        self._hot.over(copy)

    def _send_heartbeats(self) -> None:
        """Sends clients whose requests have no tokens yet the request's phase and place in the queue."""
        self._next_heartbeat = None
        for position, live in enumerate(self.waiting, start=1):
            live.queue_position = position
            live.output.heartbeat()
        for live in self.running:
            if live.lifecycle.state in EARLY:
                live.output.heartbeat()
        self._pump()

    # Ends

    def _on_refused(self, error: BatonError) -> None:
        if isinstance(error, (Overloaded, DeadlineExceeded)):  # with more room it might have run
            self._demand.add_end(self.clock(), is_kept=False)
