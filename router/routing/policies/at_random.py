"""Any prefill worker and any decode worker, each as likely as the others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.routing.load_tracker import Placement
from router.routing.policies.interface import Candidate, Policy, RoutingRequest, disaggregated, local


class AtRandom(Policy):
    """Remembers nothing."""

    def choose(self, request: RoutingRequest, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement:
        decode_id = random.choice(decode).worker_id
        if not prefill:
            return local(decode_id)
        return disaggregated(random.choice(prefill).worker_id, decode_id, "at random")
