"""Decides whether a request runs now, waits, or is refused, and with which error.

    too large for a bound -> OUT_OF_RANGE           a quota is used up        -> RESOURCE_EXHAUSTED
    room and none waits   -> runs                   the queue is full         -> RESOURCE_EXHAUSTED
    cannot be in time     -> DEADLINE_EXCEEDED, or RESOURCE_EXHAUSTED for its own or the router's queue timeout
    an overload           -> RESOURCE_EXHAUSTED if it would wait longer than the objective of the first token

Knows requests by their sizes, the queue by its order, and workers as a policy knows them; no client, no command and no
timer. docs/admission.md explains the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from cluster.errors import BatonError
from cluster.pb import generation_pb2, worker_pb2
from cluster.step_cost import NO_STEP, StepSize
from router.api.call import ANYONE, MOST_PRIORITY, Principal
from router.queue.fair_order import FairOrder
from router.queue.pressure import InFlight, Overload
from router.queue.quota import Quotas
from router.routing.candidate_pool import CandidatePool
from router.routing.load_tracker import RequestLoad
from router.routing.policies.interface import RoutingContext
from router.routing.prefix_index import Candidate
from router.stream import failures

_SURELY = 0.8
"""A request is refused for its wait if it would be too long even at this share of the prediction."""
_EARLY = 0.5
"""During an overload the reverse holds: a request is refused if this share of the longest wait is exceeded."""
_LEAST_WAIT = 0.2
"""Share of the first token's objective that a request may wait in an overload however slow workers are."""
_MOST_PROMPTS = 0.5
"""Share of the first token's objective: in an overload, workers get no more prompts than take this long."""
_MORE_SEQUENCES = 2
"""Sequences beyond each decode worker's batch: their prompts are computed by when a place is free."""
_FEW = 16
"""Workers that are looked at where the least busy one decides."""
_LEAST_RETRY_S, _MOST_RETRY_S = 0.25, 60.0
_RETRY_SHARE, _LEAST_RETRIES = 0.2, 4
"""Share of all requests that may be computed again at one time, and how many always may."""
_RUNNING_REQUESTS = 256
"""At one time, unless the configuration has a number, or the workers have more places."""
_SPARE_SHARE, _SPARE_UP_TO = 0.5, 0.875
"""Share of the decode workers that batches may take, and up to which total load they may add to it."""

Refusal = tuple[str, BatonError]
"""Reason, one of `observe.counters.REFUSAL_REASONS`, and the client's error."""


class AdmissionRequest(NamedTuple):
    """A request as admission sees it."""

    work: RequestLoad
    principal: Principal = ANYONE
    priority: int = 0
    queue_timeout_s: float | None = None
    """The request's own; None: the router's."""
    time_left_s: float | None = None
    """Seconds to its deadline."""

    @classmethod
    def smallest(
        cls,
        spec: generation_pb2.GenerationSpec,
        principal: Principal,
        time_left_s: float | None,
        *,
        max_model_len: int,
        max_sequences: int,
    ) -> AdmissionRequest:
        """The least that a request can be, from its message alone, so that refusing it costs little.

        A text prompt counts as one token; values that validation would refuse are cut to what the model allows.
        """
        num_prompt = min(max(1, len(spec.token_ids.ids)), max_model_len)
        num_sequences = min(max(1, spec.sampling.n), max_sequences)
        num_output = min(max(1, spec.stopping.max_output_tokens), max_model_len - num_prompt)
        scheduling = spec.scheduling
        timeout = scheduling.queue_timeout
        return cls(
            RequestLoad(num_prompt, num_sequences, num_prompt + num_sequences * num_output),
            principal,
            max(-MOST_PRIORITY, min(scheduling.priority, MOST_PRIORITY)),
            timeout.seconds + timeout.nanos / 1e9 if scheduling.HasField("queue_timeout") else None,
            time_left_s,
        )


class Admission:
    """`ready(role)`: workers that may get new work."""

    def __init__(
        self,
        order: FairOrder,
        context: RoutingContext,
        quotas: Quotas,
        ready: Callable[[worker_pb2.Role], CandidatePool[Any]],
        can_serve: Callable[[], bool],
    ) -> None:
        self._order = order
        self._context = context
        self._quotas = quotas
        self._ready = ready
        self._can_serve = can_serve
        self.overload = Overload()
        self._in_flight = InFlight(context.lengths)

    @property
    def max_wait_s(self) -> float:
        """Longest wait in an overload: the objective of the first token, less the time that workers take for it."""
        own, ttft_s = self._context.limits.max_queue_wait_s, self._context.objectives.ttft_s
        return max(_LEAST_WAIT * ttft_s, ttft_s - self._in_flight.first_token_s) if own is None else own

    @property
    def tokens_per_s(self) -> float | None:
        """Promised tokens that workers give back each second; None while that is not known."""
        return self._in_flight.tokens_per_s(len(self._decode_workers()))

    def refusal(self, request: AdmissionRequest, now: float) -> Refusal | None:
        """Why a request is not accepted; None: it runs or waits."""
        found = self._too_large(request) or self._over_quota(request, now)
        if found is None and not self._may_run(request.work, now):
            found = self._no_place(request) or self._too_late(request, now)
        return found

    def has_room(self, work: RequestLoad, now: float) -> bool:
        """Whether workers may be given one more request; they always may if they have none."""
        held, limits = self._in_flight, self._context.limits
        if not held:
            return True
        most, decode = limits.max_running_tokens, self._decode_workers()
        pool = decode.kv_tokens
        places = decode.max_num_seqs + _MORE_SEQUENCES * decode.num_sized
        if len(held) >= (limits.max_running_requests or max(_RUNNING_REQUESTS, places)):
            return False
        if most is not None and held.num_tokens + work.num_output_tokens > most:
            return False
        if most is None and pool and held.num_expected_tokens + held.expected(work) > pool:
            return False
        if places and held.num_sequences + work.num_sequences > places:
            return False
        return not self.overload.is_on(now) or self._keeps_pace(work)

    def has_spare(self, num_running: int, now: float) -> bool:
        """Whether a batch, of which `num_running` sequences run, may begin one more sequence.

        No request waits, the next prompt would be in time, and places stay free. While other requests run, their steps
        keep the objective as well.
        """
        held, decode, work = self._in_flight, self._decode_workers(), RequestLoad(1, 1, 2)
        if self._order or not self._can_serve() or self.overload.is_on(now) or not self.has_room(work, now):
            return False
        if not num_running:
            return not held or self._keeps_pace(work)
        places, pool = decode.max_num_seqs, decode.kv_tokens
        if num_running >= _SPARE_SHARE * places or held.num_sequences >= _SPARE_UP_TO * places:
            return False
        if pool and held.num_expected_tokens > _SPARE_UP_TO * pool:
            return False
        if len(held) > num_running:
            return self._keeps_pace(work)
        is_free = any(not self._context.loads[worker.worker_id].num_prompts for worker in self._least_busy())
        return is_free or self._prompts_s(NO_STEP) <= _MOST_PROMPTS * self._context.objectives.ttft_s

    def may_retry(self) -> bool:
        """Whether workers may be given one more request that ran before, to compute it again.

        A few always may. More are a share of all requests, and leave time for the prompts of others.
        """
        num_retries = self._context.loads.num_retries
        if num_retries < _LEAST_RETRIES:
            return True
        if num_retries >= _RETRY_SHARE * (len(self._in_flight) + len(self._order)):
            return False
        return self._prompts_s(NO_STEP) <= _MOST_PROMPTS * self._context.objectives.ttft_s

    def on_arrival(self, work: RequestLoad, now: float) -> None:
        """A request arrived; call it before `refusal`."""
        self.overload.add_arrival(now, work.num_output_tokens)

    def on_placed(self, generation_id: str, work: RequestLoad, now: float) -> None:
        self._in_flight.add(generation_id, work, now)

    def on_paused(self, generation_id: str) -> None:
        """Workers hold nothing for the request until it is placed again."""
        self._in_flight.pause(generation_id)

    def on_end(
        self, generation_id: str, work: RequestLoad, now: float, first_token_at: float | None, *, is_complete: bool
    ) -> None:
        """A placed request is over; `is_complete`: with all its output."""
        num_workers = len(self._decode_workers())
        self._in_flight.remove(generation_id, now, num_workers, first_token_at, is_complete=is_complete)
        self.overload.add_end(now, work.num_output_tokens)

    def on_change(self, now: float) -> None:
        """The queue or the set of running requests has changed."""
        is_empty = not self._waits_for_room()
        self.overload.set_queue(now, is_empty=is_empty)
        self._in_flight.set_pressure(now, is_pressed=not is_empty or self.overload.is_on(now))

    def retry_after_s(self, wait_s: float | None = None) -> float:
        """Retry delay: when the queue should have drained, later the more arrives than ends, spread over clients."""
        if wait_s is None:
            rate = self.tokens_per_s
            wait_s = self._order.cost / rate if rate else failures.RETRY_AFTER_S
        spread = self._context.rng.uniform(1.0, 1.5)
        return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, wait_s * self.overload.excess) * spread)

    def _decode_workers(self) -> CandidatePool[Any]:
        return self._ready(worker_pb2.ROLE_DECODE)

    def _least_busy(self) -> Iterator[Candidate]:
        """The workers that compute prompts which should be through with theirs first."""
        return islice((self._ready(worker_pb2.ROLE_PREFILL) or self._decode_workers()).ranked(self._prompts_on), _FEW)

    def _prompts_on(self, worker: Candidate) -> float:
        """Seconds that the prompts on a worker take; infinite while it has some, and its cost is not known."""
        load, cost = self._context.loads[worker.worker_id], worker.step_cost
        return 0.0 if not load.num_prompts else math.inf if cost is None else cost.of(load.prompts)

    def _step_s(self, worker: Candidate) -> float:
        """Seconds of a step of the sequences on a worker; 0 while its cost is not known."""
        return 0.0 if worker.step_cost is None else worker.step_cost.of(self._context.loads[worker.worker_id].sequences)

    def _may_run(self, work: RequestLoad, now: float) -> bool:
        return not self._waits_for_room() and self._can_serve() and self.has_room(work, now)

    def _waits_for_room(self) -> bool:
        """Whether something waits, and not only for the retries before it."""
        num_returned = self._order.num_returned
        return len(self._order) > num_returned or (num_returned > 0 and self.may_retry())

    def _keeps_pace(self, work: RequestLoad) -> bool:
        """Whether queued prompts leave time, and some decode worker's step keeps the objective with this request."""
        if self._prompts_s(NO_STEP) > _MOST_PROMPTS * self._context.objectives.ttft_s:
            return False
        own = StepSize(num_sequences=work.num_sequences, num_kv_tokens=work.num_sequences * work.num_prompt_tokens)
        least = islice(self._decode_workers().ranked(self._step_s), _FEW)
        return any(self._is_in_pace(worker, own) for worker in least)

    def _is_in_pace(self, worker: Candidate, own: StepSize) -> bool:
        cost, load = worker.step_cost, self._context.loads[worker.worker_id].sequences
        return cost is None or not load.num_sequences or cost.of(load + own) <= self._context.objectives.tpot_s

    def _too_large(self, request: AdmissionRequest) -> Refusal | None:
        num_tokens, most = request.work.num_output_tokens, self._context.limits.max_running_tokens
        if most is None or num_tokens <= most:
            return None
        return "too_large", failures.larger_than(num_tokens, "router.max_running_tokens", most)

    def _over_quota(self, request: AdmissionRequest, now: float) -> Refusal | None:
        exceeded = self._quotas.exceeded(request.principal, request.work.num_prompt_tokens, now)
        return None if exceeded is None else (f"quota_{exceeded.limit}", exceeded.error_for(request.principal))

    def _no_place(self, request: AdmissionRequest) -> Refusal | None:
        """The queue's bounds. A named tenant may take as much of the queue as it leaves free, times its weight."""
        limits, order, own = self._context.limits, self._order, request.work.num_output_tokens
        if own > limits.max_queued_tokens and not order:
            return "too_large", failures.larger_than(own, "router.max_queued_tokens", limits.max_queued_tokens)
        free = limits.max_queued_requests - len(order)
        free_tokens = limits.max_queued_tokens - order.cost
        if free < 1:
            return "queue_requests", failures.queue_full(limits.max_queued_requests, self.retry_after_s())
        if free_tokens < own:
            return "queue_tokens", failures.queue_full_of_tokens(limits.max_queued_tokens, self.retry_after_s())
        if request.principal.tenant:
            num_waiting, num_tokens = order.of_tenant(request.principal.tenant)
            weight = request.principal.weight
            if num_waiting and (num_waiting >= weight * free or num_tokens >= weight * free_tokens):
                return "tenant_share", failures.share_used(self.retry_after_s())
        return None

    def _too_late(self, request: AdmissionRequest, now: float) -> Refusal | None:
        """None also while the rate is unknown."""
        rate = self.tokens_per_s
        if rate is None:
            return None
        principal = request.principal
        before = self._order.ahead_of(principal.tenant, principal.weight, request.priority)
        wait_s = (before + request.work.num_output_tokens) / rate
        sure_s = _SURELY * wait_s
        prompt = StepSize.of_prompt(request.work.num_prompt_tokens)
        if request.time_left_s is not None and sure_s + self._prompts_s(prompt) > request.time_left_s:
            return "deadline", failures.deadline_too_near(wait_s, request.time_left_s, self.retry_after_s(wait_s))
        own_s = request.queue_timeout_s
        timeout_s = self._context.limits.queue_timeout_s if own_s is None else own_s
        if sure_s > timeout_s:
            return "queue_timeout", failures.would_wait_too_long(wait_s, timeout_s, self.retry_after_s(wait_s))
        is_overload = self.overload.is_on(now) or self.overload.may_begin(now)
        if own_s is None and is_overload and wait_s > _EARLY * self.max_wait_s:
            self.overload.add_refusal(now)
            return "overload", failures.overloaded(wait_s, self.max_wait_s, self.retry_after_s(wait_s))
        return None

    def _prompts_s(self, prompt: StepSize) -> float:
        """Seconds until a prompt placed now would be computed, after those that workers have; 0 while unknown."""
        known = [
            cost.of(self._context.loads[worker.worker_id].prompts) + cost.of(prompt)
            for worker in self._least_busy()
            if (cost := worker.step_cost) is not None
        ]
        return min(known, default=0.0)
