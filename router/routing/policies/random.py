"""Any prefill worker and any decode worker, each as likely as the others."""

from __future__ import annotations

from router.routing.candidate_pool import of_revision
from router.routing.load_tracker import Placement
from router.routing.policies.interface import (
    Candidates,
    Policy,
    RoutingRequest,
    disaggregated,
    local,
)


class Random(Policy):
    """Keeps no state."""

    def choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        choice = self.context.rng.choice
        chosen = choice(decode)
        prefill = of_revision(prefill, chosen.weights_revision)
        if not prefill:
            return local(chosen.worker_id)
        return disaggregated(choice(prefill).worker_id, chosen.worker_id, "at random")
