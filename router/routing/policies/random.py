"""Any prefill worker and any decode worker, each as likely as the others."""

from __future__ import annotations

import random

from router.routing.load_tracker import Placement
from router.routing.policies.interface import Candidates, Policy, RoutingRequest, disaggregated, local


class Random(Policy):
    """Keeps no state."""

    def choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        decode_id = random.choice(decode).worker_id
        if not prefill:
            return local(decode_id)
        return disaggregated(random.choice(prefill).worker_id, decode_id, "at random")
