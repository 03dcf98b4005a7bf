"""What happens to requests when a worker is lost, stalls, or cannot go on with one of them.

    a worker is lost            each of its requests is placed again; one that may not be retried fails
    a worker stalls             the same while another decode worker is ready; one that may not be retried waits for it
    a worker fails a request    it is placed again where another path can help (`RETRYABLE`), else it fails

`router.routing.worker_client` finds that a worker is lost, `router.routing.stalls` that it stalls, and
`router.routing.retry` chooses where a request goes next, and how often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.errors import BatonError, InternalError
from cluster.pb import worker_pb2
from router.observe.counters import Counters
from router.queue.waiting_queue import WaitingQueue
from router.routing.demand import DemandWindow
from router.routing.fleet import Fleet
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

    def on_worker_lost(self, worker: WorkerClient) -> None:
        """Retries every request that a lost worker held."""
        failure = AttemptFailure("WORKER_LOST", failures.worker_lost(worker.worker_id), worker.worker_id)
        for live in self._running.on(worker):
            try:
                self.retry(live, failure, by=worker)
            except Exception:
                log.exception("a request of worker %s, which is lost, could not be placed again", worker.worker_id)
                self.fail_internally(live)

    def on_worker_stalled(self, worker: WorkerClient) -> None:
        """Retries the requests of a worker that seems to stall, while another can take them; else they wait for it."""
        for live in self._running.on(worker):
            if not self._fleet.candidates()[1]:
                return
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
        if not live.retry.may_retry(live.num_tokens) or self._waiting.is_closed:
            self.fail(live, failure.error, by=by)
            return
        log.warning("%s is placed again: %s", live.key.request_id, failure.error.message)
        if not self._running.restart(live, failure, by=by):
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
        error = InternalError("the router failed on this request; its log says why")
        if self._running.get(live.key.request_id) is not None:
            self.fail(live, error)
        elif not live.is_over and live.key.request_id not in self._waiting:
            self._end_failed(live, error)

    def _end_failed(self, live: LiveRequest, error: BatonError) -> None:
        self._counters.failed += 1
        self._demand.add_end(self._clock(), is_kept=False)
        live.fail(failures.given_up(error, live.num_tokens), self._clock())
