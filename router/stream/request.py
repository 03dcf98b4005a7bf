"""One live request: its lifecycle, its sequences, and what its client has not been told yet.

    worker events -> on_phase / on_prompt_logprobs / on_tokens -> pending output -> take() -> the client's stream
    finish / fail / cancel / reject       -> is_over, and the last take()

Events only record and wake the client's task once; `take` builds messages from all that has gathered. Owns the
instants from which Timing is told. Knows no gRPC stream, no worker connection, no queue.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from cluster.errors import BatonError, Cancelled, InternalError
from cluster.lifecycle import Lifecycle, RequestState
from cluster.pb import generation_pb2, worker_pb2
from cluster.request_key import RequestKey
from router.api.call import ANYONE, Principal, ValidatedRequest
from router.routing.load_tracker import Placement, RequestLoad
from router.routing.policies.interface import RoutingRequest, SessionKey
from router.routing.prefix_index import PromptHashes
from router.stream.attempt import Attempt
from router.stream.detokenizer import Detokenizer
from router.stream.prompt_logprobs import PromptLogprobs
from router.stream.retry import RetryState
from router.stream.sequence import SequenceOutput
from router.stream.timing import timing_of

Response = generation_pb2.GenerateStreamResponse
Phase = generation_pb2.Heartbeat.Phase

_STATE_OF = {
    generation_pb2.Heartbeat.PHASE_PREFILL: RequestState.PREFILLING,
    generation_pb2.Heartbeat.PHASE_TRANSFER: RequestState.TRANSFERRING,
    generation_pb2.Heartbeat.PHASE_DECODE: RequestState.DECODING,
}
_PHASE_OF = {state: phase for phase, state in _STATE_OF.items()} | {
    RequestState.QUEUED: generation_pb2.Heartbeat.PHASE_QUEUED
}
_LADDER = (RequestState.QUEUED, RequestState.PREFILLING, RequestState.TRANSFERRING, RequestState.DECODING)


class Effect(enum.Enum):
    """What tokens did to their sequence."""

    OPEN = "it goes on"
    ENDED = "the worker ended it"
    STOPPED = "a stop string ended it, and workers must be told"


class RequestObserver:
    """Follows a request without changing it: metrics, activity, traces. Called on the event loop; must not raise."""

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """The first token came, `seconds` after the request's arrival."""

    def on_tokens(self, count: int, interval_s: float | None) -> None:
        """`count` tokens of one sequence came, `interval_s` after its last ones; None: they are its first."""

    def on_end(self, live: LiveRequest) -> None:
        """The request has reached its terminal state."""


class LiveRequest:
    """Used from one event loop. `now` is always the router's monotonic clock."""

    def __init__(
        self,
        generation_id: str,
        request: ValidatedRequest,
        detokenizers: Iterable[Detokenizer],
        *,
        model: str,
        now: float,
        arrival_time_s: float,
        is_streaming: bool,
        caller: Principal = ANYONE,
        may_resume: bool = False,
        first_attempt: int = 1,
    ) -> None:
        """`arrival_time_s` is the wall clock at `now`. One detokenizer for each sequence.

        `may_resume`: what the client was told is kept, so that it can be told again.
        """
        self.key = RequestKey(generation_id, first_attempt)
        self.request = request
        self.caller = caller
        self.model = model
        self.lifecycle = Lifecycle(now, "arrived")
        self.may_resume = may_resume
        self.sequences = [SequenceOutput(i, request, d, is_kept=may_resume) for i, d in enumerate(detokenizers)]
        self.prompt_logprobs = PromptLogprobs(len(request.prompt_token_ids), request.prompt_logprobs)
        self.attempts: list[Attempt] = []
        """In the order of their placement; empty while the request has only waited."""
        self.retry = RetryState()
        self.error: BatonError | None = None
        self.queue_position = 0
        self.arrival_time_s = arrival_time_s
        self.first_token_at: float | None = None
        self.observers: list[RequestObserver] = []
        self.num_cached_tokens = 0
        self.num_moves = 0
        """How often it was placed again."""
        self.is_stopped_here = False
        """A stop string ended at least one sequence."""
        self.arrived_at = now
        self.when_over: Callable[[], None] | None = None
        """Called once."""
        self.traceparent = ""
        """The request's own span, as W3C trace context writes it; empty: it is not traced."""
        self._is_streaming = is_streaming
        self._is_started = False
        self._is_heartbeat_due = False
        self._ended: list[SequenceOutput] = []
        self._wake = asyncio.Event()
        self._pauses: set[asyncio.Future[None]] = set()

    @property
    def attempt(self) -> Attempt:
        """The attempt that runs, or the last one that ran."""
        return self.attempts[-1]

    @property
    def placement(self) -> Placement | None:
        """The last placement; None while the request has only waited."""
        return self.attempts[-1].placement if self.attempts else None

    @property
    def has_run(self) -> bool:
        """An earlier attempt ran, here or at another router."""
        return self.key.attempt > 1

    @property
    def is_over(self) -> bool:
        return self.lifecycle.is_terminal

    @property
    def is_complete(self) -> bool:
        """All sequences have ended."""
        return all(sequence.end is not None for sequence in self.sequences)

    @property
    def has_left_prefill(self) -> bool:
        """The prefill worker owes it nothing more: decode has begun, and every token is here that prefill leads to."""
        if self.lifecycle.state is not RequestState.DECODING:
            return False
        num_prefilled = self.attempt.num_prefilled_outputs
        return all(sequence.num_tokens > num_prefilled for sequence in self.sequences)

    @property
    def exposed_s(self) -> float:
        """How much longer than for its first token the client has waited for decode to begin; 0: no longer."""
        decode = self.lifecycle.instant(RequestState.DECODING, last=True)
        return 0.0 if decode is None or self.first_token_at is None else max(0.0, decode - self.first_token_at)

    @property
    def num_tokens(self) -> int:
        """Of all outputs, as far as they are here: what another attempt goes on from."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @cached_property
    def to_place(self) -> RoutingRequest:
        """What a policy is told of this attempt: what earlier ones have told is computed again, like a prompt.

        Of several sequences, each with its own tokens, caches hold no more than the prompt.
        """
        request, token_ids = self.request, self.request.prompt_token_ids
        if len(self.sequences) == 1 and self.num_tokens:
            token_ids = (*token_ids, *self.sequences[0].known_ids)
        prompt = PromptHashes(token_ids, request.cache_salt)
        work = replace(self.work, num_prompt_tokens=len(request.prompt_token_ids) + self.num_tokens)
        uses_cache = not request.bypass_prefix_cache and request.prompt_logprobs is None
        session = SessionKey(self.caller.tenant, request.session_id) if request.session_id else None
        return RoutingRequest(work, prompt, uses_cache, session)

    @property
    def work(self) -> RequestLoad:
        """Of the request as it came."""
        num_prompt, sampling = len(self.request.prompt_token_ids), self.request.sampling
        return RequestLoad(num_prompt, sampling.n, num_prompt + sampling.n * sampling.max_output_tokens)

    def on_phase(self, event: worker_pb2.PhaseChanged, now: float) -> None:
        """Phases of two workers may come interleaved: the later state stays."""
        if event.phase == generation_pb2.Heartbeat.PHASE_PREFILL and not self.num_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        state = _STATE_OF.get(event.phase)
        if state is not None and self._reach(state, now, "told by a worker"):
            self.heartbeat()

    def on_prompt_logprobs(self, event: worker_pb2.PromptLogprobs) -> None:
        """The client is told once all are here. Raises InternalError for what does not come next."""
        self.prompt_logprobs.add(event)
        if self.prompt_logprobs.is_complete:
            self._notify()

    def on_tokens(self, event: worker_pb2.Tokens, now: float) -> Effect:
        """Tokens of a sequence that has ended, or that the request does not have, change nothing."""
        if event.sequence_index >= len(self.sequences):
            return Effect.OPEN
        sequence = self.sequences[event.sequence_index]
        if sequence.end is not None:
            return Effect.OPEN
        num_before, last_at = sequence.num_tokens, sequence.last_token_at
        is_stopped = sequence.add(event)
        self.is_stopped_here |= is_stopped
        if sequence.num_tokens > num_before:
            sequence.last_token_at = now
            interval_s = None if last_at is None else now - last_at
            for observer in self.observers:
                observer.on_tokens(sequence.num_tokens - num_before, interval_s)
        if self.first_token_at is None and sequence.num_tokens:
            if not self.prompt_logprobs.is_complete:
                raise InternalError("the first token came before the logprobs of the prompt")
            self.first_token_at = now
            for observer in self.observers:
                observer.on_first_token(now - self.arrived_at, len(self.request.prompt_token_ids))
            self._reach(RequestState.PREFILLING, now, "a token came")
        if sequence.end is None:
            if sequence.is_due:
                self._notify()
            return Effect.OPEN
        self._ended.append(sequence)
        self._notify()
        return Effect.STOPPED if is_stopped else Effect.ENDED

    def place(self, attempt: Attempt) -> None:
        """Begins an attempt, which gets the tokens that are here."""
        attempt.num_prefilled_outputs = self.num_tokens if len(self.sequences) == 1 else 0
        self.attempts.append(attempt)

    def restart(self, now: float, why: str) -> None:
        """The attempt is over and another begins: what is still told of the last one is not its own any more."""
        if self.lifecycle.state is not RequestState.QUEUED:
            self.lifecycle.advance(RequestState.QUEUED, now, why)
        self._begin_attempt(now, why)
        self.heartbeat()

    def move(self, now: float, why: str) -> None:
        """It leaves the worker that decodes it, and goes on from the same tokens on another."""
        self.lifecycle.advance(RequestState.TRANSFERRING, now, why)
        self._begin_attempt(now, why, is_move=True)

    def rewind(self, first_wanted: int, detokenizers: Iterable[Detokenizer], *, is_streaming: bool) -> None:
        """From here on it is told to a client that holds the tokens before `first_wanted` of each sequence."""
        self.sequences[:] = [s.rewound(first_wanted, d) for s, d in zip(self.sequences, detokenizers, strict=True)]
        self.tell_anew(is_streaming=is_streaming)

    def tell_anew(self, *, is_streaming: bool) -> None:
        """From its start, and of its sequences what they have to tell."""
        self._ended = [s for s in self.sequences if s.end is not None]
        self._is_started = False
        self._is_heartbeat_due = True
        self._is_streaming = is_streaming
        self.wake()
        self._wake = asyncio.Event()  # whoever was told so far still has to find the old one set
        self._wake.set()

    def wake(self) -> None:
        """Has whoever waits for it, or pauses, look again."""
        self._wake.set()
        for paused in self._pauses:
            _resolve(paused)

    def heartbeat(self) -> None:
        """Has the phase of the request sent to the client."""
        self._is_heartbeat_due = True
        self._notify()

    def finish(self, now: float) -> None:
        """Every sequence has ended. A first token that ends it all finishes without a hand-off."""
        self._reach(RequestState.DECODING, now, "ended by its first token")
        self._end(RequestState.FINISHED, now, None, "every sequence ended")

    def fail(self, error: BatonError, now: float) -> None:
        self._end(RequestState.FAILED, now, error, error.reason)

    def reject(self, error: BatonError, now: float) -> None:
        """It leaves the queue without having run."""
        self._end(RequestState.REJECTED, now, error, error.reason)

    def cancel(self, now: float, why: str) -> None:
        for sequence in self.sequences:
            if sequence.end is None:
                sequence.close(generation_pb2.FINISH_REASON_CANCELLED)
                self._ended.append(sequence)
        self._end(RequestState.CANCELLED, now, Cancelled(f"the generation was cancelled: {why}"), why)

    async def wait(self) -> None:
        """Until there is something to take, or the request is over."""
        wake = self._wake
        await wake.wait()
        wake.clear()

    async def pause(self, seconds: float) -> None:
        """So long, or until the request is over or another client is told."""
        if self.is_over:
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

    def take(self) -> list[Response]:
        """Everything that the client has not been told, in the contract's order."""
        out: list[Response] = []
        is_over = self.is_over
        due = [s for s in self.sequences if s.is_due or (is_over and s.num_pending)]
        has_output = bool(due or self._ended)
        can_start = has_output or (self._has_begun() and (self.prompt_logprobs.is_complete or is_over))
        if not self._is_started and can_start:
            self._is_started = True
            out.append(Response(started=self._started()))
        if self._is_heartbeat_due and not has_output and not is_over:
            out.append(Response(heartbeat=self._heartbeat()))
        self._is_heartbeat_due = False
        out.extend(self._deltas(due))
        if self.lifecycle.state is RequestState.FINISHED:
            out.append(Response(completed=generation_pb2.Completed(usage=self.usage(), timing=self.timing())))
        return out

    def usage(self) -> generation_pb2.Usage:
        return generation_pb2.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=self.num_cached_tokens,
        )

    def timing(self) -> generation_pb2.Timing | None:
        """None unless the client asked. Each duration is the difference of two recorded instants."""
        if not self.request.wants_timing:
            return None
        return timing_of(self.lifecycle, self.arrival_time_s, self.first_token_at, self.placement, self.num_moves)

    def _reach(self, state: RequestState, now: float, why: str) -> bool:
        """Climbs to `state` if it is ahead; a state that was skipped on the way is entered at the same instant."""
        at = _LADDER.index(self.lifecycle.state) if self.lifecycle.state in _LADDER else len(_LADDER)
        target = _LADDER.index(state)
        if target <= at:
            return False
        without_hand_off = state is RequestState.DECODING and self.is_complete
        for step in _LADDER[at + 1 : target + 1]:
            if step is not RequestState.TRANSFERRING or not without_hand_off:
                self.lifecycle.advance(step, now, why)
        return True

    def _begin_attempt(self, now: float, why: str, *, is_move: bool = False) -> None:
        if self.attempts:
            last = self.attempt
            last.ended_at, last.why, last.has_failed = now, why, not is_move
        self.key = RequestKey(self.key.request_id, self.key.attempt + 1)
        self.num_moves += 1
        self.prompt_logprobs.restart()
        self.__dict__.pop("to_place", None)
        for sequence in self.sequences:
            sequence.restart()

    def _end(self, state: RequestState, now: float, error: BatonError | None, why: str) -> None:
        self.lifecycle.advance(state, now, why)
        self.error = error
        for observer in self.observers:
            observer.on_end(self)
        if self.when_over is not None:
            self.when_over()
        self.wake()

    def _notify(self) -> None:
        if self._is_streaming:
            self._wake.set()

    def _has_begun(self) -> bool:
        return self.lifecycle.instant(RequestState.PREFILLING) is not None

    def _deltas(self, due: list[SequenceOutput]) -> Iterator[Response]:
        for sequence in due:
            delta = sequence.take()
            if delta is not None:
                yield Response(delta=delta)
        for sequence in self._ended:
            yield Response(sequence_end=sequence.end)
        self._ended = []

    def _started(self) -> generation_pb2.Started:
        return generation_pb2.Started(
            generation_id=self.key.request_id,
            model=self.model,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs.take(is_kept=self.may_resume),
        )

    def _heartbeat(self) -> generation_pb2.Heartbeat:
        state = self.lifecycle.state
        position = self.queue_position if state is RequestState.QUEUED else 0
        is_migrating = self.key.attempt > 1 and self.num_tokens > 0 and state is not RequestState.DECODING
        phase = generation_pb2.Heartbeat.PHASE_MIGRATING if is_migrating else _PHASE_OF[state]
        return generation_pb2.Heartbeat(phase=phase, queue_position=position)


def _resolve(paused: asyncio.Future[None]) -> None:
    if not paused.done():
        paused.set_result(None)
