"""What one client saw of its request. Pure; instants are of one clock, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Sample:
    """Filled in while the answer comes."""

    num_prompt_tokens: int
    sent_at: float
    told: list[float] = field(default_factory=list)
    """When each message with output came."""
    num_output_tokens: int = 0
    num_told: list[int] = field(default_factory=list)
    """Tokens in each message. Only gRPC says so."""
    token_ids: list[int] = field(default_factory=list)
    """Of the output, where the request asked for them."""
    num_cached_tokens: int = 0
    """Of the prompt, as the server says."""
    num_moves: int = 0
    """How often it was placed again, as the server says."""
    num_gaps: int = 0
    """Messages that did not follow upon those before: tokens lost or repeated. Only gRPC numbers them."""
    placement: str = ""
    """Which workers it was placed on and why, as Baton says."""
    ended_at: float = 0.0
    was_refused: bool = False
    """For too much load, or as more than a client may use."""
    error: str = ""
    """Why it did not complete."""

    @property
    def is_complete(self) -> bool:
        return not self.error and bool(self.told)

    @property
    def ttft_s(self) -> float:
        return self.told[0] - self.sent_at

    @property
    def e2el_s(self) -> float:
        return self.told[-1] - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first; 0 for one token."""
        num_later = self.num_output_tokens - 1
        return (self.told[-1] - self.told[0]) / num_later if num_later > 0 else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Between messages: a server that sends several tokens at once is measured by what its client sees."""
        return [after - before for before, after in zip(self.told, self.told[1:], strict=False)]
