"""Least work: the prefill worker with fewest prompt tokens to compute, the decode worker with fewest sequences."""

from __future__ import annotations

from router.routing.candidate_pool import first, of_revision
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


class LeastLoaded(Policy):
    """Ties go to the worker that holds fewer tokens, then to the lowest id."""

    def __init__(self, context: RoutingContext) -> None:
        super().__init__(context)
        self._loads = context.loads

    def choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        chosen = first(decode, self._sequences)
        prefill = of_revision(prefill, chosen.weights_revision)
        if not prefill:
            return local(chosen.worker_id)
        return disaggregated(first(prefill, self._prompt_tokens).worker_id, chosen.worker_id, "least work")

    def _sequences(self, worker: Candidate) -> tuple[int, int]:
        load = self._loads[worker.worker_id]
        return load.sequences.num_sequences, load.num_tokens

    def _prompt_tokens(self, worker: Candidate) -> int:
        return self._loads[worker.worker_id].prompts.num_prompt_tokens
