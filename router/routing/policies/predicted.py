"""Chooses the workers on which a request should finish first, by what each worker has learned of its own steps.

    first token  = the prompts queued on the prefill worker + this prompt's tokens that its prefix cache lacks
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
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cluster.step_cost import PACE_SHARE, StepCost, usual
from router.routing.load_tracker import Load, Placement, PlacementKind, RequestLoad
from router.routing.policies.interface import (
    Candidates,
    Policy,
    RoutingContext,
    RoutingRequest,
    SessionKey,
    by_revision,
    disaggregated,
    least_loaded,
    local,
)
from router.routing.prefix_index import Candidate

MOST_SESSIONS = 16_384
"""Beyond this, the session whose last turn is oldest is forgotten."""
NEARLY = 1.05
"""A session's own workers are preferred while they take at most this many times the soonest completion."""
_LEAST_SHARE = 0.02
"""Least share of a decode worker's time that prompts get, even where the pace leaves nothing."""
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
        """Where the last turn was placed; None for no session, or an unknown one."""
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

    def is_nearly(self, best: _Prefill) -> bool:
        return self.first_token_s <= NEARLY * best.first_token_s


class _Decode(NamedTuple):
    """Prediction for an output on one worker."""

    misses_tpot: bool
    handed_end_s: float
    """Seconds from the first token to the last, hand-off included."""
    worker_id: str
    local_end_s: float
    """As `handed_end_s` if this worker also computes the prompt, plus the delay that adds to every running sequence."""
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

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        self._loads = context.loads
        self._sessions = Sessions()
        self._reported_costs: list[tuple[str, StepCost | None]] = []
        self._costs: dict[str, StepCost] = {}
        """Derived from `_reported_costs`, which changes less often than it is needed."""
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
        costs = self._costs_of([*prefill, *decode])
        if not costs:
            return least_loaded(self._loads, prefill, decode)
        num_tokens = self.context.lengths.expected(request.work.most_output)
        groups = [
            (
                [self._weigh_prefill(p, costs[p.worker_id], request) for p in prefills],
                [self._weigh_decode(d, costs[d.worker_id], request, num_tokens) for d in decodes],
            )
            for prefills, decodes in by_revision(prefill, decode)
        ]
        here = [o for group in groups for o in self._local_options(request, *group)]
        chosen = best = min([*(o for group in groups for o in self._handed_options(*group, None)), *here])
        home = self._sessions.home_of(request.session)
        if home is not None and not best.is_home(home):
            handed = (o for group in groups for o in self._handed_options(*group, home))
            nearly = [o for o in (*handed, *here) if o.is_nearly(best)]
            chosen = min(nearly, key=lambda o: (not o.is_home(home), o.decode_id != home.decode_id, o), default=best)
        return self._place(chosen, request, by_session=chosen != best, has_prefill=bool(prefill))

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
        return _Option(num_missed, first_s + end_s, is_local, d.worker_id, p, kind, d.own.num_cached_tokens)

    def _place(self, option: _Option, request: RoutingRequest, *, by_session: bool, has_prefill: bool) -> Placement:
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
        self, worker: Candidate, cost: StepCost, request: RoutingRequest, time_share: float = 1.0
    ) -> _Prefill:
        """`time_share`: share of the worker's time that prompts get."""
        num_tokens = request.work.num_prompt_tokens
        cached = min(worker.num_cached_tokens(request.prompt), num_tokens - 1) if request.uses_cache else 0
        load = self._loads[worker.worker_id]
        wait_s = cost.of(load.prompts) / time_share if load.num_prompts else 0.0
        own_s = cost.of_prompt(num_tokens - cached, cached)
        return _Prefill(wait_s + own_s / time_share, worker.worker_id, wait_s, own_s, cached)

    def _weigh_decode(self, worker: Candidate, cost: StepCost, request: RoutingRequest, num_tokens: float) -> _Decode:
        work, load = request.work, self._loads[worker.worker_id]
        step_s = cost.of_sequences(
            load.sequences.num_sequences + work.num_sequences,
            load.sequences.num_kv_tokens + work.num_sequences * work.num_prompt_tokens,
        )
        num_missing = load.num_tokens + work.num_output_tokens - worker.kv_tokens
        # Blocks come free as others end: each holds its share of what is promised for as long as such an output takes.
        room_s = 0.0
        if num_missing > 0 and load.num_tokens:
            room_s = min(1.0, num_missing / load.num_tokens) * num_tokens * step_s
        own = self._weigh_prefill(worker, cost, request, self._time_share(cost, load))
        num_handed = work.num_prompt_tokens - own.num_cached_tokens
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

    def _costs_of(self, workers: Sequence[Candidate]) -> dict[str, StepCost]:
        """By worker id; empty while no worker has learned anything."""
        reported = [(w.worker_id, w.step_cost) for w in workers]
        if reported != self._reported_costs:
            self._reported_costs, self._costs = reported, _filled(reported)
        return self._costs


def _filled(reported: Sequence[tuple[str, StepCost | None]]) -> dict[str, StepCost]:
    """Each worker's cost; what it has not learned is filled in from the others."""
    known = [cost for _, cost in reported if cost is not None]
    if not known:
        return {}
    mean = usual(known)
    return {worker_id: mean if cost is None else cost.filled(mean) for worker_id, cost in reported}
