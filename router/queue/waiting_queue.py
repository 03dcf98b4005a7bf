"""The requests that wait for a worker, from their arrival until they are placed or turned away.

    submit -> refused (REJECTED) | waits -> next | its time is over (REJECTED, or FAILED if it has run before)
    requeue, adopt -> waits at the head, while there is room in the budget of retries (`Admission.may_retry`) -> next

Owns the queue, its timers, the counters of refusals and the charging of quotas. `Admission` decides who is accepted,
`FairOrder` who is next; the dispatcher decides where a request runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cluster.errors import BatonError, DeadlineExceeded
from cluster.pb import worker_pb2
from router.api.call import Principal
from router.observe.counters import Counters
from router.queue.admission import Admission, AdmissionRequest, Refusal
from router.queue.fair_order import FairOrder
from router.queue.quota import UNLIMITED, Quotas
from router.routing.candidate_pool import CandidatePool
from router.routing.policies.interface import RoutingContext
from router.stream import failures
from router.stream.request import LiveRequest, RequestObserver

_SWEEP_S = 0.1
"""Time between two looks through the queue for late requests, in an overload."""


@dataclass(frozen=True)
class _Waiter:
    live: LiveRequest
    timer: asyncio.TimerHandle


class _QuotaMeter(RequestObserver):
    """Charges the output of a request with quotas as it comes, and ends the request's count as live."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float], principal: Principal) -> None:
        self._quotas = quotas
        self._clock = clock
        self._principal = principal

    def on_tokens(self, count: int, interval_s: float | None) -> None:
        self._quotas.add_output(self._principal, count, self._clock())

    def on_end(self, live: LiveRequest) -> None:
        self._quotas.end(self._principal)


class WaitingQueue:
    """`has_worker(revision)`: a worker with these weights may get the rest of an output that began with them; with any,
    if that is empty. `on_change` is called when a request has left by itself, `on_refused` for each that will not run.
    """

    def __init__(
        self,
        context: RoutingContext,
        ready: Callable[[worker_pb2.Role], CandidatePool[Any]],
        can_serve: Callable[[], bool],
        has_worker: Callable[[str], bool],
        counters: Counters,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_refused: Callable[[BatonError], None],
    ) -> None:
        self.is_closed = False
        """Accepts nothing new."""
        self.is_over = False
        """No waiting request will run."""
        self._context = context
        self._can_serve = can_serve
        self._has_worker = has_worker
        self._counters = counters
        self._clock = clock
        self._on_change = on_change
        self._on_refused = on_refused
        self._waiters: dict[str, _Waiter] = {}
        self._suspects: dict[str, None] = {}
        """Waiters that may have ended a worker: they are in no order, and run apart from the others."""
        self._aside: dict[str, None] = {}
        """Waiters that go on with weights which no ready worker has: they are in no order, and in nobody's way."""
        self._order = FairOrder()
        self._quotas = Quotas()
        self._swept_at = -_SWEEP_S
        self._held_at = -math.inf
        """When the budget of retries last kept a request from running."""
        self.admission = Admission(self._order, context, self._quotas, ready, can_serve)

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, generation_id: str) -> bool:
        return generation_id in self._waiters

    def __iter__(self) -> Iterator[LiveRequest]:
        """In the order in which they will run, suspects first, and last those for which there is no worker."""
        ids = (*self._suspects, *self._order.in_order(), *self._aside)
        return (self._waiters[generation_id].live for generation_id in ids)

    @property
    def apart(self) -> list[LiveRequest]:
        """The requests that wait in no order: suspects, and those for whose weights there is no worker."""
        return [self._waiters[generation_id].live for generation_id in (*self._suspects, *self._aside)]

    def submit(self, live: LiveRequest, time_left_s: float | None) -> bool:
        """False: the request was rejected. `time_left_s`: to its deadline."""
        now, spec = self._clock(), live.request
        request = AdmissionRequest(live.work, live.principal, spec.priority, spec.queue_timeout_s, time_left_s)
        self.admission.on_arrival(request.work, now)
        refusal = self._refusal(request, now)
        if refusal is not None:
            self._reject(live, *refusal)
            return False
        self._quotas.begin(live.principal, live.work.num_prompt_tokens, now)
        self._meter(live)
        timeout_s = self._timeout_s(live)
        if time_left_s is not None and time_left_s <= timeout_s:
            late = DeadlineExceeded("the deadline passed before a worker was free")
            self._add(live, time_left_s, lambda waited_id: self.fail(waited_id, late))
        else:
            self._add(live, timeout_s, self._time_out)
        return True

    def refuse_early(self, request: AdmissionRequest) -> None:
        """Raises the error for which a request would be refused, before its prompt is read; it is counted then."""
        now = self._clock()
        refusal = self._refusal(request, now)
        if refusal is not None:
            reason, error = refusal
            self.admission.on_arrival(request.work, now)
            self._count_refusal(reason, error)
            raise error

    def refuse_over_quota(self, principal: Principal) -> None:
        """Raises the error for which a call that needs no worker would be refused; it is counted then."""
        exceeded = self._quotas.exceeded(principal, 1, self._clock())
        if exceeded is not None:
            error = exceeded.error_for(principal)
            self._count_refusal(f"quota_{exceeded.limit}", error)
            raise error

    def charge(self, principal: Principal, num_tokens: int) -> None:
        """Charges such a call, with its tokens as those of a prompt."""
        self._quotas.begin(principal, num_tokens, self._clock())
        self._quotas.end(principal)

    def adopt(self, live: LiveRequest) -> None:
        """A request that ran at another router waits at the head; its further output is charged."""
        self._quotas.adopt(live.principal)
        self._meter(live)
        self.requeue(live)

    def requeue(self, live: LiveRequest) -> None:
        """A request that has run waits at the head, at least as long as others may, whatever its own timeout.

        Time for which the budget of retries holds it back does not count.
        """
        self._add(live, self._timeout_s(live), self._time_out)

    def may_retry(self) -> bool:
        """Whether a request may be computed again at once: the budget allows it, and nobody waits for that."""
        return not self._order.num_returned and self.admission.may_retry()

    def next(self) -> LiveRequest | None:
        """Removes the next request that workers may be given now. In an overload, late requests are shed."""
        now, found = self._clock(), None
        self._look_aside()
        while found is None and not self.is_over:
            may_retry = self._may_take_returned(now)
            if not may_retry and (len(self._order) == self._order.num_returned or not self._can_serve()):
                break
            live = self._waiters[self._order.first(among_returned=may_retry)].live
            if self._is_late(live, now):
                self._shed(live)
            elif not self._has_worker_for(live):
                self._order.remove(live.key.request_id)
                self._aside[live.key.request_id] = None
            elif self.admission.has_room(live.work, now):
                self._waiters.pop(self._order.serve(among_returned=may_retry)).timer.cancel()
                found = live
            else:
                break
        self.admission.on_change(now)
        return found

    def first_suspect(self, may_run: Callable[[LiveRequest], bool]) -> LiveRequest | None:
        """The suspect that may run and has sent the most tokens: it is the least likely to end its worker."""
        suspects = [live for generation_id in self._suspects if may_run(live := self._waiters[generation_id].live)]
        return max(suspects, key=lambda live: (live.num_tokens, live.key.request_id), default=None)

    def find(self, generation_id: str) -> LiveRequest | None:
        """None: it does not wait here."""
        waiter = self._waiters.get(generation_id)
        return None if waiter is None else waiter.live

    def remove(self, generation_id: str) -> LiveRequest | None:
        """Removes a request that is not to run; None: it does not wait here."""
        waiter = self._waiters.pop(generation_id, None)
        if waiter is None:
            return None
        waiter.timer.cancel()
        if generation_id in self._suspects:
            del self._suspects[generation_id]
        elif generation_id in self._aside:
            del self._aside[generation_id]
        else:
            self._order.remove(generation_id)
        return waiter.live

    def fail(self, generation_id: str, error: BatonError) -> None:
        """Turns away a waiting request."""
        live = self.remove(generation_id)
        assert live is not None, generation_id
        if live.has_run:
            self._counters.failed += 1
            live.fail(failures.given_up(error, live.num_tokens), self._clock())
        else:
            self._reject(live, "waited", error)
        self._on_change()

    def _may_take_returned(self, now: float) -> bool:
        """Whether one that ran before is next."""
        if not self._order.num_returned or not self._has_worker(""):
            return False
        may_retry = self.admission.may_retry()
        if not may_retry:
            self._held_at = now
        return may_retry

    def _has_worker_for(self, live: LiveRequest) -> bool:
        return not live.weights_revision or self._has_worker(live.weights_revision)

    def _look_aside(self) -> None:
        """Puts those back at the head for which there is a worker now."""
        for live in [self._waiters[generation_id].live for generation_id in self._aside]:
            if self._has_worker_for(live):
                del self._aside[live.key.request_id]
                self._put_in_order(live)

    def _add(self, live: LiveRequest, timeout_s: float, on_timeout: Callable[[str], None]) -> None:
        """In its order; at the head if it has run before."""
        generation_id = live.key.request_id
        timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), on_timeout, generation_id)
        self._waiters[generation_id] = _Waiter(live, timer)
        self._put_in_order(live)

    def _put_in_order(self, live: LiveRequest) -> None:
        generation_id, tenant, cost = live.key.request_id, live.principal.tenant, live.work.num_output_tokens
        if live.retry.is_suspect:
            self._suspects[generation_id] = None
        elif live.has_run:
            self._order.add_returned(generation_id, tenant=tenant, cost=cost)
        else:
            weight, priority = live.principal.weight, live.request.priority
            self._order.add(generation_id, tenant=tenant, weight=weight, priority=priority, cost=cost)

    def _meter(self, live: LiveRequest) -> None:
        if live.principal.quota != UNLIMITED:
            live.observers.append(_QuotaMeter(self._quotas, self._clock, live.principal))

    def _timeout_s(self, live: LiveRequest) -> float:
        own, usual = live.request.queue_timeout_s, self._context.limits.queue_timeout_s
        if own is None:
            return usual
        return max(own, usual) if live.has_run else own

    def _time_out(self, generation_id: str) -> None:
        live = self._waiters[generation_id].live
        timeout_s = self._timeout_s(live)
        left_s = self._held_at + timeout_s - self._clock()
        if live.has_run and left_s > 0 and generation_id not in (*self._suspects, *self._aside):
            timer = asyncio.get_running_loop().call_later(left_s, self._time_out, generation_id)
            self._waiters[generation_id] = _Waiter(live, timer)
            return
        error: BatonError = failures.waited_too_long(timeout_s, self.admission.retry_after_s())
        if not (self._has_worker("") if live.has_run else self._can_serve()):
            error = failures.no_worker()
        elif live.retry.is_suspect:
            error = failures.no_worker_to_itself(timeout_s)
        elif not self._has_worker_for(live):
            error = failures.weights_lost(live.weights_revision)
        elif live.has_run:
            error = failures.waited_again_too_long(timeout_s)
        self.fail(generation_id, error)

    def _refusal(self, request: AdmissionRequest, now: float) -> Refusal | None:
        if self.is_closed:
            return "draining", failures.shutting_down()
        refusal = self.admission.refusal(request, now)
        if refusal is not None:
            self._shed_late(now)
        return refusal

    def _is_late(self, live: LiveRequest, now: float, wait_s: float = 0.0) -> bool:
        """In an overload, running a request that waits too long helps nobody: those behind it can still be in time."""
        if live.has_run or live.request.queue_timeout_s is not None or not self.admission.overload.is_on(now):
            return False
        return now - live.arrived_at + wait_s > self.admission.max_wait_s

    def _shed_late(self, now: float) -> None:
        """Rejects waiting requests that will be late; at most once in `_SWEEP_S`."""
        rate = self.admission.tokens_per_s
        if rate is None or not self.admission.overload.is_on(now) or now - self._swept_at < _SWEEP_S:
            return
        self._swept_at = now
        late, before = [], 0.0
        for live in self:
            if self._is_late(live, now, before / rate):
                late.append(live)
            else:
                before += live.work.num_output_tokens
        for live in late:
            self._shed(live)

    def _shed(self, live: LiveRequest) -> None:
        self.remove(live.key.request_id)
        self._reject(live, "shed", failures.waited_in_vain(self.admission.max_wait_s, self.admission.retry_after_s()))

    def _reject(self, live: LiveRequest, reason: str, error: BatonError) -> None:
        self._count_refusal(reason, error)
        live.reject(error, self._clock())

    def _count_refusal(self, reason: str, error: BatonError) -> None:
        self._counters.refused[reason] += 1
        self._counters.rejected += 1
        self._on_refused(error)
