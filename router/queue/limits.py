"""How much the router takes on at one time. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.routing.policies import Objectives


@dataclass(frozen=True)
class Limits:
    """How much the router takes on at one time."""

    max_running_requests: int
    max_queued_requests: int
    queue_timeout_s: float
    dead_after_s: float = 3.0
    """A worker silent for so long is lost."""
    needs_prefill: bool = True
    """Nothing runs without a prefill worker; False: decode workers compute prompts while there is none."""
    policy: str = "predicted"
    """Which workers a request runs on: one of `router.routing.policies`."""
    objectives: Objectives = field(default_factory=Objectives)
    """That it keeps where it can."""
    max_running_tokens: int | None = None
    """Prompts and most outputs of what runs; None: what the decode workers' KV pools should hold."""
    max_queued_tokens: int = 2**20
    """Prompts and most outputs of what waits."""
    max_queue_wait_s: float | None = None
    """How long a request may wait while there is more than can be served; None: the objective of the first token."""
