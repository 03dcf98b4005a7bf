"""Least work: the prefill worker with fewest prompt tokens to compute, the decode worker with fewest sequences."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.load_tracker import LoadTracker, Placement
from router.routing.policies.interface import Candidate, Policy, RoutingRequest, disaggregated, local


class LeastLoaded(Policy):
    """Equals are taken by id."""

    def __init__(self, ledger: LoadTracker) -> None:
        self._ledger = ledger

    def choose(self, request: RoutingRequest, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement:
        decode_id = min((d.worker_id for d in decode), key=self._decode_load)
        if not prefill:
            return local(decode_id)
        prefill_id = min((p.worker_id for p in prefill), key=self._prefill_load)
        return disaggregated(prefill_id, decode_id, "least work")

    def _decode_load(self, worker_id: str) -> tuple[int, int, str]:
        load = self._ledger[worker_id]
        return load.sequences.num_sequences, load.num_tokens, worker_id

    def _prefill_load(self, worker_id: str) -> tuple[int, str]:
        return self._ledger[worker_id].prompts.num_prompt_tokens, worker_id
