"""Chooses the workers on which a request should finish first, by what each worker has learned of its own steps.

    first token  = the prompts queued on the prefill worker + this prompt's tokens that its prefix cache lacks
                   or: those that no other one has either, once the others are fetched, where that is sooner
    hand-off     = measured time per token moved, for the prompt's tokens that the decode worker's prefix cache lacks
    completion   = first token + hand-off + expected output tokens * the decode worker's step with the request in it
                   + the wait for KV blocks, where the decode worker's pool is promised to others up to the end

Pairs that keep the objectives come before those that do not; among equals the lowest completion wins. A decode worker
computes a prompt itself when that finishes sooner and delays its other sequences by no more than one token may take,
or when every prefill worker is busy: beside running sequences a prompt gets the time that their pace leaves, and the
delay that it adds to each of them is added to its own completion. A session returns to the workers of its last turn
where that finishes as soon as elsewhere, or nearly.
What a worker has not learned yet is taken from the others; while no worker has learned anything, the least loaded are
chosen. The workers of a role are ranked apart and the best of each are paired, so a choice looks at each worker once;
where workers have different weights, this is done for each revision of them, and the best pair of all wins.

Of many workers only a few are looked at: those that hold the longest beginnings of the prompt, of equals the least busy
ones; the least busy ones of all; and the session's. Where steps cost the same everywhere, the best is among them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from cluster.step_cost import PACE_SHARE, StepCost, usual
from router.routing.candidate_pool import FEW, CandidatePool, Key, by_revision
from router.routing.demand import FIRST_GUESS_TOKENS
from router.routing.fetch_plan import Holding, Work, fetch_for, holders_of, with_fetch
from router.routing.load_tracker import Fetch, Load, Placement, PlacementKind, RequestLoad
from router.routing.policies.interface import (
    Candidates,
    Policy,
    RoutingContext,
    RoutingRequest,
    SessionKey,
    disaggregated,
    local,
)
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.prefix_index import Candidate

MOST_SESSIONS = 16_384
"""Beyond this, the session whose last turn is oldest is forgotten."""
NEARLY = 1.05
"""A session's own workers are preferred while they take at most this many times the soonest completion."""
_LEAST_SHARE = 0.02
"""Least share of a decode worker's time that prompts get, even where the pace leaves nothing."""
_BY_LOAD, _BY_CACHE, _OF_EQUALS = 4, 6, 2
"""Workers that are looked at, where there are many: the number of the least busy ones, the number of those chosen for
what they have cached, and the most of these that have equally much."""
_USUAL_TOKENS, _MANY_TOKENS = 1024, 8192
"""Prompts by which workers are compared before the request is known."""
_MEMORY = 0.95
"""Weight that earlier hand-offs keep when another one completes."""


class Sessions:
    """The workers of each session's last turn, for at most `most` sessions."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._homes: OrderedDict[SessionKey, Placement] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home_of(self, key: SessionKey | None) -> Placement | None:
        """Returns where the last turn was placed; None for no session, or an unknown one."""
        return self._homes.get(key) if key is not None else None

    def on_placed(self, key: SessionKey | None, placement: Placement) -> None:
        if key is None:
            return
        self._homes[key] = placement
        self._homes.move_to_end(key)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def on_worker_lost(self, worker_id: str) -> None:
        """Forgets the sessions that were there: their cached blocks are gone."""
        for key in [k for k, home in self._homes.items() if worker_id in (home.prefill_id, home.decode_id)]:
            del self._homes[key]


class _Prefill(NamedTuple):
    """Prediction for a prompt on one worker; here and below, tuples sort by preference."""

    first_token_s: float
    worker_id: str
    wait_s: float
    own_s: float
    """Time of the worker's steps for this prompt alone."""
    num_cached_tokens: int
    """With those that are fetched first."""
    num_present_tokens: int
    fetch: Fetch | None = None

    def is_nearly(self, best: _Prefill) -> bool:
        return self.first_token_s <= NEARLY * best.first_token_s


class _Decode(NamedTuple):
    """Prediction for an output on one worker."""

    misses_tpot: bool
    handed_end_s: float
    """Seconds from the first token to the last, hand-off included."""
    worker_id: str
    local_end_s: float
    """Like `handed_end_s` if this worker also computes the prompt, plus the delay for every running sequence."""
    num_others: int
    own: _Prefill
    """Prediction for the prompt on this worker."""

    def is_nearly(self, best: _Decode) -> bool:
        return self.misses_tpot == best.misses_tpot and self.handed_end_s <= NEARLY * best.handed_end_s


class _Option(NamedTuple):
    """One possible placement of a request."""

    num_missed: int
    completion_s: float
    is_local: bool
    decode_id: str
    prefill: _Prefill
    kind: PlacementKind
    num_present_tokens: int
    """Prompt tokens that the decode worker's prefix cache holds."""

    def is_home(self, home: Placement) -> bool:
        return self.decode_id == home.decode_id and self.prefill.worker_id in (home.prefill_id, home.decode_id)

    def is_nearly(self, best: _Option) -> bool:
        return self.num_missed == best.num_missed and self.completion_s <= NEARLY * best.completion_s


class Predicted(Policy):
    """Keeps the sessions, and a moving average of what hand-offs cost."""

    weighs_fetches = True

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        self._loads = context.loads
        self._sessions = Sessions()
        self._least_loaded = LeastLoaded(context)
        self._mean = StepCost(0.0, 0.0, 0.0, 0.0, 0.0)
        """The cost that the last choice took for a worker that has measured nothing."""
        self._handoff_tokens = self._handoff_s = 0.0
        """Sums over recent hand-offs; older ones fade."""

    def on_handoff(self, placement: Placement, work: RequestLoad, exposed_s: float) -> None:
        num_tokens = work.num_prompt_tokens - placement.num_present_tokens
        self._handoff_tokens = _MEMORY * self._handoff_tokens + num_tokens
        self._handoff_s = _MEMORY * self._handoff_s + exposed_s

    def on_placed(self, request: RoutingRequest, placement: Placement) -> None:
        self._sessions.on_placed(request.session, placement)

    def on_worker_lost(self, worker_id: str) -> None:
        self._sessions.on_worker_lost(worker_id)

    def choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        mean = _mean_cost(prefill, decode)
        if mean is None:
            placement = self._least_loaded.choose(request, prefill, decode)
            return with_fetch(self.context, placement, request, prefill, decode)
        self._mean = mean
        chosen, best = self._best(request, prefill, decode)
        return self._place(chosen, request, by_session=chosen != best, has_prefill=bool(prefill))

    def few(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> tuple[Candidates, Candidates]:
        groups = [self._few_of_each(request, *group) for group in by_revision(prefill, decode)]
        return [p for prefills, _ in groups for p in prefills], [d for _, decodes in groups for d in decodes]

    def _best(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> tuple[_Option, _Option]:
        """Returns the option to take, and the one that ends soonest."""
        num_tokens = self.context.lengths.expected(request.work.most_output)
        groups = [
            (
                [self._weigh_prefill(p, request, holders) for p in prefills],
                [self._weigh_decode(d, request, num_tokens, holders) for d in decodes],
            )
            for group in by_revision(prefill, decode)
            for holders in (holders_of(self.context, request, *group),)
            for prefills, decodes in (self._few_of_each(request, *group),)
        ]
        here = [o for group in groups for o in self._local_options(request, *group)]
        chosen = best = min([*(o for group in groups for o in self._handed_options(*group, None)), *here])
        home = self._sessions.home_of(request.session)
        if home is not None and not best.is_home(home):
            handed = (o for group in groups for o in self._handed_options(*group, home))
            nearly = [o for o in (*handed, *here) if o.is_nearly(best)]
            chosen = min(nearly, key=lambda o: (not o.is_home(home), o.decode_id != home.decode_id, o), default=best)
        return chosen, best

    def _few_of_each(
        self, request: RoutingRequest, prefill: Candidates, decode: Candidates
    ) -> tuple[Iterable[Candidate], Iterable[Candidate]]:
        """Returns those of both roles, all with the same weights, among which the best pair should be."""
        return (
            self._few(prefill, request, self._long_prompt_s, self._prompt_s),
            self._few(decode, request, self._output_s, self._own_prompt_s),
        )

    def _few(self, candidates: Candidates, request: RoutingRequest, *keys: Key[Candidate]) -> Iterable[Candidate]:
        """`keys`: the ways in which a worker may be the least busy one; the last one is about a prompt."""
        if len(candidates) <= FEW or not isinstance(candidates, CandidatePool):
            return candidates
        found: dict[str, Candidate] = {}
        for key in keys:
            found |= {worker.worker_id: worker for worker in islice(candidates.ranked(key), _BY_LOAD)}
        if request.uses_cache:
            token_s = self._mean.prompt_token_s
            holders = candidates.holders(request.prompt, keys[-1], token_s, _OF_EQUALS, _BY_CACHE)
            found |= {worker.worker_id: worker for worker in holders}
        home = self._sessions.home_of(request.session)
        for worker_id in () if home is None else (home.prefill_id, home.decode_id):
            if worker_id is not None and (worker := candidates.get(worker_id)) is not None:
                found[worker_id] = worker
        return found.values()

    def _prompt_s(self, worker: Candidate) -> float:
        """Seconds until a prompt of usual length would be computed on a worker."""
        cost, load = self._cost_of(worker), self._loads[worker.worker_id]
        return cost.of(load.prompts) + cost.of_prompt(_USUAL_TOKENS, 0)

    def _long_prompt_s(self, worker: Candidate) -> float:
        """Does what `_prompt_s` does, for a long prompt: a fast worker is worth a longer wait to it."""
        cost, load = self._cost_of(worker), self._loads[worker.worker_id]
        return cost.of(load.prompts) + cost.of_prompt(_MANY_TOKENS, 0)

    def _output_s(self, worker: Candidate) -> float:
        """Seconds of an output's token on a worker, more where it waits for room."""
        cost, load = self._cost_of(worker), self._loads[worker.worker_id]
        size, num_kv_tokens = load.sequences, load.sequences.num_kv_tokens + _USUAL_TOKENS
        num_missing = load.num_tokens + 2 * _USUAL_TOKENS - worker.kv_tokens
        waits = min(1.0, num_missing / load.num_tokens) if num_missing > 0 and load.num_tokens else 0.0
        return (1 + waits) * cost.of_sequences(size.num_sequences + 1, num_kv_tokens)

    def _own_prompt_s(self, worker: Candidate) -> float:
        """Seconds until a usual request would be over on a decode worker alone, with what that takes from others."""
        cost, load = self._cost_of(worker), self._loads[worker.worker_id]
        own_s = cost.of_prompt(_USUAL_TOKENS, 0)
        num_others = load.decoding.num_sequences + load.num_prompts
        prompt_s = (cost.of(load.prompts) + own_s) / self._time_share(cost, load)
        return prompt_s + num_others * own_s + FIRST_GUESS_TOKENS * self._output_s(worker)

    def _handed_options(
        self, prefills: list[_Prefill], decodes: list[_Decode], home: Placement | None
    ) -> Iterator[_Option]:
        """The hand-off between the best of both roles, or the session's own where they are nearly as good."""
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
        """Decode workers that may compute the prompt themselves."""
        is_busy = all(p.wait_s for p in prefills)
        for d in decodes:
            if not prefills:
                yield self._option(d.own, d, d.local_end_s, PlacementKind.LOCAL_NO_PREFILL)
            elif d.own.first_token_s <= self.context.objectives.tpot_s:
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
        num_missed = (first_s > self.context.objectives.ttft_s) + d.misses_tpot
        is_local = kind is not PlacementKind.DISAGGREGATED
        return _Option(num_missed, first_s + end_s, is_local, d.worker_id, p, kind, d.own.num_present_tokens)

    def _place(self, option: _Option, request: RoutingRequest, *, by_session: bool, has_prefill: bool) -> Placement:
        placement = self._placement_of(option, request, by_session=by_session, has_prefill=has_prefill)
        return placement._replace(fetch=option.prefill.fetch)

    def _placement_of(
        self, option: _Option, request: RoutingRequest, *, by_session: bool, has_prefill: bool
    ) -> Placement:
        p, kind = option.prefill, PlacementKind.SESSION if by_session else option.kind
        cached = f", {p.num_cached_tokens} of {request.work.num_prompt_tokens} cached" if p.num_cached_tokens else ""
        session = ", where its session is" if by_session else ""
        when = f"first token predicted after {1000 * p.first_token_s:.0f} ms{cached}{session}"
        if not option.is_local:
            present = option.num_present_tokens
            return disaggregated(p.worker_id, option.decode_id, when, p.num_cached_tokens, kind, present)
        if option.kind is PlacementKind.LOCAL_NO_PREFILL:
            why = "no prefill worker has its weights" if has_prefill else "there is no prefill worker"
            return local(p.worker_id, why, p.num_cached_tokens, kind)
        return local(p.worker_id, when, p.num_cached_tokens, kind)

    def _weigh_prefill(
        self, worker: Candidate, request: RoutingRequest, holders: Sequence[Holding], time_share: float = 1.0
    ) -> _Prefill:
        """`time_share`: share of the worker's time that prompts get. `holders`: of what it may fetch."""
        cost, num_tokens = self._cost_of(worker), request.work.num_prompt_tokens
        cached = min(worker.num_cached_tokens(request.prompt), num_tokens - 1) if request.uses_cache else 0
        load = self._loads[worker.worker_id]
        begin_s = wait_s = cost.of(load.prompts) / time_share if load.num_prompts else 0.0
        work = Work(num_tokens, cost, wait_s, time_share)
        fetch, present = fetch_for(self.context, request, work, worker, holders), cached
        if fetch is not None:
            cached, begin_s = fetch.num_useful, max(wait_s, fetch.seconds)
        own_s = cost.of_prompt(num_tokens - cached, cached)
        return _Prefill(begin_s + own_s / time_share, worker.worker_id, wait_s, own_s, cached, present, fetch)

    def _weigh_decode(
        self, worker: Candidate, request: RoutingRequest, num_tokens: float, holders: Sequence[Holding]
    ) -> _Decode:
        cost, work, load = self._cost_of(worker), request.work, self._loads[worker.worker_id]
        step_s = cost.of_sequences(
            load.sequences.num_sequences + work.num_sequences,
            load.sequences.num_kv_tokens + work.num_sequences * work.num_prompt_tokens,
        )
        num_missing = load.num_tokens + work.num_output_tokens - worker.kv_tokens
        # Blocks come free as others end: each holds its share of what is promised for as long as such an output takes.
        room_s = 0.0
        if num_missing > 0 and load.num_tokens:
            room_s = min(1.0, num_missing / load.num_tokens) * num_tokens * step_s
        own = self._weigh_prefill(worker, request, holders, self._time_share(cost, load))
        num_handed = work.num_prompt_tokens - own.num_present_tokens
        handoff_s = num_handed * self._handoff_s / self._handoff_tokens if self._handoff_tokens else 0.0
        # Sequences that decode here, and prompts queued here; prompts that other workers compute may take longer.
        end_s, num_others = room_s + num_tokens * step_s, load.decoding.num_sequences + load.num_prompts
        misses_tpot = step_s > self.context.objectives.tpot_s
        # The others would have had the step anyway: it takes longer by its variable part.
        local_end_s = end_s + num_others * (own.own_s - cost.fixed_s)
        return _Decode(misses_tpot, handoff_s + end_s, worker.worker_id, local_end_s, num_others, own)

    def _time_share(self, cost: StepCost, load: Load) -> float:
        """Share of a decode worker's time for prompts: its steps are filled up to the pace of its sequences."""
        if not load.decoding.num_sequences:
            return 1.0
        step_s = cost.of_sequences(load.decoding.num_sequences, load.decoding.num_kv_tokens)
        return max(_LEAST_SHARE, 1 - step_s / (PACE_SHARE * self.context.objectives.tpot_s))

    def _cost_of(self, worker: Candidate) -> StepCost:
        """A worker's cost; what it has not learned is filled in from the others."""
        cost = worker.step_cost
        if cost is None:
            return self._mean
        return cost.filled(self._mean)


def _mean_cost(prefill: Candidates, decode: Candidates) -> StepCost | None:
    """None while no worker has learned anything."""
    if isinstance(prefill, CandidatePool) and isinstance(decode, CandidatePool) and len(prefill) + len(decode) > FEW:
        return prefill.usual_cost.merge(decode.usual_cost).value
    known = [cost for worker in (*prefill, *decode) if (cost := worker.step_cost) is not None]
    return usual(known) if known else None
