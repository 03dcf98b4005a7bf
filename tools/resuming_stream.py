"""A stream that outlives its calls: when one breaks, the next asks for what is missing, and nothing comes twice.

    call -> (UNAVAILABLE, a broken connection) -> call with resume{id, next token} -> ... -> completed

`StreamProgress` is pure: it knows what the reader holds, and cuts that off what a later call tells again. Owns how long
it is tried; knows no stub.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, Self

from cluster.errors import BatonError, DeadlineExceeded, NotFound, Unavailable
from cluster.pb import generation_pb2 as pb

PATIENCE_S = 30.0
"""Without a new event for so long, a broken stream is given up."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

Event = pb.GenerateStreamResponse


class StreamCall(Protocol):
    """One call's events."""

    def __next__(self) -> Event: ...
    def cancel(self) -> None: ...


class OpenStream(Protocol):
    """Makes a call whose errors are BatonErrors. `is_again`: the one before was lost."""

    def __call__(self, spec: pb.GenerationSpec, timeout_s: float | None, *, is_again: bool) -> StreamCall: ...


@dataclass
class _Held:
    """Of one sequence: what the reader has, and how far the present call has told it."""

    num_tokens: int = 0
    num_characters: int = 0
    tokens_told: int = 0
    characters_told: int = 0
    has_ended: bool = False


class StreamProgress:
    """What the reader of one generation holds."""

    def __init__(self, num_sequences: int) -> None:
        self.generation_id = ""
        self.has_begun = False
        """Some event came, if only a heartbeat."""
        self.is_complete = False
        self._is_alone = num_sequences == 1
        self._held: defaultdict[int, _Held] = defaultdict(_Held)

    def next_spec(self, first: pb.GenerationSpec) -> pb.GenerationSpec:
        """What the next call asks for; from now on, events are that call's.

        Where there are several sequences, all are told again from the start: only there is known how much text goes
        with how many tokens of each.
        """
        index = self._held[0].num_tokens if self._is_alone else 0
        for held in self._held.values():
            held.tokens_told = index
            held.characters_told = held.num_characters if self._is_alone else 0
        if not self.generation_id:
            return first
        return pb.GenerationSpec(resume=pb.ResumeFrom(generation_id=self.generation_id, next_token_index=index))

    def take(self, event: Event) -> Event | None:
        """What of an event is new; None: nothing."""
        self.has_begun = True
        match event.WhichOneof("event"):
            case "started":
                is_new, self.generation_id = not self.generation_id, event.started.generation_id
                return event if is_new else None
            case "delta":
                return self._take_delta(event)
            case "sequence_end":
                held = self._held[event.sequence_end.index]
                is_new, held.has_ended = not held.has_ended, True
                return event if is_new else None
            case "completed":
                self.is_complete = True
        return event

    def _take_delta(self, event: Event) -> Event | None:
        delta, held = event.delta, self._held[event.delta.index]
        num_old = min(delta.token_count, max(0, held.num_tokens - held.tokens_told))
        old_text = min(len(delta.text), max(0, held.num_characters - held.characters_told))
        held.tokens_told += delta.token_count
        held.characters_told += len(delta.text)
        held.num_tokens = max(held.num_tokens, held.tokens_told)
        held.num_characters = max(held.num_characters, held.characters_told)
        if not num_old and not old_text:
            return event
        if num_old == delta.token_count and old_text == len(delta.text):
            return None
        rest = pb.SequenceDelta(
            index=delta.index,
            first_token_index=delta.first_token_index + num_old,
            token_count=delta.token_count - num_old,
            token_ids=delta.token_ids[num_old:],
            text=delta.text[old_text:],
            logprobs=delta.logprobs[num_old:],
        )
        return Event(delta=rest)


class ResumingStream:
    """The events of one generation, each once; leaving it (as a context manager) cancels what has not ended."""

    def __init__(
        self,
        open_call: OpenStream,
        cancel: Callable[[str], object],
        spec: pb.GenerationSpec,
        *,
        timeout_s: float | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`cancel(generation id)` ends it at the server; its BatonErrors are not told. Nothing is asked before the
        first event is."""
        self._open = open_call
        self._cancel = cancel
        self._spec = pb.GenerationSpec()
        self._spec.CopyFrom(spec)
        self._spec.resume.SetInParent()
        self._progress = StreamProgress(max(1, spec.sampling.n))
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._patience_s = patience_s
        self._call = self._open(self._spec, timeout_s, is_again=False)
        self._pause_s = FIRST_PAUSE_S
        self._broken_at: float | None = None
        self._is_left = threading.Event()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while True:
            try:
                event = self._progress.take(next(self._call))
            except NotFound as error:
                if self._broken_at is None:
                    raise
                raise Unavailable(f"the stream broke and cannot be resumed: {error.message}") from error
            except Unavailable as error:
                self._call_again(error)
                continue
            if event is not None:
                self._pause_s, self._broken_at = FIRST_PAUSE_S, None
                return event

    def cancel(self) -> None:
        """Ends the generation at the server; from any thread; harmless when it has ended."""
        self._is_left.set()
        self._call.cancel()
        if self._progress.generation_id and not self._progress.is_complete:
            with suppress(BatonError):  # it is freed without this as well, only later
                self._cancel(self._progress.generation_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _call_again(self, error: Unavailable) -> None:
        """After a pause. Raises `error` when it is in vain, and DeadlineExceeded."""
        now = time.monotonic()
        if self._broken_at is None:
            self._broken_at = now
        is_given_up = now - self._broken_at > self._patience_s or not self._progress.has_begun
        if is_given_up or self._is_left.wait(self._pause_s):
            raise error
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        left_s = None if self._ends_at is None else self._ends_at - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("the deadline passed while the stream was broken") from error
        self._call.cancel()
        self._call = self._open(self._progress.next_spec(self._spec), left_s, is_again=True)
