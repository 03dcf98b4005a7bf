"""The pair of workers on which a request should end first, by what each worker has learned of its own steps.

    first token  = the prompts before it on the prefill worker + this one's tokens that its prefix cache lacks
    completion   = first token + expected output tokens * the decode worker's step with the request in it
                   + the wait for room, where the decode worker's KV pool is promised to others up to the end

Pairs that keep the objectives come before those that do not; among equals the lowest completion wins. A decode worker
computes a prompt itself when that ends sooner and holds its other sequences up for no longer than one token may take,
or when it has none and every prefill worker is busy.
What workers have not learned yet is taken from the others; while nobody knows anything, the least loaded are chosen.
Workers of a role are weighed apart, and the best of each meet: a choice costs as many looks as there are workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.step_cost import StepCost, StepSize, usual
from router.ledger import Ledger, Placement
from router.policies.least_loaded import LeastLoaded
from router.policies.seam import Candidate, Objectives, Policy, Request, disaggregated, local

FIRST_GUESS_TOKENS = 128
"""Of one sequence's output, before any has ended."""
_MEMORY = 0.95
"""What an ended sequence leaves of the mean before it."""


@dataclass(frozen=True)
class _Prefill:
    """A prompt on one worker."""

    worker_id: str
    wait_s: float
    compute_s: float
    num_cached_tokens: int

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.compute_s


@dataclass(frozen=True)
class _Decode:
    """An output on one worker."""

    worker: Candidate
    cost: StepCost
    step_s: float
    room_s: float
    num_others: int

    def end_s(self, num_tokens: float) -> float:
        return self.room_s + num_tokens * self.step_s


class Predicted(Policy):
    """Over the router's own ledger."""

    def __init__(self, ledger: Ledger, objectives: Objectives) -> None:
        self._ledger = ledger
        self._objectives = objectives
        self._without_knowledge = LeastLoaded(ledger)
        self._mean_output: float = FIRST_GUESS_TOKENS

    def finished(self, num_output_tokens: int) -> None:
        self._mean_output = _MEMORY * self._mean_output + (1 - _MEMORY) * num_output_tokens

    def choose(self, request: Request, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement:
        costs = _costs([*prefill, *decode])
        if not costs:
            return self._without_knowledge.choose(request, prefill, decode)
        num_tokens = self._expected_tokens(request)
        decodes = [self._weigh_decode(d, costs[d.worker_id], request) for d in decode]
        best = min(decodes, key=lambda d: (d.step_s > self._objectives.tpot_s, d.end_s(num_tokens), d.worker.worker_id))
        prefills = [self._weigh_prefill(p, costs[p.worker_id], request) for p in prefill]
        soonest = min(prefills, key=lambda p: (p.first_token_s, p.worker_id), default=None)
        options = [] if soonest is None else [(soonest, best, False)]
        for d in decodes:
            own = self._weigh_prefill(d.worker, d.cost, request)
            is_short = own.first_token_s <= self._objectives.tpot_s
            if soonest is None or is_short or (soonest.wait_s and not d.num_others):
                options.append((own, d, True))
        chosen = min(options, key=lambda o: self._rank(o[0], o[1], o[2], num_tokens))
        return self._place(*chosen, request, has_prefill=bool(prefills))

    def _rank(self, p: _Prefill, d: _Decode, is_local: bool, num_tokens: float) -> tuple[int, float, bool, str]:
        first_s = p.first_token_s
        num_missed = (first_s > self._objectives.ttft_s) + (d.step_s > self._objectives.tpot_s)
        return num_missed, first_s + d.end_s(num_tokens), is_local, d.worker.worker_id

    def _place(self, p: _Prefill, d: _Decode, is_local: bool, request: Request, *, has_prefill: bool) -> Placement:
        cached = f", {p.num_cached_tokens} of {request.work.num_prompt_tokens} cached" if p.num_cached_tokens else ""
        when = f"first token predicted after {1000 * p.first_token_s:.0f} ms{cached}"
        if not is_local:
            return disaggregated(p.worker_id, d.worker.worker_id, when, p.num_cached_tokens)
        if not has_prefill:
            return local(p.worker_id, num_cached_tokens=p.num_cached_tokens)
        return local(p.worker_id, when, p.num_cached_tokens)

    def _weigh_prefill(self, worker: Candidate, cost: StepCost, request: Request) -> _Prefill:
        num_tokens = request.work.num_prompt_tokens
        cached = min(worker.num_cached_tokens(request.prompt), num_tokens - 1) if request.uses_cache else 0
        load = self._ledger[worker.worker_id]
        wait_s = cost.of(load.prompts) if load.num_prompts else 0.0
        return _Prefill(worker.worker_id, wait_s, cost.of(StepSize.of_prompt(num_tokens - cached, cached)), cached)

    def _weigh_decode(self, worker: Candidate, cost: StepCost, request: Request) -> _Decode:
        work, load = request.work, self._ledger[worker.worker_id]
        own = StepSize(num_sequences=work.num_sequences, num_kv_tokens=work.num_sequences * work.num_prompt_tokens)
        step_s = cost.of(load.sequences + own)
        num_missing = load.num_tokens + work.num_output_tokens - worker.kv_tokens
        # Room comes as others end: each holds its share of what is promised, for as long as an output takes.
        room_s = 0.0
        if num_missing > 0 and load.num_tokens:
            room_s = min(1.0, num_missing / load.num_tokens) * self._mean_output * step_s
        return _Decode(worker, cost, step_s, room_s, load.sequences.num_sequences)

    def _expected_tokens(self, request: Request) -> float:
        """Of one sequence."""
        work = request.work
        return min(self._mean_output, (work.num_output_tokens - work.num_prompt_tokens) / work.num_sequences)


def _costs(workers: Sequence[Candidate]) -> dict[str, StepCost]:
    """By id; nothing while nobody knows anything."""
    told = {w.worker_id: w.step_cost for w in workers}
    known = [cost for cost in told.values() if cost is not None]
    if not known:
        return {}
    mean = usual(known)
    return {worker_id: mean if cost is None else cost.filled(mean) for worker_id, cost in told.items()}
