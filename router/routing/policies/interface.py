"""What policies are given and what they give back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.step_cost import StepCost
from router.routing.load_tracker import Placement, PlacementKind, RequestLoad
from router.routing.prefix_index import PromptHashes
from router.routing.sessions import SessionKey


@dataclass(frozen=True)
class Objectives:
    """What requests should keep, in seconds: time to first token, and time per output token after it."""

    ttft_s: float = 0.5
    tpot_s: float = 0.05

    def are_kept(self, first_token_s: float, last_token_s: float, num_tokens: int) -> bool:
        """By a request with these seconds after its arrival, whose longest output has so many tokens."""
        later_s = self.tpot_s * max(0, num_tokens - 1)
        return first_token_s <= self.ttft_s and last_token_s - first_token_s <= later_s


@dataclass(frozen=True)
class RoutingRequest:
    """What a policy may know of a request."""

    work: RequestLoad
    prompt: PromptHashes
    uses_cache: bool = True
    session: SessionKey | None = None
    """None: the client named none."""


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
    def choose(self, request: RoutingRequest, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement:
        """There is at least one decode worker. Without a prefill worker, decode computes the prompt."""

    def handed_over(self, placement: Placement, work: RequestLoad, exposed_s: float) -> None:  # noqa: B027 (most learn nothing from it)
        """A prompt has gone from one worker to another; its client waited so long more for the second token."""

    def set_objectives(self, objectives: Objectives) -> None:  # noqa: B027 (most look at none)
        """From now on."""

    def placed(self, request: RoutingRequest, placement: Placement) -> None:  # noqa: B027
        """So it was done, by `choose` or after a failure."""

    def lost(self, worker_id: str) -> None:  # noqa: B027
        """A worker is gone, and its cache with it."""


def local(
    decode_id: str,
    why: str = "there is no prefill worker",
    num_cached_tokens: int = 0,
    kind: PlacementKind = PlacementKind.LOCAL_NO_PREFILL,
) -> Placement:
    """The decode worker computes the prompt."""
    return Placement(None, decode_id, f"local prefill on {decode_id}: {why}", num_cached_tokens, kind)


def disaggregated(
    prefill_id: str,
    decode_id: str,
    why: str,
    num_cached_tokens: int = 0,
    kind: PlacementKind = PlacementKind.DISAGGREGATED,
    num_present_tokens: int = 0,
) -> Placement:
    reason = f"disaggregated: {prefill_id} -> {decode_id}, {why}"
    return Placement(prefill_id, decode_id, reason, num_cached_tokens, kind, num_present_tokens)
