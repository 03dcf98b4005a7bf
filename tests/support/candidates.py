"""Workers as a policy sees them, and requests that are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.step_cost import StepCost
from router.routing.load_tracker import RequestLoad
from router.routing.policies.interface import RoutingRequest, SessionKey
from router.routing.prefix_index import PrefixIndex, PromptHashes


@dataclass(frozen=True)
class FakeCandidate:
    """`cached`: tokens of any prompt that it has."""

    worker_id: str
    step_cost: StepCost | None = None
    kv_tokens: int = 1_000_000
    max_num_seqs: int = 0
    cached: int = 0
    weights_revision: str = ""
    prefix_index: PrefixIndex | None = None
    prefix_format: str = ""

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        return self.cached


def named(*worker_ids: str) -> list[FakeCandidate]:
    return [FakeCandidate(worker_id) for worker_id in worker_ids]


def request_of(
    num_prompt_tokens: int, *, n: int = 1, most_output: int = 100, uses_cache: bool = True, session: str = ""
) -> RoutingRequest:
    prompt: Sequence[int] = range(num_prompt_tokens)
    work = RequestLoad(num_prompt_tokens, n, num_prompt_tokens + n * most_output)
    key = SessionKey("", session) if session else None
    return RoutingRequest(work, PromptHashes(prompt, b""), uses_cache, key)
