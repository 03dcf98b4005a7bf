"""The requests that workers hold: placing them, moving them, placing them again, and removing them.

Owns the tables of which request is on which worker, and charges the load tracker and admission for them. A policy
chooses the workers; the dispatcher decides when a request runs, moves, is retried or ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from router.observe.counters import Counters
from router.queue.admission import Admission
from router.routing.fetch_plan import with_fetch
from router.routing.fleet import PREFILL, Fleet
from router.routing.load_tracker import Charge, FetchedPrefix, Placement
from router.routing.policies.interface import Candidates, Policy, RoutingRequest
from router.routing.prefix_fetches import PrefixFetches
from router.routing.retry import AttemptFailure, alone, moved, next_placement, stood_in
from router.routing.worker_client import WorkerClient
from router.stream.request import Attempt, LiveRequest


class RunningRequests:
    """The requests that run, by generation id."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        admission: Admission,
        counters: Counters,
        clock: Callable[[], float],
        session_ttl_s: float = 0.0,
    ) -> None:
        """`session_ttl_s`: for which workers keep the KV of sessions; 0: they are not told of them."""
        self._session_ttl_s = session_ttl_s
        self._on_decision: Callable[[float], None] = lambda seconds: None
        self._fleet = fleet
        self._policy = policy
        self._admission = admission
        self._counters = counters
        self._clock = clock
        self._running: dict[str, LiveRequest] = {}
        self._on_worker: dict[WorkerClient, dict[str, None]] = {}
        self.fetches = PrefixFetches(policy.context.fetch_times, counters, clock)

    def observe(self, on_decision: Callable[[float], None], on_fetched: Callable[[float], None]) -> None:
        """Has them called with the seconds of each choice of workers, and of each fetch that went well."""
        self._on_decision, self.fetches.on_fetched = on_decision, on_fetched

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterates over a copy: requests may be removed meanwhile."""
        return iter(list(self._running.values()))

    def get(self, generation_id: str) -> LiveRequest | None:
        return self._running.get(generation_id)

    def find(self, worker: WorkerClient, key: worker_pb2.RequestKey) -> LiveRequest | None:
        """None for what comes late: for a request or an attempt that is over, or from a worker that was released."""
        live = self._running.get(key.request_id)
        if live is None or live.key.attempt != key.attempt or worker not in live.attempts[-1].workers:
            return None
        return live

    def on(self, worker: WorkerClient) -> list[LiveRequest]:
        """Lists the requests that a worker holds something for."""
        return list(self.iterate_on(worker))

    def iterate_on(self, worker: WorkerClient) -> Iterator[LiveRequest]:
        """Iterates over what `on` lists, for as long as nothing changes."""
        return map(self._running.__getitem__, self._on_worker.get(worker, ()))

    def num_on(self, worker: WorkerClient) -> int:
        return len(self._on_worker.get(worker, ()))

    def handing_over(self) -> Counter[tuple[str, str]]:
        """Counts, for each prefill and decode worker, the requests that both hold."""
        attempts = [live.attempt for live in self._running.values()]
        both = [a.placement for a in attempts if a.prefill is not None and a.prefill in a.workers]
        return Counter((placement.computing_id, placement.decode_id) for placement in both)

    def start(self, live: LiveRequest) -> Placement:
        """Places a request that waited, and returns where."""
        placement = self._next(live) or self._choose(live.to_place, *self._fleet.candidates(live.weights_revision))
        self._place(live, placement)
        return placement

    def move(self, live: LiveRequest, to_id: str, why: str) -> None:
        """Moves a request from the worker that decodes it, which hands it over as it is."""
        last = live.attempt
        last.cancel()
        self.pause(live)
        self._counters.moved += 1
        live.move(self._clock(), why)
        self._place(live, moved(last.placement, to_id, why, live.to_place.work), is_move=True)

    def start_alone(self, live: LiveRequest, worker: WorkerClient) -> None:
        """Places a suspect that waited on a worker that is reserved for suspects."""
        self._place(live, alone(worker.worker_id))

    def restart(self, live: LiveRequest, failure: AttemptFailure, *, by: WorkerClient | None, is_held: bool) -> bool:
        """Places a request again after a failed attempt, unless it `is_held`; `by`: the worker that reported that.

        False: it is held, no decode worker is ready, or the request is a suspect; it holds no worker any more.
        """
        last = live.attempt
        last.cancel(by=by)
        self.pause(live)
        self._counters.retried[failure.reason] += 1
        live.retry.add(last.placement, failure)
        live.restart(self._clock(), failure.reason)
        placement = None if live.retry.is_suspect or is_held else self._next(live)
        if placement is not None:
            self._place(live, placement)
        return placement is not None

    def _next(self, live: LiveRequest) -> Placement | None:
        """Returns where a request goes after its last failed attempt; None: nowhere, or none has failed here."""
        if live.retry.failure is None or not live.attempts:
            return None
        candidates = self._fleet.candidates(live.weights_revision)
        few = self._policy.few(live.to_place, *candidates)
        prefill, decode = ({worker.worker_id: worker for worker in workers} for workers in few)
        last = candidates[1].get(live.attempt.placement.decode_id)
        if last is not None:
            decode[last.worker_id] = last
        choose = partial(self._choose, live.to_place)
        return next_placement(live.retry, live.attempt.placement, live.retry.failure, prefill, decode, choose)

    def pause(self, live: LiveRequest) -> None:
        """Removes a request that goes on elsewhere from its workers."""
        self._remove(live)
        self._admission.on_paused(live.key.request_id)

    def end(self, live: LiveRequest) -> None:
        """Removes a request that is over from its workers."""
        self._remove(live)
        self._admission.on_end(
            live.key.request_id, live.work, self._clock(), live.first_token_at, is_complete=live.is_complete
        )

    def release(self, live: LiveRequest, worker: WorkerClient) -> None:
        """Records that the worker holds nothing for the request any more."""
        live.attempt.workers.remove(worker)
        ids = self._on_worker[worker]
        ids.pop(live.key.request_id, None)
        if not ids:
            del self._on_worker[worker]
            self._fleet.on_requests(worker)

    def _choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        begun = time.perf_counter()
        placement = self._policy.choose(request, prefill, decode)
        if not self._policy.weighs_fetches:
            placement = with_fetch(self._policy.context, placement, request, prefill, decode)
        self._on_decision(time.perf_counter() - begun)
        return placement

    def _place(self, live: LiveRequest, placement: Placement, *, is_move: bool = False) -> None:
        """Charges the request's workers, and sends it to them, or after what they are to fetch first."""
        self._fleet.has_served = True
        decode = self._fleet[placement.decode_id]
        prefill = self._fleet[placement.prefill_id] if placement.prefill_id is not None else None
        if decode.role == PREFILL and not is_move:
            placement = stood_in(placement)
        is_retry = live.has_run and not is_move
        charge = Charge(self._policy.context.loads, placement, live.to_place.work, is_retry=is_retry)
        workers = [decode] if prefill is None else [prefill, decode]
        attempt = Attempt(live.key, placement, self._clock(), charge, prefill, workers, is_move=is_move)
        live.place(attempt)
        live.placed_revision = decode.weights_revision
        self._counters.placements[placement.kind] += 1
        self._policy.on_placed(live.to_place, placement)
        self._running[live.key.request_id] = live
        for worker in attempt.workers:
            self._on_worker.setdefault(worker, {})[live.key.request_id] = None
            if len(self._on_worker[worker]) == 1:
                self._fleet.on_requests(worker)
        self._admission.on_placed(live.key.request_id, live.work, self._clock())
        fetch = placement.fetch
        if fetch is None:
            self._send(live, attempt)
        else:
            key = RequestKey(f"{live.key.request_id}/prefix-{live.key.attempt}", 1)
            holder, target, on_over = self._fleet[fetch.holder_id], workers[0], partial(self._on_fetched, live, attempt)
            self.fetches.begin(attempt, key, fetch, holder, target, live.to_place.prompt, on_over)

    def _on_fetched(self, live: LiveRequest, attempt: Attempt, fetched: FetchedPrefix) -> None:
        """The computing worker has what it was to fetch, or goes without."""
        if self._running.get(live.key.request_id) is live and live.attempt is attempt:
            attempt.fetched, attempt.fetch_s = fetched, self._clock() - attempt.placed_at
            self._send(live, attempt)

    def _send(self, live: LiveRequest, attempt: Attempt) -> None:
        """To prefill first, whose Open is on its way while decode is sent its part; that takes both in either order."""
        prefill, decode, command = attempt.prefill, attempt.workers[-1], _admit(live)
        self._keep_for_session(live, command.admit)
        if prefill is None:
            self._counters.local_prefills += 1
        else:
            prefill.admit(_to_prefill(command, decode), live.prompt)
            command.admit.expect_handoff = True
            command.admit.ClearField("prompt_logprobs")
        decode.admit(command, live.prompt)
        for sequence in live.sequences:
            if sequence.end is not None:  # by an earlier attempt
                attempt.cancel(sequence.index)

    def _keep_for_session(self, live: LiveRequest, admit: worker_pb2.Admit) -> None:
        """Has workers keep the KV for the session that the request names, or as long as it asks for."""
        request = live.request
        ttl_s = self._session_ttl_s if request.session_id else min(request.retain_s, self._session_ttl_s)
        if ttl_s and not request.bypass_prefix_cache:
            admit.session.tenant, admit.session.session_id = live.principal.tenant, request.session_id
            admit.session.ttl_s = ttl_s

    def _remove(self, live: LiveRequest) -> None:
        """Gives back everything that the request had charged."""
        del self._running[live.key.request_id]
        self.fetches.leave(live.attempt)
        live.attempt.charge.all_done()
        for worker in list(live.attempt.workers):
            self.release(live, worker)


def _to_prefill(command: worker_pb2.Command, decode: WorkerClient) -> worker_pb2.Command:
    """Returns the same request for the worker that computes its prompt and hands it to `decode`."""
    copy = worker_pb2.Command()
    copy.CopyFrom(command)
    copy.admit.role = worker_pb2.ROLE_PREFILL
    copy.admit.decode_peer.CopyFrom(decode.peer)
    return copy


def _admit(live: LiveRequest) -> worker_pb2.Command:
    """Returns what a decode worker is told that computes the prompt itself, but for the prompt's tokens."""
    request = live.request
    return worker_pb2.Command(
        admit=worker_pb2.Admit(
            key=live.key.to_proto(),
            role=worker_pb2.ROLE_DECODE,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            bypass_prefix_cache=request.bypass_prefix_cache,
            tell_each_token=request.stream_interval_tokens is not None,
            prompt_logprobs=live.output.prompt_logprobs.wanted,
            known_tokens=[
                worker_pb2.KnownTokens(sequence_index=s.index, token_ids=s.known_ids)
                for s in live.sequences
                if s.known_ids
            ],
        )
    )
