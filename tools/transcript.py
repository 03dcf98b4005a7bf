"""What a stream of GenerateStreamResponse adds up to: text, tokens and end of each sequence, usage and timing.

Pure: events in, state out; no socket. Checks as it goes that every token came exactly once, which is what
`first_token_index` is for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.errors import InternalError
from cluster.pb import generation_pb2 as pb


@dataclass
class SequenceText:
    """One sequence so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    """`stop`, `length`, ...; None until the sequence has ended."""
    matched_stop: str | int | None = None


class Transcript:
    """Feed it every event of one stream, in order."""

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.usage: pb.Usage | None = None
        self.timing: pb.Timing | None = None
        self._sequences: dict[int, SequenceText] = {}

    @property
    def sequences(self) -> list[SequenceText]:
        """By index."""
        return [self._sequences[index] for index in sorted(self._sequences)]

    @property
    def is_complete(self) -> bool:
        return self.usage is not None

    def add(self, event: pb.GenerateStreamResponse) -> None:
        """Raises InternalError when a token is missing, doubled or comes after its sequence's end."""
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "delta":
                self._add_delta(event.delta)
            case "sequence_end":
                self._add_end(event.sequence_end)
            case "completed":
                self.usage = event.completed.usage
                self.timing = event.completed.timing if event.completed.HasField("timing") else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what `baton generate --json` prints."""
        started = self.started or pb.Started()
        usage = self.usage or pb.Usage()
        return {
            "generation_id": started.generation_id,
            "model": started.model,
            "outputs": [vars(sequence) for sequence in self.sequences],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "timing": None if self.timing is None else timing_dict(self.timing),
        }

    def _sequence(self, index: int) -> SequenceText:
        return self._sequences.setdefault(index, SequenceText(index))

    def _add_delta(self, delta: pb.SequenceDelta) -> None:
        sequence = self._sequence(delta.index)
        if delta.first_token_index != sequence.num_tokens or sequence.finish_reason is not None:
            end = f", which has ended with {sequence.finish_reason}" if sequence.finish_reason else ""
            raise InternalError(
                f"the server broke its promise that each token comes once: token {delta.first_token_index} of sequence "
                f"{delta.index} came after {sequence.num_tokens} tokens{end}"
            )
        sequence.num_tokens += delta.token_count
        sequence.token_ids.extend(delta.token_ids)
        sequence.text += delta.text

    def _add_end(self, end: pb.SequenceEnd) -> None:
        sequence = self._sequence(end.index)
        if end.token_count != sequence.num_tokens:
            raise InternalError(
                f"the server broke its promise that each token comes once: sequence {end.index} ended with "
                f"{end.token_count} tokens of which {sequence.num_tokens} came"
            )
        sequence.finish_reason = pb.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_").lower()
        match end.WhichOneof("matched_stop"):
            case "stop_token_id":
                sequence.matched_stop = end.stop_token_id
            case "stop_string":
                sequence.matched_stop = end.stop_string


def timing_dict(timing: pb.Timing) -> dict[str, Any]:
    """Milliseconds, and what is no duration."""
    spans = ("queue", "prefill", "kv_transfer", "time_to_first_token", "decode")
    values: dict[str, Any] = {f"{name}_ms": getattr(timing, name).ToNanoseconds() / 1e6 for name in spans}
    return values | {"migrations": timing.migrations, "placement": timing.placement}
