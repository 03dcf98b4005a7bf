"""Any prefill worker and any decode worker, each as likely as the others."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.ledger import Placement
from router.policies.seam import Candidate, Request, disaggregated, local


class AtRandom:
    """`seed` is for tests."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, request: Request, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement:
        decode_id = self._random.choice(decode).worker_id
        if not prefill:
            return local(decode_id)
        return disaggregated(self._random.choice(prefill).worker_id, decode_id, "at random")

    def finished(self, num_output_tokens: int) -> None:
        """What has ended says nothing here."""
