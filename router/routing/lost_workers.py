"""Decides what happens to requests when a worker is lost, stalls, or cannot go on with one of them.

    a worker is lost            each of its requests is placed again; one that may not be retried fails
    many are to be placed again as many at once as the budget of retries allows, the others wait at the queue's head
    a worker stalls             the same while another decode worker is ready; one that may not be retried waits for it
    a worker fails a request    it is placed again where another path can help (`RETRYABLE`), else it fails
    a worker ends by itself     the requests of its last step are suspects: one after another they run on a decode
                                worker that is reserved for them, beside none but those that were cleared there;
                                a suspect that ends that worker, too, fails, and one that goes on is cleared

`router.routing.worker_client` finds that a worker is lost, `router.routing.stalls` that it stalls, and
`router.routing.retry` chooses where a request goes next, and how often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from cluster.errors import BatonError
from cluster.pb import worker_pb2
from router.observe.counters import Counters
from router.queue.waiting_queue import WaitingQueue
from router.routing.candidate_pool import CandidatePool
from router.routing.demand import DemandWindow
from router.routing.fleet import DECODE, Fleet
from router.routing.retry import RETRYABLE, AttemptFailure
from router.routing.running_requests import RunningRequests
from router.routing.worker_client import WorkerClient
from router.stream import failures
from router.stream.request import LiveRequest

log = logging.getLogger(__name__)


class RequestRecovery:
    """Retries running requests, or fails them. `on_change` is called when one has left its workers."""

    def __init__(
        self,
        fleet: Fleet,
        waiting: WaitingQueue,
        running: RunningRequests,
        counters: Counters,
        demand: DemandWindow,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._running = running
        self._counters = counters
        self._demand = demand
        self._clock = clock
        self._on_change = on_change
        self._tester: WorkerClient | None = None
        """The decode worker that is reserved for suspects."""
        self._is_apart = False
        """It has run none but suspects since it was reserved, or was empty then."""

    def on_worker_lost(self, worker: WorkerClient) -> None:
        """Retries every request that a lost worker held."""
        if worker is self._tester:
            self._free_tester()
        error, is_crash = failures.worker_lost(worker.worker_id), worker.crash is not None
        failure = AttemptFailure("WORKER_LOST", error, worker.worker_id, is_crash=is_crash)
        residents = sorted(self._running.on(worker), key=lambda live: live.arrived_at)
        blamed = _blamed(worker, residents)
        for live in residents:
            try:
                if live in blamed and not live.retry.on_crash(live.num_tokens, is_only_suspect=len(blamed) == 1):
                    self.fail(live, failures.ends_workers(live.retry.num_crashes_in_all), by=worker)
                else:
                    self.retry(live, failure, by=worker)
            except Exception:
                log.exception("a request of worker %s, which is lost, could not be placed again", worker.worker_id)
                self.fail_internally(live)

    def place_suspects(self) -> None:
        """Places the next suspect once the reserved worker is free for it; called whenever that may have changed."""
        while not self._is_testing and (live := self._waiting.first_suspect(self._may_test)) is not None:
            tester = self._reserve_tester(live.weights_revision)
            if tester is None:
                return
            self._waiting.remove(live.key.request_id)
            self._running.start_alone(live, tester)
        if not self._is_testing:
            self._free_tester()

    @property
    def _is_testing(self) -> bool:
        """A suspect runs."""
        return self._tester is not None and any(live.retry.is_suspect for live in self._running.on(self._tester))

    def _may_test(self, live: LiveRequest) -> bool:
        """A decode worker is there with the weights that the suspect's output began with."""
        revision, tester = live.weights_revision, self._tester
        return bool(self._ready(revision)) or (tester is not None and _has_weights(tester, revision))

    def fail_without_weights(self) -> None:
        """Fails waiting requests whose output began with weights that no worker has any more."""
        for live in self._waiting.apart:
            if self._fleet.has_lost(live.weights_revision) and live.key.request_id in self._waiting:
                self._waiting.fail(live.key.request_id, failures.weights_lost(live.weights_revision))

    def _reserve_tester(self, revision: str) -> WorkerClient | None:
        """Reserves a decode worker with these weights (empty: any), at once where one has no request. None: its
        requests have to end first."""
        tester = self._tester
        if tester is not None and not (
            tester.is_ready and not tester.is_draining and tester.role == DECODE and _has_weights(tester, revision)
        ):
            self._free_tester()
            tester = None
        if tester is not None and (self._is_apart or not self._running.num_on(tester)):
            self._is_apart = True
            return tester
        candidates = self._ready(revision)
        empty = next((worker for worker in candidates if not self._running.num_on(worker)), None)
        if empty is None and (tester is not None or not candidates):
            return None
        self._free_tester()
        self._tester = empty or min(candidates, key=self._running.num_on)
        self._tester.is_reserved, self._is_apart = True, empty is not None
        return empty

    def _ready(self, revision: str) -> CandidatePool[WorkerClient]:
        """Decode workers that may get new work, with these weights; empty: any."""
        ready = self._fleet.ready(DECODE)
        return ready.of_revision(revision) if revision else ready

    def _free_tester(self) -> None:
        if self._tester is not None:
            self._tester.is_reserved = False
        self._tester, self._is_apart = None, False

    def on_worker_stalled(self, worker: WorkerClient) -> None:
        """Retries the requests of a worker that seems to stall, while another can take them; else they wait for it."""
        for live in self._running.on(worker):
            if not self._waiting.may_retry():
                return
            if not self._fleet.candidates(live.weights_revision)[1]:
                continue
            if live.retry.may_retry(live.num_tokens):  # else it would fail elsewhere, and may yet go well here
                error = failures.worker_stalled(worker.worker_id)
                self.retry(live, AttemptFailure("STALLED", error, worker.worker_id))

    def on_request_failed(self, live: LiveRequest, worker: WorkerClient, failed: worker_pb2.Failed) -> None:
        """A worker reports that it cannot go on with a request."""
        error = failures.error_of(failed, worker.worker_id)
        if failed.reason not in RETRYABLE:
            self.fail(live, error, by=worker)
            return
        reason, attempt = worker_pb2.Failed.Reason.Name(failed.reason).removeprefix("REASON_"), live.attempt
        is_unreachable = failed.reason == worker_pb2.Failed.REASON_PEER_LOST and worker is attempt.prefill
        unreachable_id = attempt.placement.decode_id if is_unreachable else None
        self.retry(live, AttemptFailure(reason, error, unreachable_id=unreachable_id), by=worker)

    def retry(self, live: LiveRequest, failure: AttemptFailure, *, by: WorkerClient | None = None) -> None:
        """After a failed attempt: places the request again where that can help, else fails it."""
        may_retry = live.retry.may_retry(live.num_tokens) or failure.is_crash
        if not may_retry or self._waiting.is_closed:
            self.fail(live, failure.error, by=by)
            return
        log.warning("%s is placed again: %s", live.key.request_id, failure.error.message)
        if not self._running.restart(live, failure, by=by, is_held=not self._waiting.may_retry()):
            self._waiting.requeue(live)
        self._on_change()

    def fail(self, live: LiveRequest, error: BatonError, *, by: WorkerClient | None = None) -> None:
        """Fails a running request; `by`: the worker that reported why."""
        live.attempt.cancel(by=by)
        self._running.end(live)
        self._end_failed(live, error)
        self._on_change()

    def fail_internally(self, live: LiveRequest) -> None:
        """After an error of the router's own, wherever that left the request. One that waits goes on waiting."""
        error = failures.router_failed()
        if self._running.get(live.key.request_id) is not None:
            self.fail(live, error)
        elif not live.is_over and live.key.request_id not in self._waiting:
            self._end_failed(live, error)

    def _end_failed(self, live: LiveRequest, error: BatonError) -> None:
        self._counters.failed += 1
        self._demand.add_end(self._clock(), is_kept=False)
        live.fail(failures.given_up(error, live.num_tokens), self._clock())


def _has_weights(worker: WorkerClient, revision: str) -> bool:
    """`revision` empty: any will do."""
    return revision in ("", worker.weights_revision)


def _blamed(worker: WorkerClient, residents: Sequence[LiveRequest]) -> list[LiveRequest]:
    """Returns the requests that may have ended the worker: those of its last step, or the suspects among them."""
    if worker.crash is None:
        return []
    in_step = [live for live in residents if live.key.request_id in worker.crash.request_ids]
    blamed = [live for live in in_step if live.retry.is_suspect] or in_step
    names = ", ".join(live.key.request_id for live in blamed) or "none of this router"
    log.error("worker %s ended by itself; suspects: %s\n%s", worker.worker_id, names, worker.crash.cause)
    return blamed
