"""Between a request's arrival and its workers: takes it in or turns it away, lets it wait, and says who is next.

    submit -> refused (REJECTED) | waits -> next | its time is over (REJECTED, or FAILED for one that ran before)

Owns the queue, its timers and the counters of refusals. Who is taken, and who is next, are admission's and the queue's
to decide; who runs where is the dispatcher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cluster.errors import BatonError, DeadlineExceeded
from router.observe.counters import Counters
from router.queue.admission import Admission, AdmissionRequest
from router.queue.limits import Limits
from router.queue.waiting import Waiter, WaitingQueue
from router.routing.fleet import Fleet
from router.routing.policies.interface import RoutingContext
from router.stream import failures
from router.stream.request import LiveRequest


class WaitingRoom:
    """`on_change` is called when somebody has left it by itself, `on_refused` for each that will not run."""

    def __init__(
        self,
        limits: Limits,
        fleet: Fleet,
        context: RoutingContext,
        counters: Counters,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_refused: Callable[[BatonError], None],
    ) -> None:
        self.is_closed = False
        """Takes nothing new."""
        self.is_over = False
        """Nobody who waits will run."""
        self._limits = limits
        self._fleet = fleet
        self._counters = counters
        self._clock = clock
        self._on_change = on_change
        self._on_refused = on_refused
        self._queue = WaitingQueue()
        self.admission = Admission(limits, self._queue, fleet, context, counters)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, generation_id: str) -> bool:
        return generation_id in self._queue

    def __iter__(self) -> Iterator[LiveRequest]:
        """In the order in which they will run."""
        return iter(self._queue)

    def submit(self, live: LiveRequest, time_left_s: float | None) -> bool:
        """False: it was rejected, and `live` says so. `time_left_s`: to its deadline."""
        now, ask = self._clock(), AdmissionRequest.of(live, time_left_s)
        self.admission.came(ask.work, now)
        refusal = self._refusal(ask, now)
        if refusal is not None:
            self._reject(live, refusal)
            return False
        self.admission.accept(live, now)
        timeout_s = self._timeout_s(live)
        if time_left_s is not None and time_left_s <= timeout_s:
            late = DeadlineExceeded("the deadline passed before a worker was free")
            self._queue.add(live, time_left_s, lambda waited_id: self.turn_away(waited_id, late))
        else:
            self._queue.add(live, timeout_s, self._time_out)
        return True

    def refuse_early(self, ask: AdmissionRequest) -> None:
        """Raises what even the least that a request can be is refused for."""
        now = self._clock()
        refusal = self._refusal(ask, now)
        if refusal is not None:
            self.admission.came(ask.work, now)
            self._counters.rejected += 1
            self._on_refused(refusal)
            raise refusal

    def take_back(self, live: LiveRequest) -> None:
        """It has run, and has to wait again: no shorter than others may, whatever its own queue timeout."""
        self._queue.add(live, self._timeout_s(live), self._time_out)

    def next(self) -> Waiter | None:
        """Takes out who may be given to workers now; None: nobody. In an overload, those who are late are shed."""
        now, found = self._clock(), None
        while self._queue and self._fleet.can_serve and not self.is_over:
            waiter = self._queue.first
            if self.admission.is_late(waiter.live, now):
                self._shed(waiter.live)
            elif self.admission.has_room(waiter.live.work, now):
                found = self._queue.next()
                break
            else:
                break
        self.admission.follow(now)
        return found

    def find(self, generation_id: str) -> LiveRequest | None:
        """None: it does not wait here."""
        return self._queue.find(generation_id)

    def leave(self, generation_id: str) -> LiveRequest | None:
        """Its client left; None: it does not wait here."""
        waiter = self._queue.pop(generation_id)
        return None if waiter is None else waiter.live

    def turn_away(self, generation_id: str, error: BatonError) -> None:
        """One that waits."""
        waiter = self._queue.pop(generation_id)
        assert waiter is not None, generation_id
        if not waiter.live.has_run:
            self._counters.refused["waited"] += 1
            self._reject(waiter.live, error)
        else:  # it has run before
            self._counters.failed += 1
            waiter.live.fail(failures.given_up(error, waiter.live.num_tokens), self._clock())
        self._on_change()

    def _timeout_s(self, live: LiveRequest) -> float:
        own, usual = live.request.queue_timeout_s, self._limits.queue_timeout_s
        if own is None:
            return usual
        return max(own, usual) if live.has_run else own

    def _time_out(self, generation_id: str) -> None:
        """It has waited as long as it may."""
        waiter = self._queue[generation_id]
        timeout_s = self._timeout_s(waiter.live)
        error: BatonError = failures.waited_too_long(timeout_s, self.admission.retry_after_s())
        if not self._fleet.can_serve:
            error = failures.no_worker()
        elif waiter.live.has_run:
            error = failures.waited_again_too_long(timeout_s)
        self.turn_away(generation_id, error)

    def _refusal(self, ask: AdmissionRequest, now: float) -> BatonError | None:
        if self.is_closed:
            self._counters.refused["draining"] += 1
            return failures.shutting_down()
        refusal = self.admission.refusal(ask, now)
        for live in self.admission.late(now) if refusal is not None else ():
            self._shed(live)
        return refusal

    def _shed(self, live: LiveRequest) -> None:
        self._queue.pop(live.key.request_id)
        self._counters.refused["shed"] += 1
        self._reject(live, failures.waited_in_vain(self.admission.max_wait_s, self.admission.retry_after_s()))

    def _reject(self, live: LiveRequest, error: BatonError) -> None:
        self._counters.rejected += 1
        self._on_refused(error)
        live.reject(error, self._clock())
