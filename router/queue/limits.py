"""How much the router takes on at one time, and which latencies requests should keep. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.config.choices import PolicyName


@dataclass(frozen=True)
class Objectives:
    """Latencies that requests should keep, in seconds: time to first token, and time per output token after it."""

    ttft_s: float = 0.5
    tpot_s: float = 0.05

    def are_kept(self, first_token_s: float, last_token_s: float, num_tokens: int) -> bool:
        """Whether a request kept them; times count from its arrival, `num_tokens` is its longest output."""
        later_s = self.tpot_s * max(0, num_tokens - 1)
        return first_token_s <= self.ttft_s and last_token_s - first_token_s <= later_s


@dataclass(frozen=True)
class Limits:
    """How much the router takes on at one time."""

    max_running_requests: int
    max_queued_requests: int
    queue_timeout_s: float
    dead_after_s: float = 3.0
    """A worker that has been silent for this long is lost."""
    needs_prefill: bool = True
    """Nothing runs without a prefill worker; False: decode workers compute prompts while there is none."""
    policy: PolicyName = "predicted"
    """How the workers of a request are chosen: the name of a file in `router/routing/policies`."""
    objectives: Objectives = field(default_factory=Objectives)
    max_running_tokens: int | None = None
    """Bound on prompts plus largest outputs of running requests; None: what decode workers' KV pools should hold."""
    max_queued_tokens: int = 2**20
    """Bound on prompts plus largest outputs of waiting requests."""
    max_queue_wait_s: float | None = None
    """How long a request may wait during an overload; None: derived from the objective of the first token."""
