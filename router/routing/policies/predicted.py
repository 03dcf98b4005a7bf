"""The pair of workers on which a request should end first, by what each worker has learned of its own steps.

    first token  = the prompts before it on the prefill worker + this one's tokens that its prefix cache lacks
    hand-off     = what it shows of moving the prompt, less the tokens that the decode worker's prefix cache holds
    completion   = first token + hand-off + expected output tokens * the decode worker's step with the request in it
                   + the wait for room, where the decode worker's KV pool is promised to others up to the end

Pairs that keep the objectives come before those that do not; among equals the lowest completion wins. A decode worker
computes a prompt itself when that ends sooner and holds its other sequences up for no longer than one token may take,
or when every prefill worker is busy: beside what decodes there, a prompt gets the time that the pace of those leaves,
and takes it from each of them, which is added to its own completion. A session goes back to the workers of its last
turn where that ends as soon as elsewhere, or nearly.
What workers have not learned yet is taken from the others; while nobody knows anything, the least loaded are chosen.
Workers of a role are weighed apart, and the best of each meet: a choice costs as many looks as there are workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cluster.step_cost import PACE_SHARE, StepCost, usual
from router.queue.output_lengths import OutputLengths
from router.routing.load_tracker import Load, LoadTracker, Placement, PlacementKind, RequestLoad
from router.routing.policies.interface import Candidate, Objectives, Policy, RoutingRequest, disaggregated, local
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.sessions import Sessions

NEARLY = 1.05
"""Times the soonest end: what a session's own workers may take, and still be nearly as soon."""
_LEAST_SHARE = 0.02
"""Of a decode worker's time, for prompts: they move on even where the pace leaves nothing."""
_MEMORY = 0.95
"""What a hand-off leaves of those before it."""


class _Prefill(NamedTuple):
    """A prompt on one worker; the order is that of preference, here and below."""

    first_token_s: float
    worker_id: str
    wait_s: float
    own_s: float
    """Of the worker's steps, for this prompt alone."""
    num_cached_tokens: int

    def is_nearly(self, best: _Prefill) -> bool:
        return self.first_token_s <= NEARLY * best.first_token_s


class _Decode(NamedTuple):
    """An output on one worker."""

    misses_tpot: bool
    handed_end_s: float
    """From the first token to the last, hand-off included."""
    worker_id: str
    local_end_s: float
    """The same where the prompt is computed here, and what the others here lose by that, summed up."""
    num_others: int
    own: _Prefill
    """The prompt on this same worker."""

    def is_nearly(self, best: _Decode) -> bool:
        return self.misses_tpot == best.misses_tpot and self.handed_end_s <= NEARLY * best.handed_end_s


class _Option(NamedTuple):
    """Where a request could run."""

    num_missed: int
    completion_s: float
    is_local: bool
    decode_id: str
    prefill: _Prefill
    kind: PlacementKind
    num_present_tokens: int
    """Of the prompt, that the decode worker has."""

    def is_home(self, home: Placement) -> bool:
        return self.decode_id == home.decode_id and self.prefill.worker_id in (home.prefill_id, home.decode_id)

    def is_nearly(self, best: _Option) -> bool:
        return self.num_missed == best.num_missed and self.completion_s <= NEARLY * best.completion_s


class Predicted(Policy):
    """Over the router's own ledger."""

    def __init__(self, ledger: LoadTracker, lengths: OutputLengths, objectives: Objectives) -> None:
        self._ledger = ledger
        self._lengths = lengths
        self._objectives = objectives
        self._without_knowledge = LeastLoaded(ledger)
        self._sessions = Sessions()
        self._told: list[tuple[str, StepCost | None]] = []
        self._costs: dict[str, StepCost] = {}
        """What follows from `_told`, which changes less often than it is needed."""
        self._handed_tokens = self._handoff_s = 0.0
        """Of the last hand-offs, older ones fading."""

    def set_objectives(self, objectives: Objectives) -> None:
        self._objectives = objectives

    def handed_over(self, placement: Placement, work: RequestLoad, exposed_s: float) -> None:
        num_tokens = work.num_prompt_tokens - placement.num_present_tokens
        self._handed_tokens = _MEMORY * self._handed_tokens + num_tokens
        self._handoff_s = _MEMORY * self._handoff_s + exposed_s

    def placed(self, request: RoutingRequest, placement: Placement) -> None:
        self._sessions.placed(request.session, placement)

    def lost(self, worker_id: str) -> None:
        self._sessions.lost(worker_id)

    def choose(self, request: RoutingRequest, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement:
        costs = self._costs_of([*prefill, *decode])
        if not costs:
            return self._without_knowledge.choose(request, prefill, decode)
        prefills = [self._weigh_prefill(p, costs[p.worker_id], request) for p in prefill]
        num_tokens = self._lengths.expected(request.work.most_output)
        decodes = [self._weigh_decode(d, costs[d.worker_id], request, num_tokens) for d in decode]
        here = list(self._local_options(request, prefills, decodes))
        chosen = best = min([*self._handed_options(prefills, decodes, None), *here])
        home = self._sessions.home_of(request.session)
        if home is not None and not best.is_home(home):
            nearly = [o for o in (*self._handed_options(prefills, decodes, home), *here) if o.is_nearly(best)]
            chosen = min(nearly, key=lambda o: (not o.is_home(home), o.decode_id != home.decode_id, o), default=best)
        return self._place(chosen, request, by_session=chosen != best, has_prefill=bool(prefills))

    def _handed_options(
        self, prefills: list[_Prefill], decodes: list[_Decode], home: Placement | None
    ) -> Iterator[_Option]:
        """A hand-off between the best of both roles, or the session's own where they are nearly as good."""
        if not prefills:
            return
        p, d = min(prefills), min(decodes)
        if home is not None:
            p = next((o for o in prefills if o.worker_id == home.prefill_id and o.is_nearly(p)), p)
            d = next((o for o in decodes if o.worker_id == home.decode_id and o.is_nearly(d)), d)
        yield self._option(p, d, d.handed_end_s, PlacementKind.DISAGGREGATED)

    def _local_options(
        self, request: RoutingRequest, prefills: list[_Prefill], decodes: list[_Decode]
    ) -> Iterator[_Option]:
        """Each decode worker that may compute the prompt itself."""
        is_busy = all(p.wait_s for p in prefills)
        for d in decodes:
            if not prefills:
                yield self._option(d.own, d, d.local_end_s, PlacementKind.LOCAL_NO_PREFILL)
            elif d.own.first_token_s <= self._objectives.tpot_s:
                is_cached = 2 * d.own.num_cached_tokens >= request.work.num_prompt_tokens
                yield self._option(
                    d.own, d, d.local_end_s, PlacementKind.LOCAL_CACHED if is_cached else PlacementKind.LOCAL_SHORT
                )
            elif is_busy:
                yield self._option(
                    d.own, d, d.local_end_s, PlacementKind.LOCAL_BESIDE if d.num_others else PlacementKind.LOCAL_IDLE
                )

    def _option(self, p: _Prefill, d: _Decode, end_s: float, kind: PlacementKind) -> _Option:
        first_s = p.first_token_s
        num_missed = (first_s > self._objectives.ttft_s) + d.misses_tpot
        is_local = kind is not PlacementKind.DISAGGREGATED
        return _Option(num_missed, first_s + end_s, is_local, d.worker_id, p, kind, d.own.num_cached_tokens)

    def _place(self, option: _Option, request: RoutingRequest, *, by_session: bool, has_prefill: bool) -> Placement:
        p, kind = option.prefill, PlacementKind.SESSION if by_session else option.kind
        cached = f", {p.num_cached_tokens} of {request.work.num_prompt_tokens} cached" if p.num_cached_tokens else ""
        session = ", where its session is" if by_session else ""
        when = f"first token predicted after {1000 * p.first_token_s:.0f} ms{cached}{session}"
        if not option.is_local:
            present = option.num_present_tokens
            return disaggregated(p.worker_id, option.decode_id, when, p.num_cached_tokens, kind, present)
        if not has_prefill:
            return local(p.worker_id, num_cached_tokens=p.num_cached_tokens, kind=kind)
        return local(p.worker_id, when, p.num_cached_tokens, kind)

    def _weigh_prefill(
        self, worker: Candidate, cost: StepCost, request: RoutingRequest, time_share: float = 1.0
    ) -> _Prefill:
        """`time_share`: of the worker's time, what prompts get."""
        num_tokens = request.work.num_prompt_tokens
        cached = min(worker.num_cached_tokens(request.prompt), num_tokens - 1) if request.uses_cache else 0
        load = self._ledger[worker.worker_id]
        wait_s = cost.of(load.prompts) / time_share if load.num_prompts else 0.0
        own_s = cost.of_prompt(num_tokens - cached, cached)
        return _Prefill(wait_s + own_s / time_share, worker.worker_id, wait_s, own_s, cached)

    def _weigh_decode(self, worker: Candidate, cost: StepCost, request: RoutingRequest, num_tokens: float) -> _Decode:
        work, load = request.work, self._ledger[worker.worker_id]
        step_s = cost.of_sequences(
            load.sequences.num_sequences + work.num_sequences,
            load.sequences.num_kv_tokens + work.num_sequences * work.num_prompt_tokens,
        )
        num_missing = load.num_tokens + work.num_output_tokens - worker.kv_tokens
        # Room comes as others end: each holds its share of what is promised, for as long as an output like this takes.
        room_s = 0.0
        if num_missing > 0 and load.num_tokens:
            room_s = min(1.0, num_missing / load.num_tokens) * num_tokens * step_s
        own = self._weigh_prefill(worker, cost, request, self._time_share(cost, load))
        num_handed = work.num_prompt_tokens - own.num_cached_tokens
        handoff_s = num_handed * self._handoff_s / self._handed_tokens if self._handed_tokens else 0.0
        # Those who decode, and those whose prompts are before this one; prompts that others compute may take longer.
        end_s, num_others = room_s + num_tokens * step_s, load.decoding.num_sequences + load.num_prompts
        misses_tpot = step_s > self._objectives.tpot_s
        # They would have had the step anyway: it lasts longer by what is not fixed of it.
        local_end_s = end_s + num_others * (own.own_s - cost.fixed_s)
        return _Decode(misses_tpot, handoff_s + end_s, worker.worker_id, local_end_s, num_others, own)

    def _time_share(self, cost: StepCost, load: Load) -> float:
        """What a decode worker has for prompts: beside sequences, its steps are filled up to their pace."""
        if not load.decoding.num_sequences:
            return 1.0
        step_s = cost.of_sequences(load.decoding.num_sequences, load.decoding.num_kv_tokens)
        return max(_LEAST_SHARE, 1 - step_s / (PACE_SHARE * self._objectives.tpot_s))

    def _costs_of(self, workers: Sequence[Candidate]) -> dict[str, StepCost]:
        """By id; nothing while nobody knows anything."""
        told = [(w.worker_id, w.step_cost) for w in workers]
        if told != self._told:
            self._told, self._costs = told, _filled(told)
        return self._costs


def _filled(told: Sequence[tuple[str, StepCost | None]]) -> dict[str, StepCost]:
    """Each worker's, with what the others know where it knows nothing."""
    known = [cost for _, cost in told if cost is not None]
    if not known:
        return {}
    mean = usual(known)
    return {worker_id: mean if cost is None else cost.filled(mean) for worker_id, cost in told}
