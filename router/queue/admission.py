"""What the router takes on: whether a request runs now, waits, or is turned away, and what it is told then.

    too large for a bound -> OUT_OF_RANGE           a quota is used up        -> RESOURCE_EXHAUSTED
    room and nobody waits -> runs                   the queue is full         -> RESOURCE_EXHAUSTED
    it cannot be in time  -> DEADLINE_EXCEEDED, or RESOURCE_EXHAUSTED for its own or the router's queue timeout
    an overload           -> RESOURCE_EXHAUSTED for who would wait longer than the objective of the first token

The order of those that wait is the queue's, the rates and what an overload is are of `pressure`. Owns what runs in
tokens; knows no client, no command and no timer. docs/admission.md says why it is as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import BatonError
from cluster.step_cost import NO_STEP, StepSize
from router.api.call import ANYONE, Principal
from router.observe.counters import Counters
from router.queue.in_flight import InFlight
from router.queue.limits import Limits
from router.queue.pressure import Overload
from router.queue.quota import UNLIMITED, LocalQuotas, Quotas
from router.queue.waiting import WaitingQueue
from router.routing.fleet import DECODE, PREFILL, Fleet
from router.routing.load_tracker import RequestLoad
from router.routing.policies.interface import RoutingContext
from router.stream import failures
from router.stream.request import LiveRequest

_SURELY = 0.8
"""A request is refused for a wait that is longer than it may be even if it is predicted by so much too long."""
_EARLY = 0.5
"""In an overload it is the other way round: who is let in should be in time."""
_LEAST_WAIT = 0.2
"""Of the first token's objective, that a request may wait in an overload however long workers take for it."""
_MOST_PROMPTS = 0.5
"""Of the first token's objective: in an overload, no more prompts are handed out than take so long."""
_MORE_SEQUENCES = 2
"""Beside those that each decode worker steps at a time: their prompts begin when a place is free."""
_LEAST_RETRY_S, _MOST_RETRY_S = 0.25, 60.0
_SWEEP_S = 0.1
"""In an overload, the queue is looked through so often."""
_SPARE_SHARE, _SPARE_UP_TO = 0.5, 0.875
"""Of what decode workers hold: so much may be work that can wait, and up to so much it is added to."""


@dataclass(frozen=True)
class AdmissionRequest:
    """What is known of a request; before its prompt has been read, the least that it can be."""

    work: RequestLoad
    caller: Principal = ANYONE
    priority: int = 0
    queue_timeout_s: float | None = None
    """Its own; None: the router's."""
    time_left_s: float | None = None
    """To its deadline."""

    @classmethod
    def of(cls, live: LiveRequest, time_left_s: float | None) -> AdmissionRequest:
        request = live.request
        return cls(live.work, live.caller, request.priority, request.queue_timeout_s, time_left_s)


class Admission:
    """Of one router. `uniform(a, b)` spreads retries."""

    def __init__(
        self,
        limits: Limits,
        queue: WaitingQueue,
        fleet: Fleet,
        context: RoutingContext,
        counters: Counters,
        quotas: Quotas | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._fleet = fleet
        self._context = context
        self._counters = counters
        self._quotas = quotas or LocalQuotas()
        self._uniform = uniform
        self._overload = Overload()
        self._in_flight = InFlight(context.lengths)
        self._swept_at = -_SWEEP_S
        self._metered: dict[str, int] = {}
        """Output tokens that were charged, of requests whose caller has a quota."""

    @property
    def max_wait_s(self) -> float:
        """In an overload: what the objective of the first token leaves, beside the time that workers take for it."""
        own, ttft_s = self._limits.max_queue_wait_s, self._context.objectives.ttft_s
        return max(_LEAST_WAIT * ttft_s, ttft_s - self._in_flight.first_token_s) if own is None else own

    def refusal(self, ask: AdmissionRequest, now: float) -> BatonError | None:
        """Why it is not taken, counted by reason; None: it runs or waits. Changes nothing else."""
        found = self._too_large(ask) or self._over_quota(ask, now)
        if found is None and not self._may_run(ask.work, now):
            found = self._no_place(ask) or self._too_late(ask, now)
        if found is None:
            return None
        reason, error = found
        self._counters.refused[reason] += 1
        return error

    def came(self, work: RequestLoad, now: float) -> None:
        """A request, before it is asked about."""
        self._overload.came(now, work.num_output_tokens)

    def accept(self, live: LiveRequest, now: float) -> None:
        """It runs or waits from now on."""
        if live.caller.quota != UNLIMITED:
            self._quotas.begin(live.caller, live.work.num_prompt_tokens, now)
            self._meter(live)

    def take_up(self, live: LiveRequest) -> None:
        """One that was accepted elsewhere goes on here: its caller is charged what follows its known tokens."""
        if live.caller.quota != UNLIMITED:
            self._quotas.go_on(live.caller)
            self._meter(live)

    def output_came(self, live: LiveRequest, now: float) -> None:
        """Charges what its caller has not been charged yet."""
        charged = self._metered.get(live.key.request_id)
        if charged is not None and live.num_tokens > charged:
            self._quotas.output_came(live.caller, live.num_tokens - charged, now)
            self._metered[live.key.request_id] = live.num_tokens

    def has_room(self, work: RequestLoad, now: float) -> bool:
        """Whether workers may be given one more. Alone, a request always may."""
        held, limits = self._in_flight, self._limits
        if not held:
            return True
        if len(held) >= limits.max_running_requests:
            return False
        most, decode = limits.max_running_tokens, self._fleet.ready(DECODE)
        pool = sum(worker.kv_tokens for worker in decode)
        if most is not None and held.num_tokens + work.num_output_tokens > most:
            return False
        if most is None and pool and held.num_expected_tokens + held.expected(work) > pool:
            return False
        places = sum(w.info.max_num_seqs for w in decode if w.info is not None)
        if places:
            places += _MORE_SEQUENCES * len(decode)
            if held.num_sequences + work.num_sequences > places:
                return False
        return not self._overload.is_on(now) or self._keeps_pace(work)

    def has_spare(self, num_running: int, now: float) -> bool:
        """Whether one more sequence may be begun of work that can wait, of which so many run: nobody waits, the next
        prompt would be in time, and places stay free. While others run, their steps keep the objective as well."""
        held, decode, work = self._in_flight, self._fleet.ready(DECODE), RequestLoad(1, 1, 2)
        if self._queue or not self._fleet.can_serve or self._overload.is_on(now) or not self.has_room(work, now):
            return False
        if not num_running:
            return not held or self._keeps_pace(work)
        places = sum(w.info.max_num_seqs for w in decode if w.info is not None)
        pool = sum(worker.kv_tokens for worker in decode)
        if num_running >= _SPARE_SHARE * places or held.num_sequences >= _SPARE_UP_TO * places:
            return False
        if pool and held.num_expected_tokens > _SPARE_UP_TO * pool:
            return False
        if len(held) > num_running:
            return self._keeps_pace(work)
        workers = self._fleet.ready(PREFILL) or decode
        is_free = any(not self._context.loads[worker.worker_id].num_prompts for worker in workers)
        return is_free or self._prompts_s(NO_STEP) <= _MOST_PROMPTS * self._context.objectives.ttft_s

    def started(self, live: LiveRequest, now: float) -> None:
        """Workers have it."""
        self._in_flight.add(live.key.request_id, live.work, now)

    def paused(self, live: LiveRequest) -> None:
        """Workers have it no more, until it is placed again."""
        self._in_flight.pause(live.key.request_id)

    def ended(self, live: LiveRequest, now: float) -> None:
        """Workers had it, and it is over."""
        num_workers = len(self._fleet.ready(DECODE))
        self._in_flight.remove(live.key.request_id, now, num_workers, live.first_token_at, is_complete=live.is_complete)
        self._overload.left(now, live.work.num_output_tokens)

    def follow(self, now: float) -> None:
        """The queue, or what runs, has changed."""
        if self._queue:
            self._overload.stands(now)
        else:
            self._overload.is_empty(now)
        self._in_flight.press(now, is_pressed=bool(self._queue) or self._overload.is_on(now))

    def is_late(self, live: LiveRequest, now: float, wait_s: float = 0.0) -> bool:
        """In an overload it is not worth running any more, so much later: those behind it can still be in time."""
        if live.has_run or live.request.queue_timeout_s is not None or not self._overload.is_on(now):
            return False
        return now - live.arrived_at + wait_s > self.max_wait_s

    def late(self, now: float) -> list[LiveRequest]:
        """Those that wait and will be; in an overload, now and then."""
        rate = self._rate()
        if rate is None or not self._overload.is_on(now) or now - self._swept_at < _SWEEP_S:
            return []
        self._swept_at = now
        found, before = [], 0.0
        for live in self._queue:
            if self.is_late(live, now, before / rate):
                found.append(live)
            else:
                before += live.work.num_output_tokens
        return found

    def retry_after_s(self, wait_s: float | None = None) -> float:
        """When the queue should have drained, the later the more comes than leaves; for each client another time."""
        if wait_s is None:
            rate = self._rate()
            wait_s = self._queue.num_tokens / rate if rate else failures.RETRY_AFTER_S
        spread = self._uniform(1.0, 1.5)
        return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, wait_s * self._overload.excess) * spread)

    def _rate(self) -> float | None:
        return self._in_flight.tokens_per_s(len(self._fleet.ready(DECODE)))

    def _may_run(self, work: RequestLoad, now: float) -> bool:
        return not self._queue and self._fleet.can_serve and self.has_room(work, now)

    def _keeps_pace(self, work: RequestLoad) -> bool:
        """Prompts that are handed out leave time, and some decode worker's step, with it, keeps the objective."""
        if self._prompts_s(NO_STEP) > _MOST_PROMPTS * self._context.objectives.ttft_s:
            return False
        own = StepSize(num_sequences=work.num_sequences, num_kv_tokens=work.num_sequences * work.num_prompt_tokens)
        for worker in self._fleet.ready(DECODE):
            cost, load = worker.step_cost, self._context.loads[worker.worker_id].sequences
            if cost is None or not load.num_sequences or cost.of(load + own) <= self._context.objectives.tpot_s:
                return True
        return False

    def _too_large(self, ask: AdmissionRequest) -> tuple[str, BatonError] | None:
        num_tokens, most = ask.work.num_output_tokens, self._limits.max_running_tokens
        if most is None or num_tokens <= most:
            return None
        return "too_large", failures.larger_than(num_tokens, "router.max_running_tokens", most)

    def _over_quota(self, ask: AdmissionRequest, now: float) -> tuple[str, BatonError] | None:
        exceeded = self._quotas.exceeded(ask.caller, ask.work.num_prompt_tokens, now)
        return None if exceeded is None else (f"quota_{exceeded.limit}", failures.over_quota(exceeded, ask.caller))

    def _no_place(self, ask: AdmissionRequest) -> tuple[str, BatonError] | None:
        """The queue's bounds. A tenant with a name may take as much of it as it leaves free, by its weight."""
        limits, queue, own = self._limits, self._queue, ask.work.num_output_tokens
        if own > limits.max_queued_tokens and not queue:
            return "too_large", failures.larger_than(own, "router.max_queued_tokens", limits.max_queued_tokens)
        free = limits.max_queued_requests - len(queue)
        free_tokens = limits.max_queued_tokens - queue.num_tokens
        if free < 1:
            return "queue_requests", failures.queue_full(limits.max_queued_requests, self.retry_after_s())
        if free_tokens < own:
            return "queue_tokens", failures.queue_full_of_tokens(limits.max_queued_tokens, self.retry_after_s())
        if ask.caller.tenant:
            num_waiting, num_tokens = queue.of_tenant(ask.caller.tenant)
            weight = ask.caller.weight
            if num_waiting and (num_waiting >= weight * free or num_tokens >= weight * free_tokens):
                return "tenant_share", failures.share_used(self.retry_after_s())
        return None

    def _too_late(self, ask: AdmissionRequest, now: float) -> tuple[str, BatonError] | None:
        """Nothing while no rate is known."""
        rate = self._rate()
        if rate is None:
            return None
        before = self._queue.num_tokens_before(ask.caller, ask.priority)
        wait_s = (before + ask.work.num_output_tokens) / rate
        sure_s = _SURELY * wait_s
        prompt = StepSize.of_prompt(ask.work.num_prompt_tokens)
        if ask.time_left_s is not None and sure_s + self._prompts_s(prompt) > ask.time_left_s:
            return "deadline", failures.deadline_too_near(wait_s, ask.time_left_s, self.retry_after_s(wait_s))
        own_s = ask.queue_timeout_s
        timeout_s = self._limits.queue_timeout_s if own_s is None else own_s
        if sure_s > timeout_s:
            return "queue_timeout", failures.would_wait_too_long(wait_s, timeout_s, self.retry_after_s(wait_s))
        is_overload = self._overload.is_on(now) or self._overload.may_begin(now)
        if own_s is None and is_overload and wait_s > _EARLY * self.max_wait_s:
            self._overload.refused(now)
            return "overload", failures.overloaded(wait_s, self.max_wait_s, self.retry_after_s(wait_s))
        return None

    def _prompts_s(self, prompt: StepSize) -> float:
        """Until a prompt would be computed that workers were given now, after those that they have; 0: nobody knows."""
        known = [
            cost.of(self._context.loads[worker.worker_id].prompts) + cost.of(prompt)
            for worker in self._fleet.ready(PREFILL) or self._fleet.ready(DECODE)
            if (cost := worker.step_cost) is not None
        ]
        return min(known, default=0.0)

    def _meter(self, live: LiveRequest) -> None:
        self._metered[live.key.request_id] = live.num_tokens
        live.when_over = lambda: self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        if self._metered.pop(live.key.request_id, None) is not None:
            self._quotas.end(live.caller)
