"""The interface of routing policies: what they receive, and the placements that they return."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.config.schema import RouterSection, SloSection
from router.routing.demand import OutputLengths
from router.routing.fetch_times import FetchTimes
from router.routing.load_tracker import LoadTracker, Placement, PlacementKind, RequestLoad
from router.routing.prefix_index import Candidate, PromptHashes


@dataclass(frozen=True)
class Objectives:
    """Latencies that requests should keep, in seconds: time to first token, and time per output token after it."""

    ttft_s: float = 0.5
    tpot_s: float = 0.05

    @classmethod
    def of(cls, slo: SloSection) -> Objectives:
        return cls(slo.ttft_ms / 1000, slo.tpot_ms / 1000)

    def are_kept(self, first_token_s: float, last_token_s: float, num_tokens: int) -> bool:
        """Whether a request kept them; times count from its arrival, `num_tokens` is its longest output."""
        later_s = self.tpot_s * max(0, num_tokens - 1)
        return first_token_s <= self.ttft_s and last_token_s - first_token_s <= later_s


@dataclass
class RoutingContext:
    """Knowledge on which one router decides; admission and the policy share it."""

    loads: LoadTracker = field(default_factory=LoadTracker)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    objectives: Objectives = field(default_factory=Objectives)
    """May be replaced while the router runs, as `limits` may: read both for each decision."""
    limits: RouterSection = field(default_factory=RouterSection)
    """The limits of how much the router takes on at one time."""
    rng: random.Random = field(default_factory=random.Random)
    """Whatever the router draws at random."""
    fetch_times: FetchTimes = field(default_factory=FetchTimes)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class SessionKey:
    """A client's session: the same id of two tenants is two sessions."""

    tenant: str
    session_id: str


@dataclass(frozen=True)
class RoutingRequest:
    """A request as a policy sees it."""

    work: RequestLoad
    prompt: PromptHashes
    uses_cache: bool = True
    session: SessionKey | None = None
    """None: the client named none."""


Candidates = Sequence[Candidate]
"""The router's own are a `CandidatePool`, which need not be looked at one by one."""


class Policy(ABC):
    """Chooses the workers of each request."""

    weighs_fetches = False
    """Its placements say what is fetched first."""

    def __init__(self, context: RoutingContext) -> None:
        self.context = context

    @abstractmethod
    def choose(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> Placement:
        """There is at least one decode worker. Where no prefill worker has its weights, it computes the prompt."""

    def few(self, request: RoutingRequest, prefill: Candidates, decode: Candidates) -> tuple[Candidates, Candidates]:
        """Returns those at which `choose` would look, for a choice in which some may not be chosen."""
        return prefill, decode

    def on_handoff(self, placement: Placement, work: RequestLoad, exposed_s: float) -> None:  # noqa: B027 (optional)
        """A hand-off is complete; it kept the client waiting `exposed_s` longer for the second token."""

    def on_placed(self, request: RoutingRequest, placement: Placement) -> None:  # noqa: B027 (optional)
        """A request was placed, by `choose` or after a failure."""

    def on_worker_lost(self, worker_id: str) -> None:  # noqa: B027 (optional)
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
