"""The events of one generation: a stream that survives broken connections, and the text that events add up to.

    call -> (UNAVAILABLE, a broken connection) -> call with resume{id, next token} -> ... -> completed

`StreamProgress` and `Transcript` are pure: events in, state out. `ResumingStream` decides when to call again; it knows
no stub and no channel.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from cluster.errors import BatonError, DeadlineExceeded, InternalError, NotFound, Unavailable
from cluster.pb import generation_pb2 as pb

PATIENCE_S = 30.0
"""A broken stream that brings no new event for so long is given up."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

Event = pb.GenerateStreamResponse


class StreamCall(Protocol):
    """The events of one call."""

    def __next__(self) -> Event: ...
    def cancel(self) -> None: ...


OpenStream = Callable[[pb.GenerationSpec, float | None, bool], StreamCall]
"""Makes a call whose errors are BatonErrors, from a spec, a timeout and whether an earlier call was lost."""


@dataclass
class _SequenceProgress:
    """The part of a sequence that the reader has, and the part that the present call has come to."""

    num_tokens: int = 0
    num_characters: int = 0
    num_units: int = 0
    """Of parts, as `_num_units` counts them."""
    call_tokens: int = 0
    call_characters: int = 0
    call_units: int = 0
    has_ended: bool = False


class StreamProgress:
    """The part of one generation that its reader has; cuts off what a later call repeats."""

    def __init__(self, num_sequences: int) -> None:
        self.generation_id = ""
        self.has_begun = False
        """At least one event came, if only a heartbeat."""
        self.is_complete = False
        self._is_single = num_sequences == 1
        self._sequences: defaultdict[int, _SequenceProgress] = defaultdict(_SequenceProgress)

    def next_spec(self, first: pb.GenerationSpec) -> pb.GenerationSpec:
        """The spec of the next call; later events are that call's.

        Several sequences are all asked for from their first token: only there is known how much text goes with how
        many tokens of each.
        """
        index = self._sequences[0].num_tokens if self._is_single else 0
        for sequence in self._sequences.values():
            sequence.call_tokens = index
            sequence.call_characters = sequence.num_characters if self._is_single else 0
            sequence.call_units = sequence.num_units if self._is_single else 0
        if not self.generation_id:
            return first
        return pb.GenerationSpec(resume=pb.ResumeFrom(generation_id=self.generation_id, next_token_index=index))

    def new_part(self, event: Event) -> Event | None:
        """The part of an event that the reader does not have yet; None: nothing."""
        self.has_begun = True
        match event.WhichOneof("event"):
            case "started":
                is_new, self.generation_id = not self.generation_id, event.started.generation_id
                return event if is_new else None
            case "delta":
                return self._new_delta(event)
            case "sequence_end":
                sequence = self._sequences[event.sequence_end.index]
                is_new, sequence.has_ended = not sequence.has_ended, True
                return event if is_new else None
            case "completed":
                self.is_complete = True
        return event

    def _new_delta(self, event: Event) -> Event | None:
        delta, sequence = event.delta, self._sequences[event.delta.index]
        num_old = min(delta.token_count, max(0, sequence.num_tokens - sequence.call_tokens))
        old_text = min(len(delta.text), max(0, sequence.num_characters - sequence.call_characters))
        num_units = sum(map(_num_units, delta.parts))
        old_units = min(num_units, max(0, sequence.num_units - sequence.call_units))
        sequence.call_tokens += delta.token_count
        sequence.call_characters += len(delta.text)
        sequence.call_units += num_units
        sequence.num_tokens = max(sequence.num_tokens, sequence.call_tokens)
        sequence.num_characters = max(sequence.num_characters, sequence.call_characters)
        sequence.num_units = max(sequence.num_units, sequence.call_units)
        if not (num_old or old_text or old_units):
            return event
        if (num_old, old_text, old_units) == (delta.token_count, len(delta.text), num_units):
            return None
        rest = pb.SequenceDelta(
            index=delta.index,
            first_token_index=delta.first_token_index + num_old,
            token_count=delta.token_count - num_old,
            token_ids=delta.token_ids[num_old:],
            text=delta.text[old_text:],
            logprobs=delta.logprobs[num_old:],
            parts=_behind(delta.parts, old_units),
        )
        return Event(delta=rest, resumable=event.resumable) if event.HasField("resumable") else Event(delta=rest)


def _num_units(part: pb.OutputPart) -> int:
    """Characters, and one each for a call's begin and its end: a stream that is sent again has the same, cut at other
    places."""
    call = part.tool_call
    return len(part.text) + len(part.reasoning) + bool(call.name) + len(call.arguments) + call.is_whole


def _behind(parts: Iterable[pb.OutputPart], num_old: int) -> list[pb.OutputPart]:
    """The parts without their first units."""
    rest = []
    for part in parts:
        num_units, new = _num_units(part), pb.OutputPart()
        if num_old < num_units:
            new.CopyFrom(part)
            if new.HasField("tool_call"):
                has_begin = num_old > 0 and bool(new.tool_call.name)
                if has_begin:
                    new.tool_call.id = new.tool_call.name = ""
                new.tool_call.arguments = part.tool_call.arguments[num_old - has_begin :]
            elif new.HasField("reasoning"):
                new.reasoning = part.reasoning[num_old:]
            else:
                new.text = part.text[num_old:]
            rest.append(new)
        num_old = max(0, num_old - num_units)
    return rest


class ResumingStream:
    """Iterates over the events of one generation, each once. As a context manager, it cancels what has not ended."""

    def __init__(
        self,
        open_call: OpenStream,
        cancel: Callable[[str], object],
        spec: pb.GenerationSpec,
        *,
        timeout_s: float | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`cancel` is given the generation's id and ends it at the server; its BatonErrors are ignored."""
        self._open = open_call
        self._cancel = cancel
        self._spec = pb.GenerationSpec()
        self._spec.CopyFrom(spec)
        self._spec.resume.SetInParent()
        self._progress = StreamProgress(max(1, spec.sampling.n))
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._patience_s = patience_s
        self._call = self._open(self._spec, timeout_s, False)
        self._pause_s = FIRST_PAUSE_S
        self._broken_at: float | None = None
        self._is_cancelled = threading.Event()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while True:
            try:
                event = self._progress.new_part(next(self._call))
            except NotFound as error:
                if self._broken_at is None:
                    raise
                raise Unavailable(f"the stream broke and cannot be resumed: {error.message}") from error
            except Unavailable as error:
                self._reconnect(error)
                continue
            if event is not None:
                self._pause_s, self._broken_at = FIRST_PAUSE_S, None
                return event

    def cancel(self) -> None:
        """Ends the generation at the server. May be called from any thread, and after the end."""
        self._is_cancelled.set()
        self._call.cancel()
        if self._progress.generation_id and not self._progress.is_complete:
            with suppress(BatonError):  # without it, the server frees the generation later
                self._cancel(self._progress.generation_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _reconnect(self, error: Unavailable) -> None:
        """Calls again after a pause. Raises `error` when that is in vain, and DeadlineExceeded."""
        now = time.monotonic()
        if self._broken_at is None:
            self._broken_at = now
        is_given_up = now - self._broken_at > self._patience_s or not self._progress.has_begun
        if is_given_up or self._is_cancelled.wait(self._pause_s):
            raise error
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        left_s = None if self._ends_at is None else self._ends_at - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("the deadline passed while the stream was broken") from error
        self._call.cancel()
        self._call = self._open(self._progress.next_spec(self._spec), left_s, True)


@dataclass
class SequenceText:
    """The text of one sequence so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    """`stop`, `length`, ...; None until the sequence has ended."""
    matched_stop: str | int | None = None


class Transcript:
    """Collects text, tokens and end of each sequence, usage and timing.

    `add` every event of one stream, in order; `first_token_index` shows whether every token came exactly once.
    """

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.usage: pb.Usage | None = None
        self.timing: pb.Timing | None = None
        self._sequences: dict[int, SequenceText] = {}
        self._calls: dict[tuple[int, int], pb.ToolCallDelta] = {}

    @property
    def tool_calls(self) -> list[pb.ToolCallDelta]:
        """The calls that came whole, each as one delta; one that was cut off is not to be carried out."""
        return [call for _, call in sorted(self._calls.items()) if call.is_whole]

    @property
    def sequences(self) -> list[SequenceText]:
        """Sequences in the order of their index."""
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
        """The document of `baton generate --json`."""
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
        for part in delta.parts:
            if part.HasField("tool_call"):
                call = self._calls.setdefault((delta.index, part.tool_call.index), pb.ToolCallDelta())
                arguments = call.arguments + part.tool_call.arguments
                call.MergeFrom(part.tool_call)
                call.arguments = arguments

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
    """Durations in milliseconds, and the other fields as they are."""
    spans = ("queue", "prefill", "kv_transfer", "time_to_first_token", "decode")
    values: dict[str, Any] = {f"{name}_ms": getattr(timing, name).ToNanoseconds() / 1e6 for name in spans}
    fields = ("migrations", "fetched_tokens", "placement")
    return values | {name: getattr(timing, name) for name in fields}
