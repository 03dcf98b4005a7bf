"""What policies are given and what they give back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.step_cost import StepCost
from router.ledger import Placement, Work
from router.prefix_index import PromptHashes


@dataclass(frozen=True)
class Objectives:
    """What requests should keep, in seconds: time to first token, and time per output token after it."""

    ttft_s: float = 0.5
    tpot_s: float = 0.05


@dataclass(frozen=True)
class Request:
    """What a policy may know of a request."""

    work: Work
    prompt: PromptHashes
    uses_cache: bool = True


class Candidate(Protocol):
    """A worker that is ready."""

    @property
    def worker_id(self) -> str: ...

    @property
    def step_cost(self) -> StepCost | None:
        """What it has learned of its own steps; None: nothing yet."""
        ...

    @property
    def kv_tokens(self) -> int:
        """That its pool holds."""
        ...

    def num_cached_tokens(self, prompt: PromptHashes) -> int:
        """Of a prompt, in its prefix cache, as far as it has told."""
        ...


class Policy(ABC):
    """One of the others in this folder."""

    @abstractmethod
    def choose(self, request: Request, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement:
        """There is at least one decode worker. Without a prefill worker, decode computes the prompt."""

    def finished(self, num_output_tokens: int) -> None:  # noqa: B027 (most learn nothing from it)
        """A sequence has ended after so many tokens."""


def local(decode_id: str, why: str = "there is no prefill worker", num_cached_tokens: int = 0) -> Placement:
    """The decode worker computes the prompt."""
    return Placement(None, decode_id, f"local prefill on {decode_id}: {why}", num_cached_tokens)


def disaggregated(prefill_id: str, decode_id: str, why: str, num_cached_tokens: int = 0) -> Placement:
    return Placement(prefill_id, decode_id, f"disaggregated: {prefill_id} -> {decode_id}, {why}", num_cached_tokens)
