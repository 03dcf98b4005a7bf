"""Each worker of a role in turn, by id, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.load_tracker import Placement
from router.routing.policies.interface import (
    Candidates,
    Policy,
    RoutingContext,
    RoutingRequest,
    disaggregated,
    local,
    with_weights_of,
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
        prefill = with_weights_of(chosen, prefill)
        if not prefill:
            return local(self._last_decode)
        self._last_prefill = _next(self._last_prefill, prefill).worker_id
        return disaggregated(self._last_prefill, self._last_decode, "in turn")


def _next(last: str, candidates: Sequence[Candidate]) -> Candidate:
    in_order = sorted(candidates, key=lambda c: c.worker_id)
    return next((c for c in in_order if c.worker_id > last), in_order[0])
