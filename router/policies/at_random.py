"""Any prefill worker and any decode worker, each as likely as the others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.ledger import Placement
from router.policies.seam import Candidate, Policy, Request, disaggregated, local


class AtRandom(Policy):
    """Remembers nothing."""

    def choose(self, request: Request, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement:
        decode_id = random.choice(decode).worker_id
        if not prefill:
            return local(decode_id)
        return disaggregated(random.choice(prefill).worker_id, decode_id, "at random")
