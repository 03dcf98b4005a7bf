"""Least work: the prefill worker with fewest prompt tokens to compute, the decode worker with fewest sequences."""

from __future__ import annotations

from router.routing.load_tracker import Placement
from router.routing.policies.interface import Candidates, Policy, RoutingRequest, least_loaded


class LeastLoaded(Policy):
    """Ties go to the lowest id."""

    def choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        return least_loaded(self.context.loads, prefill, decode)
