"""Each worker of a role in turn, by id, whatever its load."""

from __future__ import annotations

from router.routing.candidate_pool import CandidatePool, of_revision
from router.routing.load_tracker import Placement
from router.routing.policies.interface import (
    Candidates,
    Policy,
    RoutingContext,
    RoutingRequest,
    disaggregated,
    local,
)
from router.routing.prefix_index import Candidate


class RoundRobin(Policy):
    """The next worker is the first id after the last one, so that workers that come or go do not shift the others."""

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        self._last_prefill = self._last_decode = ""

    def choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        chosen = _next(self._last_decode, decode)
        self._last_decode = chosen.worker_id
        prefill = of_revision(prefill, chosen.weights_revision)
        if not prefill:
            return local(self._last_decode)
        self._last_prefill = _next(self._last_prefill, prefill).worker_id
        return disaggregated(self._last_prefill, self._last_decode, "in turn")


def _next(last: str, candidates: Candidates) -> Candidate:
    if isinstance(candidates, CandidatePool):
        found: Candidate = candidates.after(last)
        return found
    in_order = sorted(candidates, key=lambda c: c.worker_id)
    return next((c for c in in_order if c.worker_id > last), in_order[0])
