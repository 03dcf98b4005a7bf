"""Workers as a policy sees them, and requests that are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.step_cost import StepCost
from router.ledger import Work
from router.policies import Request
from router.prefix_index import PromptHashes
from router.sessions import SessionKey


@dataclass(frozen=True)
class FakeCandidate:
    """`cached`: tokens of any prompt that it has."""

    worker_id: str
    step_cost: StepCost | None = None
    kv_tokens: int = 1_000_000
    cached: int = 0

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        return self.cached


def named(*worker_ids: str) -> list[FakeCandidate]:
    return [FakeCandidate(worker_id) for worker_id in worker_ids]


def request_of(
    num_prompt_tokens: int, *, n: int = 1, most_output: int = 100, uses_cache: bool = True, session: str = ""
) -> Request:
    prompt: Sequence[int] = range(num_prompt_tokens)
    work = Work(num_prompt_tokens, n, num_prompt_tokens + n * most_output)
    key = SessionKey("", session) if session else None
    return Request(work, PromptHashes(prompt, b""), uses_cache, key)
