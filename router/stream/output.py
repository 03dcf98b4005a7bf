"""A request's output: its sequences, and what its client has not been sent yet.

    tokens of workers -> SequenceOutput.add -> OutputBuffer.notify / add_end -> the client's task wakes -> take

`SequenceOutput` puts the tokens of one sequence in order, exactly once, turns them into text and finds its end. The
first token comes from the prefill worker and the rest from the decode worker over another stream, so tokens that come
early wait until those before them are here, and tokens that came before are dropped. What the client has not taken
merges into one delta: memory is bounded by the sequence's length, however slow the client.

`OutputBuffer` holds the sequences of one request for one client and wakes its task. Knows no message's other parts, no
clock, no connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from cluster.pb import generation_pb2, worker_pb2
from router.api.call import OutputParts, ValidatedRequest
from router.stream.detokenizer import Detokenizer, Fed, StopMatcher
from router.stream.prompt_logprobs import PromptLogprobs

_STOP = generation_pb2.FINISH_REASON_STOP
_OPEN = generation_pb2.FINISH_REASON_UNSPECIFIED


class SequenceOutput:
    """`end` is set once; after that nothing is added."""

    def __init__(
        self,
        index: int,
        request: ValidatedRequest,
        detokenizer: Detokenizer,
        *,
        generation_id: str = "",
        first_wanted: int = 0,
        is_kept: bool = False,
    ) -> None:
        """`first_wanted`: the client holds the tokens before it, and their text. `is_kept`: taken logprobs stay."""
        self.index = index
        self.num_tokens = 0
        """Tokens of this sequence that are here and in order."""
        self.known_ids: list[int] = []
        """The ids of those tokens; another attempt does not change them any more."""
        self.last_token_at: float | None = None
        """When its last token came; set by the request, which knows the time."""
        self.end: generation_pb2.SequenceEnd | None = None
        self._request = request
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(request.stop, include_stop=request.include_stop_in_output) if request.stop else None
        self._generation_id = generation_id
        new_parts = request.new_parts if request.wants_text else None
        self._parts: OutputParts | None = new_parts and new_parts(f"{generation_id} {index}")
        self._can_append_at_once = self._matcher is None and self._parts is None and not request.wants_logprobs
        self._min_tokens = request.sampling.stopping.min_output_tokens
        self._interval_tokens = request.stream_interval_tokens or 1
        self._early: dict[int, worker_pb2.Tokens] = {}
        self._num_taken = first_wanted
        """The first token that the client does not hold; may be ahead of what is here."""
        self._kept_logprobs: list[generation_pb2.TokenLogprob] | None = [] if is_kept else None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[generation_pb2.TokenLogprob] = []

    @property
    def num_pending(self) -> int:
        """Tokens that the client has not taken yet."""
        return max(0, self.num_tokens - self._num_taken)

    @property
    def num_thinking_tokens(self) -> int:
        return 0 if self._parts is None else self._parts.num_thinking_tokens

    @property
    def is_due(self) -> bool:
        """What is here should go to the client now: the first token, an interval's worth, or the rest at the end."""
        least = self._interval_tokens if self._num_taken else 1
        return self.end is not None or self.num_tokens - self._num_taken >= least

    def add(self, tokens: worker_pb2.Tokens) -> bool:
        """Adds tokens from a worker. True when a stop string ended the sequence, which no worker knows."""
        if self.end is not None:
            return False
        first = tokens.first_token_index
        if first > self.num_tokens:
            self._early[first] = tokens
            return False
        is_stopped = self._append(tokens, self.num_tokens - first)
        while self._early and self.end is None and self.num_tokens in self._early:
            is_stopped = self._append(self._early.pop(self.num_tokens), 0)
        if self.end is not None:
            self._early.clear()
        return is_stopped

    def take(self) -> generation_pb2.GenerateStreamResponse | None:
        """Returns everything pending as one delta; None when there is nothing."""
        first, texts = self._num_taken, self._texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        num_pending = self.num_tokens - first
        if num_pending <= 0:
            if not text and (self._parts is None or self._parts.is_empty):
                return None
            num_pending = 0
        message = generation_pb2.GenerateStreamResponse()
        delta = message.delta  # filled in its place: a message that is put into another one is copied
        delta.index, delta.first_token_index, delta.token_count, delta.text = self.index, first, num_pending, text
        if self._parts is not None:
            self._parts.take(delta)
        self._num_taken = first + num_pending
        self._texts = []
        if self._token_ids:
            delta.token_ids.extend(self._token_ids)
            self._token_ids = []
        if self._logprobs:
            delta.logprobs.extend(self._logprobs)
            self._logprobs = []
        return message

    def restart(self) -> None:
        """Drops what came early from an attempt that is over: the next one goes on from the known tokens."""
        self._early.clear()

    def known(self, first_token_index: int = 0) -> worker_pb2.Tokens:
        """The tokens from there on, and the end, as a worker would have sent them. For a kept sequence only."""
        assert self._kept_logprobs is not None, "this sequence keeps nothing"
        tokens = worker_pb2.Tokens(
            sequence_index=self.index,
            first_token_index=first_token_index,
            token_ids=self.known_ids[first_token_index:],
            logprobs=self._kept_logprobs[first_token_index:],
        )
        if self.end is not None and self.end.WhichOneof("matched_stop") != "stop_string":
            tokens.finish_reason = self.end.finish_reason
            if self.end.HasField("stop_token_id"):
                tokens.stop_token_id = self.end.stop_token_id
        return tokens

    def rewound(self, first_wanted: int, detokenizer: Detokenizer) -> SequenceOutput:
        """Returns the sequence for a client that holds its tokens before `first_wanted`, and their text.

        Text that only the end releases belongs to the last token.
        """
        keeping = partial(SequenceOutput, generation_id=self._generation_id, is_kept=True)
        fresh = keeping(self.index, self._request, detokenizer, first_wanted=first_wanted)
        fresh.add(self.known())
        fresh._early, fresh.last_token_at = self._early, self.last_token_at
        return fresh

    def close(self, reason: generation_pb2.FinishReason) -> None:
        """Ends an open sequence from outside, by a cancel."""
        self._early.clear()
        self._finish(reason)

    def _append(self, tokens: worker_pb2.Tokens, num_known: int) -> bool:
        """Adds tokens of which the first `num_known` are here already."""
        token_ids = tokens.token_ids[num_known:]
        num_ahead = self._num_taken - self.num_tokens
        if num_ahead <= 0 and self._can_append_at_once and tokens.finish_reason == _OPEN:
            self._append_at_once(token_ids)
            return False
        is_last = tokens.finish_reason != _OPEN
        is_stop_token = is_last and tokens.HasField("stop_token_id") and not self._request.include_stop_in_output
        with_text = token_ids[:-1] if is_stop_token else token_ids
        num_held = max(0, min(len(token_ids), num_ahead))
        num_kept, stop = self._read(with_text, num_held)
        if stop is None:
            num_kept = len(token_ids)
        self.num_tokens += num_kept
        self.known_ids.extend(token_ids[:num_kept])
        if self._request.wants_token_ids:
            self._token_ids.extend(token_ids[num_held:num_kept])
        if self._request.wants_logprobs:
            logprobs = tokens.logprobs[num_known : num_known + num_kept]
            self._logprobs.extend(logprobs[num_held:])
            if self._kept_logprobs is not None:
                self._kept_logprobs.extend(logprobs)
        if stop is not None:
            self.end = self._make_end(_STOP, is_held=num_kept <= num_held)
            self.end.stop_string = stop
            return not is_last
        if is_last:
            self._finish(tokens.finish_reason, is_held=0 < len(token_ids) == num_held)
            if tokens.HasField("stop_token_id") and self.end is not None:
                self.end.stop_token_id = tokens.stop_token_id
        return False

    def _append_at_once(self, token_ids: Sequence[int]) -> None:
        """Does what `_append` does, for most tokens: the client holds none, they end nothing, and are ids and text
        alone."""
        if self._request.wants_text:
            self._texts.append(self._detokenizer.push(token_ids))
        self.num_tokens += len(token_ids)
        self.known_ids += token_ids
        if self._request.wants_token_ids:
            self._token_ids += token_ids

    def _read(self, token_ids: Sequence[int], num_held: int) -> tuple[int, str | None]:
        """Turns tokens into text; returns how many count, and the stop string that ended the sequence with the last.

        The client holds the text of the first `num_held` already.
        """
        if self._matcher is None and self._parts is None:
            if self._request.wants_text:
                if num_held:
                    self._detokenizer.push(token_ids[:num_held])
                self._texts.append(self._detokenizer.push(token_ids[num_held:]))
            return len(token_ids), None
        for count, token_id in enumerate(token_ids, start=1):
            piece, can_stop = self._detokenizer.push((token_id,)), self.num_tokens + count >= self._min_tokens
            fed = Fed(piece) if self._matcher is None else self._matcher.feed(piece, can_stop=can_stop)
            self._add_text(fed.text, 1, is_held=count <= num_held)
            if fed.stop is not None:
                return count, fed.stop
        return len(token_ids), None

    def _finish(self, reason: generation_pb2.FinishReason, *, is_held: bool = False) -> None:
        """`is_held`: the client has the last token, and with it the text that was held back."""
        if self._matcher is not None:
            self._add_text(self._matcher.flush(), is_held=is_held)
        self._add_text(self._detokenizer.flush(), is_held=is_held)
        self.end = self._make_end(reason, is_held=is_held)

    def _make_end(self, reason: generation_pb2.FinishReason, *, is_held: bool) -> generation_pb2.SequenceEnd:
        if self._parts is not None:
            self._parts.end(is_held=is_held)
            if reason == _STOP and self._parts.num_calls:
                reason = generation_pb2.FINISH_REASON_TOOL_CALLS
        return generation_pb2.SequenceEnd(index=self.index, finish_reason=reason, token_count=self.num_tokens)

    def _add_text(self, text: str, num_tokens: int = 0, *, is_held: bool = False) -> None:
        if self._parts is not None:
            self._parts.feed(text, num_tokens, is_held=is_held)
        elif text and not is_held and self._request.wants_text:
            self._texts.append(text)


class Unsent(NamedTuple):
    """The output that a client is to be sent now."""

    has_begun: bool
    """`Started` is due, before everything else."""
    is_heartbeat_due: bool
    deltas: list[generation_pb2.GenerateStreamResponse]
    ended: list[SequenceOutput]
    """Sequences whose end is due."""


class OutputBuffer:
    """The output of one request for one client; another call that resumes the request gets a new one (`rewound`)."""

    def __init__(self, sequences: list[SequenceOutput], prompt_logprobs: PromptLogprobs, *, is_streaming: bool) -> None:
        """`is_streaming`: False for a client that waits for the end."""
        self.sequences = sequences
        self.prompt_logprobs = prompt_logprobs
        self._is_streaming = is_streaming
        self._is_over = False
        self.is_started = False
        """The client has been sent `Started`."""
        self._is_heartbeat_due = False
        self._ended = [sequence for sequence in sequences if sequence.end is not None]
        """Sequences whose end the client has not been sent."""
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        """The future of the one task that reads it, while that waits."""
        self._pauses: set[asyncio.Future[None]] = set()

    @property
    def num_pending(self) -> int:
        """Tokens that the client has not taken yet."""
        return sum(sequence.num_pending for sequence in self.sequences)

    def rewound(
        self, first_wanted: Sequence[int], detokenizers: Iterable[Detokenizer], *, is_streaming: bool
    ) -> OutputBuffer:
        """A buffer for another client, which holds the tokens of each sequence before its `first_wanted`.

        The reader of this one wakes, and gets nothing more.
        """
        each = zip(self.sequences, first_wanted, detokenizers, strict=True)
        sequences = [sequence.rewound(first, detokenizer) for sequence, first, detokenizer in each]
        fresh = OutputBuffer(sequences, self.prompt_logprobs, is_streaming=is_streaming)
        fresh._is_over = self._is_over
        fresh._is_heartbeat_due = True
        fresh._has_news = True
        self.wake()
        return fresh

    def restart(self) -> None:
        """Drops what an attempt that is over has sent in part."""
        self.prompt_logprobs.restart()
        for sequence in self.sequences:
            sequence.restart()

    def notify(self) -> None:
        """Wakes a client that streams."""
        if self._is_streaming:
            self._tell_reader()

    def add_end(self, sequence: SequenceOutput) -> None:
        """A sequence has ended."""
        self._ended.append(sequence)
        self.notify()

    def heartbeat(self) -> None:
        """Has the phase of the request sent to a client that streams."""
        self._is_heartbeat_due = True
        self.notify()

    def close(self) -> None:
        """The request is over: everything that is here is due."""
        self._is_over = True
        self.wake()

    def cancel(self) -> None:
        """Ends the sequences that are open, as cancelled."""
        for sequence in self.sequences:
            if sequence.end is None:
                sequence.close(generation_pb2.FINISH_REASON_CANCELLED)
                self._ended.append(sequence)

    def wake(self) -> None:
        """Wakes every task that waits or pauses."""
        self._tell_reader()
        for paused in self._pauses:
            _resolve(paused)

    def wait(self) -> Awaitable[None]:
        """Returns what to await until there is something to take, or the request is over. For one task at a time."""
        if self._has_news:
            self._has_news = False
            return _NOTHING
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def pause(self, seconds: float) -> None:
        """Waits `seconds`, or until the request is over or another client reads it."""
        if self._is_over:
            return
        loop = asyncio.get_running_loop()
        paused: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _resolve, paused)
        self._pauses.add(paused)
        try:
            await paused
        finally:
            self._pauses.discard(paused)
            timer.cancel()

    @property
    def has_deltas_alone(self) -> bool:
        """Nothing but tokens may be due: the request goes on, and so do its sequences."""
        return self.is_started and not (self._is_over or self._ended or self._is_heartbeat_due)

    def take_deltas(self) -> list[generation_pb2.GenerateStreamResponse]:
        """Does what `take` does, where `has_deltas_alone`."""
        self._has_news = False
        deltas = list[generation_pb2.GenerateStreamResponse]()
        for sequence in self.sequences:
            if sequence.is_due and (delta := sequence.take()) is not None:
                deltas.append(delta)
        return deltas

    def take(self, *, is_prefilling: bool) -> Unsent:
        """Returns what the client has not been sent. `is_prefilling`: a worker has begun with the request."""
        self._has_news = False
        due = (s for s in self.sequences if s.is_due or (self._is_over and s.num_pending))
        deltas = [delta for sequence in due if (delta := sequence.take()) is not None]
        has_output = bool(deltas or self._ended)
        can_begin = has_output or (is_prefilling and (self.prompt_logprobs.is_complete or self._is_over))
        has_begun = can_begin and not self.is_started
        self.is_started = can_begin or self.is_started
        is_heartbeat_due = self._is_heartbeat_due and not has_output and not self._is_over
        self._is_heartbeat_due = False
        ended, self._ended = self._ended, []
        return Unsent(has_begun, is_heartbeat_due, deltas, ended)

    def _tell_reader(self) -> None:
        self._has_news = True
        if self._waiter is not None:
            _resolve(self._waiter)
            self._waiter = None


class _Nothing:
    """Is awaited without waiting."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()


_NOTHING = _Nothing()


def _resolve(paused: asyncio.Future[None]) -> None:
    if not paused.done():
        paused.set_result(None)
