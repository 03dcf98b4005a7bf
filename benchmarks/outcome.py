"""What one client got of a stream, token by token and when, and in what it differs from what another one got.

Of streams with several sequences, texts and logprobs, which what `baton bench` keeps of a stream does not have. Knows
no cluster and no fault.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cluster.errors import BatonError
from cluster.pb import generation_pb2 as pb
from tools.client import BatonClient

LOGPROBS_AGREE_TO = 1e-3
"""Steps of other sizes add up in other orders."""


@dataclass
class Outcome:
    """What one client got."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    told_at: list[float] = field(default_factory=list)
    """When each message with tokens came."""
    num_told: list[int] = field(default_factory=list)
    """Tokens that had been told by then, over all sequences."""
    num_prompt_tokens: int = 0
    prefill_s: float = 0.0
    """From leaving the queue to the first token."""
    num_cached_tokens: int = 0
    """Of the prompt."""
    placement: str = ""
    """Where it ended up, and why."""
    placed_at: float = 0.0
    """When it left the queue, in seconds since the epoch."""
    problem: str = ""
    """Why it did not complete, or what is wrong with what it told."""

    def difference(self, other: Outcome) -> str:
        """In what it differs from the undisturbed one, or nothing."""
        for name in ("tokens", "texts", "ends"):
            if getattr(self, name) != getattr(other, name):
                return f"its {name} are {getattr(self, name)}, undisturbed {getattr(other, name)}"
        for index, values in self.logprobs.items():
            theirs = other.logprobs[index]
            if len(values) != len(theirs) or any(
                abs(a - b) > LOGPROBS_AGREE_TO for a, b in zip(values, theirs, strict=True)
            ):
                return f"logprobs of its sequence {index} are others"
        return ""

    def longest_stall(self, since: float, until: float) -> tuple[float, int]:
        """The longest time between two messages that overlaps with a span of time; tokens that had been told then."""
        gaps = zip(self.told_at, self.told_at[1:], self.num_told, strict=False)
        stalls = [(after - before, told) for before, after, told in gaps if after > since and before < until]
        return max(stalls, default=(0.0, 0))


def run_one(client: BatonClient, spec: pb.GenerationSpec) -> Outcome:
    """Never raises: what goes wrong is the outcome."""
    outcome = Outcome()
    try:
        with client.stream(spec) as stream:
            for event in stream:
                note(outcome, event)
    except BatonError as error:
        outcome.problem = f"{type(error).__name__}: {error.message}"
    return outcome


def note(outcome: Outcome, event: pb.GenerateStreamResponse) -> None:
    if event.HasField("delta"):
        delta = event.delta
        told = outcome.tokens.setdefault(delta.index, [])
        if delta.first_token_index != len(told):
            outcome.problem = f"token {delta.first_token_index} came when {len(told)} was next"
        told.extend(delta.token_ids)
        outcome.texts[delta.index] = outcome.texts.get(delta.index, "") + delta.text
        outcome.logprobs.setdefault(delta.index, []).extend(entry.logprob for entry in delta.logprobs)
        outcome.told_at.append(time.perf_counter())
        outcome.num_told.append(sum(map(len, outcome.tokens.values())))
    elif event.HasField("sequence_end"):
        end = event.sequence_end
        outcome.ends[end.index] = (end.finish_reason, end.stop_string)
    elif event.HasField("completed"):
        timing, usage = event.completed.timing, event.completed.usage
        outcome.prefill_s = timing.prefill.ToNanoseconds() / 1e9
        outcome.num_prompt_tokens, outcome.num_cached_tokens = usage.prompt_tokens, usage.cached_tokens
        outcome.placement = timing.placement
        outcome.placed_at = (timing.arrival_time.ToNanoseconds() + timing.queue.ToNanoseconds()) / 1e9
